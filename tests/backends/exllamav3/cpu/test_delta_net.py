from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backends.exllamav3.cpu import delta_net

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6


@dataclass
class Inputs:
    """Of one sequence, head by head."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @classmethod
    def random(cls, tokens: int) -> Inputs:
        return cls(
            q=torch.randn(tokens, KEY_HEADS, KEY_DIM),
            k=torch.randn(tokens, KEY_HEADS, KEY_DIM),
            v=torch.randn(tokens, VALUE_HEADS, VALUE_DIM),
            g=-torch.rand(tokens, VALUE_HEADS),
            beta=torch.rand(tokens, VALUE_HEADS),
            state=torch.randn(VALUE_HEADS, KEY_DIM, VALUE_DIM),
        )

    @property
    def channels(self) -> Tensor:
        return torch.cat([x.flatten(1) for x in (self.q, self.k, self.v)], dim=-1)

    def reference(self) -> tuple[Tensor, Tensor]:
        """The recurrence as it is written down, in double precision."""
        out = torch.empty(self.v.shape, dtype=torch.double)
        state = self.state.double().clone()
        for t in range(len(self.q)):
            for head in range(VALUE_HEADS):
                shared = head // (VALUE_HEADS // KEY_HEADS)
                q, k = (x[t, shared].double() for x in (self.q, self.k))
                q = q / (q @ q + 1e-6).sqrt() / KEY_DIM**0.5
                k = k / (k @ k + 1e-6).sqrt()
                decayed = state[head] * self.g[t, head].double().exp()
                written = self.beta[t, head] * (self.v[t, head] - k @ decayed)
                state[head] = decayed + torch.outer(k, written)
                out[t, head] = q @ state[head]
        return out.float(), state.float()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_the_chunked_rule_equals_the_recurrence(tokens: int) -> None:
    inputs = Inputs.random(tokens)
    q, k, v, g, beta, state = (
        x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.state)
    )
    out, final = delta_net.chunk_gated_delta_rule(q, k, v, g, beta, state, True, use_qk_l2norm_in_kernel=True)
    expected, expected_state = inputs.reference()
    torch.testing.assert_close(out[0], expected, atol=1e-4, rtol=1e-4)
    assert final is not None
    torch.testing.assert_close(final[0], expected_state, atol=1e-4, rtol=1e-4)


def test_a_state_is_zero_unless_given_and_left_alone() -> None:
    inputs = Inputs.random(70)
    q, k, v, g, beta = (x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    zeros = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    implicit, none = delta_net.chunk_gated_delta_rule(q, k, v, g, beta)
    explicit, _ = delta_net.chunk_gated_delta_rule(q, k, v, g, beta, zeros, True)
    assert torch.equal(implicit, explicit)
    assert none is None
    assert not zeros.any()


@pytest.mark.parametrize("history", [False, True])
def test_the_sequential_rule_on_the_rows_of_a_state_pool(history: bool) -> None:
    first, second = Inputs.random(3), Inputs.random(3)
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


@pytest.mark.parametrize("token_stride", [1, 3])
@pytest.mark.parametrize("state_half", [False, True])
def test_a_replay_of_the_first_tokens_gives_the_state_after_them(token_stride: int, state_half: bool) -> None:
    inputs, kept = Inputs.random(5), 2
    rows = [index * token_stride for index in range(5)]
    staged_qkv, staged_g, staged_beta = (
        torch.full((5 * token_stride, width), float("nan"))
        for width in (inputs.channels.shape[1], VALUE_HEADS, VALUE_HEADS)
    )
    staged_qkv[rows], staged_g[rows], staged_beta[rows] = inputs.channels, inputs.g, inputs.beta
    dtype = torch.half if state_half else torch.float
    base, scratch = inputs.state.to(dtype), torch.empty_like(inputs.state, dtype=dtype)
    job = delta_net.ScanReplayJob(
        staged_qkv.data_ptr(),
        staged_g.data_ptr(),
        staged_beta.data_ptr(),
        base.data_ptr(),
        scratch.data_ptr(),
        0,
        kept,
        token_stride,
    )
    delta_net.batched_scan_replay([job], None, 0, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, state_half)
    q, k, v, g, beta = (x[:kept] for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    head = Inputs(q, k, v, g, beta, base.float())
    tolerance = 2e-3 if state_half else 1e-5
    torch.testing.assert_close(scratch.float(), head.reference()[1], atol=tolerance, rtol=tolerance)


def test_a_replay_of_another_recurrence_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="drafting"):
        delta_net.batched_scan_replay([], None, 1, 1, 1, 1, 1)


def test_overlapping_columns_of_a_convolution_move_back() -> None:
    state = torch.arange(2 * 7).view(2, 7).float()  # 2 channels; 4 columns are the state
    expected = state[:, 1:5].clone()
    source, target = state.data_ptr() + state.element_size(), state.data_ptr()
    delta_net.batched_conv_rewind([delta_net.ConvRewindJob(source, target, 2, 4, 7)], None)
    assert torch.equal(state[:, :4], expected)
    assert state[:, 5:].tolist() == [[5, 6], [12, 13]]


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


def test_a_decay_per_channel_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="KDA"):
        delta_net.chunk_kda()
    with pytest.raises(NotImplementedError, match="KDA"):
        delta_net.cuda_recurrent_gated_delta_rule(
            torch.randn(1, 1, 5), torch.randn(1, 1, 1, 2), torch.rand(1, 1, 1), torch.zeros(1, 1, 1, 2, 1),
            torch.empty(1, 1, 1, 1), 1, 1, 2, 1,
        )  # fmt: skip
