from __future__ import annotations

import pytest
import torch

from backends.exllamav3.cpu import paging

PAGE = 4


@pytest.mark.parametrize("pages", [[6, 1, 3], [2, 3, 4]])
@pytest.mark.parametrize("past", [0, 3, 4])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_rows_go_to_their_pages_and_come_back(pages: list[int], past: int, count: int) -> None:
    cache, rows, table = torch.zeros(8, PAGE, 2, 3), torch.randn(count, 2, 3), torch.tensor(pages, dtype=torch.int32)
    paging.append_rows(cache, table, past, rows)
    for index, row in enumerate(rows):
        page, offset = divmod(past + index, PAGE)
        assert torch.equal(cache[pages[page], offset], row)
    assert cache.count_nonzero() == rows.numel()
    assert torch.equal(paging.gather_rows(cache, table, past + count)[past:], rows)


def test_pages_that_follow_each_other_are_not_copied() -> None:
    cache = torch.zeros(8, PAGE, 2, 3)
    rows = paging.gather_rows(cache, torch.tensor([2, 3, 7], dtype=torch.int32), 7)
    assert rows.data_ptr() == cache[2].data_ptr()
    assert paging.gather_rows(cache, torch.tensor([2, 3], dtype=torch.int32), 0).shape == (0, 2, 3)


def test_an_update_of_several_sequences() -> None:
    k_cache, v_cache = torch.zeros(2, 4, PAGE, 1, 2)
    k, v = torch.randn(2, 2, 2, 1, 2)
    table, lengths = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    paging.paged_kv_cache_update(k, v, k_cache, v_cache, table, lengths)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        assert torch.equal(torch.stack((cache[0, 3], cache[2, 0])), rows[0])
        assert torch.equal(cache[3, :2], rows[1])
        assert cache.count_nonzero() == rows.numel()


def test_pages_rotate_through_a_spare_one() -> None:
    cache = torch.arange(4.0).view(4, 1).expand(4, PAGE).contiguous()
    order = torch.tensor([-1, 0, 0, 2, 2, 3, 3, -1])  # 0 aside, 2 to 0, 3 to 2, what was 0 to 3
    paging.cache_rotate(cache, order, torch.empty(PAGE))
    assert cache[:, 0].tolist() == [2, 1, 3, 0]


def test_staging_a_decode_step() -> None:
    arena = torch.full((12,), -1, dtype=torch.int32)
    batch_ids, pages = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, 8, dtype=torch.long)
    sequences = [torch.arange(100, 110).view(1, 10), torch.arange(200, 210).view(1, 10)]
    blocks = [torch.tensor([[5, 6]], dtype=torch.int32), torch.tensor([[7, 8, 9, 10]], dtype=torch.int32)]
    paging.generator_stage_decode(arena, 3, blocks, [4, 9], [0, 1], batch_ids, sequences, [pages[0], pages[1]], [4, 1])
    assert arena.tolist() == [5, 6, 0, 7, 8, 9, 4, 9, 4, 10, -1, -1]
    assert batch_ids.tolist() == [[104], [209]]
    assert pages.flatten().nonzero().flatten().tolist() == [4, 9]
    assert pages.flatten()[[4, 9]].tolist() == [104, 209]


def test_staging_without_tokens_and_offsets() -> None:
    arena = torch.full((6,), -1, dtype=torch.int32)
    paging.generator_stage_decode(arena, 2, [torch.tensor([3], dtype=torch.int32)], [7], [], None, [], [], [])
    assert arena.tolist() == [3, 0, 7, -1, -1, -1]
