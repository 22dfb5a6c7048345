"""The engine on a GPU, with a hybrid of random weights in bf16. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import make_hybrid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TOKENS = 12
PROMPT = torch.randint(5, 1000, (1, 3000), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("gpu") / "hybrid")


@pytest.fixture(scope="module")
def generator(hybrid: Path) -> Any:
    # Not at the top: with no GPU the CPU kernels would be installed, and that is for other tests.
    from backends.exllamav3.engine import DEVICE, Cache, Config, Generator, Model, Tokenizer

    assert DEVICE == "cuda"
    config = Config.from_directory(str(hybrid))
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=8192, max_batch_size=2)
    model.load(progressbar=False)
    yield Generator(
        model=model,
        cache=cache,
        tokenizer=Tokenizer.from_config(config),
        max_chunk_size=512,
        recurrent_checkpoint_interval=512,
        recurrent_checkpoint_interval_pp=512,
    )
    model.unload()


def answer(generator: Any, ids: torch.Tensor) -> tuple[list[int], dict[str, Any]]:
    from backends.exllamav3.engine import ArgmaxSampler, Job

    generator.enqueue(Job(input_ids=ids, max_new_tokens=TOKENS, sampler=ArgmaxSampler()))
    tokens: list[int] = []
    last: dict[str, Any] = {}
    while generator.num_remaining_jobs():
        for chunk in generator.iterate():
            if chunk["stage"] == "streaming":
                last = chunk
                if "token_ids" in chunk:
                    tokens += chunk["token_ids"].flatten().tolist()
    return tokens, last


def test_a_hybrid_generates_on_the_gpu(generator: Any) -> None:
    tokens, last = answer(generator, PROMPT[:, :700])
    assert len(tokens) == TOKENS
    assert last["prompt_tokens"] == 700
    assert generator.model.output_device.type == "cuda"


def test_nothing_of_the_cpu_kernels_is_loaded(generator: Any) -> None:
    import sys

    assert not [name for name in sys.modules if name.startswith("backends.exllamav3.cpu.install")]


def test_an_edited_prompt_resumes_from_a_checkpoint(generator: Any) -> None:
    cold, first = answer(generator, PROMPT)
    assert first["cached_tokens"] <= 512  # what the first test left
    again, second = answer(generator, PROMPT)
    assert second["cached_tokens"] == 2816  # the last full page of 256
    assert again == cold
    edited = PROMPT.clone()
    edited[0, 1700] = edited[0, 1700] % 900 + 6
    _, third = answer(generator, edited)
    assert third["cached_tokens"] == 1536
