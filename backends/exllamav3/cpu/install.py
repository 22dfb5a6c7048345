"""Putting the CPU kernels into the engine: everything that is replaced outside its extension stands here.

The engine's files are not touched. Before it is imported, two of its modules are put in place ready-made: the extension
and the vendored Triton kernels of the recurrences. Then single attributes are replaced, `PATCHES`, and its modules are
given a `torch` without CUDA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from backends.exllamav3.cpu import (
    convolution,
    delta_net,
    exl3,
    kda,
    latent_attention,
    linear,
    mamba2,
    memory,
    norms,
    sparse_attention,
    tied,
    tiers,
)
from backends.exllamav3.cpu.attention import ATTENTION_FUNCTIONS, by_span, paged_attention
from backends.exllamav3.cpu.extension import Extension
from backends.exllamav3.cpu.quantised_cache import attend_quantised
from backends.exllamav3.cpu.stand_ins import importable_triton, torch_facade
from common.errors import SettingsError

CPU = torch.device("cpu")

# All modules of these are imported at once: what the engine imports later would find neither the `torch` without CUDA
# nor the stand-in for Triton.
PACKAGES = ("exllamav3.architecture", "exllamav3.cache", "exllamav3.generator", "exllamav3.modules")
# What modules of the engine get where they name a type.
TYPES: dict[str, dict[str, torch.dtype]] = {
    # Intermediates of recurrent layers, which in bf16 cost more accuracy than all the rest together.
    "exllamav3.modules.gated_delta_net": {"bfloat16": delta_net.INTERMEDIATE_DTYPE},
    "exllamav3.modules.gated_delta_net_fn.gated_delta_rule": {"bfloat16": delta_net.INTERMEDIATE_DTYPE},
    "exllamav3.modules.mamba2": {"bfloat16": delta_net.INTERMEDIATE_DTYPE},
    # Activations: in fp16, every kernel would convert what it reads and what it writes.
    "exllamav3.modules.attn": {"half": torch.float},
    "exllamav3.modules.mla_attn": {"half": torch.float},
    "exllamav3.modules.mlp": {"half": torch.float},
    "exllamav3.modules.transformer": {"half": torch.float},
    # The type of queries for which it attends to a quantised cache as it is packed.
    "exllamav3.modules.attention_fn.dispatch": {"float16": torch.float},
}


@dataclass(frozen=True)
class Patch:
    """One attribute of the engine that is replaced.

    Attributes:
        module: where it is.
        attribute: its name, dotted for a method.
        replacement: makes the new value from the old one.
        newer: the module is not in all supported versions; where it is missing there is nothing to replace.
    """

    module: str
    attribute: str
    replacement: Callable[[Any], Any]
    newer: bool = False

    def apply(self) -> None:
        """Replace it.

        Raises:
            SettingsError: the engine no longer has it.
        """
        if self.newer and importlib.util.find_spec(self.module) is None:
            return
        try:
            *path, name = self.attribute.split(".")
            owner: Any = importlib.import_module(self.module)
            for step in path:
                owner = getattr(owner, step)
            setattr(owner, name, self.replacement(getattr(owner, name)))
        except (ImportError, AttributeError) as error:
            raise _incompatible(f"{self.module}.{self.attribute}") from error


def _by(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _attention_functions(original: list[Any]) -> list[Any]:
    return [*ATTENTION_FUNCTIONS]


def _linear_init(original: Callable[..., None]) -> Callable[..., None]:
    """No padding to a multiple of 128, which no kernel here needs and which does not fit sizes such as 576.

    Except at the vocabulary's width: the generator expects logits as wide as the engine makes them.
    """

    @wraps(original)
    def init(
        self: Any, config: Any, key: str, in_features: int, out_features: int, *arguments: Any, **options: Any
    ) -> None:
        if out_features != getattr(config, "vocab_size", None):
            options["pad_to"] = 1
        original(self, config, key, in_features, out_features, *arguments, **options)

    return init


def _cache_alloc(original: Callable[..., None]) -> Callable[..., None]:
    """Keys and values in fp32: attention reads them without a pass of conversion."""

    def alloc(self: Any, device: torch.device) -> None:
        self.device = device
        self.k, self.v = (torch.zeros(self.shape, device=device) if self.shape else None for _ in range(2))

    return alloc


def _cache_storage_size(original: Callable[..., int]) -> Callable[..., int]:
    """Bytes of keys and values in fp32."""

    def storage_size(self: Any) -> int:
        return 2 * math.prod(map(int, self.shape)) * torch.float.itemsize

    return storage_size


def _moe_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The engine sets up routing when it loads to a CUDA device; here on first use."""

    @wraps(original)
    def forward(self: Any, *arguments: Any, **options: Any) -> Tensor:
        if self.routing_cfg is None and self.routing_gate is not None:
            self.load_routing()
        return original(self, *arguments, **options)

    return forward


def _load_autosplit(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[tuple[int, int]]]:
    """Where the engine spreads a model over the GPUs it sees, load every module to the CPU.

    Yields (modules loaded, modules) as the original does; what the caller says about devices is for GPUs.
    """

    @wraps(original)
    def load(self: Any, *arguments: Any, **options: Any) -> Iterator[tuple[int, int]]:
        loader, modules = self.config.stc, self.modules
        for index, module in enumerate(modules):
            yield index, len(modules)
            deferred = module.can_defer_load()
            if deferred:
                loader.begin_deferred_load()
            module.load(CPU)
            if deferred:
                loader.end_deferred_load()
            tied.tie(module, modules)
            linear.prepare(module)
            norms.prepare(module)
            convolution.prepare(module)
            memory.return_freed()
        loader.close()
        yield len(modules), len(modules)

    return load


PATCHES = (
    Patch("exllamav3.model.model_ls", "Model_LSMixin._load_autosplit", _load_autosplit),
    Patch("exllamav3.cache.fp16", "CacheLayer_fp16.alloc", _cache_alloc),
    Patch("exllamav3.cache.fp16", "CacheLayer_fp16.storage_size", _cache_storage_size),
    Patch("exllamav3.generator.cpu_cache", "CPUPageCache.__init__", tiers.page_cache_init),
    Patch("exllamav3.modules.linear", "Linear.__init__", _linear_init),
    Patch("exllamav3.modules.linear", "Linear.load_exl3", _by(exl3.load_exl3)),
    Patch("exllamav3.modules.linear", "Linear.quant_format_id", _by(exl3.quant_format_id)),
    Patch("exllamav3.modules.quant.fp16", "LinearFP16", linear.with_matrix),
    Patch("exllamav3.modules.quant.fp16", "LinearFP16.forward", _by(linear.linear_forward)),
    Patch("exllamav3.modules.block_sparse_mlp", "BlockSparseMLP.forward", _moe_forward),
    Patch("exllamav3.modules.attention_fn.dispatch", "attn_fns", _attention_functions),
    Patch("exllamav3.modules.attention_fn.dispatch", "_fns_qc", _by([by_span(attend_quantised)])),
    Patch("exllamav3.modules.sliding_attn", "paged_attn_triton_decode", _by(paged_attention)),
    Patch("exllamav3.modules.sliding_attn", "paged_attn_triton_prefill", _by(paged_attention)),
    Patch("exllamav3.modules.shared_kv_attn", "paged_attn_triton_decode", _by(paged_attention), newer=True),
    Patch("exllamav3.modules.gated_delta_net", "causal_conv1d_update", _by(convolution.causal_conv1d_update)),
    Patch("exllamav3.modules.gated_delta_net", "_proj_dtype", _by(torch.float)),
    Patch("exllamav3.modules.mamba2", "causal_conv1d_update", _by(convolution.causal_conv1d_update)),
    Patch("exllamav3.modules.attention_fn.mla_triton", "mla_kv_append", _by(latent_attention.mla_kv_append)),
    Patch(
        "exllamav3.modules.attention_fn.mla_triton",
        "mla_kv_quant_append",
        _by(latent_attention.mla_kv_quant_append),
    ),
    Patch("exllamav3.modules.attention_fn.mla_triton", "mla_plane_append", _by(latent_attention.mla_plane_append)),
    Patch("exllamav3.modules.attention_fn.dsa_triton", "dsa_attn", _by(sparse_attention.dsa_attn)),
    Patch("exllamav3.modules.attention_fn.dsa_triton", "dsa_indexer_scores", _by(sparse_attention.dsa_indexer_scores)),
    Patch("exllamav3.modules.mla_attn", "mla_absorb", _by(latent_attention.mla_absorb)),
    Patch("exllamav3.modules.mla_attn", "mla_unfold", _by(latent_attention.mla_unfold)),
    Patch("exllamav3.modules.mla_attn", "mla_attn_triton_decode", _by(latent_attention.attend_to_latents)),
    Patch("exllamav3.modules.mla_attn", "mla_attn_triton_prefill", _by(latent_attention.attend_to_latents)),
    Patch(
        "exllamav3.modules.mla_attn",
        "mla_attn_triton_prefill_mha",
        _by(latent_attention.mla_attn_triton_prefill_mha),
    ),
    # Decode steps as captured CUDA graphs.
    Patch("exllamav3.modules.attn", "_bc_attn_enable", _by(False)),
    Patch("exllamav3.modules.sliding_attn", "_bc_attn_enable", _by(False)),
    Patch("exllamav3.modules.shared_kv_attn", "_bc_attn_enable", _by(False), newer=True),
    Patch("exllamav3.modules.attention_fn.bc_mla", "bc_attn_enable", _by(False)),
)


def install() -> None:
    """Import the engine with the CPU kernels in place.

    Raises:
        SettingsError: this version of the engine is not built as expected. The message names what is missing.
    """
    assert "exllamav3" not in sys.modules, "the CPU kernels must be installed before exllamav3 is imported"
    kernels = ModuleType("exllamav3.ext")
    vars(kernels).update(exllamav3_ext=Extension(), extension_name="exllamav3_ext")
    recurrences = ModuleType("exllamav3.vendor.fla")
    vars(recurrences).update(
        chunk_gated_delta_rule=delta_net.chunk_gated_delta_rule,
        chunk_kda=kda.chunk_kda,
        chunk_simple_gla=mamba2.chunk_simple_gla,
    )
    sys.modules.update({module.__name__: module for module in (kernels, recurrences)})
    with importable_triton():
        for package in map(importlib.import_module, PACKAGES):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
        for patch in PATCHES:
            patch.apply()
    _replace_torch()


def _replace_torch() -> None:
    for name, types in TYPES.items():
        Patch(name, "torch", _by(torch_facade(**types))).apply()
    facade = torch_facade()
    for name, module in list(sys.modules.items()):
        if name.startswith("exllamav3.") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = facade


def _incompatible(missing: str) -> SettingsError:
    version = importlib.metadata.version("exllamav3")
    return SettingsError(
        f"exllamav3 {version} has no {missing}, which the CPU kernels replace. They are made for 1.6.4 and 1.6.5: "
        "install one of these, or use a CUDA GPU."
    )
