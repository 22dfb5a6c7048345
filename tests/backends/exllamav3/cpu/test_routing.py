from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu.routing import (
    routing_ds3_group,
    routing_ds3_nogroup,
    routing_gemv_f32,
    routing_sel_norm,
    routing_std,
)

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
        activated = [activation(float(x), act_fn) for x in hidden[row].float() @ gate.float()]
        ranks = [a + (0.0 if bias is None else float(bias[i])) for i, a in enumerate(activated)]
        best = sorted(range(EXPERTS), key=lambda expert: -ranks[expert])[:CHOSEN]
        total = sum(activated[expert] for expert in best)
        assert indices[row].tolist() == best
        assert weights[row].tolist() == pytest.approx([2.5 * activated[e] / total for e in best], rel=1e-4)


@pytest.mark.parametrize("act_fn", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_best_groups_first(act_fn: int, with_bias: bool) -> None:
    logits, groups = torch.randn(50, 12), 4
    bias = torch.randn(12) if with_bias else None
    indices, weights = torch.empty(50, 3, dtype=torch.long), torch.empty(50, 3).half()
    routing_ds3_group(logits, bias, indices, weights, 2.5, act_fn, groups, 2)
    for row in range(50):
        activated = [activation(float(x), act_fn) for x in logits[row]]
        ranks = [a + (0.0 if bias is None else float(bias[i])) for i, a in enumerate(activated)]
        members = [range(group * 3, group * 3 + 3) for group in range(groups)]
        worth = [sum(sorted((ranks[i] for i in group), reverse=True)[:2]) for group in members]
        kept = sorted(range(groups), key=lambda group: -worth[group])[:2]
        best = sorted((i for group in kept for i in members[group]), key=lambda i: -ranks[i])[:3]
        total = sum(activated[expert] for expert in best)
        assert indices[row].tolist() == best
        assert weights[row].tolist() == pytest.approx([2.5 * activated[e] / total for e in best], rel=2e-3)


def test_a_group_of_one_expert_is_worth_that_one() -> None:
    indices, weights = torch.empty(1, 2, dtype=torch.long), torch.empty(1, 2)
    routing_ds3_group(torch.tensor([[1.0, 3.0, 2.0]]), None, indices, weights, 1.0, 0, 3, 2)
    assert indices.tolist() == [[1, 2]]


@pytest.mark.parametrize("act_fn", [0, 1])
def test_weights_of_given_experts(act_fn: int) -> None:
    hidden, gate, scores, _, weights = inputs()
    selected = torch.tensor([[5, 0], [1, 2], [3, 3]])
    routing_sel_norm(hidden, gate, scores, selected, weights, 1.5, None, act_fn)
    for row in range(ROWS):
        chosen = [activation(float(scores[row, expert]), act_fn) for expert in selected[row]]
        assert weights[row].tolist() == pytest.approx([1.5 * a / sum(chosen) for a in chosen], rel=1e-4)
    torch.testing.assert_close(scores, hidden.float() @ gate.float())


def test_logits_of_one_row() -> None:
    hidden, gate = torch.randn(DIM).half(), torch.randn(EXPERTS, DIM).half()
    scores = torch.empty(EXPERTS)
    routing_gemv_f32(hidden, gate, scores)
    torch.testing.assert_close(scores, gate.float() @ hidden.float())


def activation(logit: float, act_fn: int) -> float:
    return math.sqrt(math.log1p(math.exp(logit))) if act_fn else 1 / (1 + math.exp(-logit))


def test_large_logits_are_told_apart() -> None:
    """Their sigmoids are all 1 in fp32."""
    scores, indices, weights = torch.empty(1, 3), torch.empty(1, 1, dtype=torch.long), torch.empty(1, 1)
    hidden, gate = torch.ones(1, 1), torch.tensor([[30.0, 50.0, 40.0]])
    routing_ds3_nogroup(hidden, gate, scores, None, indices, weights, 2.5)
    assert indices.tolist() == [[1]]
    assert weights.tolist() == [[2.5]]
