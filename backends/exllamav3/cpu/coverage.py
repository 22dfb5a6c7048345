"""Which models the CPU kernels can run: asked before a weight is read.

A model is a tree of the engine's modules, which is there as soon as its configuration is read. `COVERED` are the kinds
of modules whose kernels are all here; `GAPS` are the others, and what within a covered kind is missing. One that is in
neither list is of an engine that is newer than these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from common.errors import Unsupported

COVERED = frozenset(
    {
        # Language models
        *("Attention", "BlockSparseMLP", "Embedding", "GatedDeltaNet", "GatedMLP", "GatedRMSNorm", "LayerNorm"),
        *("Linear", "MLAttention", "MLP", "Mamba2", "OutputGather", "ParallelDecoderBlock", "RMSNorm"),
        *("ShortConv", "SlidingAttention", "TransformerBlock"),
        # Drafters
        *("DFlashInputLayer", "Gemma4AssistantHead", "Gemma4AssistantInputLayer", "Qwen3_5MTPInputLayer"),
        "SharedKVAttention",
        # Vision towers
        *("Conv", "DeepseekV4VisionAligner", "DeepstackEmbed", "Gemma3MMPool", "Gemma4UnifiedVisionEmbedder"),
        *("Gemma4VisionPatchEmbedder", "Gemma4VisionPooler", "Glm4VPosEmbedding", "Glm4VVisionPatchMerger"),
        *("Mistral3PatchMerger", "MuseGlimmerVisionAdapter", "MuseGlimmerVisionPatchEmbedder"),
        *("MuseGlimmerVisionPixelShuffle", "NemotronHOmniPatchEmbedder", "PixelUnshuffle", "PosEmbedding"),
        *("Qwen2_5VLVisionPatchMerger", "Qwen2_5VLVisionSpatialMerger", "Qwen3VLPosEmbedding"),
        *("Qwen3VLVisionPatchMerger", "Step3_7Downsampler", "Step3_7PosEmbedding", "MiMoV2VisionReorder"),
    }
)


def _always(module: Any) -> bool:
    return True


@dataclass(frozen=True)
class Gap:
    """What only a GPU can compute.

    Attributes:
        feature: as its users know it.
        models: that have it.
        modules: kinds of modules of the engine.
        kernels: those that are missing, of the extension or in Triton.
        applies: whether a module of these kinds needs them.
    """

    feature: str
    models: str
    modules: tuple[str, ...]
    kernels: tuple[str, ...]
    applies: Callable[[Any], bool] = _always


GAPS = (
    Gap(
        "attention to compressed tokens",
        "DeepSeek-V4 and its MTP heads",
        ("DSV4Attention", "DSparkAttention", "DSparkInputLayer"),
        ("dsv4_compress", "dsv4_ring_append", "dsv4_pool_quant_scatter", "_dsa_indexer_fewq_kernel"),
    ),
    Gap(
        "hyper-connections",
        "DeepSeek-V4, GLM-5.3",
        ("HyperConnection", "HyperHead", "ExpandStreams"),
        ("hc_mix", "hc_mix_fused", "hc_mix_num_chunks", "hc_apply", "hc_head"),
    ),
    Gap(
        "gated residual streams",
        "Qwen3.8-Flash-Next and its MTP heads",
        ("GatedResidual", "Qwen4ExpMTPInputLayer", "Qwen4ExpMTPStackOut"),
        ("gr_mix", "gr_mix_tiled", "gr_mix_tiled_slices", "hc_apply"),
    ),
    Gap(
        "sparse attention to blocks",
        "Qwen3.8-Flash-Next",
        ("QSAIndexer",),
        (
            *("dsa_topk_tile", "dsa_topk_merge_tiles", "qsa_sparse_attend_rows"),
            *("_qsa_pool_update_kernel", "_qsa_stage_kernel", "_dsa_pool_expand_kernel", "_mla_plane_update_kernel"),
        ),
    ),
    Gap(
        "n-gram embeddings",
        "Qwen3.8-Flash-Next",
        ("NGramEmbedding", "PLELayer"),
        ("ngram_hash_cpu", "ngram_dequant", "ple_gate", "ple_forward_streams"),
    ),
    Gap(
        "drafts of a block by convolution",
        "DFlash 2 drafters",
        ("DFlash2Block", "DFlash2DynConv", "DFlash2Selector"),
        ("dflash2_dynconv", "dflash2_topk", "dflash2_selector_walk"),
    ),
    Gap(
        "attention sinks on the first key",
        "the vision tower of MiMo-V2",
        ("Attention",),
        ("varlen_attn_triton",),
        lambda module: module.sink_key0,
    ),
)


def find_gaps(modules: Iterable[Any]) -> dict[Gap, Any]:
    """What cannot be computed here, each with the first module that has it."""
    found: dict[Gap, Any] = {}
    for module in modules:
        kind = type(module).__name__
        gaps = [gap for gap in GAPS if kind in gap.modules and gap.applies(module)]
        if not gaps and kind not in COVERED:
            gaps = [Gap(f"layers of the kind {kind}", "", (kind,), ())]
        for gap in gaps:
            found.setdefault(gap, module)
    return found


def check(model: Any, name: str, param: str | None = None) -> None:
    """Refuse one of the engine's models that needs a kernel which is missing here.

    Args:
        param: the setting that asks for it.

    Raises:
        Unsupported: names layers and kernels.
    """
    if gaps := find_gaps(model):
        raise Unsupported(
            f"{name} ({model.config.architecture}) needs a CUDA GPU. The CPU has no kernels for "
            f"{'; nor for '.join(_described(gap, module) for gap, module in gaps.items())}. Use another model, or a "
            "machine with a GPU.",
            param=param,
        )


def _described(gap: Gap, module: Any) -> str:
    kernels = f", which needs {', '.join(gap.kernels)}" if gap.kernels else ""
    return f"{gap.feature} (from {module.key} on{kernels})"


def table() -> str:
    """`GAPS` for the documentation, in Markdown."""
    rows = [(gap.feature, gap.models, ", ".join(f"`{kernel}`" for kernel in gap.kernels)) for gap in GAPS]
    return "".join(f"| {' | '.join(row)} |\n" for row in [("Missing", "Models", "Kernels"), ("---",) * 3, *rows])
