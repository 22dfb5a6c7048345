"""Checkpoints where prompts change, on the real engine: where they are made, what they cost, and what they save."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.checkpoints import plan
from backends.exllamav3.engine import AsyncJob, Job
from backends.exllamav3.jobs import AsyncCheckpointJob, CheckpointLedger, Made, check_engine_job
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig, MemoryConfig
from common.errors import SettingsError
from common.generation import GenerationRequest, Prefill, Usage
from tests.containers import GREEDY, Answer, answered, loaded

CHUNK = 512
INTERVALS = ("recurrent_checkpoint_interval", "recurrent_checkpoint_interval_pp")
RECURRENT = ["tiny_hybrid", "tiny_sliding", "tiny_conv"]


@pytest.fixture(scope="module")
async def shared_hybrid(tiny_hybrid: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_hybrid, chunk_size=CHUNK) as container:
        yield container


@pytest.fixture(scope="module")
async def shared_conv(tiny_conv: Path) -> AsyncIterator[ExllamaV3Container]:
    """The quickest of the recurrent models."""
    async with loaded(tiny_conv, chunk_size=CHUNK) as container:
        yield container


@pytest.fixture
async def hybrid(shared_hybrid: ExllamaV3Container) -> AsyncIterator[ExllamaV3Container]:
    yield shared_hybrid
    await shared_hybrid.clear()


@pytest.fixture
async def conv(shared_conv: ExllamaV3Container) -> AsyncIterator[ExllamaV3Container]:
    """Tests may change the sizes that `set_sizes` knows."""
    engine = engine_of(shared_conv)
    budget = engine.recurrent_cache.max_size
    sizes = {name: getattr(engine, name) for name in ("max_chunk_size", *INTERVALS)}
    yield shared_conv
    vars(engine).update(sizes)
    engine.recurrent_cache.max_size = budget
    await shared_conv.clear()


def engine_of(container: ExllamaV3Container) -> Any:
    assert container.generator is not None
    return container.generator.generator


def some_prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, 1000), k=tokens)


def edited(prompt: list[int], position: int) -> list[int]:
    return [*prompt[:position], 5 + (prompt[position] + 1) % 900, *prompt[position + 1 :]]


def positions(container: ExllamaV3Container) -> list[int]:
    return sorted(checkpoint["position"] for checkpoint in engine_of(container).recurrent_cache.values())


def set_sizes(container: ExllamaV3Container, **sizes: int) -> None:
    vars(engine_of(container)).update(sizes)


def limit_checkpoints(container: ExllamaV3Container, capacity: int) -> None:
    info = container.info().checkpoints
    assert info is not None
    engine_of(container).recurrent_cache.max_size = capacity * info.bytes


@contextmanager
def passes(container: ExllamaV3Container) -> Iterator[list[int]]:
    """The tokens of each prefill pass of the model."""
    taken: list[int] = []
    model = container.model
    original = model.prefill

    def prefill(input_ids: Any, params: Any) -> Any:
        taken.append(input_ids.shape[-1])
        return original(input_ids=input_ids, params=params)

    model.prefill = prefill
    try:
        yield taken
    finally:
        del model.prefill


async def usage_of(container: ExllamaV3Container, prompt: str | list[int], **fields: Any) -> Usage:
    return (await answered(container, prompt, **({"max_tokens": 1} | fields))).finish.usage


def assert_at_rest(container: ExllamaV3Container) -> None:
    """Nothing that a job held is held any longer."""
    engine = engine_of(container)
    assert not engine.num_remaining_jobs()
    assert not engine.pagetable.referenced_pages


# --- where checkpoints are made, and at what price --------------------------------------------------------------------


@pytest.mark.parametrize(
    "boundaries",
    [[], [100], [600], [300, 700], [900, 600, 601, 256], [1000], [600, 1050], [256, 512, 768, 1024]],
    ids=str,
)
async def test_marks_and_passes_are_those_planned(hybrid: ExllamaV3Container, boundaries: list[int]) -> None:
    prompt = some_prompt(1100)
    engine = engine_of(hybrid)
    with passes(hybrid) as taken:
        usage = await usage_of(hybrid, prompt, cache_boundaries=boundaries)
    planned = plan(
        len(prompt),
        CHUNK,
        engine.recurrent_checkpoint_interval,
        engine.recurrent_checkpoint_interval_pp,
        checkpoint_bytes=1,
        budget_bytes=2**30,
        boundaries=boundaries,
    )
    assert positions(hybrid) == list(planned.marks)
    assert len(taken) == planned.passes
    assert sum(taken) == usage.prompt_tokens - 1 == 1099
    assert (usage.cached_tokens, usage.matched_tokens) == (0, 0)


async def test_past_the_last_boundary_marks_follow_the_interval(conv: ExllamaV3Container) -> None:
    set_sizes(conv, max_chunk_size=256, recurrent_checkpoint_interval=512)
    prompt = some_prompt(1400)
    for boundaries, marks in (
        ([], [1024, 1280]),  # the last two chunks
        ([300, 600], [256, 512, 1024, 1280]),
        ([1350], [1280]),
    ):
        await usage_of(conv, prompt, cache_boundaries=boundaries)
        assert positions(conv) == marks
        await conv.clear()


async def test_up_to_the_last_boundary_marks_follow_the_interval_of_prompts(conv: ExllamaV3Container) -> None:
    set_sizes(conv, max_chunk_size=256, recurrent_checkpoint_interval_pp=512)
    await usage_of(conv, some_prompt(1400), cache_boundaries=[300, 1050, 1350])
    assert positions(conv) == [256, 768, 1024, 1280]


async def test_boundaries_outside_a_prompt_are_left_out(hybrid: ExllamaV3Container) -> None:
    await usage_of(hybrid, some_prompt(700), cache_boundaries=[-300, 701, 400, 9000, 0])
    assert positions(hybrid) == [256, 512]


async def test_without_recurrent_layers_boundaries_mean_nothing(llama: ExllamaV3Container) -> None:
    prompt = some_prompt(700)
    with passes(llama) as plain:
        await usage_of(llama, prompt)
    await llama.clear()
    with passes(llama) as placed:
        await usage_of(llama, prompt, cache_boundaries=[300, 600])
    assert placed == plain


async def test_characters_of_a_text_become_tokens(hybrid: ExllamaV3Container) -> None:
    system = "<|im_start|>system\n" + "Ada measured the river near the harbour. " * 40 + "<|im_end|>\n"
    question = "<|im_start|>user\n" + "Basil painted a lantern. " * 60 + "<|im_end|>\n"
    text = system + question + "<|im_start|>assistant\n"
    literals = [(len("<|im_start|>system\n"), len(system) - len("<|im_end|>\n"))]
    for fields in ({}, {"literals": literals}, {"add_bos": True}):
        await hybrid.clear()
        await usage_of(hybrid, text, cache_boundaries=[len(system), len(system + question)], **fields)
        ids = hybrid.encode(system, add_bos=bool(fields.get("add_bos")), encode_special_tokens=True)
        all_ids = hybrid.encode(text, add_bos=bool(fields.get("add_bos")), encode_special_tokens=True)
        assert len(ids) > 256
        assert positions(hybrid) == [len(ids) // 256 * 256, (len(all_ids) - 1) // 256 * 256]


# --- what they save ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fixture", [RECURRENT[0], *(pytest.param(other, marks=pytest.mark.slow) for other in RECURRENT[1:])]
)
async def test_an_edit_at_a_boundary_is_resumed_there(request: pytest.FixtureRequest, fixture: str) -> None:
    """For one pass more and no token more; and it is answered as if nothing had been cached."""
    prompt = some_prompt(900)
    fields: dict[str, Any] = {"cache_boundaries": [300, 600], "logprobs": 3}
    async with loaded(request.getfixturevalue(fixture), chunk_size=CHUNK) as container:
        with passes(container) as taken:
            await answered(container, prompt, **fields)
        assert taken == [256, 256, 256, 131]
        assert positions(container) == [256, 512, 768]
        for boundary, expected in ((600, [256, 131]), (300, [256, 256, 131])):
            changed = edited(prompt, boundary)
            with passes(container) as taken:
                warm = await answered(container, changed, **fields)
            assert taken == expected
            usage = warm.finish.usage
            assert usage.cached_tokens == usage.matched_tokens == boundary // 256 * 256
            assert usage.prompt_tokens - usage.cached_tokens == 1 + sum(taken)
        await container.clear()
        with passes(container) as taken:
            fresh = await answered(container, changed, logprobs=3)
        assert taken == [512, 256, 131]
        assert positions(container) == [768]
        assert_same(warm, fresh)


def assert_same(one: Answer, other: Answer) -> None:
    assert one.token_ids == other.token_ids
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        assert left.logprob == pytest.approx(right.logprob, abs=0.02)


async def test_what_lies_past_the_last_checkpoint_is_matched_and_replayed(hybrid: ExllamaV3Container) -> None:
    prompt = some_prompt(1100)
    await usage_of(hybrid, prompt)
    usage = await usage_of(hybrid, edited(prompt, 1000))
    assert (usage.matched_tokens, usage.cached_tokens) == (768, 0)
    usage = await usage_of(hybrid, prompt)
    assert (usage.matched_tokens, usage.cached_tokens) == (1024, 1024)
    assert (hybrid.ledger.hits, hybrid.ledger.replayed_tokens) == (1, 768)


async def test_a_dense_model_replays_nothing(llama: ExllamaV3Container) -> None:
    prompt = some_prompt(700)
    await usage_of(llama, prompt)
    usage = await usage_of(llama, edited(prompt, 600))
    assert usage.matched_tokens == usage.cached_tokens == 600  # the engine copies a part of a page too


async def test_what_comes_back_from_other_tiers_is_told(tiny_conv: Path, tmp_path: Path) -> None:
    prompt = some_prompt(800)
    memory = MemoryConfig(sysmem_kv_cache=64, disk_cache_dir=str(tmp_path), disk_cache_checkpoint_interval=0)
    sizes: dict[str, Any] = {"chunk_size": CHUNK, "cache_size": 1024, "max_seq_len": 1024, "memory": memory}
    async with loaded(tiny_conv, **sizes) as container:
        usage = await usage_of(container, prompt, cache_boundaries=[300])
        assert (usage.cached_tokens, usage.ram_tokens, usage.disk_tokens) == (0, 0, 0)
        usage = await usage_of(container, prompt)
        assert (usage.cached_tokens, usage.ram_tokens, usage.disk_tokens) == (768, 0, 0)
        await usage_of(container, some_prompt(800, seed=1))  # takes all but one page
        usage = await usage_of(container, edited(prompt, 400))
        assert usage.cached_tokens == 256
        usage = await usage_of(container, prompt)
        assert (usage.matched_tokens, usage.cached_tokens) == (768, 768)
        assert usage.ram_tokens > 0
        assert usage.disk_tokens == 0
        await container.flush()
    async with loaded(tiny_conv, **sizes) as container:
        usage = await usage_of(container, edited(prompt, 450), cache_boundaries=[300])
        assert (usage.matched_tokens, usage.cached_tokens, usage.ram_tokens, usage.disk_tokens) == (256, 256, 0, 256)
        assert positions(container) == [256, 768]
        boundary = next(key for key, entry in engine_of(container).recurrent_cache.items() if entry["position"] == 256)
        assert container.ledger.of(boundary) == Made(None, True)


async def test_segments_of_an_answer_leave_the_figures_alone(
    conv: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[Job] = []
    prepare_for_requeue = Job.prepare_for_requeue

    def requeue(job: Job) -> Job:
        requeued.append(job)
        return prepare_for_requeue(job)

    monkeypatch.setattr(Job, "prepare_for_requeue", requeue)
    limits = replace(conv._limits(), max_rq_tokens=1)
    monkeypatch.setattr(conv, "_limits", lambda: limits)
    set_sizes(conv, recurrent_checkpoint_interval=256)
    hits = conv.ledger.hits
    prompt = some_prompt(760)
    await usage_of(conv, prompt, cache_boundaries=[300])
    requeued.clear()
    usage = await usage_of(conv, edited(prompt, 400), cache_boundaries=[300], max_tokens=20)
    assert len(requeued) == 1
    assert usage.completion_tokens == 20
    assert (usage.cached_tokens, usage.matched_tokens) == (256, 256)
    assert conv.ledger.hits == hits + 1
    assert_at_rest(conv)


async def test_an_explanation_is_of_the_moment_in_which_the_job_leaves_the_queue(hybrid: ExllamaV3Container) -> None:
    prompt = some_prompt(700)
    first, second = await asyncio.gather(
        usage_of(hybrid, prompt, cache_boundaries=[300], explain_cache=True),
        usage_of(hybrid, edited(prompt, 500), explain_cache=True),
    )
    third = await usage_of(hybrid, edited(prompt, 400), explain_cache=True, owner="somebody")
    for usage, resumed in ((first, 0), (second, 0), (third, 256)):
        assert usage.explanation is not None
        assert usage.explanation.resumed_tokens == usage.cached_tokens == resumed
        assert usage.explanation.matched_tokens == usage.matched_tokens
    assert third.explanation is not None
    assert third.explanation.difference is None  # what others asked is not shown
    fourth = await usage_of(hybrid, edited(prompt, 450), explain_cache=True)
    assert fourth.explanation is not None
    assert fourth.explanation.difference is not None
    assert fourth.explanation.difference.position == 450
    assert (await usage_of(hybrid, prompt)).explanation is None


# --- kept -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixture", "capacity", "results", "calls"),
    [
        ("tiny_conv", 2, [255], 8),
        pytest.param("tiny_conv", 2, [255], 30, marks=pytest.mark.slow),
        pytest.param("tiny_hybrid", 3, [260, 1200], 30, marks=pytest.mark.slow),
        pytest.param("tiny_conv", 4, [100, 2100], 30, marks=pytest.mark.slow),
        pytest.param("tiny_sliding", 6, [260], 30, marks=pytest.mark.slow),
    ],
)
async def test_a_long_tool_loop_keeps_the_system_anchor(
    request: pytest.FixtureRequest, fixture: str, capacity: int, results: list[int], calls: int
) -> None:
    """`results` are tokens of what tools say, in turn."""
    boundaries = [600, 800]  # the end of the system prompt, the user's turn
    async with loaded(
        request.getfixturevalue(fixture),
        chunk_size=CHUNK,
        recurrent_checkpoint_interval=1024,
        cache_size=65536,
        max_seq_len=65536,
    ) as container:
        limit_checkpoints(container, capacity)
        prompt = some_prompt(1025)
        resumable = 0
        for call in range(calls):
            answer = await answered(container, prompt, cache_boundaries=boundaries, max_tokens=1)
            assert answer.finish.usage.cached_tokens == resumable, f"call {call}"
            resumable = (len(prompt) - 1) // 256 * 256
            prompt = prompt + answer.token_ids + some_prompt(results[call % len(results)], seed=call)
            assert len(positions(container)) <= capacity
            assert 512 in positions(container), f"call {call}"
        if capacity > 2:
            assert 768 in positions(container)
        assert (await usage_of(container, edited(prompt, 550)[:700])).cached_tokens == 512


async def test_anchors_below_the_resume_point_are_kept_too(conv: ExllamaV3Container) -> None:
    """A conversation of others, who share nothing, pushes out what this one does not name."""
    limit_checkpoints(conv, 5)
    prompt = some_prompt(1300)
    await usage_of(conv, prompt, cache_boundaries=[300, 600])
    await usage_of(conv, some_prompt(300, seed=8))
    longer = prompt + some_prompt(10, seed=9)
    assert (await usage_of(conv, longer, cache_boundaries=[300, 600])).cached_tokens == 1280
    for seed in (20, 21):
        await usage_of(conv, some_prompt(300, seed=seed))
    for edit, resumed in ((1290, 1280), (700, 512), (400, 256)):
        assert (await usage_of(conv, edited(prompt, edit)[: edit + 1])).cached_tokens == resumed
    assert (await usage_of(conv, some_prompt(300, seed=8))).cached_tokens == 0


@pytest.mark.slow
async def test_generated_text_does_not_push_out_anchors(tiny_conv: Path) -> None:
    async with loaded(tiny_conv, chunk_size=256, recurrent_checkpoint_interval=256) as container:
        limit_checkpoints(container, 3)
        prompt = some_prompt(780)
        await usage_of(container, prompt, cache_boundaries=[300], max_tokens=520)
        assert len(positions(container)) == 3
        assert positions(container)[:2] == [256, 768]  # and one of the answer


# --- progress is kept -------------------------------------------------------------------------------------------------


async def cancelled_after(container: ExllamaV3Container, prompt: list[int], tokens: int, **fields: Any) -> None:
    """Start a request, and cancel it as soon as so many tokens of its prompt are done."""
    job = container.start(GenerationRequest(prompt=prompt, sampling=GREEDY, max_tokens=4, **fields))
    try:
        async for event in job.events():
            assert isinstance(event, Prefill), "too late"
            if event.done_tokens >= tokens:
                break
    finally:
        await job.cancel()
        await job.cancel()  # which does nothing


async def test_a_cancelled_prefill_is_gone_on_from(hybrid: ExllamaV3Container) -> None:
    prompt = some_prompt(2000)
    await cancelled_after(hybrid, prompt, 1000)
    assert positions(hybrid) == [1024]
    assert_at_rest(hybrid)
    with passes(hybrid) as taken:
        warm = await answered(hybrid, prompt, logprobs=2)
    assert warm.finish.usage.cached_tokens == 1024
    assert sum(taken) == 1999 - 1024
    await hybrid.clear()
    assert_same(warm, await answered(hybrid, prompt, logprobs=2))


async def test_a_cancelled_prefill_adds_to_its_boundaries(hybrid: ExllamaV3Container) -> None:
    prompt = some_prompt(2000)
    await cancelled_after(hybrid, prompt, 1000, cache_boundaries=[300])
    assert positions(hybrid) == [256, 1280]
    assert (await usage_of(hybrid, prompt, cache_boundaries=[300])).cached_tokens == 1280


async def test_what_was_processed_is_remembered(conv: ExllamaV3Container) -> None:
    prompt = some_prompt(1300)
    await cancelled_after(conv, prompt, 512, owner="impatient")
    answer = await answered(conv, prompt, owner="patient")
    cancelled = conv.history.nearest("impatient", prompt)
    finished = conv.history.nearest("patient", prompt + answer.token_ids)
    assert cancelled is not None
    assert finished is not None
    assert cancelled.common in range(512, 1300, 256)
    assert finished.common == len(prompt + answer.token_ids) - 1  # the last token was sampled, not processed
    assert conv.history.nearest("somebody else", prompt) is None


async def test_requests_that_share_a_prompt_are_cancelled_one_by_one(hybrid: ExllamaV3Container) -> None:
    prompt = some_prompt(2000)
    _, _, left = await asyncio.gather(
        cancelled_after(hybrid, prompt, 512),
        cancelled_after(hybrid, prompt, 1024, cache_boundaries=[800]),
        answered(hybrid, prompt),
    )
    assert_at_rest(hybrid)
    assert set(positions(hybrid)) >= {768, 1792}
    await hybrid.clear()
    assert_same(left, await answered(hybrid, prompt))


async def test_a_request_that_waits_has_nothing_to_keep(tiny_conv: Path) -> None:
    async with loaded(tiny_conv, chunk_size=256, max_batch_size=1) as container:
        running = asyncio.create_task(usage_of(container, some_prompt(1000, seed=1), max_tokens=20))
        await asyncio.sleep(0)
        job = container.start(GenerationRequest(prompt=some_prompt(600), sampling=GREEDY))
        await job.cancel()
        await running
        assert positions(container) == [768]
        assert_at_rest(container)


async def test_a_request_that_is_answering_has_nothing_to_keep(conv: ExllamaV3Container) -> None:
    job = conv.start(GenerationRequest(prompt=some_prompt(600), sampling=GREEDY))
    async for event in job.events():
        if not isinstance(event, Prefill):
            break
    await job.cancel()
    assert positions(conv) == [512]
    assert_at_rest(conv)


async def test_after_a_failure_of_the_generator_nothing_is_kept(conv: ExllamaV3Container) -> None:
    assert conv.generator is not None
    job = conv.start(GenerationRequest(prompt=some_prompt(1300), sampling=GREEDY))
    async for event in job.events():
        if isinstance(event, Prefill) and event.done_tokens:
            break
    conv.generator.error = RuntimeError("as if the engine had failed")
    await job.cancel()
    assert positions(conv) == []
    conv.generator.error = None
    engine_of(conv).clear_queue()


# --- beside other requests --------------------------------------------------------------------------------------------


async def test_a_boundary_before_a_page_with_which_another_request_ends_a_chunk(conv: ExllamaV3Container) -> None:
    """The one that stops before it writes the page again while the other makes a checkpoint of it."""
    prompt = some_prompt(1400)
    set_sizes(conv, recurrent_checkpoint_interval=CHUNK)
    first, second = await asyncio.gather(
        answered(conv, prompt), answered(conv, edited(prompt, 1350), cache_boundaries=[512, 800])
    )
    assert_at_rest(conv)
    assert positions(conv) == [512, 768, 1024, 1280]
    await conv.clear()
    assert_same(first, await answered(conv, prompt))
    assert_same(second, await answered(conv, edited(prompt, 1350)))


async def test_boundaries_while_another_answer_is_generated(hybrid: ExllamaV3Container) -> None:
    talking = asyncio.create_task(answered(hybrid, some_prompt(20, seed=7), max_tokens=80))
    while engine_of(hybrid).num_active_jobs() == 0:
        await asyncio.sleep(0)
    with passes(hybrid) as taken:
        answer = await answered(hybrid, some_prompt(1100), cache_boundaries=[600, 900])
    await talking
    assert taken == [256] * 4 + [75]  # the chunk is half of chunk_size
    assert positions(hybrid) == [512, 768, 1024]
    await hybrid.clear()
    assert_same(answer, await answered(hybrid, some_prompt(1100)))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("tiny_hybrid", DraftModelConfig(draft_mode="ngram")),
        pytest.param(
            "tiny_llama", DraftModelConfig(draft_mode="model", draft_model_name="tiny-conv"), marks=pytest.mark.slow
        ),
    ],
    ids=["ngram", "recurrent drafter"],
)
async def test_with_drafts(
    request: pytest.FixtureRequest, tiny_conv: Path, target: str, draft: DraftModelConfig
) -> None:
    draft = draft.model_copy(update={"draft_model_dir": str(tiny_conv.parent)})
    prompt = [5 + i % 40 for i in range(700)]
    async with loaded(request.getfixturevalue(target), chunk_size=CHUNK, draft_model=draft) as container:
        await answered(container, prompt, cache_boundaries=[300], max_tokens=20)
        assert positions(container) == [256, 512]
        changed = edited(prompt, 400)
        warm = await answered(container, changed, cache_boundaries=[300], max_tokens=20)
        assert warm.finish.usage.cached_tokens == 256
        await container.clear()
        assert_same(warm, await answered(container, changed, max_tokens=20))


# --- the ledger -------------------------------------------------------------------------------------------------------


async def test_the_ledger_tells_anchors_from_other_checkpoints(conv: ExllamaV3Container) -> None:
    prompt = some_prompt(700)
    cache = engine_of(conv).recurrent_cache

    def anchors() -> dict[int, bool]:
        made = {entry["position"]: conv.ledger.of(key) for key, entry in cache.items()}
        assert all(entry is not None and entry.at is not None for entry in made.values())
        return {position: entry.boundary for position, entry in made.items() if entry is not None}

    await usage_of(conv, prompt, cache_boundaries=[300])
    assert anchors() == {256: True, 512: False}
    await usage_of(conv, prompt + prompt, cache_boundaries=[300, 600])
    assert anchors() == {256: True, 512: True, 1280: False}


async def test_the_ledger_follows_a_checkpoint_that_gets_another_key(conv: ExllamaV3Container) -> None:
    """Pages that hold the beginning of a banned string are hashed once it has not come."""
    set_sizes(conv, recurrent_checkpoint_interval=256)
    cache = engine_of(conv).recurrent_cache
    pieces = conv.tokenizer.get_id_to_piece_list(True)
    prompt = some_prompt(500)
    plain = await answered(conv, prompt, max_tokens=20)
    await conv.clear()
    # While token 512 is processed, what is said may be the beginning of this.
    banned = "".join(pieces[token] for token in plain.token_ids[8:16]) + "\u2603"
    answer = await answered(conv, prompt, max_tokens=20, banned_strings=[banned])
    assert answer.token_ids == plain.token_ids
    assert positions(conv) == [256, 512]
    assert all(conv.ledger.of(key) is not None for key in cache)


def test_the_ledger_does_not_grow() -> None:
    ledger = CheckpointLedger()
    held = {index.to_bytes(2, "big") for index in range(990, 1000)}
    for index in range(1000):
        ledger.note(index.to_bytes(2, "big"), boundary=False, held=held.__contains__)
    assert len(ledger._made) < 100
    assert all(ledger.of(key) is not None for key in held)


def test_the_ledger_knows_what_it_is_told() -> None:
    ledger = CheckpointLedger()
    ledger.note(b"a", boundary=False, held=lambda key: True)
    ledger.note_boundary(b"a")
    ledger.note_boundary(b"from disk")
    made = ledger.of(b"a")
    assert made is not None
    assert made.boundary
    assert made.at is not None
    assert ledger.of(b"from disk") == Made(None, True)
    ledger.rekey(b"a", b"b")
    ledger.rekey(b"unknown", b"c")
    assert (ledger.of(b"a"), ledger.of(b"b"), ledger.of(b"c")) == (None, made, None)
    ledger.tidy({b"b"}.__contains__)
    assert (ledger.of(b"b"), ledger.of(b"from disk")) == (made, None)


# --- the engine -------------------------------------------------------------------------------------------------------


def test_an_engine_whose_jobs_are_others_is_refused() -> None:
    class Other:
        def prefill(self, results: list[Any]) -> None: ...

        def maybe_stash_recurrent(self, cache: Any, interval: int | None = None) -> None: ...

    with pytest.raises(SettingsError) as raised:
        check_engine_job(Other)
    message = str(raised.value)
    for lacking in ("allocate_pages()", "prefill(results, chunk_size)", "is_checkpoint_boundary(override_interval)"):
        assert lacking in message
    assert "maybe_stash_recurrent" not in message
    assert "pip install" in message
    check_engine_job(Job)


async def test_a_job_has_what_the_engines_has(conv: ExllamaV3Container) -> None:
    """Its constructor does not call the engine's."""
    theirs = AsyncJob(conv.generator, input_ids=conv.tokenizer.encode("Ada"), max_new_tokens=1)
    await theirs.cancel()  # the queue takes none but ours
    ours = conv.start(GenerationRequest(prompt="Ada", sampling=GREEDY, max_tokens=1))
    try:
        assert isinstance(ours._job, AsyncCheckpointJob)  # type: ignore[union-attr]
        assert vars(ours._job).keys() == {*vars(theirs), "_on_results"}  # type: ignore[union-attr]
    finally:
        await ours.cancel()


# --- a chat of 5,000 tokens, as by default ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fixture", RECURRENT)
async def test_a_chat_of_5000_tokens(request: pytest.FixtureRequest, fixture: str) -> None:
    prompt = some_prompt(5000)
    boundaries = [700, 3900, 4700]  # the end of the system prompt, the last two turns of the user
    async with loaded(request.getfixturevalue(fixture), cache_size=32768) as container:
        with passes(container) as taken:
            await usage_of(container, prompt, cache_boundaries=boundaries)
        assert positions(container) == [512, 3840, 4608, 4864]
        assert sum(taken) == 4999
        assert len(taken) == 4 + 2  # 4 without boundaries
        for boundary in boundaries:
            usage = await usage_of(container, edited(prompt, boundary), cache_boundaries=boundaries)
            assert usage.cached_tokens == boundary // 256 * 256


@pytest.mark.slow
async def test_a_cancelled_prefill_of_5000_tokens(tiny_hybrid: Path) -> None:
    prompt = some_prompt(5000)
    async with loaded(tiny_hybrid) as container:
        for done in (2048, 4096):
            await cancelled_after(container, prompt, done)
            usage = await usage_of(container, prompt[:4990]) if done == 4096 else None
            assert done in positions(container)
        assert usage is not None
        assert usage.cached_tokens == 4096
