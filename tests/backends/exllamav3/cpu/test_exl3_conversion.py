"""Models that the engine's own converter has quantised, against the weights that its quantiser means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.exllamav3.engine import Config, Linear, Model
from tests.conftest import MakeOnce
from tests.containers import answered, loaded
from tests.exl3_converter import convert, make_source, needs_converter
from tests.logits import engine_logits, prompt, reference_logits
from tests.models import VOCABULARY

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are installed where there is no GPU"),
    needs_converter,
]


@dataclass(frozen=True)
class Case:
    """A conversion.

    Attributes:
        options: of the converter's command line.
        rates: bits a weight of its layers.
        markers: of the codebook, as the names of tensors.
        intermediate_size: of the MLP; one that is no multiple of 128 is padded.
        text: calibrated with the text that the engine brings, which takes longer to tokenise than all the rest.
    """

    options: str
    rates: set[float]
    markers: tuple[str, ...] = ("mul1",)
    intermediate_size: int = 256
    text: bool = True


CASES = {
    "mul1": Case("--bits 2.8 --head_bits 16", {2.5, 3}, text=False),
    "mcg": Case("--codebook mcg --bits 4.5 --head_bits 6", {4, 5, 6}, ("mcg",)),
    "3inst": Case("--codebook 3inst --bits 2 --head_bits 5 --out_scales never", {2, 5}, ()),
    "few-bits": Case("--bits 1.3 --head_bits 3.5 --scaled_hessian", {1, 1.5, 3.5}),
    "padded": Case("--bits 3 --head_bits 16", {3}, intermediate_size=320),
}


@pytest.fixture(
    scope="module",
    params=[name if name == "mul1" else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def converted(case: str, make_once: MakeOnce) -> Path:
    details = CASES[case]

    def make(folder: Path) -> Path:
        source = make_source(folder.with_name(f"{folder.name}-source"), details.intermediate_size)
        options = details.options.split()
        if not details.text:
            rows = folder.with_name(f"{folder.name}-rows")
            save_file({"input_ids": torch.randint(VOCABULARY, (7, 64), generator=torch.manual_seed(0))}, rows)
            options += ["--cal_data", str(rows)]
        return convert(folder, source, *options)

    return make_once(f"converted-{case}", make)


def test_weights_are_those_that_the_quantiser_means(case: str, converted: Path) -> None:
    written, meant = (load_file(folder / "model.safetensors") for folder in (converted, converted / "decoded"))
    source = load_file(converted.with_name(f"{converted.name}-source") / "model.safetensors")
    model = Model.from_config(Config.from_directory(str(converted)))
    model.load(progressbar=False)
    rates = set()
    for layer in (module for module in model if isinstance(module, Linear)):
        weight, name = layer.inner.weight.T.float(), f"{layer.key}.weight"
        # Of the scales of rows and columns and of the product, each rounded to fp16 once.
        torch.testing.assert_close(weight, meant[name].float(), rtol=3 * 2**-11, atol=1e-5)
        if f"{layer.key}.trellis" in written:
            rates.add(written[f"{layer.key}.trellis"].shape[-1] / 16)
            assert CASES[case].markers == tuple(name for name in ("mcg", "mul1") if f"{layer.key}.{name}" in written)
            assert correlation(weight, source[name].float()) > 0.5
    assert rates == CASES[case].rates
    model.unload()


def test_logits_are_those_of_transformers_with_these_weights(converted: Path) -> None:
    ids = prompt(100)
    logits, expected = engine_logits(converted, ids), reference_logits(converted / "decoded", ids)
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() >= 0.9999
    assert (logits - expected).abs().max() < 0.05 * expected.std()


async def test_the_server_answers_from_it(converted: Path) -> None:
    answers = []
    for directory in (converted, converted / "decoded"):
        async with loaded(directory) as container:
            assert container.info().warnings == []
            answers.append((await answered(container, [5 + i * i % 900 for i in range(40)])).token_ids)
    assert answers[0] == answers[1]


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])
