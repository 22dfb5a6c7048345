"""Models of the real engine that are loaded once and used with one generator after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from backends.exllamav3.engine import ArgmaxSampler, Cache, Config, Generator, Job, Model, Tokenizer

CHUNK = 512


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        return self.chunks[-1]


@dataclass
class Loaded:
    """A model that is loaded once and used with fresh generators."""

    model: Model
    cache: Cache
    tokenizer: Tokenizer

    def generator(self, **options: Any) -> Generator:
        return Generator(
            model=self.model, cache=self.cache, tokenizer=self.tokenizer, **({"max_chunk_size": CHUNK} | options)
        )

    def answer(self, generator: Generator, ids: Tensor, tokens: int = 20, **options: Any) -> Answer:
        job = Job(input_ids=ids, max_new_tokens=tokens, **({"sampler": ArgmaxSampler()} | options))
        (answer,) = run(generator, [job])
        return answer


def run(generator: Generator, jobs: Sequence[Job], after_step: Callable[[], None] = lambda: None) -> list[Answer]:
    """Run jobs beside each other to their ends."""
    answers = {generator.enqueue(job): Answer() for job in jobs}
    while generator.num_remaining_jobs():
        for chunk in generator.iterate():
            if chunk["stage"] == "streaming":
                answer = answers[chunk["serial"]]
                answer.chunks.append(chunk)
                answer.text += chunk.get("text", "")
                if "token_ids" in chunk:
                    answer.tokens += chunk["token_ids"].flatten().tolist()
        after_step()
    return [*answers.values()]


class Load(Protocol):
    def __call__(self, directory: Path, component: str = "text", **cache_options: Any) -> Loaded: ...


@contextmanager
def loading() -> Iterator[Load]:
    """Loads a model once for every kind of cache that is asked for, and unloads them all at the end."""
    models: dict[tuple[Path, str, str], Loaded] = {}

    def load(directory: Path, component: str = "text", **cache_options: Any) -> Loaded:
        key = directory, component, str(cache_options)
        if key not in models:
            config = Config.from_directory(str(directory))
            model = Model.from_config(config, component=component)
            cache = Cache(model, max_num_tokens=8192, max_history=8, max_batch_size=4, **cache_options)
            model.load(progressbar=False)
            models[key] = Loaded(model, cache, Tokenizer.from_config(config))
        return models[key]

    yield load
    for loaded in models.values():
        loaded.model.unload()


def random_ids(tokens: int, seed: int = 2) -> Tensor:
    """A prompt, (1, tokens)."""
    return torch.randint(5, 1000, (1, tokens), generator=torch.Generator().manual_seed(seed))
