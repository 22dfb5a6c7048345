"""What an embedding model or a reranker is asked for, computed in steps that several requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from backends.embeddings.batches import Batches, Job, Piece
from backends.embeddings.messages import Embed, Embedded, EmbeddingModelInfo, EmbedOptions, Rank, Ranked
from backends.embeddings.prompts import Purpose, find_purpose
from common.errors import (
    MAX_TOKEN_CHARACTERS,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    Unsupported,
    check_token_ids,
)

Rows: TypeAlias = NDArray[np.float32]  # one for each value that was given
Pair: TypeAlias = tuple[str, str]  # query, document
Value: TypeAlias = str | list[int] | Pair
Compute: TypeAlias = Callable[[Hashable, Sequence[Value]], Rows]
Report: TypeAlias = Callable[[str], None]
T = TypeVar("T", str, Pair)

# Of the texts that are tokenised in one go, which takes about a tenth of a second.
SLICE_CHARACTERS: Final = 100_000
# The key of jobs with token ids, and of those with pairs.
IDS: Final = "ids"
PAIRS: Final = "pairs"


class EmbeddingContainer(Protocol):
    """An embedding model; see `backends.embeddings.model`."""

    info: EmbeddingModelInfo
    prompts: dict[str, str]
    default_prompt: str | None

    def count(self, texts: Sequence[str], purpose: Purpose) -> list[int]: ...

    def embed(self, texts: Sequence[str], purpose: Purpose) -> Rows: ...

    def embed_ids(self, ids: Sequence[Sequence[int]]) -> Rows: ...


@runtime_checkable
class RerankContainer(Protocol):
    """A reranker; see `backends.embeddings.model`."""

    info: EmbeddingModelInfo

    def count(self, pairs: Sequence[Pair]) -> list[int]: ...

    def judge(self, pairs: Sequence[Pair]) -> Rows: ...


class Stepper:
    """Computes jobs step by step; between two steps the loop takes what else has come.

    Args:
        compute: the rows of values that have the key in common.
        tokens: of a step; see `Batches`.
        report: called after each step for every job that had a part in it, with the id of its request.
    """

    def __init__(self, compute: Compute, tokens: int, report: Report) -> None:
        self._compute = compute
        self._report = report
        self._batches: Batches[Value, Rows] = Batches(tokens)
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            if step := self._batches.next():
                self._do(step)
                await asyncio.sleep(0)
            else:
                self._more.clear()
                await self._more.wait()

    async def rows(self, request_id: str, key: Hashable, values: Sequence[Value], tokens: Sequence[int]) -> list[Rows]:
        """One for each value. Nothing more is computed of them when the caller is cancelled."""
        job: Job[Value, Rows] = Job(request_id, key, values, tokens)
        self._batches.add(job)
        self._more.set()
        try:
            return await job.done
        finally:
            self._batches.remove(job)

    def _do(self, step: Mapping[Job[Value, Rows], list[Piece[Value]]]) -> None:
        key = next(iter(step)).key
        values = [piece.value for pieces in step.values() for piece in pieces]
        try:
            rows = iter(_checked(self._compute(key, values)))
        except Exception as error:
            if len(step) == 1:
                next(iter(step)).fail(error)
                return
            for job, pieces in step.items():  # whose it is shall be the only one to hear of it
                self._do({job: pieces})
            return
        for job, pieces in step.items():
            job.finish(pieces, [next(rows) for _ in pieces])
            self._report(job.request_id)


class Embedder:
    """Embeds, and ranks by the angle between embeddings."""

    def __init__(self, model: EmbeddingContainer, tokens: int, report: Report) -> None:
        """`tokens`, `report`: see `Stepper`."""
        self._model = model
        self.stepper = Stepper(self._compute, tokens, report)

    async def embed(self, request: Embed) -> Embedded:
        """Raises `InvalidRequest`, or what the library does."""
        options = request.options
        self._check_dimensions(options.dimensions)
        purpose = find_purpose(self._model.prompts, self._model.default_prompt, options)
        ids = [each for each in request.inputs if isinstance(each, list)]
        texts = [each for each in request.inputs if isinstance(each, str)]
        if ids and texts:
            raise InvalidRequest("Give texts, or token ids, but not both at once.", param=request.param)
        if ids:
            rows, tokens = await self._rows_of_ids(request.id, ids, bool(options.truncate), request.param)
        else:
            paths = _paths(request.param, len(texts))
            rows, tokens = await self._rows(request.id, texts, purpose, bool(options.truncate), paths)
        return Embedded(request.id, [_finished(row, options) for row in rows], tokens)

    async def rank(self, request: Rank) -> Ranked:
        """Errors as for `embed()`."""
        paths = ["query", *(f"documents.{place}" for place in range(len(request.documents)))]
        query, documents = (
            find_purpose(self._model.prompts, self._model.default_prompt, EmbedOptions(input_type=task))
            for task in ("query", "document")
        )
        one, of_query = await self._rows(request.id, [request.query], query, request.truncate, paths[:1])
        rows, of_documents = await self._rows(request.id, request.documents, documents, request.truncate, paths[1:])
        target = _unit(one[0])
        return Ranked(request.id, [float(target @ _unit(row)) for row in rows], of_query + of_documents)

    async def _rows(
        self, request_id: str, texts: Sequence[str], purpose: Purpose, truncate: bool, paths: Sequence[str]
    ) -> tuple[list[Rows], int]:
        """Of texts, and how many tokens they have taken."""
        info = self._model.info
        texts = [_cut(text, info, truncate, path) for text, path in zip(texts, paths, strict=True)]
        lengths: list[int] = []
        for part in _slices(texts):
            lengths += self._model.count(part, purpose)
            await asyncio.sleep(0)
        lengths = _fitting(lengths, info, truncate, paths)
        return await self.stepper.rows(request_id, purpose, texts, lengths), sum(lengths)

    async def _rows_of_ids(
        self, request_id: str, ids: list[list[int]], truncate: bool, param: str
    ) -> tuple[list[Rows], int]:
        info = self._model.info
        if info.vocab_size is None:
            raise Unsupported(f"{info.name} takes text only, and no token ids.", param=param)
        paths = _paths(param, len(ids))
        for each, path in zip(ids, paths, strict=True):
            check_token_ids(each, info.vocab_size, path)
        lengths = _fitting([len(each) for each in ids], info, truncate, paths)
        values = [each[:length] for each, length in zip(ids, lengths, strict=True)]
        return await self.stepper.rows(request_id, IDS, values, lengths), sum(lengths)

    def _check_dimensions(self, dimensions: int | None) -> None:
        most = self._model.info.dimensions
        if dimensions is not None and most is not None and dimensions > most:
            raise InvalidRequest(
                f"dimensions is {dimensions}; vectors of {self._model.info.name} have {most}.", param="dimensions"
            )

    def _compute(self, key: Hashable, values: Sequence[Value]) -> Rows:
        if isinstance(key, Purpose):
            return self._model.embed([each for each in values if isinstance(each, str)], key)
        return self._model.embed_ids([each for each in values if isinstance(each, list)])


class Judge:
    """Ranks by what a reranker says of each document."""

    def __init__(self, model: RerankContainer, tokens: int, report: Report) -> None:
        """As `Embedder`."""
        self._model = model
        self.stepper = Stepper(self._compute, tokens, report)

    async def embed(self, request: Embed) -> Embedded:
        raise Unsupported(f"{self._model.info.name} is a reranker, which makes no embeddings.", param="model")

    async def rank(self, request: Rank) -> Ranked:
        """Errors as for `Embedder.embed()`."""
        info = self._model.info
        query = _cut(request.query, info, request.truncate, "query")
        paths = [f"documents.{place}" for place in range(len(request.documents))]
        pairs = [
            (query, _cut(document, info, request.truncate, path))
            for document, path in zip(request.documents, paths, strict=True)
        ]
        lengths: list[int] = []
        for part in _slices(pairs):
            lengths += self._model.count(part)
            await asyncio.sleep(0)
        lengths = _fitting(lengths, info, request.truncate, paths)
        rows = await self.stepper.rows(request.id, PAIRS, pairs, lengths)
        scores = [float(row) for row in rows]
        return Ranked(request.id, scores if request.raw else list(map(_sigmoid, scores)), sum(lengths))

    def _compute(self, key: Hashable, values: Sequence[Value]) -> Rows:
        return self._model.judge([each for each in values if isinstance(each, tuple)])


def _checked(rows: Rows) -> Rows:
    """Raise `EngineFailed` where they hold what is no number: nothing that is made of it would mean anything."""
    if not np.isfinite(rows).all():
        raise EngineFailed(
            "The model gave numbers that are not finite. Its files may be damaged, or half precision is too little "
            "for it; with embeddings_device: cpu it has more."
        )
    return rows


def _paths(param: str, count: int) -> list[str]:
    """Of inputs in their request, where a single one may stand without a list around it."""
    return [param] if count == 1 else [f"{param}.{place}" for place in range(count)]


def _cut(text: str, info: EmbeddingModelInfo, truncate: bool, path: str) -> str:
    """Without what no tokens of the model can hold, so that no time is spent on it."""
    if info.max_seq_len is None or len(text) <= (most := info.max_seq_len * MAX_TOKEN_CHARACTERS):
        return text
    if truncate:
        return text[:most]
    raise ContextLengthExceeded(
        f"{path} has {len(text)} characters, which is too large for {info.name}: the {info.max_seq_len} tokens that it "
        f"reads hold at most {most}. Shorten it, or send truncate: true.",
        param=path,
    )


def _fitting(lengths: list[int], info: EmbeddingModelInfo, truncate: bool, paths: Sequence[str]) -> list[int]:
    """Tokens that are read of each text."""
    most = info.max_seq_len
    if most is None:
        return lengths
    for length, path in zip(lengths, paths, strict=True):
        if length > most and not truncate:
            raise ContextLengthExceeded(
                f"{path} has {length} tokens, which is too large for {info.name}: it reads at most {most}. Shorten it, "
                "or send truncate: true.",
                param=path,
            )
    return [min(length, most) for length in lengths]


def _slices(values: Sequence[T]) -> Iterator[list[T]]:
    """Parts that are tokenised in one go."""
    part: list[T] = []
    characters = 0
    for value in values:
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if part and characters + size > SLICE_CHARACTERS:
            yield part
            part, characters = [], 0
        part.append(value)
        characters += size
    yield part


def _finished(row: Rows, options: EmbedOptions) -> bytes:
    """Vectors of models that were trained for it (Matryoshka) keep their meaning when their end is cut off."""
    kept = row[: options.dimensions]
    return (_unit(kept) if options.normalize else kept).astype("<f4").tobytes()


def _unit(row: Rows) -> Rows:
    length = np.linalg.norm(row)
    return row / length if length > 0 else row


def _sigmoid(score: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(score, -80, 80))))
