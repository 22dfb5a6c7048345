"""The errors that reach a user, as one tree.

    ServerError                        500  server_error
    ├── InvalidRequest                 400  invalid_request_error
    │   ├── ContextLengthExceeded      400  invalid_request_error   context_length_exceeded
    │   ├── PreviousResponseNotFound   400  invalid_request_error   previous_response_not_found
    │   ├── Unsupported                400  invalid_request_error   unsupported
    │   └── Conflict                   409  invalid_request_error   conflict
    ├── AuthenticationFailed           401  authentication_error    invalid_api_key
    ├── NotFound                       404  not_found_error         not_found
    │   └── ModelNotFound              404  not_found_error         model_not_found
    ├── MethodNotAllowed               405  invalid_request_error   method_not_allowed
    ├── HostNotAllowed                 403  permission_error        host_not_allowed
    ├── OriginNotAllowed               403  permission_error        origin_not_allowed
    ├── BodyTimeout                    408  invalid_request_error   body_timeout
    ├── RequestTooLarge                413  invalid_request_error   request_too_large
    ├── TooManyRequests                429  rate_limit_error        rate_limit_exceeded
    ├── ModelNotLoaded                 503  service_unavailable     model_not_loaded
    ├── ServerBusy                     503  service_unavailable     server_busy
    ├── QueueTimeout                   503  service_unavailable     queue_timeout
    ├── ModelLoadFailed                500  server_error            model_load_failed
    ├── DownloadFailed                 502  server_error            download_failed
    ├── DiskFull                       507  server_error            disk_full
    ├── EngineFailed                   500  server_error            engine_failed
    │   ├── EngineOutOfMemory          500  server_error            engine_out_of_memory
    │   └── EngineHangs                500  server_error            engine_hangs
    └── RequestCancelled               503  service_unavailable     request_cancelled
    SettingsError                      (stops the start; never leaves the process)

Every API renders these in its own envelope (`endpoints/server.py`). An error that happens in the engine process
crosses to the server as an `ErrorRecord` and is raised there as the same leaf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

# Tokenizers have few that are longer, for runs of blanks or dashes. No text consists of those.
MAX_TOKEN_CHARACTERS = 64


class ErrorRecord(msgspec.Struct, frozen=True):
    """A `ServerError` as plain data, for the way between two processes."""

    code: str
    message: str
    param: str | None = None


class ServerError(Exception):
    """Something went wrong on our side. Leaves set the class attributes and hold no logic.

    Attributes:
        status: HTTP status.
        type: the `type` of OpenAI's error object.
        code: the `code` of OpenAI's error object; unique per leaf.
        retry_after: seconds for a `Retry-After` header, or None where a retry cannot help.
        message: text for the user; names the field and the remedy.
        param: path of the field at fault, such as "messages.0.content", or None.
    """

    status: int = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "server_error"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def to_record(self) -> ErrorRecord:
        return ErrorRecord(code=self.code, message=self.message, param=self.param)

    @staticmethod
    def from_record(record: ErrorRecord) -> ServerError:
        """The leaf with the record's code; a plain `ServerError` where no leaf has it."""
        return _leaf_with_code(record.code, ServerError)(record.message, param=record.param)


class InvalidRequest(ServerError):
    """The request cannot be served as it is; changing it helps."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the context or the cache."""

    code = "context_length_exceeded"


class PreviousResponseNotFound(InvalidRequest):
    """The stored response that the request goes on from is not there."""

    code = "previous_response_not_found"


class Unsupported(InvalidRequest):
    """The request asks for something this server or this model cannot do."""

    code = "unsupported"


class Conflict(InvalidRequest):
    """What is there already, or under way, stands against the request."""

    status = 409
    code = "conflict"


class AuthenticationFailed(ServerError):
    """No key, or a key that does not open this route."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(ServerError):
    """No such route or object."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """No model of that name."""

    code = "model_not_found"


class MethodNotAllowed(ServerError):
    """The route exists, but not for this HTTP method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class HostNotAllowed(ServerError):
    """A browser addressed the server, which asks for no keys, by a name that is not known to be its own."""

    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class OriginNotAllowed(ServerError):
    """A web page that network.cors_origins does not name used the server, which asks for no keys."""

    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class BodyTimeout(ServerError):
    """The body of the request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class RequestTooLarge(ServerError):
    """The body of the request is larger than network.max_body_mb."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class TooManyRequests(ServerError):
    """Too many requests with this key wait for the model."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 5


class ModelNotLoaded(ServerError):
    """No model is up, or it is still loading."""

    status = 503
    type = "service_unavailable"
    code = "model_not_loaded"
    retry_after = 5


class ServerBusy(ServerError):
    """Too many requests wait for the model."""

    status = 503
    type = "service_unavailable"
    code = "server_busy"
    retry_after = 5


class QueueTimeout(ServerError):
    """The request waited for the model longer than network.queue_timeout."""

    status = 503
    type = "service_unavailable"
    code = "queue_timeout"
    retry_after = 5


class ModelLoadFailed(ServerError):
    """The model could not be loaded; what served before still serves."""

    code = "model_load_failed"


class DownloadFailed(ServerError):
    """The hub cannot be reached, or sends what it should not; what has come of the files is kept."""

    status = 502
    code = "download_failed"


class DiskFull(ServerError):
    """The files do not fit the disk."""

    status = 507
    code = "disk_full"


class EngineFailed(ServerError):
    """The engine process died or failed while it worked on the request; it is started again."""

    code = "engine_failed"
    retry_after = 5


class EngineOutOfMemory(EngineFailed):
    """The engine ran out of memory while it worked on the request."""

    code = "engine_out_of_memory"


class EngineHangs(EngineFailed):
    """The engine reported no progress for network.engine_timeout and was ended; it is started again."""

    code = "engine_hangs"


class RequestCancelled(ServerError):
    """The server ended the request before it was done: the model was unloaded, swapped, or is shutting down."""

    status = 503
    type = "service_unavailable"
    code = "request_cancelled"
    retry_after = 1


class SettingsError(Exception):
    """Settings that cannot be used: the message names the file, line or option and what to do."""


def _leaf_with_code(code: str, base: type[ServerError]) -> type[ServerError]:
    for leaf in base.__subclasses__():
        found = _leaf_with_code(code, leaf)
        if found.code == code:
            return found
    return base


def validate_context_requirements(
    context_len: int,
    max_seq_len: int,
    max_tokens: int,
    cache_capacity: int,
    max_rq_tokens: int | None = None,
    allocation_boundary: int = 256,
) -> int:
    """Check that a prompt leaves room for an answer, by the engine's own arithmetic.

    The engine (`Job.prepare_for_queue`, exllamav3 1.6.4 and later) limits an answer to what the cache holds past the
    prompt and one more token, and cuts its first reservation, which ends on a multiple of `allocation_boundary`, at the
    end of the cache. So neither a long answer nor the reservation can make a prompt that fits unservable; only the
    prompt itself counts.

    Args:
        context_len: tokens of the prompt, images and BOS included.
        max_seq_len: the most tokens of prompt and answer together that the model is set up for.
        max_tokens: the most tokens the answer may have; 0 or less means all that fit.
        cache_capacity: tokens the key/value cache holds, less the draft window where drafting is on.
        max_rq_tokens: tokens of output reserved at a time, None for the whole answer. Does not change the result, see
            above; part of the signature because callers of TabbyAPI's function pass it.
        allocation_boundary: tokens; the recurrent checkpoint interval on recurrent models, else 256. As above.

    Returns:
        The tokens the answer may have, at least 1: `max_tokens`, or fewer where the context or the cache ends before.

    Raises:
        ContextLengthExceeded: not even one token of output fits. The message says how many prompt tokens do.
    """
    longest_prompt = max(0, min(max_seq_len - 1, cache_capacity - 2))
    if context_len > longest_prompt:
        raise ContextLengthExceeded(
            f"The prompt has {context_len} tokens, which exceeds the available context size: at most {longest_prompt} "
            f"fit here (max_seq_len {max_seq_len}, cache {cache_capacity} tokens, one token kept for the answer). "
            "Shorten the prompt, or load the model with a larger max_seq_len and cache_size."
        )
    room = min(max_seq_len - context_len, cache_capacity - context_len - 1)
    return room if max_tokens <= 0 else min(max_tokens, room)


def check_characters(characters: int, max_seq_len: int, param: str) -> None:
    """Refuse a text that no tokens of the model can hold, before the time is spent on finding that out.

    Raises:
        ContextLengthExceeded: it has more characters than `max_seq_len` tokens do, however long these are.
    """
    most = max_seq_len * MAX_TOKEN_CHARACTERS
    if characters > most:
        raise ContextLengthExceeded(
            f"The prompt has {characters} characters, which exceeds the available context size: {max_seq_len} tokens "
            f"(max_seq_len) hold at most {most}. Shorten the prompt.",
            param=param,
        )


def check_token_ids(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest for an id that the model has no embedding for."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {token}; ids of this model go from 0 to {vocab_size - 1}.", param=param
            )
