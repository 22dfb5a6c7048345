"""Events -> answers as KoboldCpp gives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from common.errors import RequestCancelled
from common.generation import Event, Finish, TextDelta
from common.generation import FinishReason as ServerFinishReason
from endpoints.Kobold.types.generate import (
    FinishReason,
    KoboldGenerateRequest,
    KoboldResult,
    KoboldResults,
    KoboldToken,
)
from endpoints.Kobold.utils.generations import Generation
from endpoints.Kobold.utils.wire import message
from endpoints.OAI.types.chat import ChatLogprobs, ChatTokenLogprob
from endpoints.OAI.utils.logprobs import chat_entries
from endpoints.streaming import IndexedEvents, Queued
from endpoints.wire import NamedEvent


@dataclass
class _Answer:
    """What is known of an answer beside its text."""

    prompt_tokens: int = 0
    tokens: int = 0
    entries: list[ChatTokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = "abort"


class KoboldCodec:
    """Renders the answers to one request, which their client may abort: what there is of them then is the answer.

    Args:
        fields: of the body, with presets applied.
        generation: is told the text.
    """

    def __init__(self, fields: KoboldGenerateRequest, generation: Generation) -> None:
        self._fields = fields
        self._generation = generation

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[NamedEvent]:
        """One for each piece of the only answer, the last without text."""
        finish_reason: FinishReason = "abort"
        async for index, event in self._until_aborted(answers):
            if isinstance(event, TextDelta) and (event.text or event.logprobs):
                entries = self._entries(event)
                yield message(
                    KoboldToken(token=event.text, logprobs=ChatLogprobs(content=entries) if entries else None)
                )
            elif isinstance(event, Finish):
                if stop := self._stop_sequence(event):
                    self._generation.add(index, stop)
                    yield message(KoboldToken(token=stop))
                finish_reason = _finish_reason(event)
        yield message(KoboldToken(token="", finish_reason=finish_reason))

    async def collect(self, answers: IndexedEvents) -> KoboldResults:
        collected = [_Answer() for _ in range(self._fields.n)]
        async for index, event in self._until_aborted(answers):
            answer = collected[index]
            if isinstance(event, Queued):
                answer.prompt_tokens = event.prompt_tokens
            elif isinstance(event, TextDelta):
                answer.tokens += len(event.token_ids)
                answer.entries += self._entries(event)
            elif isinstance(event, Finish):
                self._generation.add(index, self._stop_sequence(event))
                answer.tokens = event.usage.completion_tokens
                answer.finish_reason = _finish_reason(event)
        return KoboldResults(results=[self._result(index, answer) for index, answer in enumerate(collected)])

    def finish_reason(self, index: int, finish: Finish) -> ServerFinishReason:
        return finish.reason

    async def _until_aborted(self, answers: IndexedEvents) -> AsyncIterator[tuple[int, Event | Queued]]:
        try:
            async for index, event in answers:
                if isinstance(event, TextDelta):
                    self._generation.add(index, event.text)
                elif isinstance(event, Finish) and index == 0:
                    self._generation.usage = event.usage
                yield index, event
        except RequestCancelled:
            if not self._generation.aborted:
                raise

    def _result(self, index: int, answer: _Answer) -> KoboldResult:
        return KoboldResult(
            text=self._generation.text(index),
            finish_reason=answer.finish_reason,
            logprobs=ChatLogprobs(content=answer.entries) if self._fields.logprobs else None,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.tokens,
        )

    def _stop_sequence(self, finish: Finish) -> str:
        """What the answer ends with, where the client wants to see it."""
        wanted = not self._fields.trim_stop or self._fields.include_stop_str_in_output
        return (finish.stop_sequence or "") if wanted and finish.eos_reason == "stop_string" else ""

    def _entries(self, delta: TextDelta) -> list[ChatTokenLogprob]:
        return chat_entries(delta.logprobs, self._fields.top_logprobs) if self._fields.logprobs else []


def _finish_reason(finish: Finish) -> FinishReason:
    return "length" if finish.reason == "length" else "stop"
