"""LoRA adapters as PEFT saves them: checked against a model, and put on its linear layers.

The engine adds `x @ A @ B` to what a linear layer gives, for each pair that is registered there (`Linear.apply_lora`).
Its own reader of adapters is not used: what it cannot apply it leaves out, and the answers are then those of no adapter
that anybody has trained. Here such an adapter is refused, before anything is touched.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, Final, TypeGuard

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from backends.exllamav3.engine import DEVICE, Linear, Model, Tensor
from backends.exllamav3.model_files import LENGTH, read_object
from common.errors import InvalidRequest, Unsupported
from common.hidden_paths import hide_paths
from common.limits import MAX_ADAPTER_WEIGHTS
from common.model_folder import ADAPTER_CONFIG, adapter_folder

WEIGHTS: Final = "adapter_model.safetensors"
PICKLE: Final = "adapter_model.bin"
_MOST_HEADER_BYTES: Final = 500 * MAX_ADAPTER_WEIGHTS
_KEY: Final = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_LAYER_NAME: Final = re.compile(r"[\w.]+")
_DTYPES: Final = frozenset({"F16", "BF16", "F32"})
# What PEFT and architectures put before the name that a layer has within the language model.
_WRAPPERS: Final = frozenset({"base_model", "model", "language_model"})
_SHOWN: Final = 3  # names in a message
_LONGEST_SHOWN: Final = 200  # characters of one

# What an adapter may not ask for, as its configuration calls it, since the engine would not do it.
_NOT_APPLIED: Final = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "weights stored in columns (fan_in_fan_out)",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "layer_replication": "repeated layers (layer_replication)",
    "trainable_token_indices": "embeddings of single tokens (trainable_token_indices)",
    "target_parameters": "parameters that are no linear layers (target_parameters)",
    "alora_invocation_tokens": "invocation tokens (aLoRA)",
    "use_qalora": "grouped inputs (QA-LoRA)",
}


class _NoGraphs(dict[Any, Any]):
    """In place of an attention layer's compiled steps: there is none, and none is to be made."""

    def get(self, key: Any, default: Any = None) -> Any:
        return False


def _off(value: object) -> object:
    return False if isinstance(value, bool) else None


def _each_off(values: Sequence[object]) -> list[None]:
    return [None] * len(values)


def _no_graphs(graphs: object) -> _NoGraphs:
    return _NoGraphs()


_OF_ATTENTION: Final = {"multi_qkv": _off, "multi_qg": _off, "multi_kv": _off, "bc_attn": _no_graphs}
# Kinds of layers that can take adapters. For the few rows of a decode step the engine has shortcuts through the
# quantised weights of several linear layers at once, which do not ask for adapters. These are the attributes that lead
# to them, and what makes of their values those with which every linear layer is called by itself.
_SHORTCUTS: Final[Mapping[str, Mapping[str, Callable[[Any], object]]]] = {
    "Attention": _OF_ATTENTION,
    "SlidingAttention": _OF_ATTENTION,
    "SharedKVAttention": {"bc_attn": _no_graphs},
    "GatedDeltaNet": {"bc_split": _off, "multi_qkvz": _off},
    "ShortConv": {},
    "MLP": {"bc": _off},
    "GatedMLP": {"bc": _off, "multi_gu": _each_off},
}
_BLOCKS: Final = frozenset({"TransformerBlock", "ParallelDecoderBlock"})


@dataclass(frozen=True)
class _Place:
    """A linear layer of the model under one of its names.

    Attributes:
        around: the modules that it is part of.
        rows: of a weight that holds several layers, those of this one; None: all.
    """

    linear: Linear
    around: tuple[Any, ...]
    rows: tuple[int, int] | None = None

    @property
    def inputs(self) -> int:
        return int(self.linear.in_features_unpadded)

    @property
    def width(self) -> int:
        """Of what the layer gives, where the adapter's part is added."""
        linear = self.linear
        return int(linear.out_features_unpadded if linear.trim_padded_out else linear.out_features)

    def refusal(self) -> str | None:
        """Why no adapter can be put here."""
        for module in self.around:
            kind = type(module).__name__
            if kind not in _SHORTCUTS and kind not in _BLOCKS:
                return f"the engine applies none in layers of the kind {kind}"
        if self.linear.is_sliced or (self.rows is not None and self.linear.fdequant is not None):
            return "the engine keeps its weights cut up"
        return None


@dataclass(frozen=True)
class _Pair:
    """The two weights of one layer. `factor` is that of B @ A."""

    a: _Half
    b: _Half
    places: Sequence[_Place]
    factor: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """One that fits the model it was checked against. `scaling` is the factor that was asked for, 0 or more."""

    name: str
    directory: Path
    scaling: float
    pairs: Sequence[_Pair] = field(repr=False)

    def tensors(self) -> Iterator[tuple[_Place, Tensor, Tensor]]:
        """For each layer: A as (inputs, rank) and B as (rank, outputs), scaled, in host memory.

        Raises:
            InvalidRequest: they hold what is no number, or is none once it is scaled, or they are not those that were
                checked.
        """
        dtype = torch.float if DEVICE == "cpu" else torch.half
        with safe_open(self.directory / WEIGHTS, "pt") as file:
            for pair in self.pairs:
                a, b = self._read(file, pair.a), self._read(file, pair.b)
                for place in pair.places:
                    rows = b if place.rows is None else b[slice(*place.rows)]
                    scaled = rows * (pair.factor * self.scaling * place.linear.weight_scale)
                    columns = _padded(a.T, rows=int(place.linear.in_features)).to(dtype)
                    outputs = _padded(scaled, rows=place.width).T.to(dtype)
                    if not (columns.isfinite().all() and outputs.isfinite().all()):
                        raise InvalidRequest(
                            f"The adapter {self.name} holds numbers that are not finite at scaling {self.scaling:g} "
                            f"({pair.b.key}). Lower the scaling, or download it again."
                        )
                    yield place, columns.contiguous(), outputs.contiguous()

    def _read(self, file: Any, half: _Half) -> Tensor:
        if _half(file, half.key) != half:
            raise InvalidRequest(
                f"The adapter {self.name} was overwritten after it had been checked: {half.key} is not what it was. "
                "Apply it again."
            )
        weight: Tensor = file.get_tensor(half.key)
        return weight.float()


class ModelAdapters:
    """The adapters of one model.

    Attributes:
        active: those that it computes with, in the order of their application.
        root: what its cached pages stand for beside their tokens, see `set_cache_root()`.
    """

    def __init__(self, model: Model, name: str, lora_dir: Path, *, tensor_parallel: bool) -> None:
        self.active: Sequence[Adapter] = ()
        self.root: bytes | None = None
        self._name = name
        self._lora_dir = lora_dir
        self._tensor_parallel = tensor_parallel
        self._places = _places(model)
        self._set_aside: list[tuple[Any, dict[str, Any]]] = []  # modules, with their shortcuts

    def find(self, name: str, scaling: float, param: str) -> Adapter:
        """Read an adapter's configuration and what its weights are called. The model need not be loaded.

        Raises:
            NotFound: there is none of that name.
            InvalidRequest: it cannot be read, does not fit the model, or asks for what the engine does not do.
        """
        directory = adapter_folder(self._lora_dir, name, param)
        try:
            return self._check(name, directory, scaling)
        except InvalidRequest as error:
            error.param = param
            raise

    def _check(self, name: str, directory: Path, scaling: float) -> Adapter:
        if self._tensor_parallel:
            raise Unsupported(
                f"The adapter {name} cannot be applied: the engine applies none with model.tensor_parallel. Load the "
                "model without it."
            )
        config = _read_config(directory)
        alphas = _Alphas(config)
        pairs = []
        unknown, refused, misfits, again = [], {}, [], []
        paired: set[Linear] = set()
        for layer, halves in _read_shapes(directory).items():
            places = self._places.get(_bare(layer))
            if not places:
                unknown.append(layer)
            elif reason := next(filter(None, (place.refusal() for place in places)), None):
                refused[layer] = reason
            elif (pair := _pair(layer, halves, places, config, alphas)) is None:
                misfits.append(f"{layer} ({_shape(halves['A'])} and {_shape(halves['B'])})")
            elif paired & (linears := {place.linear for place in places}):
                again.append(layer)
            else:
                pairs.append(pair)
                paired |= linears
        base = config.get("base_model_name_or_path")
        made_for = f" It was made for {hide_paths(_legible(base))}." if isinstance(base, str) and base else ""
        if unknown:
            raise InvalidRequest(
                f"The adapter {name} does not fit {self._name}, whose language model has no {_some(unknown)}.{made_for}"
            )
        if misfits:
            raise InvalidRequest(
                f"The adapter {name} does not fit {self._name}, whose layers have other sizes or the adapter another "
                f"rank than it says: {_some(misfits)}.{made_for}"
            )
        if again:
            raise InvalidRequest(
                f"The adapter {name} changes a layer of {self._name} twice: {_some(again)}. Download it again."
            )
        if refused:
            raise Unsupported(
                f"The adapter {name} cannot be applied to {self._name}: {next(iter(refused.values()))} "
                f"({_some(list(refused))}). Use one that was trained on attention and dense layers."
            )
        return Adapter(name, directory, scaling, pairs)

    def apply(self, adapters: Sequence[Adapter]) -> None:
        """Have the loaded model compute with these adapters and no others. Nothing changes where this raises.

        Args:
            adapters: from `find()`. One with scaling 0 changes nothing.

        Raises:
            InvalidRequest: as for `Adapter.tensors()`, or a file was damaged after the check.
        """
        effective = [adapter for adapter in adapters if adapter.scaling > 0]
        digest = hashlib.blake2b(digest_size=16)  # of what is applied: the files may be others by now
        tensors = []
        try:
            for adapter in effective:
                for place, a, b in adapter.tensors():
                    digest.update(f"{place.linear.key} {place.rows}".encode())
                    digest.update(a.numpy().data)
                    digest.update(b.numpy().data)
                    device = place.linear.device
                    tensors.append((adapter, place, a.to(device), b.to(device)))
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(
                f"An adapter cannot be read any more: {hide_paths(str(error))}. Download it again."
            ) from error
        self.remove()
        for adapter, place, a, b in tensors:
            place.linear.lora_a_tensors[adapter] = a
            place.linear.lora_b_tensors[adapter] = b
        self._bypass_shortcuts(module for _, place, _, _ in tensors for module in place.around)
        self.active, self.root = tuple(adapters), digest.digest() if effective else None

    def remove(self) -> None:
        """Put everything back as it was without adapters."""
        for places in self._places.values():
            for place in places:
                place.linear.lora_a_tensors.clear()
                place.linear.lora_b_tensors.clear()
        for module, shortcuts in self._set_aside:
            vars(module).update(shortcuts)
        self._set_aside.clear()
        self.active, self.root = (), None

    def _bypass_shortcuts(self, modules: Iterable[Any]) -> None:
        for module in {id(module): module for module in modules}.values():
            off = _SHORTCUTS.get(type(module).__name__, {})
            own = {name: vars(module)[name] for name in off if name in vars(module)}
            self._set_aside.append((module, own))
            vars(module).update({name: off[name](value) for name, value in own.items()})


# --- the model's layers -----------------------------------------------------------------------------------------------


def _places(model: Model) -> dict[str, list[_Place]]:
    """The linear layers by their names, without what is put before these.

    A name of a checkpoint that keeps several in one weight stands for all of them.
    """
    places: dict[str, list[_Place]] = {}
    for place in _linear_layers(model.modules, ()):
        linear = place.linear
        places.setdefault(_bare(linear.key), []).append(place)
        if linear.fkey is not None and linear.frange is not None and linear.fidx is None:
            part = _Place(linear, place.around, tuple(linear.frange))
            places.setdefault(_bare(linear.fkey), []).append(part)
    return places


def _linear_layers(modules: Iterable[Any], around: tuple[Any, ...]) -> Iterator[_Place]:
    for module in modules:
        if isinstance(module, Linear):
            yield _Place(module, around)
        yield from _linear_layers(module.modules, (*around, module))


def _bare(name: str) -> str:
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


# --- the adapter's files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Half:
    """One weight of a file."""

    key: str
    dtype: str
    shape: tuple[int, ...]


def _half(file: Any, key: str) -> _Half:
    weight = file.get_slice(key)
    return _Half(key, weight.get_dtype(), tuple(weight.get_shape()))


def _read_config(directory: Path) -> dict[str, Any]:
    config = read_object(directory / ADAPTER_CONFIG)
    name = directory.name
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Unsupported(f"The adapter {name} is of the kind {short_repr(kind)}. Only LORA can be applied.")
    asked = [what for key, what in _NOT_APPLIED.items() if config.get(key)]
    if (config.get("bias") or "none") != "none":
        asked.append("biases")
    if asked:
        raise Unsupported(
            f"The adapter {name} brings or needs what the engine does not apply: {', '.join(asked)}. Merge it into its "
            "model with PEFT, and load the merged model."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not _is_number(alpha):
        raise InvalidRequest(
            f"{ADAPTER_CONFIG} of the adapter {name} says r {short_repr(rank)} and lora_alpha {short_repr(alpha)}, "
            "which are no numbers to scale with. Download the file again."
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise InvalidRequest(f"{ADAPTER_CONFIG} of the adapter {name} says no mapping {key}. Download it again.")
    return config


def _read_shapes(directory: Path) -> dict[str, dict[str, _Half]]:
    """The halves "A" and "B" of each layer, by its name in the file."""
    name = directory.name
    path = directory / WEIGHTS
    if not path.is_file():
        if (directory / PICKLE).exists():
            raise Unsupported(
                f"The adapter {name} has its weights in {PICKLE}, which could run code when it is opened. Save it as "
                "safetensors."
            )
        raise InvalidRequest(f"The adapter {name} is incomplete: {WEIGHTS} is missing. Download it again.")
    layers: dict[str, dict[str, _Half]] = {}
    strange = []
    try:
        _check_header(path, name)
        with safe_open(path, "pt") as file:
            keys = file.keys()
            if len(keys) > MAX_ADAPTER_WEIGHTS:
                raise _too_many_weights(name)
            for key in keys:
                half = _half(file, key)
                match = _KEY.fullmatch(key)
                halves = layers.setdefault(match[1], {}) if match is not None else {}
                if match is None or match[2] in halves or half.dtype not in _DTYPES:
                    strange.append(key)
                else:
                    halves[match[2]] = half
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(
            f"{WEIGHTS} of the adapter {name} cannot be read: {hide_paths(str(error))}. Download it again."
        ) from error
    if strange:
        raise Unsupported(
            f"The adapter {name} brings weights beside those of linear layers, or in a format that the engine does not "
            f"apply: {_some(strange)}. Merge it into its model with PEFT, and load the merged model."
        )
    if lone := [layer for layer, halves in layers.items() if len(halves) < 2]:
        raise InvalidRequest(f"The adapter {name} has only one of two weights for {_some(lone)}. Download it again.")
    if not layers:
        raise InvalidRequest(f"The adapter {name} holds no weights. Download it again.")
    return layers


def _check_header(path: Path, name: str) -> None:
    """Refuse a file whose list of weights is longer than an adapter's can be, before it is read."""
    with path.open("rb") as file:
        length = file.read(LENGTH.size)
    if len(length) == LENGTH.size and LENGTH.unpack(length)[0] > _MOST_HEADER_BYTES:
        raise _too_many_weights(name)


def _too_many_weights(name: str) -> Unsupported:
    return Unsupported(
        f"The adapter {name} lists more than {MAX_ADAPTER_WEIGHTS:,} weights. Use one that was trained on attention "
        "and dense layers: these have some thousands, and the engine applies none to experts."
    )


def _pair(
    layer: str, halves: Mapping[str, _Half], places: Sequence[_Place], config: Mapping[str, Any], alphas: _Alphas
) -> _Pair | None:
    """The weights of a layer; None where they do not fit it."""
    a, b = halves["A"], halves["B"]
    rank = a.shape[0] if a.shape else 0
    outputs = max(int(place.linear.out_features_unpadded) if place.rows is None else place.rows[1] for place in places)
    expected = rank if config.get("rank_pattern") else config["r"]
    if not rank or rank != expected or a.shape != (rank, places[0].inputs) or b.shape != (outputs, rank):
        return None
    factor = alphas.of(layer) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return _Pair(a, b, places, factor)


class _Alphas:
    """`lora_alpha`, or what `alpha_pattern` says for a layer, whose keys are names or ends of names: the first counts.

    Raises `Unsupported` for other patterns.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._default = float(config["lora_alpha"])
        self._names: dict[str, tuple[int, float]] = {}  # with the place in the mapping
        self._ends: dict[str, tuple[int, float]] = {}
        for place, (pattern, alpha) in enumerate((config.get("alpha_pattern") or {}).items()):
            name = pattern.removeprefix("^")
            if not _LAYER_NAME.fullmatch(name) or not _is_number(alpha):
                raise Unsupported(
                    f"alpha_pattern {short_repr(pattern)} of the adapter is no name of a layer with a number."
                )
            self._names.setdefault(_bare(name), (place, float(alpha)))
            if name == pattern:
                self._ends.setdefault(name, (place, float(alpha)))

    def of(self, layer: str) -> float:
        parts = layer.split(".")
        ends = [self._ends.get(".".join(parts[start:])) for start in range(1, len(parts))]
        found = [match for match in (self._names.get(_bare(layer)), *ends) if match is not None]
        return min(found)[1] if found else self._default


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is one that a float can hold, and finite."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _padded(weight: Tensor, *, rows: int) -> Tensor:
    return F.pad(weight, (0, 0, 0, rows - weight.shape[0]))


def _shape(half: _Half) -> str:
    return " x ".join(map(str, half.shape))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(_legible, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _legible(name: str) -> str:
    """A name from a file, in which anything may stand, at any length."""
    return name if name.isprintable() and len(name) <= _LONGEST_SHOWN else short_repr(name)
