"""The engine's names, for the rest of the package: nothing else imports `exllamav3`, except `cpu/`.

On a machine with a CUDA GPU this is the plain engine. Elsewhere its kernels are replaced by those of `cpu/` before it
is imported; nothing on the CUDA path touches that package.

Exactly one thread of the process may call torch: with a second one, decoding on the CPU gets two to three times slower
(see `cpu/`). The number of OpenMP threads is left at torch's default.
"""

from __future__ import annotations

import gc
import importlib.metadata
import secrets
from time import monotonic
from typing import Literal

import torch
from loguru import logger
from packaging.specifiers import SpecifierSet
from torch import Tensor

from common.errors import SettingsError

ENGINE_REQUIREMENT = SpecifierSet(">=1.6.4,<2", prereleases=True)


def check_engine_version(version: str) -> None:
    """Raise SettingsError for a version whose checkpoint schedule or interfaces are not those relied on."""
    if not ENGINE_REQUIREMENT.contains(version):
        raise SettingsError(
            f"exllamav3 {version} is installed, but this server needs exllamav3 {ENGINE_REQUIREMENT}. "
            f'Install it with: pip install "exllamav3{ENGINE_REQUIREMENT}"'
        )


def _installed_version() -> str:
    try:
        return importlib.metadata.version("exllamav3")
    except importlib.metadata.PackageNotFoundError as error:
        raise SettingsError("exllamav3 is not installed. Run start.py, which sets everything up.") from error


ENGINE_VERSION = _installed_version()
check_engine_version(ENGINE_VERSION)

DEVICE: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    from backends.exllamav3 import cpu

    logger.info("No CUDA GPU: exllamav3 {} runs on CPU kernels, which are for trying, not for speed.", ENGINE_VERSION)
    cpu.install()

# Only now: on the CPU the kernels have to be in place first.
from exllamav3 import (  # noqa: E402
    AsyncGenerator,
    AsyncJob,
    Cache,
    CacheLayer_fp16,
    CacheLayer_quant,
    Config,
    Filter,
    Generator,
    Job,
    LLGuidanceFilter,
    Model,
    Tokenizer,
)
from exllamav3.ext import exllamav3_ext as kernels  # noqa: E402
from exllamav3.generator import job as _engine_job  # noqa: E402
from exllamav3.generator import pagetable as _engine_pagetable  # noqa: E402
from exllamav3.generator.pagetable import Sequence, is_content_hash, tensor_hash_checksum  # noqa: E402
from exllamav3.generator.sampler import (  # noqa: E402
    SS_DRY,
    SS_XTC,
    AdaptivePSampler,
    ArgmaxSampler,
    CategoricalSampler,
    ComboSampler,
    CustomSampler,
    DefaultSampler,
    GreedySampler,
    GumbelSampler,
    Sampler,
    SS_AdaptiveP,
    SS_Argmax,
    SS_BanTokens,
    SS_Base,
    SS_LogitBias,
    SS_MinP,
    SS_Normalize,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Sort,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
    TopKSampler,
    TopPSampler,
    dry_sequence_breaker_tokens,
)
from exllamav3.modules.linear import Linear  # noqa: E402
from exllamav3.tokenizer.mm_embedding import FIRST_MM_EMBEDDING_INDEX, MMEmbedding  # noqa: E402
from exllamav3.util.memory import check_host_memory  # noqa: E402

__all__ = [
    "DEVICE",
    "ENGINE_VERSION",
    "FIRST_IMAGE_ID",
    "FLOAT32",
    "SS_DRY",
    "SS_XTC",
    "AdaptivePSampler",
    "ArgmaxSampler",
    "AsyncGenerator",
    "AsyncJob",
    "Cache",
    "CacheLayer_fp16",
    "CacheLayer_quant",
    "CategoricalSampler",
    "ComboSampler",
    "Config",
    "CustomSampler",
    "DefaultSampler",
    "Filter",
    "Generator",
    "GreedySampler",
    "GumbelSampler",
    "Job",
    "LLGuidanceFilter",
    "Linear",
    "MMEmbedding",
    "Model",
    "SS_AdaptiveP",
    "SS_Argmax",
    "SS_BanTokens",
    "SS_Base",
    "SS_LogitBias",
    "SS_MinP",
    "SS_Normalize",
    "SS_PresFreqP",
    "SS_RepP",
    "SS_Sample",
    "SS_Sort",
    "SS_Temperature",
    "SS_TopK",
    "SS_TopP",
    "Sampler",
    "Sequence",
    "Tensor",
    "Tokenizer",
    "TopKSampler",
    "TopPSampler",
    "check_engine_version",
    "check_host_memory",
    "check_kernels",
    "device_bytes",
    "dry_sequence_breaker_tokens",
    "gpu_count",
    "is_content_hash",
    "kernels",
    "release_memory",
    "set_cache_root",
    "smallest_compute_capability",
    "token_tensor",
]

FLOAT32 = torch.float
FIRST_IMAGE_ID: int = FIRST_MM_EMBEDDING_INDEX  # no id of a vocabulary is as large
_PROCESS = secrets.token_bytes(16)


class _Stamp:
    """A moment that the engine notes in a job, taken from a clock that does not jump: it reads the wall clock."""

    def __init__(self, name: str) -> None:
        self._name = f"_steady_{name}"

    def __get__(self, job: Job, kind: type | None = None) -> float | None:
        moment: float | None = getattr(job, self._name)
        return moment

    def __set__(self, job: Job, wall_time: float | None) -> None:
        setattr(job, self._name, None if wall_time is None else monotonic())


for _name in ("time_enqueue", "time_first_prefill", "time_first_token", "time_last_token"):
    setattr(Job, _name, _Stamp(_name))


def set_cache_root(root: bytes | None) -> None:
    """Say what cached pages stand for beside their tokens and those before them.

    The hashes of pages, which are their keys in every tier, begin with it from here on. With None they are the engine's
    own. To be called while no request runs.

    In the hashes of pages with images there is also something that only this process has: the ids of an image are those
    of another one in the next. The engine writes no such pages to disk, but forgets what they are where it took them
    for an answer that did not come to use them (`CachePage.revert()` of 1.6.5 leaves `persistable` as it was set then).
    """

    def hash_page(tokens: Tensor, previous: bytes | None) -> bytes:
        before = root if previous is None else previous
        if int(tokens.max()) >= FIRST_IMAGE_ID:
            before = (before or b"") + _PROCESS
        page_hash: bytes = tensor_hash_checksum(tokens, before)
        return page_hash

    for module in (_engine_pagetable, _engine_job):
        module.tensor_hash_checksum = hash_page


set_cache_root(None)


def check_kernels(model: Model, name: str, param: str | None = None) -> None:
    """Raise Unsupported for a model that this machine cannot run, since it has no GPU; no weight is needed for that."""
    if DEVICE == "cpu":
        cpu.check(model, name, param)


def token_tensor(tokens: list[int]) -> Tensor:
    """Token ids as the engine takes a prompt, (1, tokens)."""
    return torch.tensor([tokens], dtype=torch.long)


def gpu_count() -> int:
    return torch.cuda.device_count() if DEVICE == "cuda" else 0


def device_bytes() -> int:
    """What this process has taken of the memory of all GPUs, the blocks that torch keeps for later included."""
    return sum(torch.cuda.memory_reserved(index) for index in range(gpu_count()))


def smallest_compute_capability(devices: list[int]) -> float:
    """The lowest CUDA compute capability among GPUs, such as 8.9; infinity for none."""
    capabilities = (torch.cuda.get_device_capability(device) for device in devices)
    return min((major + minor / 10 for major, minor in capabilities), default=float("inf"))


def release_memory() -> None:
    """Return to the system what an unloaded model held."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
