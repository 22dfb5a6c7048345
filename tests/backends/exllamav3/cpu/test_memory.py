from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from backends.exllamav3.cpu.memory import buffer_at, return_freed, tensor_at


def test_a_view_shares_the_memory() -> None:
    source = torch.arange(6.0)
    view = tensor_at(source.data_ptr(), torch.float, (2, 3))
    assert view.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    view[1, 2] = 9.0
    assert source[5] == 9.0


def test_strides_count_elements() -> None:
    source = torch.arange(12, dtype=torch.half)
    view = tensor_at(source.data_ptr() + 2 * source.element_size(), torch.half, (2, 3), (5, 2))
    assert view.tolist() == [[2, 4, 6], [7, 9, 11]]


def test_bytes_are_writable() -> None:
    source = torch.zeros(4, dtype=torch.uint8)
    buffer_at(source.data_ptr() + 1, 2)[:] = b"\x05\x06"
    assert source.tolist() == [0, 5, 6, 0]


def test_freed_memory_goes_back_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    class Library:
        malloc_trim = called.append

    monkeypatch.setattr(sys, "platform", "linux")
    for library in (Library, object()):  # the second as of musl
        monkeypatch.setattr(ctypes, "pythonapi", library)
        return_freed()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "pythonapi", Library)
    return_freed()
    assert called == [0]
