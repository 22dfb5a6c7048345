"""The engine's own converter to EXL3, run on the CPU.

All of it is the engine's: what it makes of the command line, the calibration text and the Hessians, the choice of rates
and scales, LDLQ, and the files that it writes. Replaced is only what needs a GPU: three CUDA kernels (the search for
the states of a tile, their packing, a count of infinities), a Triton kernel (the sum of a Hessian) and what copies
between host and device.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.exllamav3.cpu.stand_ins import importable_triton, torch_facade
from backends.exllamav3.engine import Linear, kernels
from tests import exl3
from tests.models.writing import language_model, write

needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("exllamav3.modules.quant.exl3_lib.hessian_packed") is None,
    reason="the converter of older engines is built otherwise",
)
# Of each of the seven kinds of text that the engine brings a row, of one kind two.
CALIBRATION = ("--cal_rows", "7", "--cal_cols", "64")


def make_source(directory: Path, intermediate_size: int = 256) -> Path:
    """A Llama of one layer."""
    settings = language_model(intermediate_size=intermediate_size, num_hidden_layers=1, num_key_value_heads=4)
    return write(directory, "LlamaForCausalLM", settings)


def convert(directory: Path, source: Path, *options: str) -> Path:
    """Quantise a model into a folder; in its subfolder `decoded` are the weights that the quantiser means, in fp32.

    Args:
        options: of the converter's command line.
    """
    work = directory.with_name(f"{directory.name}-work")
    with converter() as (engine, meant):
        folders = ("--in_dir", str(source), "--work_dir", str(work), "--out_dir", str(directory))
        arguments = engine.parser.parse_args([*folders, *CALIBRATION, *options])
        job, state, ok, error = engine.prepare(arguments)
        assert ok, error
        engine.main(job, state)
    shutil.rmtree(work)

    decoded = directory / "decoded"
    shutil.copytree(source, decoded)
    weights = load_file(source / "model.safetensors")
    written = load_file(directory / "model.safetensors")
    for name in (name for name in weights if f"{name.removesuffix('weight')}trellis" in written):
        original = weights[name].half().float()  # as the engine loads it
        rows, columns = map(slice, original.shape)
        (weights[name],) = (
            after.T[rows, columns].contiguous()
            for before, after in meant
            if torch.equal(before.T[rows, columns], original)
        )
    save_file(weights, decoded / "model.safetensors", metadata={"format": "pt"})
    return directory


@contextmanager
def converter() -> Iterator[tuple[Any, list[tuple[Tensor, Tensor]]]]:
    """The engine's module `conversion.convert_model`, able to run.

    Yields:
        the module, and a list of what it quantises: each matrix (in, out) before and after, in fp32. The latter is what
        the quantiser compares with the former to know its error; it has never been packed.
    """
    known = {*sys.modules}
    with importable_triton():  # it brings a kernel for measuring
        engine = importlib.import_module("exllamav3.conversion.convert_model")
    quantiser = importlib.import_module("exllamav3.modules.quant.exl3_lib.quantize")
    hessians = importlib.import_module("exllamav3.modules.quant.exl3_lib.hessian_packed")
    meant: list[tuple[Tensor, Tensor]] = []
    refit_scales, block_ldl = quantiser.refit_scales, quantiser.block_ldl

    def refit_and_keep(weight: Tensor, *arguments: Any, **options: Any) -> Any:
        """The last step."""
        result = refit_scales(weight, *arguments, **options)
        meant.append((weight.clone(), result[0].clone()))
        return result

    def factor_a_copy(hessian: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The engine moves the matrix to the host, then writes its factor over the one that was on the GPU."""
        kept = hessian.clone()
        return block_ldl(hessian, *arguments, **options)[0], kept

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        seeded = random.getstate()
        # The converter has numbers for GPUs; here each is the CPU.
        facade = torch_facade(device=lambda device: torch.device("cpu"))
        patch.setattr(engine, "torch", facade)
        patch.setattr(quantiser, "torch", facade)
        patch.setattr(quantiser, "get_quant_stream", lambda device: None)
        patch.setattr(quantiser, "quantize_tiles_multigpu", quantize_tiles)
        patch.setattr(quantiser, "pack_trellis", pack_trellis)
        patch.setattr(quantiser, "_WeightStager", Stager)
        patch.setattr(quantiser, "block_ldl", factor_a_copy)
        patch.setattr(quantiser, "refit_scales", refit_and_keep)
        # A module may write over what it is given: on a GPU that is a copy of what the converter holds.
        patch.setattr("exllamav3.modules.module.Module.prepare_for_device", lambda module, x, parameters: x.clone())
        patch.setattr("exllamav3.modules.linear.accumulate_", lambda packed, x: packed.add_(hessians.pack(x.T @ x)))
        # Padding to multiples of 128, which the kernels do without.
        patch.setattr(Linear, "__init__", Linear.__init__.__wrapped__)
        patch.setattr(kernels, "count_inf_nan", count_inf_nan, raising=False)
        patch.setattr(kernels, "BC_LinearEXL3", lambda *arguments: None, raising=False)
        try:
            yield engine, meant
        finally:
            random.setstate(seeded)
            for name in {*sys.modules} - known:
                if name.startswith("exllamav3."):  # it has the real torch, unlike those that the server imports
                    del sys.modules[name]


def quantize_tiles(tiles: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the engine's function of that name gives: numbers near to tiles (tiles, 256) in the ring's order, states."""
    codebook = next((name for name in exl3.MULTIPLIERS if arguments.get(name)), None)
    states = nearest_states(tiles, arguments["K"], codebook)
    return torch.from_numpy(exl3.numbers(codebook)).float()[states], states.to(torch.int16)


def pack_trellis(states: Tensor, arguments: dict[str, Any]) -> Tensor:
    """(rows, columns, 256) to (rows, columns, 16 K)"""
    rings = exl3.rings_of(states.flatten(0, 1).int() & 0xFFFF, arguments["K"])
    return exl3.packed(rings).view(*states.shape[:2], -1)


class Stager:
    """Where the engine uploads matrices ahead of their use."""

    def __init__(self, device: torch.device) -> None:
        pass

    def prefetch(self, index: int, weight: Tensor) -> None:
        pass

    def get(self, index: int, weight: Tensor) -> Tensor:
        return weight.to(torch.float, copy=True)


def count_inf_nan(x: Tensor, counts: Tensor) -> None:
    counts += torch.stack((x.isinf().sum(), x.isnan().sum()))


def nearest_states(tiles: Tensor, bits: float, codebook: str | None) -> Tensor:
    """States whose numbers are near to tiles, (tiles, 256) in the order of the ring.

    As in the engine, a first search begins and ends in the middle of the ring; the second keeps to the state that the
    first has where the ring is closed.
    """
    half = exl3.RING // 2
    return _path(tiles, bits, codebook, _path(tiles.roll(half, 1), bits, codebook)[:, half - 1])


def _path(tiles: Tensor, bits: float, codebook: str | None, closing: Tensor | None = None, width: int = 4) -> Tensor:
    """By the M-algorithm: where Viterbi's keeps the best path to each of 65,536 states, this keeps the `width` best.

    Args:
        closing: (tiles,) the states to begin from, and to end in as far as the first weight sees of them.
    """
    count, places = len(tiles), exl3.ends(bits)
    table = torch.from_numpy(exl3.numbers(codebook)).float()
    free_until = places[-1] if closing is None else places[-1] - (16 - places[0])
    state = torch.zeros(count, 1, dtype=torch.long) if closing is None else closing.unsqueeze(1)
    cost, history, begin = torch.zeros(count, 1), [], 0
    for place, end in enumerate(places):
        fixed = min(max(0, end - free_until), end - begin)
        steps = torch.arange(1 << (end - begin - fixed)).unsqueeze(0) << fixed
        if closing is not None and fixed:
            steps = steps | (closing.unsqueeze(1) >> (places[-1] - end)) & ((1 << fixed) - 1)
        candidates = ((state << (end - begin)) & 0xFFFF).unsqueeze(-1) | steps.unsqueeze(1)
        errors = (table.take(candidates) - tiles[:, place, None, None]).square()
        costs = (cost.unsqueeze(-1) + errors).flatten(1)
        cost, chosen = costs.topk(min(width, costs.shape[1]), largest=False, sorted=False)
        state = candidates.flatten(1).gather(1, chosen)
        history.append((state, chosen // steps.shape[1]))
        begin = end
    last, path = cost.argmin(1, keepdim=True), []
    for state, parent in reversed(history):
        path.append(state.gather(1, last))
        last = parent.gather(1, last)
    return torch.cat(path[::-1], 1)
