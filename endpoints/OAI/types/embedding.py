"""Embeddings as OpenAI has them, and rankings as Jina's and Cohere's APIs and most servers do."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, BeforeValidator, Discriminator, Field, Tag

from backends.embeddings.messages import EmbedOptions
from common.limits import MAX_BODY_MARKS, MAX_EMBEDDED, MAX_RANKED, MAX_TOKENIZED, ShortText, at_most
from common.sampling import LARGEST, RequestModel
from endpoints.OAI.types.common import LEFT_OUT_IF_NONE


def _as_truth(value: object) -> object:
    """Cohere's and NVIDIA's APIs name the end that is cut off."""
    return {"none": False, "end": True}.get(value.lower(), value) if isinstance(value, str) else value


def _text_of(value: object) -> object:
    return value["text"] if isinstance(value, dict) and isinstance(value.get("text"), str) else value


def _shape_of(value: object) -> str:
    """Which kind of input it is meant to be, so that what is wrong with it is said of that one only."""
    if not isinstance(value, list):
        return "(text)"
    first = value[0] if value else ""
    return "(lists)" if isinstance(first, list) else "(texts)" if isinstance(first, str) else "(ids)"


_Text: TypeAlias = Annotated[str, Field(max_length=MAX_TOKENIZED)]
_TokenId: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
_TokenIds: TypeAlias = Annotated[list[_TokenId], Field(min_length=1), at_most(MAX_BODY_MARKS)]
_Texts: TypeAlias = Annotated[list[_Text], Field(min_length=1), at_most(MAX_EMBEDDED)]
_ListsOfIds: TypeAlias = Annotated[list[_TokenIds], Field(min_length=1), at_most(MAX_EMBEDDED)]
_Input: TypeAlias = Annotated[
    Annotated[_Text, Tag("(text)")]
    | Annotated[_Texts, Tag("(texts)")]
    | Annotated[_TokenIds, Tag("(ids)")]
    | Annotated[_ListsOfIds, Tag("(lists)")],
    Discriminator(_shape_of),
]
_Truncate: TypeAlias = Annotated[bool | None, BeforeValidator(_as_truth)]
_Document: TypeAlias = Annotated[_Text, BeforeValidator(_text_of)]
_Documents: TypeAlias = Annotated[list[_Document], Field(min_length=1), at_most(MAX_RANKED)]

_TRUNCATE = "Cut off what is too long for the model, or refuse it; null: as embeddings_truncate says."
_MODEL = "A loaded one; left out or null: the first that is loaded and of the kind."


# --- requests -----------------------------------------------------------------------------------------------------


class EmbeddingRequest(RequestModel):
    input: _Input = Field(
        description="A text or a list of texts, or token ids of the model, which are used as they are."
    )
    model: str | None = Field(None, description=_MODEL)
    encoding_format: Literal["float", "base64"] = Field("float", description="base64 is of float32, little-endian.")
    dimensions: Annotated[int, Field(strict=True, ge=1, le=LARGEST)] | None = Field(
        None, description="Keep so many of each vector, for models that were trained for it."
    )
    normalize: bool = Field(True, description="Vectors of length 1.")
    truncate: _Truncate = Field(None, description=_TRUNCATE)
    input_type: ShortText | None = Field(
        None, description="query or document, or the name of another of the model's prompts; says what is embedded."
    )
    prompt_name: ShortText | None = Field(None, description="Instead: exactly this one of the model's prompts.")
    user: str | None = None

    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        ids = [each for each in self.input if isinstance(each, int)]
        return [ids] if ids else [each for each in self.input if not isinstance(each, int)]

    def options(self) -> EmbedOptions:
        return EmbedOptions(
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate=self.truncate,
            input_type=self.input_type,
            prompt_name=self.prompt_name,
        )


class RerankRequest(RequestModel):
    model: str | None = Field(None, description=_MODEL)
    query: Annotated[_Text, BeforeValidator(_text_of)] = Field(description="A text, or an object with a text.")
    documents: _Documents | None = Field(None, description="Texts, or objects with a text.")
    texts: _Documents | None = Field(
        None, description="text-embeddings-inference's name for them; the answer then has its form."
    )
    top_n: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="The best so many only; null: all."
    )
    return_documents: bool = Field(False, validation_alias=AliasChoices("return_documents", "return_text"))
    truncate: _Truncate = Field(None, description=_TRUNCATE)
    raw_scores: bool = Field(False, description="What a reranker says, instead of a number between 0 and 1.")
    user: str | None = None


# --- responses ----------------------------------------------------------------------------------------------------


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int

    @classmethod
    def of(cls, tokens: int) -> EmbeddingUsage:
        return cls(prompt_tokens=tokens, total_tokens=tokens)


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int = Field(description="Of the document in the request.")
    relevance_score: float
    document: RankedText | None = LEFT_OUT_IF_NONE


class ScoredText(BaseModel):
    """As text-embeddings-inference has it."""

    index: int
    score: float
    text: str | None = LEFT_OUT_IF_NONE


class RerankResponse(BaseModel):
    """The best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
