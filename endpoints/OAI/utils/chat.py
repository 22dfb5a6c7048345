"""Chat completions: request -> generation requests, events -> chunks or one response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from common.errors import InvalidRequest, Unsupported
from common.generation import Finish, GenerationRequest, Prefill, SampledLogprob, TextDelta, TokenLogprob
from endpoints.OAI.types import chat
from endpoints.OAI.types.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatTokenLogprob,
    ChunkChoice,
    Delta,
)
from endpoints.OAI.types.common import Envelope
from endpoints.OAI.utils.generation import collect, generation_requests, total_usage
from endpoints.OAI.utils.prompt import PromptWriter
from endpoints.streaming import IndexedEvents


def chat_generation_requests(body: ChatCompletionRequest, writer: PromptWriter) -> list[GenerationRequest]:
    """Raises `InvalidRequest` for what cannot be served as it is."""
    if body.tool_choice not in ("none", "auto"):
        raise Unsupported("A tool call cannot be enforced yet; tool_choice may be none or auto.", param="tool_choice")
    prompt = writer.chat(body)
    # Templates write the BOS themselves, or mean that there is none before their text that the tokenizer would not add.
    add_bos = False if writer.template.begins_with_bos(prompt.text) else None
    return generation_requests(
        prompt.text,
        body,
        logprobs=_logprobs(body),
        add_bos=add_bos,
        literals=prompt.literals,
        stop_strings=prompt.stop_strings,
    )


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives to report for each token; None for no log-probabilities."""
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return None
    # TabbyAPI also takes a number, as the older API does.
    return body.top_logprobs or (0 if body.logprobs is True else int(body.logprobs))


class ChatCodec:
    """Renders the answers to one chat completion."""

    def __init__(self, envelope: Envelope, n: int, *, include_usage: bool) -> None:
        self._head = envelope.model_dump()
        self._n = n
        self._include_usage = include_usage

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[str]:
        begun: set[int] = set()
        finishes: dict[int, Finish] = {}
        async for index, event in answers:
            if isinstance(event, Prefill):
                continue
            if index not in begun:
                begun.add(index)
                yield self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            if isinstance(event, Finish):
                finishes[index] = event
                yield self._chunk(_final_choice(index, event))
            elif isinstance(event, TextDelta) and (event.text or event.logprobs):
                choice = ChunkChoice(index=index, delta=Delta(content=event.text), logprobs=_render(event.logprobs))
                yield self._chunk(choice)
        if self._include_usage:
            usage = total_usage(finishes, self._n)
            yield ChatCompletionChunk(**self._head, choices=[], usage=usage).model_dump_json()

    async def collect(self, answers: IndexedEvents) -> ChatCompletion:
        texts, logprobs, finishes = await collect(answers, self._n)
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=texts[index]),
                logprobs=_render(logprobs[index]),
                finish_reason=finishes[index].reason,
                eos_reason=finishes[index].eos_reason,
                stop_str=finishes[index].stop_sequence,
            )
            for index in range(self._n)
        ]
        return ChatCompletion(**self._head, choices=choices, usage=total_usage(finishes, self._n))

    def _chunk(self, choice: ChunkChoice) -> str:
        return ChatCompletionChunk(**self._head, choices=[choice]).model_dump_json()


def _final_choice(index: int, finish: Finish) -> ChunkChoice:
    return ChunkChoice(
        index=index,
        delta=Delta(),
        finish_reason=finish.reason,
        eos_reason=finish.eos_reason,
        stop_str=finish.stop_sequence,
    )


def _render(logprobs: Sequence[SampledLogprob]) -> ChatLogprobs | None:
    if not logprobs:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(**_token(entry).model_dump(), top_logprobs=[_token(other) for other in entry.top])
            for entry in logprobs
        ]
    )


def _token(entry: TokenLogprob) -> chat.TokenLogprob:
    return chat.TokenLogprob(token=entry.token, token_id=entry.token_id, logprob=entry.logprob, bytes=list(entry.raw))
