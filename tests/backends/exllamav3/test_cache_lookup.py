"""What is said to be cached of a prompt equals what the engine then finds, on the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from backends.exllamav3.checkpoints import checkpoint_info
from backends.exllamav3.generation import EngineJob, PromptJob
from backends.exllamav3.model import ExllamaV3Container
from common.caching import CacheExplanation
from common.config_models import MemoryConfig
from common.generation import GenerationRequest, Prefill
from tests.containers import GREEDY, answered, loaded

pytestmark = pytest.mark.anyio

VOCABULARY = range(5, 1000)  # no control tokens
SHORTEST, LONGEST = 520, 1150
CHUNK = 256


@dataclass
class Editor:
    """Changes prompts as people and programs do: now the last one, now an earlier one, anywhere."""

    random: Random
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts.append(self.tokens(900))

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(VOCABULARY, k=count)

    def edited(self) -> list[int]:
        prompt = list(self.random.choice(self.prompts[-6:]))
        at = max(self.random.choices(range(len(prompt)), k=2))  # rather near the end
        match self.random.choice(["replace", "insert", "delete", "truncate", "append", "repeat"]):
            case "replace":
                prompt[at] = self.random.choice(VOCABULARY)
            case "insert":
                prompt[at:at] = self.tokens(self.random.choice([1, 40, 256]))
            case "delete":
                del prompt[at : at + self.random.choice([1, 40, 256])]
            case "truncate":
                del prompt[at:]
            case "append":
                prompt += self.tokens(self.random.choice([1, 100, 256]))
        prompt += self.tokens(SHORTEST - len(prompt))
        self.prompts.append(prompt[:LONGEST])
        return self.prompts[-1]


async def until_first_chunk(job: EngineJob | PromptJob) -> AsyncIterator[Prefill]:
    async for event in job.events():
        if isinstance(event, Prefill):
            yield event
            return


async def explained_and_served(
    container: ExllamaV3Container, editor: Editor, *, boundaries: bool = False
) -> tuple[CacheExplanation, int]:
    """Ask about an edited prompt, then send it. Every third one is cancelled after its first chunk."""
    random = editor.random
    prompt = editor.edited()
    request = GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=1)
    if boundaries and random.random() < 0.5:
        places = sorted(random.sample(range(len(prompt)), 2))
        request = msgspec.structs.replace(request, cache_boundaries=places)
    asked = container.explain(request)
    if random.random() < 0.1:
        assert container.explain(request) == asked, "to ask has changed something"
    if container.recurrent and random.random() < 1 / 3:  # without, not all is found before the first chunk
        job = container.start(request)
        cached = [event.cached_tokens async for event in until_first_chunk(job)]
        await job.cancel()
        return asked, cached[-1]
    usage = (await answered(container, prompt, max_tokens=1, cache_boundaries=request.cache_boundaries)).finish.usage
    assert usage.prompt_tokens == asked.prompt_tokens
    assert usage.matched_tokens == asked.matched_tokens
    if container.generator is not None and container.generator.generator.disk_page_cache is None:
        assert usage.ram_tokens == asked.ram_tokens
    else:  # the engine reads ahead for a job in the queue, which can push pages of the prompt out of host RAM
        assert usage.ram_tokens + usage.disk_tokens == asked.ram_tokens + asked.disk_tokens
    return asked, usage.cached_tokens


async def expect_figures_to_hold(container: ExllamaV3Container, edits: int, **options: bool) -> list[CacheExplanation]:
    editor = Editor(Random(edits))
    disk = container.generator.generator.disk_page_cache if container.generator else None
    explanations = []
    for edit in range(edits):
        if disk is not None:
            await asyncio.to_thread(disk.flush)  # else a page could arrive between question and answer
        asked, resumed = await explained_and_served(container, editor, **options)
        assert resumed == asked.resumed_tokens, f"edit {edit}: {asked}"
        assert asked.processed_tokens == asked.prompt_tokens - asked.resumed_tokens
        assert asked.replayed_tokens == asked.matched_tokens - asked.resumed_tokens
        explanations.append(asked)
    assert container.ledger.served_tokens.total() == sum(asked.resumed_tokens for asked in explanations)
    return explanations


def limit_checkpoints(container: ExllamaV3Container, count: int) -> None:
    assert container.generator is not None
    generator = container.generator.generator
    info = checkpoint_info(generator)
    assert info is not None
    generator.recurrent_cache.max_size = count * info.bytes


@pytest.mark.parametrize("edits", [15, pytest.param(100, marks=pytest.mark.slow)])
async def test_figures_hold_on_a_hybrid_with_a_small_cache_and_few_checkpoints(tiny_hybrid: Path, edits: int) -> None:
    small: dict[str, Any] = {"cache_size": 2048, "max_seq_len": 2048, "chunk_size": CHUNK}
    async with loaded(tiny_hybrid, recurrent_checkpoint_interval=512, **small) as container:
        limit_checkpoints(container, 3)
        explanations = await expect_figures_to_hold(container, edits, boundaries=True)
        assert container.generator is not None
        generator = container.generator.generator
        assert generator.pagetable.metrics["evictions_live"] > edits // 5
        assert generator.recurrent_cache.metrics["stash_evictions_live_kv"] > edits // 20
    assert any(explanation.replayed_tokens for explanation in explanations)
    assert any(0 < explanation.replayed_tokens < explanation.matched_tokens for explanation in explanations)


@pytest.mark.parametrize("edits", [24, pytest.param(60, marks=pytest.mark.slow)])
async def test_figures_hold_with_pages_in_host_ram(tiny_hybrid: Path, edits: int) -> None:
    small: dict[str, Any] = {"cache_size": 1536, "max_seq_len": 1536, "chunk_size": CHUNK}
    memory = MemoryConfig(sysmem_kv_cache=1)
    async with loaded(tiny_hybrid, memory=memory, recurrent_checkpoint_interval=512, **small) as container:
        explanations = await expect_figures_to_hold(container, edits)
        assert container.generator is not None
        assert container.generator.generator.cpu_page_cache.metrics["evictions"] > 5
    assert any(explanation.ram_tokens for explanation in explanations)


@pytest.mark.parametrize("edits", [8, pytest.param(40, marks=pytest.mark.slow)])
async def test_figures_hold_with_pages_on_disk(tiny_hybrid: Path, tmp_path: Path, edits: int) -> None:
    small: dict[str, Any] = {"cache_size": 1536, "max_seq_len": 1536, "chunk_size": CHUNK}
    memory = MemoryConfig(sysmem_kv_cache=1, disk_cache_dir=str(tmp_path), disk_cache_checkpoint_interval=0)
    async with loaded(tiny_hybrid, memory=memory, recurrent_checkpoint_interval=512, **small) as container:
        explanations = await expect_figures_to_hold(container, edits)
    assert any(explanation.disk_tokens for explanation in explanations)


@pytest.mark.parametrize("model", ["tiny_llama", pytest.param("tiny_sliding", marks=pytest.mark.slow)])
async def test_figures_hold_on_other_models(model: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(model)
    async with loaded(directory, cache_size=2048, max_seq_len=2048, chunk_size=512) as container:
        explanations = await expect_figures_to_hold(container, 12)
    if model == "tiny_llama":
        assert any(explanation.resumed_tokens % 256 for explanation in explanations), "no page was used in part"
