from __future__ import annotations

import pytest

from backends.exllamav3.cpu.extension import FAMILIES, Extension, MissingKernel


def test_every_kernel_has_one_home() -> None:
    names = [name for family in FAMILIES for name in family.__all__]
    assert len(names) == len(set(names))
    extension = Extension()
    for family in FAMILIES:
        for name in family.__all__:
            assert getattr(extension, name) is getattr(family, name)


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(MissingKernel, match="no exl3_gemm.*Use a CUDA GPU"):
        Extension().exl3_gemm()
    assert not hasattr(Extension(), "exl3_gemm")


def test_optional_features_are_absent() -> None:
    assert Extension().HAS_DET_GEMM is False
