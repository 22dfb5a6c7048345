"""Takes the place of tests/utils.py of vLLM's tests: their server is ours, which runs already."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import anthropic
import openai
import pytest

VLLM_PATH = Path(__file__).parents[1]
ROCM_EXTRA_ARGS: list[str] = []


requires_fp8 = pytest.mark.skip(reason="other hardware")


def multi_gpu_only(*, num_gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason=f"{num_gpus} GPUs")


class RemoteOpenAIServer:
    """The server of a model, by its name in SUITE_SERVERS, a JSON object; that at "*" for all others.

    The options that a test wants to start it with have no effect.
    """

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], **options: Any) -> None:
        servers = json.loads(os.environ["SUITE_SERVERS"])
        self.url_root = servers[model] if model in servers else servers["*"]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Other tests use the server as well."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options(options) | {"base_url": self.url_root})

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0} | options
