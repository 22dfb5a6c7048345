"""Speculative decoding on the CPU kernels: drafts that are right in part, and what they leave behind.

What is answered is known beforehand in most of these tests, so that no near tie of two tokens decides them. The drafts
of one round after the other are right for 0, 1, 2 ... tokens, so that every number of accepted tokens comes up.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zstandard
from torch import Tensor

from backends.exllamav3.cpu.drafting import BC_SAM
from backends.exllamav3.engine import Generator, Job, Sampler
from backends.exllamav3.options import CORPUS_IDENTITY, CORPUS_MAGIC, CORPUS_PREFIX
from tests.engines import Answer, Loaded, loading, random_ids, run
from tests.models import VOCABULARY

WINDOW = 5  # tokens drafted in a round; a pass over as many as heads or more scans Gated DeltaNet in chunks
EVERY_COUNT = {*range(WINDOW + 1)}
WITH_SCANS_OF_THEIR_OWN = ["tiny_nemotron_h", "tiny_kimi_linear"]
RECURRENT = ["tiny_hybrid", *WITH_SCANS_OF_THEIR_OWN, "tiny_conv", "tiny_sliding"]


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Callable[..., Loaded]]:
    with loading() as load:
        # A state in fp16 would be rounded once a pass, hence otherwise with drafts than without.
        yield lambda fixture, **options: load(
            request.getfixturevalue(fixture), **({"recurrent_dtype": torch.float} | options)
        )


class Scripted(Sampler):  # type: ignore[misc]  # the engine has no types
    """Chooses the tokens of an answer, whatever the logits.

    Attributes:
        position: of the token that is asked for next; drafts are verified from that of their round on.
        random: the number that each position was given to choose by, those of rejected drafts replaced by later ones.
    """

    def __init__(self, answer: list[int], *, serially: bool) -> None:
        super().__init__()
        self.reqs_past_ids = serially  # else all tokens of a draft are chosen before the first is looked at
        self.answer = answer
        self.position = 0
        self.random: dict[int, int] = {}

    def forward(self, logits: Tensor, ids: Tensor | None, random: int, *arguments: Any, **options: Any) -> Tensor:
        position, self.position = self.position, self.position + 1
        self.random[position] = random
        return torch.tensor([[self.answer[min(position, len(self.answer) - 1)]]])


def scripted(ids: Tensor, answer: Tensor, *, serially: bool = False) -> Job:
    tokens = answer[0].tolist()
    sampler = Scripted(tokens, serially=serially)
    return Job(input_ids=ids, max_new_tokens=len(tokens), sampler=sampler, seed=7, return_logits=True)


def answered_by(job: Job) -> int:
    (sequence,) = job.sequences
    return len(sequence.sequence_ids) - len(sequence.input_ids)


def active(generator: Generator) -> list[Job]:
    """The jobs that a round drafts for, in its order."""
    return [job for job in generator.active_jobs if job.is_prefill_done()]


class Rounds:
    """How much of the next drafts is right: one token more every round, from another number on for every request."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._round = -1
        self._jobs: list[Job] = []

    def begin(self) -> None:
        self._round += 1
        self._jobs = active(self._generator)
        for job in self._jobs:
            job.sampler.position = answered_by(job)

    def column(self, index: int) -> Tensor:
        """The drafted tokens that are `index` behind the last of each answer, (requests, 1)."""
        return torch.tensor([[self._token(row, job.sampler, index)] for row, job in enumerate(self._jobs)])

    def _token(self, row: int, script: Scripted, index: int) -> int:
        token = script.answer[min(script.position + index, len(script.answer) - 1)]
        right = (self._round + row) % (WINDOW + 1)
        return token if index < right else (token + 1) % VOCABULARY


def drafting(loaded: Loaded, **options: Any) -> Generator:
    """A generator whose n-gram drafts are the scripted answers of its jobs, as far as they are to be right."""
    options = {"recurrent_checkpoint_interval": 256} | options
    generator = loaded.generator(ngram_match_min=1, num_draft_tokens=WINDOW, record_draft_stats=True, **options)
    rounds = Rounds(generator)

    def drafts(results: list[Any]) -> Tensor | None:
        rounds.begin()
        return torch.cat([rounds.column(index) for index in range(WINDOW)], dim=-1) if active(generator) else None

    generator.iterate_ngram_gen = drafts
    return generator


def drafted_by(drafter: Loaded, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, method: str) -> Generator:
    """A generator with a model that drafts, which does its work and then is told what to have drafted."""
    generator = loaded.generator(
        draft_model=drafter.model, draft_cache=drafter.cache, num_draft_tokens=WINDOW, record_draft_stats=True
    )
    rounds = Rounds(generator)
    begin = generator.iterate_draftmodel_mtp_gen if method == "sample_from_state" else generator.iterate_draftmodel_gen
    compute, step = getattr(drafter.model, method), -1

    def draft(*arguments: Any, **options: Any) -> Tensor | None:
        nonlocal step
        step = 0
        rounds.begin()
        drafts: Tensor | None = begin(*arguments, **options)
        step = -1
        return drafts

    def choose(*arguments: Any, **options: Any) -> Tensor:
        nonlocal step
        out: Tensor = compute(*arguments, **options)
        if step < 0:  # no draft, but the prompt
            return out
        column, step = rounds.column(step), step + 1
        return column if method == "sample_from_state" else F.one_hot(column, VOCABULARY)

    monkeypatch.setattr(drafter.model, method, choose)
    monkeypatch.setattr(generator, begin.__name__, draft)
    return generator


def accepted(jobs: Sequence[Job]) -> list[int]:
    """Tokens accepted in each round but the last, which the end of the answer cuts short."""
    return [count for job in jobs for _, _, count in job.draft_stats[:-1]]


def logits(answer: Answer) -> Tensor:
    """(tokens, vocabulary)"""
    return torch.cat([chunk["logits"][0] for chunk in answer.chunks if "logits" in chunk]).float()[:, :VOCABULARY]


class States:
    """Recurrent states of jobs after each step, by job and position."""

    def __init__(self, jobs: Sequence[Job], side: str = "target") -> None:
        self._jobs = jobs
        self._side = side
        self.by_place: dict[tuple[int, int], list[Tensor]] = {}

    def record(self) -> None:
        for index, job in enumerate(self._jobs):
            if job.recurrent_state is not None and job.is_prefill_done():
                stashed = job.recurrent_state.stash()[self._side]
                layers = [stashed[key] for key in stashed if key not in ("position", "checkpoint_size")]
                self.by_place[index, stashed["position"]] = [*tensors(layers)]


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def assert_same_states(states: States, expected: States) -> None:
    assert len(states.by_place) > 10
    for place, state in states.by_place.items():
        for tensor, same in zip(state, expected.by_place[place], strict=True):
            assert (tensor.float() - same.float()).norm() < 0.01 * same.float().norm(), place


# --- what is accepted, and what is left -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixture", "serially"),
    [
        ("tiny_hybrid", False),
        *((name, False) for name in WITH_SCANS_OF_THEIR_OWN),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("tiny_llama", "tiny_conv", "tiny_sliding")),
        pytest.param("tiny_hybrid", True, marks=pytest.mark.slow),
    ],
)
def test_drafts_that_are_right_in_part_change_nothing(
    load: Callable[..., Loaded], fixture: str, serially: bool
) -> None:
    """Neither what is said next, nor by which random number, nor the recurrent state, of three requests at a time."""
    loaded = load(fixture)
    prompts = [(random_ids(length, seed), random_ids(30, 10 + seed)) for seed, length in enumerate((150, 240, 90))]
    plain = [scripted(*texts, serially=serially) for texts in prompts]
    drafted = [scripted(*texts, serially=serially) for texts in prompts]
    states, later = States(plain), States(drafted)
    expected = run(loaded.generator(), plain, states.record)
    answers = run(drafting(loaded), drafted, later.record)

    assert {*accepted(drafted)} == EVERY_COUNT
    for job, reference, answer, before in zip(drafted, plain, answers, expected, strict=True):
        assert answer.tokens == before.tokens == job.sampler.answer
        assert (logits(answer) - logits(before)).abs().max() < 0.05  # of logits that are about 1 apart
        assert [job.sampler.random[place] for place in range(30)] == [*reference.sampler.random.values()]
    if fixture in RECURRENT:
        assert_same_states(later, states)


@pytest.mark.parametrize(
    "fixture", ["tiny_hybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT[1:])]
)
def test_a_checkpoint_made_amid_drafts_is_resumed_from(load: Callable[..., Loaded], fixture: str) -> None:
    loaded, ids, answer = load(fixture), random_ids(236), random_ids(40, 5)
    generator = drafting(loaded)
    run(generator, [scripted(ids, answer)])
    longer, more = torch.cat((ids, answer[:, :36]), dim=-1), random_ids(8, 6)
    (warm,) = run(generator, [scripted(longer, more)])
    (cold,) = run(loaded.generator(), [scripted(longer, more)])
    assert (warm.last["cached_tokens"], cold.last["cached_tokens"]) == (256, 0)
    assert (logits(warm) - logits(cold)).abs().max() < 0.05


# --- models that draft ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["tiny_llama", pytest.param("tiny_sliding", marks=pytest.mark.slow)])
def test_a_recurrent_draft_model_stands_where_the_answer_does(
    load: Callable[..., Loaded], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts token by token, and takes back what was rejected. Its states are those of answering by itself."""
    drafter = load("tiny_hybrid")
    prompts = [(random_ids(length, seed), random_ids(30, 10 + seed)) for seed, length in enumerate((150, 90))]
    alone, drafted = ([scripted(*texts) for texts in prompts] for _ in range(2))
    states, later = States(alone), States(drafted, side="draft")
    run(drafter.generator(), alone, states.record)
    generator = drafted_by(drafter, load(target), monkeypatch, "forward")
    answers = run(generator, drafted, later.record)
    assert [answer.tokens for answer in answers] == [job.sampler.answer for job in drafted]
    assert {*accepted(drafted)} == EVERY_COUNT
    assert_same_states(later, states)


def test_a_prediction_head_keeps_what_was_accepted(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in its cache afterwards does not depend on how much of its drafts was right."""
    target, head = load("tiny_mtp"), load("tiny_mtp", component="mtp")
    ids, answer = random_ids(150), random_ids(30, 10)
    cached = []
    for right in (True, False):
        generator, job = drafted_by(head, target, monkeypatch, "sample_from_state"), scripted(ids, answer)
        if not right:
            monkeypatch.setattr(head.model, "sample_from_state", lambda state, params: torch.zeros(1, 1).long())
        run(generator, [job])
        assert {*accepted([job])} == (EVERY_COUNT if right else {0})
        (layer,) = head.cache.layers.values()
        cached += [layer.k[0, :178].clone(), layer.v[0, :178].clone()]
    assert cached[0].norm() > 1
    for one, other in zip(cached[:2], cached[2:], strict=True):
        assert (one - other).norm() < 0.01 * one.norm()


@pytest.mark.slow
def test_a_head_over_a_part_of_the_vocabulary_drafts(
    load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "sparse_draft_head" not in inspect.signature(Generator).parameters:
        pytest.skip("a newer version of the engine has it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where the engine keeps counts of tokens
    target, head = load("tiny_mtp"), load("tiny_mtp", component="mtp")
    generator = target.generator(draft_model=head.model, draft_cache=head.cache, sparse_draft_head=128)
    answer = target.answer(generator, random_ids(1500), tokens=30)
    assert generator.sparse_head.populated
    assert answer.tokens == target.answer(target.generator(), random_ids(1500), tokens=30).tokens


# --- n-grams of a corpus ----------------------------------------------------------------------------------------------


def test_a_corpus_foresees_what_it_holds(
    load: Callable[..., Loaded], tiny_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, answer = random_ids(50), random_ids(30, 10)
    known = torch.cat((ids[0, -4:], answer[0])).tolist()
    path = tmp_path / "corpus"
    write_corpus(path, tiny_hybrid, [random_ids(99, 20)[0].tolist(), known, random_ids(99, 21)[0].tolist()])
    loaded, job = load("tiny_hybrid"), scripted(ids, answer)
    generator = loaded.generator(
        ngram_match_min=3, num_draft_tokens=WINDOW, record_draft_stats=True, ngram_corpus=str(path)
    )
    drafts = generator.iterate_ngram_gen

    def begin(results: list[Any]) -> Tensor | None:
        job.sampler.position = answered_by(job)
        found: Tensor | None = drafts(results)
        return found

    monkeypatch.setattr(generator, "iterate_ngram_gen", begin)
    run(generator, [job])
    assert accepted([job]) == [WINDOW] * 4


def write_corpus(path: Path, model: Path, documents: list[list[int]]) -> None:
    """As the engine reads it."""
    tokens = [token for document in documents for token in (*document, -1)]
    ends = [index for index, token in enumerate(tokens) if token == -1]
    automaton = BC_SAM()
    automaton.accept_tensor(torch.tensor([tokens]))
    corpus = torch.tensor(tokens, dtype=torch.int32)
    arrays = [*automaton.export_csr(), corpus, torch.tensor(ends, dtype=torch.int32)]
    names = ("link", "max_len", "min_end", "edge_offsets", "edge_token", "edge_to", "root", "corpus", "document_ends")
    payload, sections = b"", []
    for name, array in zip(names, arrays, strict=True):
        payload += bytes(-len(payload) % 64)
        sections.append(
            {"name": name, "offset": len(payload), "count": len(array), "dtype": "<i4", "encoding": "byte_planes"}
        )
        payload += array.numpy().astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()
    files = {name: model / name for name in CORPUS_IDENTITY}
    header = {
        "format": "exllamav3.frozen_sam",
        "version": 1,
        "layout": "csr",
        "compression": "zstd",
        "separator": -1,
        "payload_bytes": len(payload),
        "sections": sections,
        "state_count": len(arrays[0]),
        "edge_count": len(arrays[4]),
        "token_count": len(tokens),
        "document_count": len(documents),
        "corpus_sha256": hashlib.sha256(corpus.numpy().astype("<i4").tobytes()).hexdigest(),
        "tokenizer": {
            "files": {
                name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file.exists()
            }
        },
    }
    text = json.dumps(header).encode()
    prefix = CORPUS_PREFIX.pack(CORPUS_MAGIC, 1, len(text), len(payload))
    path.write_bytes(prefix + text + zstandard.compress(payload))
