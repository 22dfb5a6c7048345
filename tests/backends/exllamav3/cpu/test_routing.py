from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu.routing import routing_ds3_nogroup, routing_std

ROWS, DIM, EXPERTS, CHOSEN = 3, 16, 6, 2


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden, gate = torch.randn(ROWS, DIM).half(), torch.randn(DIM, EXPERTS).half()
    return (
        hidden,
        gate,
        torch.empty(ROWS, EXPERTS),
        torch.empty(ROWS, CHOSEN, dtype=torch.long),
        torch.empty(ROWS, CHOSEN),
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_scale", [False, True])
def test_softmax_over_the_chosen(with_bias: bool, with_scale: bool) -> None:
    hidden, gate, scores, indices, weights = inputs()
    bias = torch.randn(EXPERTS) * 5 if with_bias else None
    scale = torch.rand(EXPERTS) if with_scale else None
    routing_std(hidden, gate, scores, indices, weights, scale, None, bias)
    logits = hidden.float() @ gate.float() + (0 if bias is None else bias)
    torch.testing.assert_close(scores, logits)
    for row in range(ROWS):
        best = sorted(range(EXPERTS), key=lambda expert: -float(logits[row, expert]))[:CHOSEN]
        exponentials = [math.exp(float(logits[row, expert])) for expert in best]
        factors = [1.0 if scale is None else float(scale[expert]) for expert in best]
        expected = [e / sum(exponentials) * factor for e, factor in zip(exponentials, factors, strict=True)]
        assert indices[row].tolist() == best
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("act_fn", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scores_one_by_one(act_fn: int, with_bias: bool) -> None:
    hidden, gate, scores, indices, weights = inputs()
    bias = torch.randn(EXPERTS) if with_bias else None
    routing_ds3_nogroup(hidden, gate, scores, bias, indices, weights, 2.5, None, act_fn)
    for row in range(ROWS):
        logits = (hidden[row].float() @ gate.float()).tolist()
        activated = [math.sqrt(math.log1p(math.exp(x))) if act_fn else 1 / (1 + math.exp(-x)) for x in logits]
        ranks = [a + (0.0 if bias is None else float(bias[i])) for i, a in enumerate(activated)]
        best = sorted(range(EXPERTS), key=lambda expert: -ranks[expert])[:CHOSEN]
        total = sum(activated[expert] for expert in best)
        assert indices[row].tolist() == best
        assert weights[row].tolist() == pytest.approx([2.5 * activated[e] / total for e in best], rel=1e-4)
