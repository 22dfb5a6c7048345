"""The records between the server and an engine process.

Frames on the pipe are a 4-byte big-endian length and one msgpack-encoded record of the unions below. Nothing else
travels: no tensors, no containers, no callables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from common.caching import CacheChange, CacheExplanation, CacheState, PlanBasis
from common.errors import ErrorRecord, RequestTooLarge
from common.generation import Event, GenerationRequest, ImageInput, TextSpan

ModelComponent: TypeAlias = Literal["vision", "draft", "model"]


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Recurrent checkpoints of a loaded model, read back from the generator."""

    interval: int  # tokens, in generated text and the last 2 x chunk_size of a prompt
    interval_pp: int  # tokens, in the rest of a prompt
    bytes: int  # one checkpoint in host RAM
    capacity: int  # how many fit the budget


class ControlToken(msgspec.Struct, frozen=True):
    """A string that the tokenizer turns into one token wherever it stands in a text."""

    text: str
    token_id: int
    special: bool  # false: the tokenizer calls it ordinary text, as most do with <think> or <tool_call>


class Lora(msgspec.Struct, frozen=True):
    """A LoRA adapter that a model computes with."""

    name: str  # of its folder in lora.lora_dir
    scaling: float  # 0 or more


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is and how it is set up."""

    name: str  # folder name
    directory: str
    architecture: str
    max_seq_len: int
    cache_size: int
    max_batch_size: int
    cache_mode: str
    chunk_size: int
    use_vision: bool  # its vision tower is loaded
    has_vision: bool = False  # it has one, loaded or not
    device: str  # "cuda" or "cpu"
    engine_version: str
    draft_mode: str | None  # None: no drafting
    draft_model_name: str | None
    checkpoints: CheckpointInfo | None  # None: the model has no recurrent layers
    vocab_size: int  # token ids go from 0 to this less 1
    control_tokens: list[ControlToken]
    warnings: list[str]  # advice given at load, also in the log
    loras: list[Lora] = []


# --- server to engine ---------------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The first message to a process, sent once: which model. Everything is checked, nothing is loaded.

    Answered by `Prepared` or `LoadFailed`. The server stops the model that it holds only after `Prepared`.
    """

    directory: str  # absolute
    settings: bytes  # JSON of `common.config_models.LoadSettings`


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the prepared model. Answered by `LoadProgress` messages, then `Loaded` or `LoadFailed`."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    id: str
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends a request. Answered by `Cancelled`, unless the request comes to another end before."""

    id: str


class Encode(msgspec.Struct, frozen=True, tag=True):
    id: str
    text: str
    add_bos: bool | None  # None: as the model's tokenizer_config says
    encode_special_tokens: bool
    literals: list[TextSpan] = []  # as in GenerationRequest, and so the images
    images: list[ImageInput] = []


class Decode(msgspec.Struct, frozen=True, tag=True):
    id: str
    tokens: list[int]
    decode_special_tokens: bool


class Split(msgspec.Struct, frozen=True, tag=True):
    """Asks what each token adds to a text."""

    id: str
    tokens: list[int]


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Asks what the engine has cached."""

    id: str


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of a prompt would be processed, without starting it or changing anything."""

    id: str
    request: GenerationRequest


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Writes everything to the disk tier. Answered by `CacheChanged` when it is there."""

    id: str


class ClearCache(msgspec.Struct, frozen=True, tag=True):
    """Forgets all that no running request uses, in all tiers, and what is known of earlier prompts."""

    id: str


class CheckLoras(msgspec.Struct, frozen=True, tag=True):
    """Asks which adapters could be applied. Changes nothing."""

    id: str
    loras: list[Lora]


class SetLoras(msgspec.Struct, frozen=True, tag=True):
    """Exchanges the adapters of the model, once all that was asked for before has come to its end.

    No `Generate` may follow before the answer, which is `LorasSet`.
    """

    id: str
    loras: list[Lora]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Release everything and exit. The end of stdin means the same."""


ToEngine: TypeAlias = (
    Prepare
    | Load
    | Generate
    | Cancel
    | Encode
    | Decode
    | Split
    | Inspect
    | Explain
    | FlushCache
    | ClearCache
    | CheckLoras
    | SetLoras
    | Shutdown
)


# --- engine to server ---------------------------------------------------------------------------------------------


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The model and its settings can be loaded, as far as can be told without loading."""

    plan: PlanBasis | None = None  # None: the model has no recurrent layers
    memory: int = 0  # bytes of device memory that it will take, estimated


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    component: ModelComponent
    module: int  # 1 to modules
    modules: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    info: ModelInfo
    plan: PlanBasis | None = None  # as in Prepared, now with what follows from a measured speed
    memory: int = 0  # bytes of device memory that it takes, measured where the device tells


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorRecord


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The prompt is tokenised, fits, and is queued."""

    id: str
    prompt_tokens: int


class Produced(msgspec.Struct, frozen=True, tag=True):
    """An event of a request. A `Finish` is the last message of its id, as `Failed` and `Cancelled` are."""

    id: str
    event: Event


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of its id, for a Generate or any call."""

    id: str
    error: ErrorRecord


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The request has ended without a `Finish`, and the engine holds nothing of it any more."""

    id: str


class Encoded(msgspec.Struct, frozen=True, tag=True):
    id: str
    tokens: list[int]


class Decoded(msgspec.Struct, frozen=True, tag=True):
    id: str
    text: str


class Pieces(msgspec.Struct, frozen=True, tag=True):
    id: str
    pieces: list[bytes]  # one for each token; the bytes of a character may be spread over several


class Inspected(msgspec.Struct, frozen=True, tag=True):
    id: str
    state: CacheState


class Explained(msgspec.Struct, frozen=True, tag=True):
    id: str
    explanation: CacheExplanation


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    id: str
    change: CacheChange


class LorasChecked(msgspec.Struct, frozen=True, tag=True):
    id: str
    problems: list[ErrorRecord | None]  # one for each that was asked about; None: it can be applied


class LorasSet(msgspec.Struct, frozen=True, tag=True):
    id: str
    info: ModelInfo


class Log(msgspec.Struct, frozen=True, tag=True):
    level: str  # loguru's level name
    message: str


FromEngine: TypeAlias = (
    Prepared
    | LoadProgress
    | Loaded
    | LoadFailed
    | Accepted
    | Produced
    | Failed
    | Cancelled
    | Encoded
    | Decoded
    | Pieces
    | Inspected
    | Explained
    | CacheChanged
    | LorasChecked
    | LorasSet
    | Log
)


# --- frames -------------------------------------------------------------------------------------------------------

HEADER_BYTES = 4
# Far more than any message needs, and less than four bytes of text say if they are read as a length.
MAX_FRAME_BYTES = 256 << 20
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """A record of one of the unions, or of those of another process. Raises `RequestTooLarge` where it takes more than
    `MAX_FRAME_BYTES`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise RequestTooLarge(
            f"The request takes {len(body) >> 20} MB on its way to the engine, which takes {MAX_FRAME_BYTES >> 20} at "
            "most. Send less at once."
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes | bytearray) -> int:
    """Raises ValueError where that is no header."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"{header!r} is not the beginning of a frame")
    return length


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete frames off the beginning of what was read so far; gives their bodies.

    Errors as for `body_length()`.
    """
    while len(buffer) >= HEADER_BYTES:
        end = HEADER_BYTES + body_length(buffer[:HEADER_BYTES])
        if len(buffer) < end:
            return
        body = bytes(buffer[HEADER_BYTES:end])
        del buffer[:end]
        yield body


to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
