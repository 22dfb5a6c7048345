"""Chat completions: request -> generation requests, events -> pieces of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint, Echo, Event, Finish, GenerationRequest, TextDelta
from endpoints.OAI.types.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
)
from endpoints.OAI.types.common import Envelope, PromptLogprobs, PromptProgress, Usage
from endpoints.OAI.utils.generation import Codec, generation_requests, how_it_ended, most_logprobs
from endpoints.OAI.utils.logprobs import chat_entries, prompt_entries
from endpoints.OAI.utils.prompt import PromptWriter


def chat_generation_requests(
    body: ChatCompletionRequest, writer: PromptWriter, constraints: Sequence[Constraint] = ()
) -> list[GenerationRequest]:
    """Raises `InvalidRequest` for what cannot be served as it is."""
    if body.tool_choice not in ("none", "auto"):
        raise Unsupported("A tool call cannot be enforced yet; tool_choice may be none or auto.", param="tool_choice")
    prompt = writer.chat(body)
    # Templates write the BOS themselves, or mean that there is none before their text that the tokenizer would not add.
    add_bos = False if writer.template.begins_with_bos(prompt.text, prompt.literals) else None
    first, *others = generation_requests(
        prompt.text,
        body,
        count=body.n,
        logprobs=most_logprobs(_logprobs(body), body.prompt_logprobs),
        constraints=constraints,
        add_bos=add_bos,
        literals=prompt.literals,
        stop_strings=prompt.stop_strings,
    )
    # All have the same prompt.
    return [msgspec.structs.replace(first, echo=body.prompt_logprobs is not None), *others]


def _logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives to report for each token; None for no log-probabilities."""
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return body.n_probs or None
    # TabbyAPI also takes a number, as the older API does.
    return body.top_logprobs or (0 if body.logprobs is True else int(body.logprobs))


class ChatCodec(Codec[ChunkChoice, ChatCompletion, ChatCompletionChunk]):
    """Renders the answers to one chat completion.

    Args:
        remember: told the text of each answer once it is complete.
    """

    def __init__(self, envelope: Envelope, body: ChatCompletionRequest, remember: Callable[[str], None]) -> None:
        super().__init__(envelope, body, body.n)
        self._remember = remember
        self._texts: list[list[str]] = [[] for _ in range(body.n)]
        self._preface = _gone_on_from(body) if body.echo else ""
        self._logprobs = _logprobs(body)
        self._alternatives_of_prompt = body.prompt_logprobs or 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._begun: set[int] = set()

    def pieces(self, index: int, event: Event) -> Iterator[ChunkChoice]:
        if index not in self._begun:
            self._begun.add(index)
            yield ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            if self._preface:
                yield ChunkChoice(index=index, delta=Delta(content=self._preface))
        if isinstance(event, Finish):
            self._remember("".join(self._texts[index]))
            yield ChunkChoice(index=index, delta=Delta(), **how_it_ended(event))
        elif isinstance(event, Echo):
            self._prompt_logprobs = prompt_entries(event, self._alternatives_of_prompt)
        elif isinstance(event, TextDelta):
            self._texts[index].append(event.text)
            logprobs = None
            if self._logprobs is not None and event.logprobs:
                logprobs = ChatLogprobs(content=chat_entries(event.logprobs, self._logprobs))
            if event.text or logprobs:
                yield ChunkChoice(index=index, delta=Delta(content=event.text), logprobs=logprobs)

    def chunk(
        self, choices: list[ChunkChoice], *, usage: Usage | None = None, progress: PromptProgress | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage, prompt_progress=progress)

    def whole(self, answers: Sequence[Sequence[ChunkChoice]], usage: Usage) -> ChatCompletion:
        choices = [self._joined(index, pieces) for index, pieces in enumerate(answers)]
        return ChatCompletion(**self._head, choices=choices, usage=usage, prompt_logprobs=self._prompt_logprobs)

    def _joined(self, index: int, pieces: Sequence[ChunkChoice]) -> ChatChoice:
        entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        return ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(piece.delta.content or "" for piece in pieces)),
            logprobs=ChatLogprobs(content=entries) if self._logprobs is not None else None,
            finish_reason=pieces[-1].finish_reason,
            eos_reason=pieces[-1].eos_reason,
            stop_str=pieces[-1].stop_str,
        )


def _gone_on_from(body: ChatCompletionRequest) -> str:
    """The text of the assistant's that the answer goes on from."""
    last = body.messages[-1]
    texts = last.texts(f"messages.{len(body.messages) - 1}") if last.role == "assistant" else []
    return "".join(texts) + (body.response_prefix or "")
