from __future__ import annotations

import pytest
import torch

from backends.exllamav3.cpu import sparse_attention
from backends.exllamav3.cpu.quantised_cache import dequantise, quantise
from tests.backends.exllamav3.cpu.allocations import largest

HEADS, RANK, ROPE, PAGE = 3, 32, 4, 16
TABLE = torch.tensor([[5, 0, 3]], dtype=torch.int32)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("compress_rate", [1, 4])
@pytest.mark.parametrize("at_once", [1, 30, 1 << 24])
def test_scores_of_an_indexer(at_once: int, paged: bool, compress_rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "NUMBERS_AT_ONCE", at_once)
    rows, heads, dim, entries, start = 5, 2, 8, 40 // compress_rate, 30
    q, w, pool = torch.randn(rows, heads, dim), torch.randn(rows, heads), torch.randn(8 * PAGE, dim)
    order = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in TABLE[0].tolist()])
    keys = pool[order][:entries]
    if paged:
        scores = torch.full((rows + 1, 64), 7.0).half()
        out = sparse_attention.dsa_indexer_scores(
            q, w, pool, start, compress_rate, entries, scores, block_table=TABLE[0], epp=PAGE
        )
        assert torch.equal(scores[:rows, :entries], out)
        assert (scores[rows] == 7).all()
    else:
        out = sparse_attention.dsa_indexer_scores(q, w, keys, start, compress_rate, entries)
    assert out.dtype == torch.half
    for row in range(rows):
        complete = min((start + row + 1) // compress_rate, entries)
        for entry in range(entries):
            products = [max(0.0, float(q[row, head] @ keys[entry])) * float(w[row, head]) for head in range(heads)]
            expected = sum(products) / (heads * dim) ** 0.5 if entry < complete else float("-inf")
            assert float(out[row, entry]) == pytest.approx(expected, rel=2e-3, abs=1e-3)


def test_a_long_prompt_needs_no_scores_of_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "NUMBERS_AT_ONCE", 1 << 12)
    rows, heads, entries = 16, 32, 1024
    q, w, keys = torch.randn(rows, heads, 8), torch.randn(rows, heads), torch.randn(entries, 8)
    assert largest(sparse_attention.dsa_indexer_scores, q, w, keys, entries, 1, entries) <= rows * entries


def test_the_best_entries() -> None:
    infinite = float("inf")
    scores = torch.tensor([[1.0, 5.0, 3.0, -infinite], [2.0, -infinite, -infinite, -infinite]]).half()
    indices = torch.zeros(2, 5, dtype=torch.int32)
    sparse_attention.dsa_topk(scores, indices, 2)
    assert indices.tolist() == [[1, 2, -1, -1, -1], [0, -1, -1, -1, -1]]


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("gathered", [1, 1 << 24])
def test_attention_to_chosen_latents(bits: int, gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "NUMBERS_AT_ONCE", gathered)
    rows = 4
    latents, rotated = torch.randn(8, PAGE, 1, RANK), torch.randn(8, PAGE, 1, ROPE)
    words, scales = quantise(latents.squeeze(2), bits) if bits else (latents, latents)
    seen = dequantise(words, scales) if bits else latents
    q, q_pe = torch.randn(HEADS, rows, RANK), torch.randn(rows, HEADS, ROPE)
    indices = torch.tensor([[3, 20, 40, -1], [0, -1, -1, -1], [17, 16, 15, 14], [47, 1, -1, -1]], dtype=torch.int32)
    out = sparse_attention.dsa_attn(
        q,
        words,
        rotated,
        TABLE,
        indices=indices,
        scale=0.3,
        page_size=PAGE,
        q_pe=q_pe,
        out_latent=True,
        qc=(scales, bits) if bits else None,
    )
    for row in range(rows):
        places = [divmod(position, PAGE) for position in indices[row].tolist() if position >= 0]
        c = torch.stack([seen[TABLE[0, page], offset].flatten() for page, offset in places])
        r = torch.stack([rotated[TABLE[0, page], offset, 0] for page, offset in places])
        for head in range(HEADS):
            logits = c @ q[head, row] + r @ q_pe[row, head]
            torch.testing.assert_close(out[head, row], (logits * 0.3).softmax(-1) @ c, atol=1e-5, rtol=1e-4)


def test_a_query_for_which_nothing_was_chosen_gets_zeros_and_no_more_than_asked_count() -> None:
    latents, rotated = torch.randn(8, PAGE, 1, RANK), torch.randn(8, PAGE, 1, ROPE)
    q, q_pe = torch.randn(HEADS, 2, RANK), torch.randn(2, HEADS, ROPE)
    indices = torch.tensor([[-1, -1, 5], [3, -1, 5]], dtype=torch.int32)
    out = sparse_attention.dsa_attn(
        q, latents, rotated, TABLE, indices=indices, k_len=2, scale=0.3, page_size=PAGE, q_pe=q_pe, out_latent=True
    )
    assert not out[:, 0].any()
    torch.testing.assert_close(out[:, 1], latents[5, 3].expand(HEADS, -1))


def test_other_forms_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="compressed pools"):
        sparse_attention.dsa_attn(
            torch.empty(1, 1, RANK), torch.empty(1), torch.empty(1), TABLE, scale=1.0, page_size=PAGE
        )
