"""Of torch, what vLLM's setup.py and its HTTP tests ask for: the source and the tests need no gigabyte of wheels."""

from __future__ import annotations

from types import SimpleNamespace

version = SimpleNamespace(cuda=None, hip=None, xpu=None)

long = strided = sparse_coo = sparse_csc = sparse_csr = object()
float32 = bfloat16 = float16 = dtype = layout = object()


def iinfo(of: object) -> SimpleNamespace:
    assert of is long
    return SimpleNamespace(min=-(2**63), max=2**63 - 1)
