"""What the section `logging` shows of requests: headers, bodies and prompts, without the keys that they carry."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from loguru import logger
from starlette.requests import Request

from common.config_models import LoggingConfig
from common.generation import GenerationRequest
from common.logger import LOG_DIRECTORY, request_id

CHAT_PATHS: Final = ("/v1/chat/completions", "/chat/completions")
DEBUG_DIRECTORY: Final = LOG_DIRECTORY / "debug"
SCHEMA: Final = "waypoint.chat_completion_request.v1"
REDACTED: Final = "[REDACTED]"

_SECRET_HEADER: Final = re.compile("auth|cookie|key|secret|token", re.IGNORECASE)
# Left out of files, which are made to be passed on.
_PERSONAL_HEADERS: Final = ("host", "user-agent")
# Of JSON objects and queries. Not every name with "token" in it: reasoning_end_token is none of these.
_SECRET_MEMBER: Final = re.compile(
    r".*(api|admin|access|auth|private|secret|signing)[-_ ]?key"
    r"|(.*(api|access|auth|bearer|hf|id|refresh|session)[-_ ]?)?token"
    r"|(.*[-_ ])?(authorization|cookies?|credentials?|pass(word|wd|phrase)|secret)",
    re.IGNORECASE | re.DOTALL,
)
_QUERY: Final = re.compile(r"\?\S+")  # of a URL in a header, as in Referer


def redact_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: REDACTED if _SECRET_HEADER.search(name) else _QUERY.sub(f"?{REDACTED}", value)
        for name, value in headers.items()
    }


def redact_members(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: REDACTED if _SECRET_MEMBER.fullmatch(name) else value for name, value in members.items()}


def redact_body(body: bytes) -> Any:
    """The JSON value of a body, its objects redacted at any depth. Of anything else no more than that it was there."""
    try:
        return json.loads(body, object_hook=redact_members)
    except ValueError:
        return {"not_json": f"{len(body)} bytes"}


async def record_request(request: Request, settings: LoggingConfig) -> None:
    """Log the body of a request, and write a file for a chat completion, as far as the settings ask for it.

    Call it after the key has been checked: what strangers send is neither read nor kept. The body stays with `request`.
    """
    to_file = settings.log_chat_completion_requests and request.url.path in CHAT_PATHS
    if not (settings.log_requests or to_file):
        return
    raw = await request.body()
    try:
        body = redact_body(raw)
        if settings.log_requests and raw:
            logger.info("Body: {}", as_json(body))
        if to_file:
            request.state.dump = DEBUG_DIRECTORY / f"{_stem()}.json"
            await asyncio.to_thread(_write, request.state.dump, as_json(_dump(request, body), indent=2))
    except RecursionError:
        logger.warning("The body is nested too deeply to be logged")


async def record_generations(
    request: Request, settings: LoggingConfig, generations: Sequence[GenerationRequest]
) -> None:
    """Log prompts and parameters of what a request generates, each that is different once, as the settings ask for it.

    The prompt also goes beside the file that `record_request()` wrote.
    """
    dump: Path | None = getattr(request.state, "dump", None)
    if settings.log_prompt or dump is not None:
        prompts = list(dict.fromkeys(str(generation.prompt) for generation in generations))
        if settings.log_prompt:
            for prompt in prompts:
                logger.info("Prompt:\n{}", prompt)
        if dump is not None:
            await asyncio.to_thread(_write, dump.with_suffix(".txt"), "\n".join(prompts))
    if settings.log_generation_params:
        for parameters in dict.fromkeys(_parameters(generation) for generation in generations):
            logger.info("Generation parameters: {}", parameters)


def as_json(value: object, indent: int | None = None) -> str:
    """JSON for people to read. What is no Unicode text, such as half a surrogate pair, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, indent=indent).encode("utf-8", "replace").decode("utf-8")


def _parameters(generation: GenerationRequest) -> str:
    fields = msgspec.to_builtins(msgspec.structs.replace(generation, images=[]))
    del fields["prompt"], fields["images"]
    return as_json(fields)


def _dump(request: Request, body: Any) -> dict[str, Any]:
    """The layout is TabbyAPI's, whose tools read it."""
    return {
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(),
        "request": {
            "id": REDACTED,
            "method": request.method,
            "url": f"{REDACTED}{request.url.path}",
            "path": request.url.path,
            "query": redact_members(request.query_params),
            "headers": redact_headers(request.headers) | dict.fromkeys(_PERSONAL_HEADERS, REDACTED),
            "body": body,
        },
    }


def _stem() -> str:
    # A client may choose the id, and Windows takes no colon in a file name.
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}_{request_id.get().replace(':', '-')}"


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner may read. A request does not fail over it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", errors="replace", newline="", opener=_private) as file:
            file.write(text)
    except OSError as error:
        logger.warning("{} was not written: {}", path, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
