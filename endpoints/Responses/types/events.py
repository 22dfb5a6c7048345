"""Events of a streamed response, in the order in which they come for one item."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from endpoints.Responses.types.response import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
    SummaryText,
    TokenLogprob,
)


class StreamEvent(BaseModel):
    """
    Attributes:
        sequence_number: from 0 on, of the event in its stream.
    """

    type: str
    sequence_number: int = -1  # until it is sent


class ResponseEvent(StreamEvent):
    """A response begins or ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(StreamEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(StreamEvent):
    item_id: str
    output_index: int


class PartEvent(_OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDeltaEvent(_OfItem):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDoneEvent(_OfItem):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ThoughtDeltaEvent(_OfItem):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    content_index: int = 0
    delta: str


class ThoughtDoneEvent(_OfItem):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    content_index: int = 0
    text: str


class SummaryPartEvent(_OfItem):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int = 0
    part: SummaryText


class SummaryDeltaEvent(_OfItem):
    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"
    summary_index: int = 0
    delta: str


class SummaryDoneEvent(_OfItem):
    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"
    summary_index: int = 0
    text: str


class ArgumentsDeltaEvent(_OfItem):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDoneEvent(_OfItem):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


class InputDeltaEvent(_OfItem):
    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class InputDoneEvent(_OfItem):
    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str
