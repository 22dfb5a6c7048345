from __future__ import annotations

import pytest
import torch

from backends.exllamav3.cpu import delta_net
from backends.exllamav3.cpu.kda import chunk_kda
from tests.backends.exllamav3.cpu.recurrences import KDA_HEADS, DeltaRule


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_the_chunked_rule_equals_the_recurrence(tokens: int) -> None:
    inputs = DeltaRule.random_kda(tokens)
    out, final = chunk_kda(*inputs.batch(), True, use_qk_l2norm_in_kernel=True)
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-4)
    assert final is not None
    torch.testing.assert_close(final[0], expected_state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("strongest", [0.0, 5.0, 100.0])
def test_no_decay_and_a_strong_one(strongest: float) -> None:
    """Over a chunk they add up to far more than the exponent of a float holds."""
    inputs = DeltaRule.random_kda(130, strongest)
    out, final = chunk_kda(*inputs.batch(), True, use_qk_l2norm_in_kernel=True)
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-4)
    assert final is not None
    torch.testing.assert_close(final[0], expected_state, atol=1e-5, rtol=1e-4)


def test_with_one_decay_for_all_channels_it_is_gated_delta_net() -> None:
    inputs = DeltaRule.random(100)
    q, k, v, g, beta, state = inputs.batch()
    per_channel = g.unsqueeze(-1).expand(-1, -1, -1, q.shape[-1])
    expected, _ = delta_net.chunk_gated_delta_rule(q, k, v, g, beta, state, use_qk_l2norm_in_kernel=True)
    out, none = chunk_kda(q, k, v, per_channel, beta, state, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert none is None


def test_pieces_continue_where_the_last_one_ended() -> None:
    inputs = DeltaRule.random_kda(150)
    q, k, v, g, beta, state = inputs.batch()
    pieces: list[torch.Tensor] = []
    for piece in (slice(0, 70), slice(70, 71), slice(71, 150)):
        part = q[:, piece], k[:, piece], v[:, piece], g[:, piece], beta[:, piece]
        out, final = chunk_kda(*part, state, True, use_qk_l2norm_in_kernel=True)
        assert final is not None
        pieces, state = [*pieces, out], final
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[0], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state[0], expected_state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("history", [False, True])
def test_the_sequential_rule_on_the_rows_of_a_state_pool(history: bool) -> None:
    inputs = [DeltaRule.random_kda(3), DeltaRule.random_kda(3)]
    heads = KDA_HEADS
    pool = torch.randn(6, 1, *heads.state_shape)
    rows_out, rows_in = torch.tensor([4, 1]), torch.tensor([5, 0]) if history else torch.tensor([4, 1])
    pool[rows_in, 0] = torch.stack([each.state for each in inputs])
    before, out = pool.clone(), torch.empty(2, 3, heads.values, heads.value_dim)
    delta_net.cuda_recurrent_gated_delta_rule(
        torch.stack([each.channels for each in inputs]),
        torch.stack([each.g for each in inputs]),
        torch.stack([each.beta for each in inputs]),
        pool,
        out,
        heads.keys,
        heads.values,
        heads.key_dim,
        heads.value_dim,
        rows_out,
        history,
        rows_in if history else None,
    )
    for index, each in enumerate(inputs):
        expected, state = each.reference()
        torch.testing.assert_close(out[index], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[rows_out[index], 0], state, atol=1e-5, rtol=1e-4)
    others = [row for row in range(6) if row not in rows_out.tolist()]
    assert torch.equal(pool[others], before[others])
