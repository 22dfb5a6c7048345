"""Weights in EXL3 and quantised caches through the container, each against the same without."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.engine import DEVICE
from backends.exllamav3.model import ExllamaV3Container
from backends.messages import Lora
from common.config_models import DraftModelConfig, LoraConfig, MemoryConfig
from common.errors import InvalidRequest
from tests.adapters import make_adapter
from tests.containers import answered, loaded
from tests.scripted import load_settings

PROMPT = [5 + i * i % 900 for i in range(600)]
# A cache of four pages, and a prompt that takes all of it.
FOUR_PAGES: dict[str, Any] = {"cache_size": 1024, "max_seq_len": 1024}
FILLER = [7 + i * 7 % 900 for i in range(1000)]
FULL_PAGES = 512

on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU kernels")


# --- weights ----------------------------------------------------------------------------------------------------------


@on_the_cpu
async def test_a_model_in_exl3_answers_as_the_same_one_unquantised(tiny_exl3: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "poet", tiny_exl3 / "decoded")
    answers = []
    for directory in (tiny_exl3, tiny_exl3 / "decoded"):
        async with loaded(directory, lora=LoraConfig(lora_dir=str(tmp_path))) as container:
            assert container.info().warnings == []
            plain = await answered(container, PROMPT[:40])
            container.set_loras([Lora("poet", 1.0)])
            adapted = await answered(container, PROMPT[:40])
        answers.append((plain.token_ids, adapted.token_ids))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


@on_the_cpu
def test_weights_in_exl3_are_estimated_as_they_will_be(tiny_exl3: Path) -> None:
    def estimated(directory: Path) -> int:
        return ExllamaV3Container.create(directory, load_settings(**FOUR_PAGES)).memory_bytes()

    assert estimated(tiny_exl3) >= estimated(tiny_exl3 / "decoded")  # the first has what the padding adds


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def packed_llama(tiny_llama: Path) -> AsyncIterator[ExllamaV3Container]:
    memory = MemoryConfig(sysmem_kv_cache=16)
    async with loaded(tiny_llama, cache_mode="8,6", memory=memory, **FOUR_PAGES) as container:
        yield container


async def logprobs(container: ExllamaV3Container) -> list[tuple[int, float]]:
    """Of a greedy answer."""
    return [(entry.token_id, entry.logprob) for entry in (await answered(container, PROMPT, logprobs=0)).logprobs]


def assert_near(answer: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    """Up to the first token that differs, as one does where two are about equally likely."""
    assert answer[0][0] == expected[0][0]
    for (token, logprob), (expected_token, expected_logprob) in zip(answer, expected, strict=True):
        assert logprob == pytest.approx(expected_logprob, abs=0.2)
        if token != expected_token:
            break


async def test_a_quantised_cache_answers_nearly_as_an_unquantised_one(
    packed_llama: ExllamaV3Container, llama: ExllamaV3Container
) -> None:
    assert (packed_llama.info().cache_mode, packed_llama.info().warnings) == ("8,6", [])
    assert_near(await logprobs(packed_llama), await logprobs(llama))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_hybrid", "tiny_sliding"])
async def test_so_it_does_beside_other_layers(name: str, request: pytest.FixtureRequest) -> None:
    answers = []
    for cache_mode in ("FP16", "Q8"):
        async with loaded(request.getfixturevalue(name), cache_mode=cache_mode) as container:
            answers.append(await logprobs(container))
    assert_near(*answers)


async def test_packed_pages_come_back_from_ram(packed_llama: ExllamaV3Container) -> None:
    cold = await answered(packed_llama, PROMPT)
    await answered(packed_llama, FILLER)
    warm = await answered(packed_llama, PROMPT)
    assert warm.finish.usage.ram_tokens == FULL_PAGES
    assert warm.token_ids == cold.token_ids


@pytest.mark.slow
async def test_packed_pages_come_back_from_disk(tiny_llama: Path, tmp_path: Path) -> None:
    settings = FOUR_PAGES | {"cache_mode": "6,5"}
    answers = []
    for _ in range(2):
        memory = MemoryConfig(sysmem_kv_cache=16, disk_cache_dir=str(tmp_path))
        async with loaded(tiny_llama, memory=memory, **settings) as container:
            answers.append(await answered(container, PROMPT))
            await answered(container, FILLER)
    assert answers[1].finish.usage.disk_tokens == FULL_PAGES
    assert answers[1].token_ids == answers[0].token_ids


async def test_a_part_of_a_packed_page_is_copied(packed_llama: ExllamaV3Container) -> None:
    cold = await answered(packed_llama, PROMPT)
    other = await answered(packed_llama, [*PROMPT[:400], *FILLER[:50]])
    assert other.finish.usage.cached_tokens > 256
    assert (await answered(packed_llama, PROMPT)).token_ids == cold.token_ids


@pytest.mark.slow
async def test_a_draft_model_has_a_mode_of_its_own(tiny_llama: Path) -> None:
    draft = DraftModelConfig(
        draft_model_dir=str(tiny_llama.parent), draft_model_name=tiny_llama.name, draft_cache_mode="8,8"
    )
    async with loaded(tiny_llama, draft_model=draft) as container:
        usage = (await answered(container, PROMPT)).finish.usage
        assert usage.completion_tokens == 8
        assert usage.accepted_draft_tokens is not None
        assert usage.accepted_draft_tokens >= 4  # it drafts for itself


def test_a_quantised_cache_is_smaller(tiny_llama: Path) -> None:
    def cache_bytes(mode: str) -> int:
        sizes = [
            ExllamaV3Container.create(tiny_llama, load_settings(cache_mode=mode, **(FOUR_PAGES | size))).memory_bytes()
            for size in ({}, {"cache_size": 2048})
        ]
        return sizes[1] - sizes[0]

    values = 4 * 2 * 2 * 32 * 1024  # layers, keys and values, heads, their size, tokens
    assert cache_bytes("8,8") == values * 8 // 8 + values // 32 * 2
    assert cache_bytes("6,3") == values * 9 // 2 // 8 + values // 32 * 2


def test_keys_that_do_not_fill_groups_are_refused_before_loading(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.update(num_key_value_heads=1, head_dim=48)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"cache_mode 8,8 does not fit .* a token's keys are 48") as raised:
        ExllamaV3Container.create(folder, load_settings(cache_mode="8,8"))
    assert raised.value.param == "model.cache_mode"
