"""Bodies of Ollama's routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field

from common.limits import (
    MAX_CALLS,
    MAX_EMBEDDED,
    MAX_IMAGES,
    MAX_LISTED_TOKENS,
    MAX_MESSAGES,
    MAX_TOKENIZED,
    MAX_TOP_LOGPROBS,
    at_most,
)
from common.sampling import Integer, RequestModel, SamplingFields
from endpoints.OAI.types.chat import Tools
from endpoints.Ollama.types.duration import KeepAlive

Text: TypeAlias = Annotated[str, Field(max_length=MAX_TOKENIZED)]
Think: TypeAlias = bool | Literal["low", "medium", "high"]
Images: TypeAlias = Annotated[list[str], at_most(MAX_IMAGES)]  # base64


def _format(value: object) -> object:
    if value == "":
        return None
    if value != "json" and not isinstance(value, dict):
        raise ValueError('should be "json" or a JSON schema')
    return value


Format: TypeAlias = Annotated[
    Literal["json"] | dict[str, Any] | None,
    BeforeValidator(_format, json_schema_input_type=Literal["", "json"] | dict[str, Any]),
]


def _limit(value: object) -> object:
    return -1 if value == -2 else value  # fill the context: all that fit


class Options(SamplingFields):
    """Ollama's names, beside all that sampling has here."""

    # A model file's parameters and a loader's are not a request's here, and say nothing about the answer.
    max_tokens: Annotated[Integer, Field(ge=-1), BeforeValidator(_limit)] = Field(
        0, validation_alias="num_predict", description="0, -1 or -2: all that fit"
    )
    num_ctx: Integer | None = Field(None, description="Without effect: the model is loaded with its length.")


def _encodable(name: str) -> str:
    """The answer has it too, in UTF-8."""
    return name.encode("utf-8", "replace").decode("utf-8")


class ModelRequest(RequestModel):
    model: Annotated[str, Field(min_length=1), AfterValidator(_encodable)] = Field(
        validation_alias=AliasChoices("model", "name"), description="Its tag may be left out where that is latest."
    )


class GenerationRequest(ModelRequest):
    """
    Attributes:
        keep_alive: seconds for which the model stays loaded after this and later requests, negative for ever; None for
            what was said before.
    """

    stream: bool = True
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    keep_alive: KeepAlive | None = Field(
        None, description="How long the model stays loaded afterwards: seconds, or a text such as 5m; negative: ever."
    )
    format: Format = Field(None, description="json, or a JSON schema.")
    think: Think | None = Field(None, description="Whether the model shall think, or how hard: low, medium, high.")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @property
    def alternatives(self) -> int | None:
        """To report for each token; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


# --- /api/chat ----------------------------------------------------------------------------------------------------


class CalledFunction(RequestModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Any = None


class Call(RequestModel):
    id: str | None = None
    function: CalledFunction


class Message(RequestModel):
    """
    Attributes:
        tool_name: of the tool whose result this is.
    """

    role: Annotated[str, Field(min_length=1)]
    content: str = ""
    thinking: str | None = None
    images: Images = Field([])
    tool_calls: Annotated[list[Call], at_most(MAX_CALLS)] = Field([])
    tool_name: str | None = Field(None, validation_alias=AliasChoices("tool_name", "name"))
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], at_most(MAX_MESSAGES)] = Field(
        [], description="None: the model is loaded, or unloaded with keep_alive 0."
    )
    tools: Tools = Field([])


# --- /api/generate ------------------------------------------------------------------------------------------------


class GenerateRequest(GenerationRequest):
    prompt: str = Field("", description="None: the model is loaded, or unloaded with keep_alive 0.")
    suffix: str = Field("", description="What follows the answer, for models that can fill in the middle.")
    images: Images = Field([])
    system: str = ""
    raw: bool = Field(False, description="The prompt as it is, without the chat template.")
    template: str = Field("", description="Has to be empty: Go's templates are not known here.")
    context: Annotated[list[int], at_most(MAX_LISTED_TOKENS)] = Field([], description="Without effect.")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to go on from."""
        return not (self.prompt or self.suffix or self.images)


# --- others -------------------------------------------------------------------------------------------------------


class ShowRequest(ModelRequest):
    verbose: bool = False


class EmbedRequest(ModelRequest):
    """Ignored: `keep_alive`, as embedding models stay until they are unloaded, and `options`."""

    input: Text | Annotated[list[Text], at_most(MAX_EMBEDDED)] = Field([], description="A text, or a list of texts.")
    truncate: bool = Field(True, description="Cut off what is too long for the model, or refuse it.")
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class EmbeddingsRequest(ModelRequest):
    """Of the route before /api/embed, which takes one text."""

    prompt: Text = ""
