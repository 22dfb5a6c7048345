"""The messages of a conversation, as requests give them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from common.errors import Unsupported
from common.sampling import RequestModel


class ContentPart(RequestModel):
    type: str = "text"
    text: str = ""


def _content_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of content parts")
    return value


# A text is the same as one part with it.
Content: TypeAlias = Annotated[
    list[ContentPart], BeforeValidator(_content_parts, json_schema_input_type=str | list[ContentPart])
]


class FunctionCall(RequestModel):
    name: str
    arguments: str | dict[str, Any] = ""  # JSON of an object, or the object itself


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One turn.

    Attributes:
        role: passed on to the template as it is; which roles there are is the model's matter.
    """

    role: str = "user"
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def text(self, path: str) -> str | None:
        """The content as one text; None without content.

        Args:
            path: of this message in the request, for errors.

        Raises:
            Unsupported: a part is no text.
        """
        if self.content is None:
            return None
        for index, part in enumerate(self.content):
            if part.type != "text":
                raise Unsupported(
                    f"The loaded model takes text only, not a content part of type {part.type!r}. Images would need "
                    "vision, which is not available here.",
                    param=f"{path}.content.{index}",
                )
        return "".join(part.text for part in self.content)
