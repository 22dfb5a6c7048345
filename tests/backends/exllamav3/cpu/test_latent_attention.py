from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import latent_attention
from backends.exllamav3.cpu.quantised_cache import dequantise, quantise
from tests.backends.exllamav3.cpu.allocations import largest

HEADS, RANK, NOPE, ROPE, VALUE, PAGE = 3, 32, 8, 4, 6, 16
SCALE = 0.3
BITS = 8


@dataclass
class Sequence:
    """Queries (n, heads, dim) that are the last of the positions; latents and rotated keys of all."""

    q: Tensor
    latents: Tensor
    rotated: Tensor

    @classmethod
    def random(cls, past: int, queries: int) -> Sequence:
        total = past + queries
        return cls(torch.randn(queries, HEADS, NOPE + ROPE), torch.randn(total, RANK), torch.randn(total, ROPE))

    def attend(self, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        """With every head's keys and values; w_uk is (rank, heads, dim), w_uv alike."""
        past = len(self.latents) - len(self.q)
        out = torch.empty(len(self.q), HEADS, w_uv.shape[-1])
        for head in range(HEADS):
            keys = torch.cat((self.latents @ w_uk[:, head], self.rotated), dim=-1)
            values = self.latents @ w_uv[:, head]
            for index, query in enumerate(self.q):
                seen = slice(0, past + index + 1)
                out[index, head] = (keys[seen] @ query[head] * SCALE).softmax(-1) @ values[seen]
        return out


@dataclass
class Pages:
    """A cache of several sequences, on pages in no order; latents in packed form where `bits` is not 0."""

    latents: Tensor
    scales: Tensor
    rotated: Tensor
    table: Tensor
    bits: int

    @classmethod
    def empty(cls, bits: int) -> Pages:
        latents = torch.full((8, PAGE, RANK // 32 * bits), -1, dtype=torch.int32)
        if not bits:
            latents = torch.full((8, PAGE, 1, RANK), float("nan"))
        scales, rotated = torch.zeros(8, PAGE, RANK // 32).half(), torch.full((8, PAGE, 1, ROPE), float("nan"))
        return cls(latents, scales, rotated, torch.tensor([[5, 0, 3], [2, 7, 1]], dtype=torch.int32), bits)

    @property
    def qc(self) -> tuple[Tensor, int] | None:
        return (self.scales, self.bits) if self.bits else None

    def append(self, latents: Tensor, rotated: Tensor, lengths: list[int]) -> None:
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        if self.bits:
            latent_attention.mla_kv_quant_append(
                latents, rotated, self.latents, self.scales, self.rotated, self.table, seqlens, self.bits
            )
        else:
            latent_attention.mla_kv_append(latents, rotated, self.latents, self.rotated, self.table, seqlens)


def cached(sequences: list[Sequence], queries: int, bits: int) -> Pages:
    pages = Pages.empty(bits)
    for row, sequence in enumerate(sequences):
        past = len(sequence.latents) - queries
        one = Pages(pages.latents, pages.scales, pages.rotated, pages.table[row : row + 1], bits)
        one.append(sequence.latents[None, :past], sequence.rotated[None, :past], [0])
    pages.append(
        torch.stack([sequence.latents[-queries:] for sequence in sequences]),
        torch.stack([sequence.rotated[-queries:] for sequence in sequences]),
        [len(sequence.latents) - queries for sequence in sequences],
    )
    for sequence in sequences if bits else ():  # what comes back is what attention has to see
        sequence.latents = dequantise(*quantise(sequence.latents, bits))
    return pages


@pytest.mark.parametrize("bits", [0, BITS])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("form", ["absorbed", "unfolded"])
def test_attention_over_cached_latents(form: str, queries: int, bits: int) -> None:
    w_uk, w_uv = torch.randn(RANK, HEADS, NOPE), torch.randn(RANK, HEADS, VALUE)
    lengths = [20, 33]
    sequences = [Sequence.random(past, queries) for past in lengths]
    pages = cached(sequences, queries, bits)
    q = torch.cat([sequence.q for sequence in sequences])
    if form == "absorbed":
        gathered = latent_attention.attend_to_latents(
            latent_attention.mla_absorb(q, w_uk.flatten(1), HEADS, NOPE),
            q[..., NOPE:].transpose(0, 1).contiguous(),
            pages.latents,
            pages.rotated,
            pages.table,
            torch.tensor(lengths, dtype=torch.int32),
            bsz=2,
            q_len=queries,
            softmax_scale=SCALE,
            pre_appended_len=queries,
            qc=pages.qc,
        )
        out = latent_attention.mla_unfold(gathered, w_uv.flatten(1), VALUE)
    else:
        out = latent_attention.mla_attn_triton_prefill_mha(
            q,
            w_uk.flatten(1),
            w_uv.flatten(1),
            pages.latents,
            pages.rotated,
            pages.table,
            lengths,
            2,
            queries,
            VALUE,
            NOPE,
            SCALE,
            pre_appended_len=queries,
            qc=pages.qc,
        )
    expected = torch.cat([sequence.attend(w_uk, w_uv) for sequence in sequences])
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_without_a_mask_every_query_sees_every_key() -> None:
    sequence = Sequence.random(7, 3)
    pages = cached([sequence], 3, 0)
    q_lat, q_pe = torch.randn(HEADS, 3, RANK), torch.randn(HEADS, 3, ROPE)
    seqlens = torch.tensor([7], dtype=torch.int32)
    out = latent_attention.attend_to_latents(
        q_lat, q_pe, pages.latents, pages.rotated, pages.table[:1], seqlens, 1, 3, False, SCALE, 3
    )
    logits = q_lat @ sequence.latents.T + q_pe @ sequence.rotated.T
    torch.testing.assert_close(out, (logits * SCALE).softmax(-1) @ sequence.latents)


def test_rows_of_other_sequences_are_left_alone() -> None:
    pages = cached([Sequence.random(4, 1), Sequence.random(4, 1)], 1, 0)
    before = pages.latents.clone()
    latent_attention.mla_kv_append(
        torch.randn(1, 2, RANK), torch.randn(1, 2, ROPE), pages.latents, pages.rotated, pages.table[:1],
        torch.tensor([PAGE - 1], dtype=torch.int32),
    )  # fmt: skip
    written = {(5, PAGE - 1), (0, 0)}
    for page in range(8):
        for row in range(PAGE):
            same = torch.equal(pages.latents[page, row].nan_to_num(), before[page, row].nan_to_num())
            assert same == ((page, row) not in written)


@pytest.mark.parametrize("value_dim", [VALUE, NOPE + ROPE + 3])  # narrower and wider than keys
def test_values_need_not_be_as_wide_as_keys(value_dim: int) -> None:
    sequence = Sequence.random(20, 5)
    pages, w_uk, w_uv = cached([sequence], 5, 0), torch.randn(RANK, HEADS, NOPE), torch.randn(RANK, HEADS, value_dim)
    out = latent_attention.mla_attn_triton_prefill_mha(
        sequence.q, w_uk.flatten(1), w_uv.flatten(1), pages.latents, pages.rotated, pages.table[:1],
        [20], 1, 5, value_dim, NOPE, SCALE, pre_appended_len=5,
    )  # fmt: skip
    torch.testing.assert_close(out, sequence.attend(w_uk, w_uv), atol=1e-4, rtol=1e-4)


def test_a_long_prompt_needs_no_matrix_of_queries_and_keys() -> None:
    queries, keys = 512, 4096
    table = torch.arange(keys // PAGE).unsqueeze(0)
    latents, rotated = torch.randn(keys // PAGE, PAGE, 1, RANK), torch.randn(keys // PAGE, PAGE, 1, ROPE)
    elements = largest(
        latent_attention.mla_attn_triton_prefill_mha,
        torch.randn(queries, HEADS, NOPE + ROPE), torch.randn(RANK, HEADS * NOPE), torch.randn(RANK, HEADS * VALUE),
        latents, rotated, table, [keys - queries], 1, queries, VALUE, NOPE, SCALE, pre_appended_len=queries,
    )  # fmt: skip
    assert elements < queries * keys / 8


def test_the_scale_is_the_inverse_root_of_all_dimensions_unless_given() -> None:
    pages, seqlens = cached([Sequence.random(7, 1)], 1, 0), torch.tensor([7], dtype=torch.int32)
    q_lat, q_pe = torch.randn(HEADS, 1, RANK), torch.randn(HEADS, 1, ROPE)
    arguments = q_lat, q_pe, pages.latents, pages.rotated, pages.table[:1], seqlens, 1, 1, True
    given = latent_attention.attend_to_latents(*arguments, (RANK + ROPE) ** -0.5, 1)
    assert torch.equal(latent_attention.attend_to_latents(*arguments, pre_appended_len=1), given)
