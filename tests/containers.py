"""Containers of the real engine inside a test's own process, and what one request got from them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig, LoraConfig, MemoryConfig
from common.generation import Echo, Finish, GenerationRequest, Prefill, SampledLogprob, TextDelta
from common.sampling import SamplingParameters
from tests.scripted import load_settings

GREEDY = SamplingParameters(temperature=0.0)
SMALL = {"cache_size": 8192, "max_seq_len": 8192}


@asynccontextmanager
async def loaded(
    directory: Path,
    *,
    draft_model: DraftModelConfig | None = None,
    memory: MemoryConfig | None = None,
    lora: LoraConfig | None = None,
    **model: object,
) -> AsyncIterator[ExllamaV3Container]:
    settings = load_settings(**(SMALL | model))
    if draft_model is not None:
        settings = settings.model_copy(update={"draft_model": draft_model})
    if memory is not None:
        settings = settings.model_copy(update={"memory": memory})
    if lora is not None:
        settings = settings.model_copy(update={"lora": lora})
    container = ExllamaV3Container.create(directory, settings)
    for _ in container.load():
        pass
    await container.create_generator()
    try:
        yield container
    finally:
        await container.unload()


@dataclass
class Answer:
    """All events of one request."""

    deltas: list[TextDelta] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    echo: Echo | None = None
    finishes: list[Finish] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[SampledLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def finish(self) -> Finish:
        (finish,) = self.finishes
        return finish


async def answered(container: ExllamaV3Container, prompt: str | list[int], **fields: Any) -> Answer:
    """Serve one request to its end; greedy and of eight tokens unless `fields` say otherwise."""
    request = GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=8)
    job = container.start(msgspec.structs.replace(request, **fields))
    answer = Answer()
    try:
        async for event in job.events():
            match event:
                case TextDelta():
                    answer.deltas.append(event)
                case Prefill():
                    answer.prefills.append(event)
                case Echo():
                    assert not answer.deltas
                    answer.echo = event
                case Finish():
                    answer.finishes.append(event)
    finally:
        await job.cancel()
    return answer


def raw_text(entries: Iterable[SampledLogprob]) -> str:
    return b"".join(entry.raw for entry in entries).decode(errors="replace")
