from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu.rope import GPTJ, NEOX, gen_mrope_pos_ids, rope

INV_FREQ = torch.tensor([1.0, 0.1, 0.01])  # 6 of 8 dimensions are rotated
HEADS, DIM = 2, 8


def run(q: Tensor, k: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    arguments: dict[str, Any] = {
        "inv_freq": INV_FREQ,
        "position": 0,
        "positions": None,
        "position_ids": None,
        "rope_mode": NEOX,
        "attn_factor": 1.0,
        "q_norm": None,
        "k_norm": None,
        "norm_eps": 1e-6,
        "norm_constant_bias": 0.0,
        "l4_beta": 0.0,
        "l4_original": 0,
        "rotate_dims": 1,
        "rotate_offset": 0,
    } | options
    out_q, out_k = torch.empty_like(q), None if k is None else torch.empty_like(k)
    rope(q, out_q, k, out_k, **arguments)
    return out_q, out_k


def rotated(head: Tensor, position: float, mode: int, factor: float = 1.0) -> list[float]:
    result = head.tolist()
    pairs = len(INV_FREQ)
    for pair, frequency in enumerate(INV_FREQ.tolist()):
        first, second = (pair, pair + pairs) if mode == NEOX else (2 * pair, 2 * pair + 1)
        turned = complex(head[first].item(), head[second].item()) * factor
        turned *= complex(math.cos(position * frequency), math.sin(position * frequency))
        result[first], result[second] = turned.real, turned.imag
    return result


@pytest.mark.parametrize("mode", [NEOX, GPTJ])
@pytest.mark.parametrize(
    ("where", "positions"),
    [
        ({"position": 7}, [[7, 8, 9], [7, 8, 9]]),
        ({"positions": torch.tensor([3, 100], dtype=torch.int32)}, [[3, 4, 5], [100, 101, 102]]),
        ({"position_ids": torch.tensor([[5, 2, 9], [0, 1, 4]], dtype=torch.int32)}, [[5, 2, 9], [0, 1, 4]]),
    ],
)
def test_every_pair_turns_by_its_angle(mode: int, where: dict[str, Any], positions: list[list[int]]) -> None:
    q, k = torch.randn(2, 3, HEADS, DIM), torch.randn(2, 3, 1, DIM)
    out_q, out_k = run(q, k, rope_mode=mode, attn_factor=1.2, **where)
    assert out_k is not None
    for row in range(2):
        for token in range(3):
            for source, out in ((q, out_q), (k, out_k)):
                for head in range(source.shape[2]):
                    expected = rotated(source[row, token, head], positions[row][token], mode, 1.2)
                    assert out[row, token, head].tolist() == pytest.approx(expected, abs=1e-5)


def test_in_place() -> None:
    q = torch.randn(1, 3, HEADS, DIM).half()
    expected, _ = run(q)
    rope(q, q, None, None, INV_FREQ, 0, None, None, NEOX, 1.0, None, None, 1e-6, 0.0, 0.0, 0, 1, 0)
    assert torch.equal(q, expected)


def test_heads_are_normalised_first() -> None:
    q, k = torch.randn(1, 2, HEADS, DIM).half(), torch.randn(1, 2, 1, DIM).half()
    q_norm, k_norm = torch.randn(DIM), torch.randn(DIM)
    out_q, out_k = run(q, k, q_norm=q_norm, k_norm=k_norm, norm_constant_bias=1.0)
    for source, weight, out in ((q, q_norm, out_q), (k, k_norm, out_k)):
        x = source.float()
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight + 1.0)
        expected, _ = run(normed)
        assert out is not None
        torch.testing.assert_close(out.float(), expected, atol=4e-3, rtol=4e-3)


def test_a_table_of_angles_replaces_frequencies() -> None:
    q = torch.randn(1, 3, HEADS, DIM)
    table = torch.outer(torch.arange(16.0), INV_FREQ)
    torch.testing.assert_close(run(q, inv_freq=table, position=5)[0], run(q, position=5)[0])
    stretched = torch.stack((table, 2 * table))
    both, _ = run(q.expand(2, -1, -1, -1), inv_freq=stretched, position=2)
    torch.testing.assert_close(both[0], run(q, position=2)[0][0])
    torch.testing.assert_close(both[1], run(q, inv_freq=2 * INV_FREQ, position=2)[0][0])
    assert torch.equal(run(q, inv_freq=stretched, position=2)[0][0], both[0])  # more tables than rows


def test_position_dimensions_take_turns_along_the_head() -> None:
    frequencies = INV_FREQ[:2]
    ids = torch.tensor([[[3, 50], [4, 60]]], dtype=torch.int32)
    q = torch.randn(1, 2, HEADS, DIM)
    out, _ = run(q, inv_freq=frequencies, position_ids=ids, rotate_dims=2)
    for dim in range(2):
        part = slice(4 * dim, 4 * dim + 4)
        alone, _ = run(q[..., part], inv_freq=frequencies, position_ids=ids[..., dim])
        torch.testing.assert_close(out[..., part], alone)


def test_llama_4_scales_queries_with_their_position() -> None:
    q, k = torch.randn(1, 3, HEADS, DIM), torch.randn(1, 3, 1, DIM)
    plain_q, plain_k = run(q, k, position=9)
    scaled_q, scaled_k = run(q, k, position=9, l4_beta=0.1, l4_original=10)
    factors = torch.tensor([1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2)]).view(1, 3, 1, 1)
    torch.testing.assert_close(scaled_q, plain_q * factors)
    assert plain_k is not None
    assert scaled_k is not None
    torch.testing.assert_close(scaled_k, plain_k)


def test_an_unknown_style_is_named() -> None:
    with pytest.raises(NotImplementedError, match="rotary style 9"):
        run(torch.randn(1, 1, 1, DIM), rope_mode=9)


def test_tokens_of_an_image_go_along_its_grid_and_text_goes_on_behind_it() -> None:
    """Text, 2 x 3 tokens of an image, text, 1 x 2 of another one, text; and two positions more than there are ids."""
    ids = torch.tensor([7, 8, *range(100, 106), 9, 200, 201, 7])
    positions = torch.zeros((3, len(ids) + 2), dtype=torch.long)
    following = gen_mrope_pos_ids(positions, ids, 2, [(200, 202), (100, 106)], [(1, 2, 4), (1, 4, 6)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]
    assert following == 11


def test_frames_of_a_video_follow_each_other() -> None:
    positions = torch.zeros((3, 6), dtype=torch.long)
    assert gen_mrope_pos_ids(positions, torch.tensor([100, 101, 102, 103, 3, 3]), 1, [(100, 104)], [(2, 1, 2)]) == 4
    assert positions.tolist() == [[0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 2, 3], [0, 1, 0, 1, 2, 3]]


def test_normalised_heads_are_not_rounded() -> None:
    q, weight = torch.randn(1, 2, HEADS, DIM), torch.randn(DIM)
    out, _ = run(q, q_norm=weight)
    expected, _ = run(q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight)
    torch.testing.assert_close(out, expected)
    rope(q, q, None, None, INV_FREQ, 0, None, None, NEOX, 1.0, weight, None, 1e-6, 0.0, 0.0, 0, 1, 0)
    assert torch.equal(q, out)
