"""What the lists of covered and missing kernels say is checked against the source of the engine itself."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backends.exllamav3.cpu.coverage import COVERED, GAPS, Gap, check, find_gaps, table
from backends.exllamav3.cpu.extension import Extension
from backends.exllamav3.cpu.install import PATCHES
from backends.exllamav3.model import ExllamaV3Container
from common.errors import Unsupported
from tests.models import write_tokenizer
from tests.scripted import load_settings

PAGE = Path(__file__).parents[4] / "docs" / "22.-Running-without-a-GPU.md"

# Kernels that covered modules name and do not get to where there is no GPU.
NOT_REACHED = {
    "BC_Attention": "decode steps as CUDA graphs",
    "BC_BlockSparseMLP": "the same",
    "BC_GatedDeltaNet": "the same",
    "BC_GatedDeltaNetSplit": "the same",
    "BC_GatedMLP": "the same",
    "BC_LinearEXL3": "the same",
    "BC_MLAttention": "the same",
    "BC_MLP": "the same",
    "BC_Mamba2": "the same",
    "BC_SharedKVAttention": "the same",
    "TritonKernel": "the same",
    "count_inf_nan": "a check while quantising",
    "_syrk_packed_kernel": "the statistics that quantising needs",
    "det_quant_weight": "an optional feature of the extension",
    "exl3_mgemm": "several EXL3 matrices at once, which are decoded here when they are loaded",
    "exl3_moe": "experts in EXL3 at once",
    "exl3_moe_gather": "the same",
    "exl3_moe_max_concurrency": "the same",
    "moe_split_map": "experts that are shared out between GPU and CPU",
    "pinned_cuda_view": "weights in host memory that a GPU reads",
    "hc_apply": "in blocks with hyper-connections, which are modules of their own",
}
# Of modules: what is done while loading for GPUs, while quantising or with several GPUs.
OTHER_WORK = ("tp_", "autosplit_", "bc_", "_bc_", "convert_", "make_tp_", "quant")


@dataclass
class Function:
    """What a function of the engine names."""

    kernel: bool  # in Triton
    extension: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    @classmethod
    def parse(cls, node: ast.FunctionDef) -> Function:
        function = cls(kernel=any("jit" in ast.unparse(decorator) for decorator in node.decorator_list))
        for inner in ast.walk(node):
            match inner:
                case ast.Attribute(value=ast.Name(id="ext"), attr=name):
                    function.extension.add(name)
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    function.names.add(name)
        return function


@dataclass
class Engine:
    functions: dict[str, list[Function]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, dict[str, Function]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)

    def modules(self) -> set[str]:
        """All kinds of modules."""
        return {name for name in self.classes if name != "Module" and "Module" in self.line(name)}

    def line(self, name: str) -> Iterator[str]:
        """A class and those that it is made of."""
        yield name
        for base in self.bases.get(name, ()):
            yield from self.line(base)

    def missing(self, name: str, known: set[str]) -> set[str]:
        """Kernels that the CPU lacks, of those that a kind of module may call.

        Args:
            known: functions that are not looked into.
        """
        passed = {patch.attribute for patch in PATCHES} | known
        methods: dict[str, Function] = {}
        for part in reversed([*self.line(name)]):
            methods |= self.classes.get(part, {})
        waiting = [method for key, method in methods.items() if not key.startswith(OTHER_WORK)]
        seen, found = [*waiting], set[str]()
        while waiting:
            function = waiting.pop()
            found |= function.extension
            for key in function.names - passed:
                for called in self.functions.get(key, ()):
                    if called.kernel:
                        found.add(key)
                    elif called not in seen:
                        seen.append(called)
                        waiting.append(called)
        return {key for key in found if not key.startswith("HAS_") and not hasattr(Extension(), key)}


@cache
def engine() -> Engine:
    spec = importlib.util.find_spec("exllamav3")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    found = Engine()
    for package in ("architecture", "modules", "util"):
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef):
                    found.functions[node.name].append(Function.parse(node))
                elif isinstance(node, ast.ClassDef):
                    found.bases[node.name] = [ast.unparse(base) for base in node.bases]
                    methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
                    found.classes[node.name] = {item.name: Function.parse(item) for item in methods}
    return found


def test_every_kind_of_module_is_listed_once() -> None:
    whole = {name for gap in GAPS if gap.applies.__name__ == "_always" for name in gap.modules}
    assert not whole & COVERED
    # Those that the lowest supported version does not have yet are listed as well.
    assert engine().modules() <= COVERED | whole


@pytest.mark.parametrize("name", sorted(COVERED))
def test_what_is_covered_needs_no_missing_kernel(name: str) -> None:
    if name not in engine().modules():
        pytest.skip("a newer version of the engine has it")
    known = {kernel for gap in GAPS if name in gap.modules for kernel in gap.kernels}
    assert engine().missing(name, known) <= NOT_REACHED.keys() | known


@pytest.mark.parametrize("gap", GAPS, ids=lambda gap: gap.feature)
def test_a_gap_names_what_is_missing(gap: Gap) -> None:
    functions = [*chain(*engine().functions.values(), *(methods.values() for methods in engine().classes.values()))]
    there = {name for function in functions for name in function.extension}
    assert {*gap.kernels} <= there | engine().functions.keys()
    assert not [kernel for kernel in gap.kernels if hasattr(Extension(), kernel)]
    assert not {*gap.kernels} & {patch.attribute for patch in PATCHES}
    for name in {*gap.modules} - COVERED & engine().modules():
        assert engine().missing(name, {*gap.kernels}) <= {*gap.kernels} | NOT_REACHED.keys()


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


# --- models -----------------------------------------------------------------------------------------------------------


def module(kind: str, **attributes: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(key=f"the.{kind}", **attributes)


def test_all_that_is_missing_is_found_where_it_is_first() -> None:
    first, second = module("HyperHead"), module("QSAIndexer")
    gaps = find_gaps([module("Linear"), first, second, module("HyperConnection")])
    assert [*gaps.values()] == [first, second]
    assert not find_gaps([module("Linear"), module("Attention", sink_key0=False)])
    assert find_gaps([module("Attention", sink_key0=True)])


def test_what_a_newer_engine_has_is_not_tried() -> None:
    with pytest.raises(Unsupported, match="no kernels for layers of the kind Novelty .from the.Novelty on"):
        check(Model([module("Novelty")]), "new")


class Model(list[Any]):
    config = SimpleNamespace(architecture="SomeArchitecture")


def test_a_model_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("deepseek_v4", num_hidden_layers=2)
    config.architectures = ["DeepseekV4ForCausalLM"]
    config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    weights = {f"model.layers.{layer}.norm.weight": torch.zeros(1) for layer in range(2)}  # and no others
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported) as caught:
        ExllamaV3Container.create(tmp_path, load_settings(cache_size=512, max_seq_len=512))
    message = str(caught.value)
    assert "(DeepseekV4ForCausalLM) needs a CUDA GPU" in message
    assert re.search(r"attention to compressed tokens \(from \S*layers.0.\S+ on, which needs dsv4_compress", message)
    assert "; nor for " in message  # they have more than one thing that is missing
