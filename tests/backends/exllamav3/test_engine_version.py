"""What `engine.py` decides when it is imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from backends.exllamav3 import engine
from common.errors import SettingsError


@pytest.mark.parametrize("version", ["1.6.4", "1.6.5", "1.7.0.dev1", "1.9", "1.6.5+cu128.torch2.13"])
def test_supported_versions(version: str) -> None:
    engine.check_engine_version(version)


@pytest.mark.parametrize("version", ["0.0.7", "1.4.0", "1.6.3", "1.6.4rc1", "2.0.0", "2.1+cu128"])
def test_other_versions_are_refused_naming_both(version: str) -> None:
    with pytest.raises(SettingsError) as raised:
        engine.check_engine_version(version)
    message = str(raised.value)
    assert f"exllamav3 {version} is installed" in message
    assert ">=1.6.4" in message
    assert "<2" in message
    assert "pip install" in message


def test_the_device_and_version_are_those_in_use() -> None:
    assert ("cuda" if torch.cuda.is_available() else "cpu") == engine.DEVICE
    assert importlib.metadata.version("exllamav3") == engine.ENGINE_VERSION
    assert engine.gpu_count() == (torch.cuda.device_count() if engine.DEVICE == "cuda" else 0)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are installed where there is no GPU")
def test_the_log_says_once_that_cpu_kernels_are_in_use() -> None:
    output = run("import backends.exllamav3.engine, backends.exllamav3.engine")
    assert output.count("CPU kernels") == 1
    assert engine.ENGINE_VERSION in output


def test_with_a_gpu_the_cpu_package_is_never_imported() -> None:
    code = """
import sys, types, torch
torch.cuda.is_available = lambda: True
class Names(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        return type(name, (), {})
names = "ext generator generator.pagetable generator.sampler modules modules.linear tokenizer tokenizer.mm_embedding"
for name in (names + " util util.memory").split():
    sys.modules["exllamav3." + name] = Names("exllamav3." + name)
sys.modules["exllamav3"] = Names("exllamav3")
import backends.exllamav3.engine as engine
print(engine.DEVICE, [name for name in sys.modules if name.startswith("backends.exllamav3.cpu")])
"""
    assert run(code).strip() == "cuda []"


def test_tokens_become_a_row() -> None:
    tensor = engine.token_tensor([5, 6, 7])
    assert tensor.shape == (1, 3)
    assert tensor.dtype == torch.long
    assert engine.token_tensor([]).shape == (1, 0)


def test_the_smallest_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(8, 9), (7, 5), (12, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    assert engine.smallest_compute_capability([0, 1, 2]) == 7.5
    assert engine.smallest_compute_capability([0, 2]) == 8.9
    assert engine.smallest_compute_capability([]) == float("inf")
