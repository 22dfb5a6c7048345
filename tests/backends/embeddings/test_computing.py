"""Requests of an embedding model and of a reranker, computed together."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from backends.embeddings.computing import Embedder, Judge
from backends.embeddings.messages import Embed, EmbedOptions, Input, Rank
from common.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, Unsupported
from tests.scripted_embedder import MAX_SEQ_LEN, ScriptedEmbedder, ScriptedReranker, vector

RAW = EmbedOptions(normalize=False, truncate=False)


@asynccontextmanager
async def running(model: Embedder | Judge) -> AsyncIterator[None]:
    task = asyncio.create_task(model.stepper.run())
    try:
        yield
    finally:
        task.cancel()


class Asked:
    """An embedder over the scripted model.

    Attributes:
        model: the scripted model.
        reported: ids of requests, after each step.
    """

    def __init__(self, tokens: int = 4) -> None:
        self.model = ScriptedEmbedder(Path("model"), "cpu")
        self.reported: list[str] = []
        self.embedder = Embedder(self.model, tokens, self.reported.append)

    async def embed(self, *inputs: Input, request_id: str = "1", options: EmbedOptions = RAW) -> list[list[float]]:
        answer = await self.embedder.embed(Embed(request_id, list(inputs), options, "input"))
        return [list(struct.unpack(f"<{len(each) // 4}f", each)) for each in answer.vectors]

    async def rank(self, query: str, documents: Sequence[str]) -> list[float]:
        return (await self.embedder.rank(Rank("1", query, list(documents), truncate=False, raw=False))).scores


async def test_vectors_come_in_the_order_of_the_texts() -> None:
    texts = ["a", "a b c", "h", "b b"]
    asked = Asked()
    async with running(asked.embedder):
        assert await asked.embed(*texts) == list(map(vector, texts))
    assert asked.model.steps == [["a b c"], ["b b", "a"], ["h"]]
    assert asked.reported == ["1"] * 3


async def test_several_requests_share_a_step() -> None:
    asked = Asked(tokens=3)
    async with running(asked.embedder):
        answers = await asyncio.gather(
            asked.embed(*"abcd", request_id="large"), asked.embed("e", request_id="small"), asked.embed([5, 6, 7])
        )
    assert list(answers) == [[vector(letter) for letter in "abcd"], [vector("e")], [vector("fgh")]]
    # Token ids need not be counted.
    assert asked.model.steps == [["fgh"], ["a", "b", "e"], ["c", "d"]]


async def test_who_fails_fails_alone() -> None:
    asked = Asked(tokens=10)
    async with running(asked.embedder):
        good, bad = await asyncio.gather(
            asked.embed("a", request_id="good"), asked.embed("FAIL", request_id="bad"), return_exceptions=True
        )
        assert await asked.embed("b") == [vector("b")]
    assert good == [vector("a")]
    assert isinstance(bad, ValueError)


async def test_what_is_no_number_is_no_answer() -> None:
    asked = Asked(tokens=10)
    async with running(asked.embedder):
        good, bad = await asyncio.gather(asked.embed("a"), asked.embed("NAN", request_id="2"), return_exceptions=True)
    assert good == [vector("a")]
    assert isinstance(bad, EngineFailed)
    assert "not finite" in bad.message


async def test_a_request_that_is_cancelled_is_not_computed_to_its_end() -> None:
    asked = Asked(tokens=1)
    async with running(asked.embedder):
        task = asyncio.create_task(asked.embed(*["a"] * 1000))
        while not asked.model.steps:
            await asyncio.sleep(0)
        task.cancel()
        assert await asked.embed("b", request_id="2") == [vector("b")]
    assert len(asked.model.steps) < 10


async def test_dimensions_cut_before_the_length_becomes_one() -> None:
    asked = Asked()
    async with running(asked.embedder):
        assert await asked.embed("aaabbbb ccc", options=EmbedOptions(dimensions=2)) == [pytest.approx([0.6, 0.8])]
        assert await asked.embed("aaabbbb ccc", options=EmbedOptions(dimensions=1, normalize=False)) == [[3.0]]
        assert await asked.embed("xyz", options=EmbedOptions(dimensions=2)) == [[0.0, 0.0]]
        with pytest.raises(InvalidRequest, match="dimensions is 9; vectors of model have 8") as raised:
            await asked.embed("a", options=EmbedOptions(dimensions=9))
    assert raised.value.param == "dimensions"


async def test_texts_of_different_purposes_get_their_prompts() -> None:
    asked = Asked(tokens=10)
    async with running(asked.embedder):
        as_query, plain = await asyncio.gather(
            asked.embed("b", options=EmbedOptions(input_type="query", normalize=False)), asked.embed("b")
        )
    assert (as_query, plain) == ([vector("aaaa b")], [vector("b")])
    assert asked.model.steps == [["b"], ["b"]]


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        (["a " * (MAX_SEQ_LEN + 1)], "input"),
        (["a", "a " * (MAX_SEQ_LEN + 1)], "input.1"),
        (["a", "a" * 100_000], "input.1"),
        ([[1] * (MAX_SEQ_LEN + 1)], "input"),
        ([[1], [1] * (MAX_SEQ_LEN + 1)], "input.1"),
    ],
)
async def test_what_is_too_long_is_refused_or_cut(inputs: list[Input], param: str) -> None:
    asked = Asked(tokens=100)
    async with running(asked.embedder):
        with pytest.raises(ContextLengthExceeded, match=f"{param} has .* too large for model.*truncate") as raised:
            await asked.embed(*inputs)
        assert raised.value.param == param
        assert asked.model.steps == []
        request = Embed("1", inputs, EmbedOptions(truncate=True), "input")
        answer = await asked.embedder.embed(request)
    assert len(answer.vectors) == len(inputs)
    assert answer.tokens <= MAX_SEQ_LEN * len(inputs)


@pytest.mark.parametrize(
    ("inputs", "error", "param"),
    [([[8]], InvalidRequest, "input"), ([[1], [-1]], InvalidRequest, "input.1"), (["a", [1]], InvalidRequest, "input")],
)
async def test_inputs_that_the_model_does_not_know(inputs: list[Input], error: type[Exception], param: str) -> None:
    with pytest.raises(error) as raised:
        await Asked().embed(*inputs)
    assert getattr(raised.value, "param", None) == param


async def test_a_model_without_a_vocabulary_takes_no_ids() -> None:
    asked = Asked()
    asked.model.info = msgspec.structs.replace(asked.model.info, vocab_size=None)
    with pytest.raises(Unsupported, match="takes text only"):
        await asked.embed([1])


async def test_ranking_by_embeddings_is_by_angle() -> None:
    asked = Asked(tokens=10)
    async with running(asked.embedder):
        scores = await asked.rank("a", ["aa aa", "bb", "ab", "x"])
    # The query has a prompt of four more.
    assert scores == [pytest.approx(1.0), 0.0, pytest.approx(0.5**0.5), 0.0]


async def test_a_reranker_scores_pairs_between_nought_and_one() -> None:
    judge = Judge(ScriptedReranker(Path("reranker"), "cpu"), 10, lambda request_id: None)
    async with running(judge):
        answer = await judge.rank(Rank("1", "abc", ["abc", "x", "a"], truncate=False, raw=False))
        raw = await judge.rank(Rank("2", "abc", ["abc", "x", "a"], truncate=False, raw=True))
        assert answer.scores == pytest.approx([0.9526, 0.5, 0.7311], abs=1e-4)
        assert raw.scores == [3.0, 0.0, 1.0]
        assert answer.tokens == 6
        with pytest.raises(ContextLengthExceeded, match="documents.1 has 22 tokens"):
            await judge.rank(Rank("3", "a", ["b", "c " * 21], truncate=False, raw=False))
        with pytest.raises(Unsupported, match="makes no embeddings"):
            await judge.embed(Embed("4", ["a"], RAW, "input"))
