"""Why so much of a prompt is cached, and not more: every case, on the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends.exllamav3.checkpoints import checkpoint_info
from backends.exllamav3.model import ExllamaV3Container
from common.caching import CacheExplanation, Difference
from common.config_models import MemoryConfig
from common.errors import ContextLengthExceeded, InvalidRequest
from common.generation import GenerationRequest, Prefill
from tests.containers import GREEDY, answered, loaded

pytestmark = pytest.mark.anyio

CHUNK = 512


@pytest.fixture(scope="module")
async def hybrid(tiny_hybrid: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_hybrid, cache_size=4096, max_seq_len=4096, chunk_size=CHUNK) as container:
        yield container


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return Random(f"{length} {seed}").choices(range(5, 1000), k=length)


def changed(prompt: list[int], position: int) -> list[int]:
    return [*prompt[:position], prompt[position] ^ 1, *prompt[position + 1 :]]


def explained(container: ExllamaV3Container, prompt: list[int] | str, owner: str = "") -> CacheExplanation:
    return container.explain(GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=1, owner=owner))


async def serve(container: ExllamaV3Container, prompt: list[int] | str, owner: str = "") -> None:
    await answered(container, prompt, max_tokens=1, owner=owner)


def figures(explanation: CacheExplanation) -> tuple[int, int]:
    return explanation.matched_tokens, explanation.resumed_tokens


def checkpoints(container: ExllamaV3Container, count: float) -> None:
    """Have the budget hold so many."""
    assert container.generator is not None
    info = checkpoint_info(container.generator.generator)
    assert info is not None
    container.generator.generator.recurrent_cache.max_size = int(count * info.bytes)


@pytest.fixture(autouse=True)
async def cleared(hybrid: ExllamaV3Container) -> None:
    checkpoints(hybrid, 100)
    await hybrid.clear()


async def test_a_prompt_unlike_any_other(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(300, seed=1))
    assert explained(hybrid, prompt_of(300)) == CacheExplanation(
        prompt_tokens=300,
        matched_tokens=0,
        resumed_tokens=0,
        processed_tokens=300,
        replayed_tokens=0,
        ram_tokens=0,
        disk_tokens=0,
        difference=None,
        reason="No earlier prompt that is still known begins like this one.",
    )


async def test_the_same_prompt_again(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(600))
    explanation = explained(hybrid, prompt_of(600))
    assert figures(explanation) == (512, 512)
    assert explanation.difference is None
    assert explanation.reason == "All of this prompt was served before; its first 512 tokens are cached."


async def test_a_prompt_that_goes_on(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(600))
    explanation = explained(hybrid, prompt_of(600)[:-1] + [7] * 500)
    assert explanation.difference is not None
    explanation = explained(hybrid, prompt_of(600) + prompt_of(500))
    assert figures(explanation) == (512, 512)
    assert explanation.difference is None
    assert (
        explanation.reason == "This prompt goes on from an earlier one of 600 tokens; its first 512 tokens are cached."
    )


async def test_a_difference_is_shown_with_the_text_around_it(hybrid: ExllamaV3Container) -> None:
    def text(weather: str) -> str:
        return f"<|im_start|>user\nThe harbour was quiet. It was {weather} in the morning.<|im_end|>\n" + "More. " * 200

    await serve(hybrid, text("warm"))
    explanation = explained(hybrid, text("cold"))
    difference = explanation.difference
    assert difference is not None
    tokens = hybrid.encode(text("cold"), add_bos=None, encode_special_tokens=True)
    before = hybrid.decode(tokens[: difference.position], decode_special_tokens=True)
    assert before == "<|im_start|>user\nThe harbour was quiet. It was "[: len(before)]
    assert difference.before == before[-60:]
    assert (before + difference.cached) == text("warm")[: len(before) + len(difference.cached)]
    assert (before + difference.requested) == text("cold")[: len(before) + len(difference.requested)]
    assert 20 < len(difference.cached) <= 60
    assert 20 < len(difference.requested) <= 60
    assert explanation.reason == (
        f"This prompt differs from the nearest earlier one at token {difference.position}; only full pages of 256 "
        "tokens are kept, and the two do not share one."
    )


async def test_tokens_that_end_inside_a_character_are_replaced(hybrid: ExllamaV3Container) -> None:
    first, *others = hybrid.encode("\u20ac", add_bos=False, encode_special_tokens=True)
    assert others
    await serve(hybrid, [*prompt_of(10), first, 9])
    difference = explained(hybrid, [*prompt_of(10), 9, first]).difference
    assert difference is not None
    assert difference.requested.endswith("\ufffd")


async def test_a_checkpoint_that_was_never_made(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(1600))
    explanation = explained(hybrid, changed(prompt_of(1600), 1400))
    assert figures(explanation) == (1280, 0)
    assert explanation.difference is not None
    assert explanation.difference.position == 1400
    assert explanation.reason == (
        "This prompt differs from the nearest earlier one at token 1,400; its first 1,280 tokens are cached; there is "
        "no usable checkpoint, so 1,280 of these are processed again; a smaller recurrent_checkpoint_interval or "
        "recurrent_checkpoint_interval_pp, or one of cache_boundaries there, puts one nearer."
    )


async def test_a_checkpoint_further_back(hybrid: ExllamaV3Container) -> None:
    await answered(hybrid, prompt_of(1600), max_tokens=1, cache_boundaries=[600])
    explanation = explained(hybrid, changed(prompt_of(1600), 1400))
    assert figures(explanation) == (1280, 512)
    assert "; the last usable checkpoint is at 512, so 768 of these are processed again; a smaller" in (
        explanation.reason
    )
    assert explained(hybrid, changed(prompt_of(1600), 600)).reason == (
        "This prompt differs from the nearest earlier one at token 600; its first 512 tokens are cached."
    )


async def test_a_checkpoint_that_was_dropped(hybrid: ExllamaV3Container) -> None:
    await answered(hybrid, prompt_of(1100), max_tokens=1, cache_boundaries=[600, 800])
    checkpoints(hybrid, 1)
    await serve(hybrid, prompt_of(300))
    explanation = explained(hybrid, changed(prompt_of(1100), 900))
    assert figures(explanation) == (768, 0)
    assert explanation.reason.endswith(
        "there is no usable checkpoint, so 768 of these are processed again; one at 768 was dropped to make room, "
        "which a larger memory.sysmem_recurrent_cache prevents."
    )


async def test_a_budget_that_holds_no_checkpoint(hybrid: ExllamaV3Container) -> None:
    checkpoints(hybrid, 0.9)
    await serve(hybrid, prompt_of(600))
    explanation = explained(hybrid, prompt_of(600))
    assert figures(explanation) == (512, 0)
    assert explanation.reason.endswith("; memory.sysmem_recurrent_cache is too small for even one.")


async def test_pages_that_were_dropped(hybrid: ExllamaV3Container) -> None:
    await answered(hybrid, prompt_of(2200), max_tokens=1, cache_boundaries=[600])
    await serve(hybrid, prompt_of(2300))
    await serve(hybrid, prompt_of(600))  # goes idle once more, and checkpoints without their pages go
    explanation = explained(hybrid, prompt_of(2200))
    left = explanation.matched_tokens
    assert 512 <= left < 2048
    assert explanation.resumed_tokens == 512
    assert (
        f"All of this prompt was served before; its first {left:,} tokens are cached; what was cached from token "
        f"{left:,} on was dropped to make room, which a larger cache_size or memory.sysmem_kv_cache prevents"
    ) in explanation.reason


async def test_a_prompt_shorter_than_a_page(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(256))
    assert explained(hybrid, prompt_of(256)).reason == (
        "All of this prompt was served before; only full pages of 256 tokens before the last token are kept, and this "
        "prompt has none."
    )


async def test_a_prompt_that_goes_on_from_a_short_one(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(100))
    assert explained(hybrid, prompt_of(100) + prompt_of(400)).reason == (
        "This prompt goes on from an earlier one of 100 tokens; only full pages of 256 tokens are kept, and the two do "
        "not share one."
    )


async def test_anothers_prompt_is_not_shown(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(900), owner="a")
    explanation = explained(hybrid, changed(prompt_of(900), 800), owner="b")
    assert figures(explanation) == (768, 768)
    assert explanation.difference is None
    assert explanation.reason == (
        "No earlier prompt that is still known begins like this one; its first 768 tokens are cached all the same, "
        "from a prompt of another key, or one that still runs or is no longer known."
    )
    await serve(hybrid, changed(prompt_of(900), 300), owner="b")
    explanation = explained(hybrid, changed(prompt_of(900), 800), owner="b")
    assert explanation.difference is None, "where a prompt of one's own departs says nothing about what is cached"
    assert explanation.reason.startswith("This prompt differs from the nearest earlier one at token 300; its first 768")
    assert explained(hybrid, changed(prompt_of(900), 300), owner="b").reason == (
        "All of this prompt was served before; its first 768 tokens are cached."
    )


async def test_an_administrator_sees_everybodys_prompts(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(900), owner="a")
    explanation = explained(hybrid, changed(prompt_of(900), 800))
    assert isinstance(explanation.difference, Difference)
    assert explanation.difference.position == 800
    hybrid.history.clear()
    assert explained(hybrid, prompt_of(900)).reason.endswith(
        "cached all the same, from one that still runs or is no longer known."
    )


async def test_a_prompt_that_is_being_processed(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(1800))
    history = hybrid.history.nearest("", prompt_of(1800))
    assert history is not None
    await hybrid.clear()
    job = hybrid.start(GenerationRequest(prompt=prompt_of(1800), sampling=GREEDY, max_tokens=1))
    hybrid.history.remember("", history.ids.tolist())
    try:
        async for event in job.events():
            if isinstance(event, Prefill) and event.done_tokens:
                break
        explanation = explained(hybrid, prompt_of(1800))
        assert figures(explanation)[0] == 512
        assert "; from token 512 on, another request is processing the same tokens at this moment" in explanation.reason
    finally:
        await job.cancel()


async def test_more_in_host_ram_than_fits_at_once(tiny_hybrid: Path) -> None:
    memory = MemoryConfig(sysmem_kv_cache=1)
    dense: dict[str, Any] = {
        "recurrent_checkpoint_interval": 256,
        "recurrent_checkpoint_interval_pp": 256,
        "chunk_size": 256,
    }
    async with loaded(tiny_hybrid, memory=memory, cache_size=1792, max_seq_len=1792, **dense) as container:
        await serve(container, prompt_of(1500))
        await serve(container, prompt_of(1500, seed=1))
        explanation = explained(container, prompt_of(1500))
        assert (*figures(explanation), explanation.ram_tokens) == (1280, 1024, 768)
        assert explanation.reason == (
            "All of this prompt was served before; its first 1,280 tokens are cached; the last usable checkpoint is at "
            "1,024, so 256 of these are processed again; the pages up to a later one cannot all be brought back "
            "through memory.sysmem_kv_cache, so a larger one helps."
        )
        answer = await answered(container, prompt_of(1500), max_tokens=1)
        assert answer.finish.usage.cached_tokens == 1024


async def test_without_recurrent_layers(llama: ExllamaV3Container) -> None:
    await serve(llama, prompt_of(900))
    explanation = explained(llama, changed(prompt_of(900), 800))
    assert figures(explanation) == (800, 800)
    assert explanation.reason == (
        "This prompt differs from the nearest earlier one at token 800; its first 800 tokens are cached."
    )
    assert explained(llama, changed(prompt_of(900), 1)).reason == (
        "This prompt differs from the nearest earlier one at token 1."
    )
    known = llama.history.nearest("", prompt_of(900))
    assert known is not None
    await llama.clear()
    llama.history.remember("", known.ids.tolist())
    for prompt in (changed(prompt_of(900), 800), changed(prompt_of(900), 200)):
        assert explained(llama, prompt).reason.endswith(
            "; what was cached from token 0 on was dropped to make room, which a larger cache_size or "
            "memory.sysmem_kv_cache prevents."
        )


async def test_the_healed_token_is_not_looked_up(llama: ExllamaV3Container) -> None:
    await llama.clear()
    healed = llama.encode("a", add_bos=False, encode_special_tokens=True)
    prompt = prompt_of(256) + healed
    await serve(llama, prompt)
    request = GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=1, token_healing=True)
    explanation = llama.explain(request)
    answer = await answered(llama, prompt, max_tokens=1, token_healing=True)
    assert explanation.resumed_tokens == answer.finish.usage.cached_tokens < 256
    assert explanation.prompt_tokens == answer.finish.usage.prompt_tokens == 257


async def test_requests_that_cannot_be_served_are_refused(hybrid: ExllamaV3Container) -> None:
    with pytest.raises(ContextLengthExceeded):
        explained(hybrid, prompt_of(5000))
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        explained(hybrid, [])
    with pytest.raises(InvalidRequest):
        explained(hybrid, [10**6])


async def test_the_explanation_of_a_served_request_is_that_from_before_it(hybrid: ExllamaV3Container) -> None:
    await serve(hybrid, prompt_of(900))
    asked = explained(hybrid, changed(prompt_of(900), 600))
    answer = await answered(hybrid, changed(prompt_of(900), 600), max_tokens=1, explain_cache=True)
    assert answer.finish.usage.explanation == asked
    assert (await answered(hybrid, prompt_of(300), max_tokens=1)).finish.usage.explanation is None
