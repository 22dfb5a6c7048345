"""The messages of a conversation, as requests give them."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from common.errors import InvalidRequest, Unsupported
from common.limits import MAX_CALLS, MAX_PARTS, at_most
from common.sampling import RequestModel

# Types of content parts that hold text, and the member that holds it. OpenAI's two APIs differ in the names.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Types of parts that need a capability of the model.
_CAPABILITIES = {
    "image": "vision",
    "image_url": "vision",
    "input_image": "vision",
    "input_audio": "audio input",
    "audio": "audio input",
    "audio_url": "audio input",
    "video": "video input",
    "video_url": "video input",
    "input_video": "video input",
    "file": "file input",
    "input_file": "file input",
}


class ImageNames(Protocol):
    """What stands for the images of a request in its texts."""

    def name_of(self, url: str) -> str | None: ...


class Unnamed:
    """Of images that are left out."""

    def name_of(self, url: str) -> str:
        return ""


class ImageUrl(RequestModel):
    url: str


def _image_url(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class ContentPart(RequestModel):
    """A part of a message's content. Which member counts depends on the type."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[ImageUrl, BeforeValidator(_image_url, json_schema_input_type=str | ImageUrl)] | None = None
    cache_control: Any = Field(
        default=None,
        description="Whatever it is: a model with recurrent layers shall keep a checkpoint after the part.",
    )

    @property
    def is_image(self) -> bool:
        return self.type != "text" and _CAPABILITIES.get(self.type) == "vision"

    def plain_text(self, path: str, images: ImageNames) -> str:
        """Its text, or what stands for its image.

        Args:
            path: of this part in the request, for errors.

        Raises:
            Unsupported: the part is neither a text nor one of the images.
            InvalidRequest: the part lacks what its type promises.
        """
        if (member := _TEXT_PARTS.get(self.type)) is not None:
            text: str | None = getattr(self, member)
            if text is None:
                raise InvalidRequest(f"{path}.{member} is missing.", param=f"{path}.{member}")
            return text
        if self.is_image and self.image_url is not None and (name := images.name_of(self.image_url.url)) is not None:
            return name
        if (capability := _CAPABILITIES.get(self.type)) is not None:
            raise Unsupported(
                f"{path} is of type {self.type}, but {capability} is not available: the model takes text only.",
                param=path,
            )
        raise Unsupported(
            f"{path} is of an unknown type {self.type!r}; parts with text are of type {', '.join(_TEXT_PARTS)}.",
            param=f"{path}.type",
        )


def _content_parts(value: object) -> object:
    if isinstance(value, str):
        return [_text_part(value)]
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of content parts")
    return [_text_part(part) if isinstance(part, str) else part for part in value]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# A text is the same as one part with it.
Content: TypeAlias = Annotated[
    list[ContentPart],
    at_most(MAX_PARTS),
    BeforeValidator(_content_parts, json_schema_input_type=str | list[str | ContentPart]),
]


class FunctionCall(RequestModel):
    """What an assistant called.

    Attributes:
        arguments: JSON of an object, or the object itself; or whatever a model once made of it.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Any = None


class CustomCall(RequestModel):
    name: str
    input: str = ""


class ToolCall(RequestModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: str = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(RequestModel):
    """One turn. Members that are not listed here reach the chat template all the same.

    Attributes:
        role: passed on to the template as it is; which roles there are is the model's matter.
        function_call: of an assistant, in the way before `tool_calls`.
    """

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)] = "user"
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning", "thinking")
    )
    tool_calls: Annotated[list[ToolCall], at_most(MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None

    @property
    def characters(self) -> int:
        """Of its content, as text."""
        return sum(len(part.text or "") for part in self.content or ())

    def texts(self, path: str, images: ImageNames) -> list[str]:
        """The text of each content part; an assistant's refusal stands for a missing content.

        Args:
            path: of this message in the request, for errors.

        Raises:
            Unsupported: a part is neither a text nor one of the images.
            InvalidRequest: a part lacks its text.
        """
        if self.content is None:
            return [] if self.refusal is None else [self.refusal]
        return [part.plain_text(f"{path}.content.{index}", images) for index, part in enumerate(self.content)]
