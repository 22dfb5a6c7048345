from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch

import backends.exllamav3.engine  # noqa: F401  (installs the kernels)
from backends.exllamav3 import cpu
from backends.exllamav3.cpu.extension import Extension
from backends.exllamav3.cpu.install import PATCHES, Patch
from common.errors import SettingsError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are installed where there is no GPU")


def test_the_extension_is_ours_and_torch_is_itself() -> None:
    assert isinstance(importlib.import_module("exllamav3.ext").exllamav3_ext, Extension)
    assert importlib.import_module("exllamav3.modules.linear").torch is not torch
    assert importlib.import_module("torch") is torch
    assert torch.bfloat16.itemsize == 2


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="there is a real Triton")
def test_no_stand_in_stays_behind() -> None:
    assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]


def test_every_module_of_the_engine_sees_the_facade() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("exllamav3.")]
    assert len(modules) > 50
    assert not [module.__name__ for module in modules if getattr(module, "torch", None) is torch]


def test_the_stand_ins_name_modules_that_the_engine_has() -> None:
    for name in ("exllamav3.ext", "exllamav3.vendor.fla"):
        package, _, leaf = name.rpartition(".")
        paths = importlib.import_module(package).__path__
        assert importlib.machinery.PathFinder.find_spec(name, paths) is not None, leaf


def test_no_attribute_is_patched_twice() -> None:
    targets = [(patch.module, patch.attribute) for patch in PATCHES]
    assert len(targets) == len(set(targets))


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("fake_engine")
    module.Class = type("Class", (), {"method": lambda self: "old"})  # type: ignore[attr-defined]  # made at run time
    module.value = 1  # type: ignore[attr-defined]  # made at run time
    monkeypatch.setitem(sys.modules, "fake_engine", module)
    return module


def test_a_module_that_only_newer_versions_have_may_be_missing() -> None:
    Patch("exllamav3.modules.of_a_newer_version", "value", lambda original: original, newer=True).apply()
    with pytest.raises(SettingsError, match="of_a_newer_version"):
        Patch("exllamav3.modules.of_a_newer_version", "value", lambda original: original).apply()


def test_a_patch_is_made_from_what_was_there(fake_module: Any) -> None:
    Patch("fake_engine", "value", lambda old: old + 1).apply()
    Patch("fake_engine", "Class.method", lambda old: lambda self: old(self) + " and new").apply()
    assert fake_module.value == 2
    assert fake_module.Class().method() == "old and new"


@pytest.mark.parametrize("target", [("fake_engine", "gone"), ("fake_engine", "Class.gone"), ("fake_gone", "value")])
def test_a_patch_without_target_names_it(fake_module: Any, target: tuple[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"exllamav3 \d.* has no fake_\w+\.(gone|Class\.gone|value)"):
        Patch(*target, lambda old: old).apply()


def test_installing_late_is_refused() -> None:
    with pytest.raises(AssertionError, match="before exllamav3 is imported"):
        cpu.install()
