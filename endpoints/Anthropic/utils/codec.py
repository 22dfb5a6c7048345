"""Events -> a message as Anthropic's API gives it, whole or in its own events."""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256

from common.config_models import PAGE_TOKENS
from common.generation import Event, Finish, FinishReason, ReasoningDelta
from common.json_body import read_json
from endpoints.Anthropic.types import events
from endpoints.Anthropic.types.events import StreamEvent
from endpoints.Anthropic.types.response import (
    CacheCreation,
    Content,
    MessageResponse,
    OutputTokensDetails,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
    Usage,
    UsageDelta,
)
from endpoints.Anthropic.utils.ids import told_id
from endpoints.Anthropic.utils.requests import ShownThoughts
from endpoints.blocks import Block, BlockDelta, BlockEnded, BlockEvent, Blocks, BlockStarted
from endpoints.OAI.utils.chat import ChatTurn
from endpoints.streaming import IndexedEvents, Queued
from endpoints.wire import NamedEvent


class MessageCodec:
    """Renders the answer to one request.

    Args:
        model: name of the one that answers.
        turn: what it answers.
        thoughts: how much of them to show.
        prompt_only: the client wants its prompt in the cache, and no answer.
    """

    def __init__(self, model: str, turn: ChatTurn, *, thoughts: ShownThoughts, prompt_only: bool) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._body = turn.body
        self._answer = turn.reading()
        self._blocks = Blocks()
        self._thoughts = thoughts
        self._prompt_only = prompt_only

    async def stream(self, answers: IndexedEvents) -> AsyncIterator[NamedEvent]:
        async for _, event in answers:
            for told in self._told(event):
                yield NamedEvent(told.type, told.model_dump_json())

    async def collect(self, answers: IndexedEvents) -> MessageResponse:
        content: list[Content] = []
        pieces: list[str] = []
        finish: Finish | None = None
        async for _, event in answers:
            if isinstance(event, Queued):
                continue
            for part in self._parts(event):
                match part:
                    case BlockDelta(_, text):
                        pieces.append(text)
                    case BlockEnded(block, complete):
                        if complete:
                            _append(content, self._whole(block, "".join(pieces)))
                        pieces.clear()
            if isinstance(event, Finish):
                finish = event
        assert finish is not None  # or there was an error
        return self._message(content, self._usage(finish), *self._ending(finish))

    def finish_reason(self, index: int, finish: Finish) -> FinishReason:
        return self._answer.reader.finish_reason(finish)

    def _parts(self, event: Event) -> Iterator[BlockEvent]:
        if self._prompt_only:
            return
        for read in self._answer.read(event):
            if self._thoughts != "none" or not isinstance(read, ReasoningDelta):
                yield from self._blocks.read(read)

    def _told(self, event: Event | Queued) -> Iterator[StreamEvent]:
        """What a stream says of an event."""
        if isinstance(event, Queued):  # how much of the prompt is cached shows later
            yield events.MessageStart(message=self._message([], Usage(input_tokens=event.prompt_tokens)))
            return
        for part in self._parts(event):
            match part:
                case BlockStarted(block):
                    yield events.ContentBlockStart(index=block.index, content_block=_begun(block))
                case BlockDelta(block, text):
                    if block.kind != "thought" or self._thoughts == "whole":
                        yield events.ContentBlockDelta(index=block.index, delta=_delta(block, text))
                case BlockEnded(block):
                    if block.kind == "thought":
                        signature = events.SignatureDelta(signature=self._signature(block))
                        yield events.ContentBlockDelta(index=block.index, delta=signature)
                    yield events.ContentBlockStop(index=block.index)
        if isinstance(event, Finish):
            reason, sequence = self._ending(event)
            ending = events.Ending(stop_reason=reason, stop_sequence=sequence)
            yield events.MessageDelta(delta=ending, usage=UsageDelta(**self._usage(event).model_dump()))
            yield events.MessageStop()

    def _message(
        self, content: list[Content], usage: Usage, stop_reason: StopReason | None = None, sequence: str | None = None
    ) -> MessageResponse:
        return MessageResponse(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _whole(self, block: Block, text: str) -> Content:
        match block.kind:
            case "text":
                return TextContent(text=text)
            case "thought":
                shown = text if self._thoughts == "whole" else ""
                return ThinkingContent(thinking=shown, signature=self._signature(block))
            case "call":
                return ToolUseContent(id=told_id(block.call_id), name=block.name, input=read_json(text.encode()))

    def _signature(self, block: Block) -> str:
        return b64encode(sha256(f"{self._id} {block.index}".encode()).digest()).decode()

    def _ending(self, finish: Finish) -> tuple[StopReason, str | None]:
        """Why the answer ends, and the stop sequence that ended it."""
        if self._prompt_only:
            return "max_tokens", None
        reason = self.finish_reason(0, finish)
        if reason == "tool_calls":
            return "tool_use", None
        if reason == "length":
            reached = 0 < self._body.max_tokens <= finish.usage.completion_tokens
            return "max_tokens" if reached else "model_context_window_exceeded", None
        if finish.eos_reason == "stop_string" and finish.stop_sequence in self._body.stop_strings:
            return "stop_sequence", finish.stop_sequence
        return "end_turn", None

    def _usage(self, finish: Finish) -> Usage:
        usage = finish.usage
        # The last token of a prompt is not kept yet, and always processed.
        whole_pages = (usage.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        created = max(0, whole_pages - usage.cached_tokens)
        return Usage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=usage.cached_tokens,
            cache_creation=CacheCreation(ephemeral_5m_input_tokens=created),
            output_tokens=0 if self._prompt_only else usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(thinking_tokens=usage.reasoning_tokens),
        )


def _begun(block: Block) -> Content:
    match block.kind:
        case "text":
            return TextContent(text="")
        case "thought":
            return ThinkingContent(thinking="", signature="")
        case "call":
            return ToolUseContent(id=told_id(block.call_id), name=block.name, input={})


def _delta(block: Block, text: str) -> events.Delta:
    match block.kind:
        case "text":
            return events.TextDelta(text=text)
        case "thought":
            return events.ThinkingDelta(thinking=text)
        case "call":
            return events.InputJsonDelta(partial_json=text)


def _append(content: list[Content], block: Content) -> None:
    """Texts that follow each other, as those around a call that was broken off do, are one."""
    if content and isinstance(last := content[-1], TextContent) and isinstance(block, TextContent):
        last.text += block.text
    else:
        content.append(block)
