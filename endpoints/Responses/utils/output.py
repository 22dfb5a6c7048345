"""Blocks of an answer -> items of a response, and the events that tell of them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from endpoints.blocks import Block, BlockDelta
from endpoints.OAI.utils.logprobs import chat_entries
from endpoints.Responses.types.events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    InputDeltaEvent,
    InputDoneEvent,
    ItemEvent,
    PartEvent,
    StreamEvent,
    SummaryDeltaEvent,
    SummaryDoneEvent,
    SummaryPartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ThoughtDeltaEvent,
    ThoughtDoneEvent,
)
from endpoints.Responses.types.items import ItemStatus
from endpoints.Responses.types.request import ResponsesRequest
from endpoints.Responses.types.response import (
    CustomCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    SummaryText,
    TokenLogprob,
)
from endpoints.Responses.utils.thoughts import sealed
from endpoints.Responses.utils.tools import INPUT, Callable, ToolTable


@dataclass(frozen=True)
class Output:
    """What a request says about the items of its response.

    Attributes:
        alternatives: to report for each token; None for no log-probabilities.
        summarised: thoughts are shown as summaries.
        sealed: thoughts are also there in a form for clients to keep.
    """

    response_id: str
    tools: ToolTable
    alternatives: int | None = None
    summarised: bool = False
    sealed: bool = False

    @staticmethod
    def of(body: ResponsesRequest, tools: ToolTable, response_id: str) -> Output:
        return Output(
            response_id,
            tools,
            alternatives=body.alternatives,
            summarised=body.reasoning.summary is not None,
            sealed=body.seals_thoughts,
        )

    def item(self, block: Block, index: int) -> ItemWriter:
        """What writes the item that a block becomes.

        Args:
            index: of the item in the response.
        """
        match block.kind:
            case "text":
                return MessageWriter(item_id("msg", self.response_id, index), index, self.alternatives)
            case "thought":
                writer = SummaryWriter if self.summarised else ThoughtWriter
                return writer(item_id("rs", self.response_id, index), index, sealed=self.sealed)
            case "call":
                called = self.tools.called(block.name)
                if called.is_custom:
                    return CustomCallWriter(item_id("ctc", self.response_id, index), index, block.call_id, called)
                return FunctionCallWriter(item_id("fc", self.response_id, index), index, block.call_id, called)


def item_id(kind: str, response_id: str, place: int | str) -> str:
    """An id that says which response the item belongs to.

    Args:
        place: index of an item of the output; of the input with an "i" before it.
    """
    return f"{kind}_{response_id.removeprefix('resp_')}_{place}"


class ItemWriter(ABC):
    """Writes one item as it is generated."""

    def __init__(self, id: str, index: int) -> None:
        self._id = id
        self._place: dict[str, Any] = {"item_id": id, "output_index": index}
        self._index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Of the block, as far as it is there."""
        return "".join(self._pieces)

    def begin(self) -> Iterator[StreamEvent]:
        item = self.item("in_progress")
        yield ItemEvent(type="response.output_item.added", output_index=self._index, item=item)
        yield from self._begin()

    def add(self, delta: BlockDelta) -> Iterator[StreamEvent]:
        self._pieces.append(delta.text)
        yield from self._add(delta)

    def end(self, status: ItemStatus) -> Iterator[StreamEvent]:
        yield from self._end()
        yield ItemEvent(type="response.output_item.done", output_index=self._index, item=self.item(status))

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is by now."""

    def _begin(self) -> Iterator[StreamEvent]:
        yield from ()

    @abstractmethod
    def _add(self, delta: BlockDelta) -> Iterator[StreamEvent]: ...

    @abstractmethod
    def _end(self) -> Iterator[StreamEvent]: ...


class MessageWriter(ItemWriter):
    def __init__(self, id: str, index: int, alternatives: int | None = None) -> None:
        super().__init__(id, index)
        self._alternatives = alternatives
        self._logprobs: list[TokenLogprob] = []

    def item(self, status: ItemStatus) -> OutputMessage:
        begun = status != "in_progress"
        return OutputMessage(id=self._id, status=status, content=[self._part()] if begun else [])

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self._logprobs)

    def _begin(self) -> Iterator[StreamEvent]:
        yield PartEvent(type="response.content_part.added", part=OutputText(text=""), **self._place)

    def _add(self, delta: BlockDelta) -> Iterator[StreamEvent]:
        logprobs: list[TokenLogprob] = []
        if self._alternatives is not None:
            entries = chat_entries(delta.logprobs, self._alternatives)
            logprobs = [TokenLogprob.model_validate(entry.model_dump()) for entry in entries]
        self._logprobs += logprobs
        yield TextDeltaEvent(delta=delta.text, logprobs=logprobs, **self._place)

    def _end(self) -> Iterator[StreamEvent]:
        yield TextDoneEvent(text=self.text, logprobs=self._logprobs, **self._place)
        yield PartEvent(type="response.content_part.done", part=self._part(), **self._place)


class ThoughtWriter(ItemWriter):
    """Writes a thought as the content of its item."""

    def __init__(self, id: str, index: int, *, sealed: bool) -> None:
        super().__init__(id, index)
        self._sealed = sealed

    def item(self, status: ItemStatus) -> Reasoning:
        done = status != "in_progress"
        return Reasoning(
            id=self._id,
            status=status,
            summary=self._summary() if done else [],
            content=self._content() if done else None,
            encrypted_content=sealed(self.text) if done and self._sealed else None,
        )

    def _summary(self) -> list[SummaryText]:
        return []

    def _content(self) -> list[ReasoningText] | None:
        return [ReasoningText(text=self.text)]

    def _begin(self) -> Iterator[StreamEvent]:
        yield PartEvent(type="response.content_part.added", part=ReasoningText(text=""), **self._place)

    def _add(self, delta: BlockDelta) -> Iterator[StreamEvent]:
        yield ThoughtDeltaEvent(delta=delta.text, **self._place)

    def _end(self) -> Iterator[StreamEvent]:
        yield ThoughtDoneEvent(text=self.text, **self._place)
        yield PartEvent(type="response.content_part.done", part=ReasoningText(text=self.text), **self._place)


class SummaryWriter(ThoughtWriter):
    """Writes a thought as the summary of its item."""

    def _summary(self) -> list[SummaryText]:
        return [SummaryText(text=self.text)]

    def _content(self) -> list[ReasoningText] | None:
        return None

    def _begin(self) -> Iterator[StreamEvent]:
        yield SummaryPartEvent(type="response.reasoning_summary_part.added", part=SummaryText(text=""), **self._place)

    def _add(self, delta: BlockDelta) -> Iterator[StreamEvent]:
        yield SummaryDeltaEvent(delta=delta.text, **self._place)

    def _end(self) -> Iterator[StreamEvent]:
        yield SummaryDoneEvent(text=self.text, **self._place)
        yield SummaryPartEvent(
            type="response.reasoning_summary_part.done", part=SummaryText(text=self.text), **self._place
        )


class FunctionCallWriter(ItemWriter):
    def __init__(self, id: str, index: int, call_id: str, called: Callable) -> None:
        super().__init__(id, index)
        self._call_id = call_id
        self._called = called

    def item(self, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._called.name,
            namespace=self._called.namespace,
            arguments="" if status == "in_progress" else self.text,
        )

    def _add(self, delta: BlockDelta) -> Iterator[StreamEvent]:
        yield ArgumentsDeltaEvent(delta=delta.text, **self._place)

    def _end(self) -> Iterator[StreamEvent]:
        yield ArgumentsDoneEvent(name=self._called.name, arguments=self.text, **self._place)


class CustomCallWriter(ItemWriter):
    """Writes the call of a tool that takes a text, which is an argument of what the model calls."""

    def __init__(self, id: str, index: int, call_id: str, called: Callable) -> None:
        super().__init__(id, index)
        self._call_id = call_id
        self._called = called
        self._argument = TextArgument()

    def item(self, status: ItemStatus) -> CustomCall:
        return CustomCall(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._called.name,
            namespace=self._called.namespace,
            input="" if status == "in_progress" else text_of(self.text),
        )

    def _add(self, delta: BlockDelta) -> Iterator[StreamEvent]:
        if text := self._argument.feed(delta.text):
            yield InputDeltaEvent(delta=text, **self._place)

    def _end(self) -> Iterator[StreamEvent]:
        text = text_of(self.text)
        if rest := text[self._argument.length :]:
            yield InputDeltaEvent(delta=rest, **self._place)
        yield InputDoneEvent(input=text, **self._place)


# --- the text of a custom tool ------------------------------------------------------------------------------------

_BEGIN: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Characters of a JSON string that are complete, and no first half of a surrogate pair without the second one.
_CHARACTERS: Final = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


class TextArgument:
    """Reads the text out of arguments as they are generated.

    Attributes:
        length: characters of the text so far.
    """

    def __init__(self) -> None:
        self.length = 0
        self._waiting = ""
        self._begun = False

    def feed(self, arguments: str) -> str:
        """What a piece of the arguments adds to the text."""
        self._waiting += arguments
        if not self._begun:
            begin = _BEGIN.match(self._waiting)
            if begin is None:
                return ""
            self._begun = True
            self._waiting = self._waiting[begin.end() :]
        complete = _CHARACTERS.match(self._waiting)
        assert complete is not None
        try:
            text = str(json.loads(f'"{complete[0]}"', strict=False))
        except ValueError:  # no JSON; `text_of()` says what is made of it
            return ""
        self._waiting = self._waiting[complete.end() :]
        self.length += len(text)
        return text


def text_of(arguments: str) -> str:
    """The text that a tool is called with. Arguments of another shape are the text themselves."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
