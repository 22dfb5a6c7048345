"""Ollama's own client for a running server."""

from __future__ import annotations

import ollama

from tests.endpoints.running import API_KEY
from tests.serving import TRUSTED


def ollama_client(base_url: str, key: str = API_KEY) -> ollama.Client:
    return ollama.Client(base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60, verify=TRUSTED)
