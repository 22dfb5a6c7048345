"""What a front end asks for and what it gets back, whatever the API and the engine.

A front end turns its request into `GenerationRequest`s and renders `Event`s. The records are plain data (msgspec
structs), so the same ones travel to the engine process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, TypeAlias

import msgspec

from common.caching import CacheExplanation
from common.sampling import SamplingParameters

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
TextSpan: TypeAlias = tuple[int, int]  # characters [start, end) of a text
ConstraintKind: TypeAlias = Literal["json_schema", "regex", "lark", "gbnf"]
DialectName: TypeAlias = Literal["tags", "harmony", "glimmer"]  # see common.parsing.dialect


class Constraint(msgspec.Struct, frozen=True):
    """What an answer must match, from its first character to its last."""

    kind: ConstraintKind
    text: str  # a JSON schema as JSON, a regular expression in Rust's syntax, or a grammar
    param: str  # path of the request's field that asked for it, for errors
    frame: str | None = None  # a Lark grammar of the whole answer, in which the text stands as @answer; None: it is all


class Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """How a model marks its thoughts in an answer, and how long they may be."""

    dialect: DialectName
    start: str = ""  # the tags, in the dialect "tags"
    end: str = ""
    inside: bool = False  # the prompt ends inside a thought
    budget: int | None = None  # tokens after which thoughts are ended; None: no limit
    message: str = ""  # text put at the end of a thought that has reached the budget


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """A picture that a prompt shows, in one place or several."""

    spans: list[TextSpan]  # of the prompt text: what stands for it, and is not a part of the prompt
    digest: bytes  # of the data
    data: bytes  # a whole file: PNG, JPEG, WEBP, GIF or BMP
    param: str  # path of the request's field that it comes from, for errors


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, one answer. `n` answers are `n` requests."""

    prompt: str | list[int]  # text, or token ids that are used as they are
    sampling: SamplingParameters
    add_bos: bool | None = None  # None: as the model's tokenizer_config says; ignored for token ids
    encode_special_tokens: bool = True  # whether strings like <|im_end|> in the text become control tokens
    literals: list[TextSpan] = []  # parts of a prompt text where such strings are ordinary text all the same
    images: list[ImageInput] = []  # with a prompt text only
    stop_strings: list[str] = []
    stop_tokens: list[int] = []  # beside the model's own end-of-sequence tokens
    max_tokens: int = 0  # 0: all that fits
    min_tokens: int = 0  # stop tokens are suppressed before this count
    seed: int | None = None
    banned_strings: list[str] = []
    token_healing: bool = False
    logprobs: int | None = None  # None: off; 0: of the sampled token; k: and of the k most likely
    constraints: list[Constraint] = []  # all hold at once
    thoughts: Thoughts | None = None  # None: they are not told apart
    echo: bool = False  # report the prompt first, with its log-probabilities where `logprobs` asks for them
    prompt_only: bool = False  # generate nothing: the echo, then a Finish
    # Where recurrent checkpoints are worth most: characters of a prompt text, or tokens of token ids, ascending.
    cache_boundaries: list[int] = []
    owner: str = ""  # who asks: prompts are compared with earlier ones of the same owner; see common.caching
    explain_cache: bool = False  # report in Usage why so much of the prompt was cached, and not more


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithm of a token's probability as the model gives it, before any sampler; finite."""

    token_id: int
    token: str  # its text; bytes that are no complete character become U+FFFD
    raw: bytes  # what it adds to the text, exactly
    logprob: float


class SampledLogprob(TokenLogprob, frozen=True):
    top: list[TokenLogprob] = []  # most likely first


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and seconds of one finished request."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0  # of completion_tokens, those of thoughts
    cached_tokens: int = 0  # of prompt_tokens, those not processed again
    matched_tokens: int = 0  # of prompt_tokens, those whose keys and values were cached; more than cached_tokens where
    # a model with recurrent layers had no checkpoint as far on: the rest was replayed
    ram_tokens: int = 0  # of cached_tokens, those that came back from the page tier in host RAM
    disk_tokens: int = 0  # of cached_tokens, those that came back from disk
    explanation: CacheExplanation | None = None  # with explain_cache
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    completion_seconds: float = 0.0


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """A prefill chunk is done. Front ends may show it; it carries no text."""

    done_tokens: int  # of total_tokens, the cached ones included
    total_tokens: int  # of the prompt
    cached_tokens: int = 0  # of done_tokens, those that were not processed


class Echo(msgspec.Struct, frozen=True, tag=True):
    """The prompt of a request with `echo`, before any of its answer."""

    text: str
    token_ids: list[int]
    logprobs: list[SampledLogprob | None] = []  # one for each token where asked for; None: nothing stands before it


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    text: str
    token_ids: list[int] = []
    logprobs: list[SampledLogprob] = []


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True):
    """A piece of a thought. This event and the next two come from `common.parsing`, not from an engine."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, tag=True):
    """A piece of a call. The first of a call has its id and name; the arguments of all joined are a JSON object."""

    index: int  # of the call in the answer
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolCallEnd(msgspec.Struct, frozen=True, tag=True):
    """No more of a call. One that is broken off is none: its text follows as a TextDelta, its arguments are no JSON."""

    index: int
    complete: bool


class Finish(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The last event of an answer."""

    reason: FinishReason
    usage: Usage
    eos_reason: str | None = None  # the engine's: stop_token, stop_string, max_new_tokens, end_filter, loop_detected
    stop_sequence: str | None = None  # the stop string or token text that ended the answer


Event: TypeAlias = Prefill | Echo | TextDelta | ReasoningDelta | ToolCallDelta | ToolCallEnd | Finish
EventStream: TypeAlias = AsyncIterator[Event]  # ends with a Finish, or raises a `common.errors.ServerError`
