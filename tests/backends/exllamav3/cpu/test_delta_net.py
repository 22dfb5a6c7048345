from __future__ import annotations

import pytest
import torch

from backends.exllamav3.cpu import delta_net
from tests.backends.exllamav3.cpu.recurrences import HEADS, DeltaRule

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = HEADS.keys, HEADS.values, HEADS.key_dim, HEADS.value_dim


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_the_chunked_rule_equals_the_recurrence(tokens: int) -> None:
    inputs = DeltaRule.random(tokens)
    out, final = delta_net.chunk_gated_delta_rule(*inputs.batch(), True, use_qk_l2norm_in_kernel=True)
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(out[0], expected, atol=1e-4, rtol=1e-4)
    assert final is not None
    torch.testing.assert_close(final[0], expected_state, atol=1e-4, rtol=1e-4)


def test_a_state_is_zero_unless_given_and_left_alone() -> None:
    inputs = DeltaRule.random(70)
    q, k, v, g, beta, _ = inputs.batch()
    zeros = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    implicit, none = delta_net.chunk_gated_delta_rule(q, k, v, g, beta)
    explicit, _ = delta_net.chunk_gated_delta_rule(q, k, v, g, beta, zeros, True)
    assert torch.equal(implicit, explicit)
    assert none is None
    assert not zeros.any()


@pytest.mark.parametrize("history", [False, True])
def test_the_sequential_rule_on_the_rows_of_a_state_pool(history: bool) -> None:
    first, second = DeltaRule.random(3), DeltaRule.random(3)
    pool = torch.randn(6, 1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    rows_out, rows_in = torch.tensor([4, 1]), torch.tensor([5, 0]) if history else torch.tensor([4, 1])
    pool[rows_in, 0] = torch.stack((first.state, second.state))
    before = pool.clone()
    out = torch.empty(2, 3, VALUE_HEADS, VALUE_DIM)
    delta_net.cuda_recurrent_gated_delta_rule(
        torch.stack((first.channels, second.channels)),
        torch.stack((first.g, second.g)),
        torch.stack((first.beta, second.beta)),
        pool,
        out,
        KEY_HEADS,
        VALUE_HEADS,
        KEY_DIM,
        VALUE_DIM,
        rows_out,
        history,
        rows_in if history else None,
    )
    for index, inputs in enumerate((first, second)):
        expected, state = inputs.reference()
        torch.testing.assert_close(out[index], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[rows_out[index], 0], state, atol=1e-5, rtol=1e-4)
    others = [row for row in range(6) if row not in rows_out.tolist()]
    assert torch.equal(pool[others], before[others])


def test_gates() -> None:
    b, a = torch.randn(1, 3, VALUE_HEADS) * 30, torch.randn(1, 3, VALUE_HEADS) * 30
    dt_bias, a_log = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    beta, g = torch.empty_like(b), torch.empty_like(a)
    delta_net.gated_delta_net_fused_op_2(b, a, dt_bias, a_log, beta, g, 2.0)
    torch.testing.assert_close(beta, 2.0 / (1.0 + (-b).exp()))
    softplus = (1.0 + (a + dt_bias).double().exp()).log()
    torch.testing.assert_close(g, (-a_log.double().exp() * softplus).float())


def test_packed_projections_are_taken_apart_per_key_head() -> None:
    tokens, group = 3, VALUE_HEADS // KEY_HEADS
    q, k = torch.randn(tokens, KEY_HEADS, KEY_DIM), torch.randn(tokens, KEY_HEADS, KEY_DIM)
    v, z = (torch.randn(tokens, VALUE_HEADS, VALUE_DIM) for _ in range(2))
    b, a = torch.randn(tokens, VALUE_HEADS), torch.randn(tokens, VALUE_HEADS)
    qkvz, ba = [], []
    for head in range(KEY_HEADS):
        mine = slice(head * group, (head + 1) * group)
        qkvz += [q[:, head], k[:, head], v[:, mine].flatten(1), z[:, mine].flatten(1)]
        ba += [b[:, mine], a[:, mine]]
    dt_bias, a_log = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    mixed, gate = torch.empty(1, channels, tokens), torch.empty(1, tokens, VALUE_HEADS, VALUE_DIM)
    beta, g = torch.empty(1, tokens, VALUE_HEADS), torch.empty(1, tokens, VALUE_HEADS)
    delta_net.gated_delta_net_fused_op(
        torch.cat(qkvz, dim=-1).unsqueeze(0),
        torch.cat(ba, dim=-1).unsqueeze(0),
        dt_bias,
        a_log,
        mixed,
        gate,
        beta,
        g,
        KEY_HEADS,
        VALUE_HEADS,
        KEY_DIM,
        VALUE_DIM,
        1.0,
    )
    assert torch.equal(mixed[0].T, torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1))
    assert torch.equal(gate[0], z)
    expected_beta, expected_g = torch.empty(tokens, VALUE_HEADS), torch.empty(tokens, VALUE_HEADS)
    delta_net.gated_delta_net_fused_op_2(b, a, dt_bias, a_log, expected_beta, expected_g, 1.0)
    assert torch.equal(beta[0], expected_beta)
    assert torch.equal(g[0], expected_g)


def test_a_pass_that_may_be_taken_back_needs_the_rows_that_it_reads() -> None:
    inputs, pool = DeltaRule.random(1), torch.zeros(2, 1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    out = torch.empty(1, 1, VALUE_HEADS, VALUE_DIM)
    with pytest.raises(ValueError, match="rows of the state that it reads"):
        delta_net.cuda_recurrent_gated_delta_rule(
            inputs.channels[None], inputs.g[None], inputs.beta[None], pool, out,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, torch.tensor([1]), True,
        )  # fmt: skip
    assert not pool.any()
