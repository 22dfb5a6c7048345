"""The recurrences of the recurrent layers as they are written down, one sequence and one token at a time, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backends.exllamav3.cpu.delta_net import Heads

HEADS = Heads(keys=2, values=4, key_dim=8, value_dim=6)
KDA_HEADS = Heads(keys=3, values=3, key_dim=8, value_dim=8)


@dataclass
class DeltaRule:
    """Inputs of Gated DeltaNet, or of KDA where g has a decay per channel: (tokens, heads, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @classmethod
    def random(cls, tokens: int) -> DeltaRule:
        return cls(
            q=torch.randn(tokens, HEADS.keys, HEADS.key_dim),
            k=torch.randn(tokens, HEADS.keys, HEADS.key_dim),
            v=torch.randn(tokens, HEADS.values, HEADS.value_dim),
            g=-torch.rand(tokens, HEADS.values),
            beta=torch.rand(tokens, HEADS.values),
            state=torch.randn(HEADS.state_shape),
        )

    @classmethod
    def random_kda(cls, tokens: int, strongest: float = 1.0) -> DeltaRule:
        """Decays from almost 0 to `strongest` in every head."""
        heads = KDA_HEADS
        return cls(
            q=torch.randn(tokens, heads.keys, heads.key_dim),
            k=torch.randn(tokens, heads.keys, heads.key_dim),
            v=torch.randn(tokens, heads.values, heads.value_dim),
            g=-strongest * torch.rand(tokens, heads.values, heads.key_dim) ** 8,
            beta=torch.rand(tokens, heads.values),
            state=torch.randn(heads.state_shape),
        )

    @property
    def channels(self) -> Tensor:
        return torch.cat([x.flatten(1) for x in (self.q, self.k, self.v)], dim=-1)

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arguments of the chunked rules, for a batch of this sequence."""
        return self.q[None], self.k[None], self.v[None], self.g[None], self.beta[None], self.state[None]

    def part(self, tokens: slice) -> DeltaRule:
        q, k, v, g, beta = (x[tokens] for x in (self.q, self.k, self.v, self.g, self.beta))
        return replace(self, q=q, k=k, v=v, g=g, beta=beta)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Outputs and the last state."""
        tokens, value_heads, _ = self.v.shape
        _, key_heads, key_dim = self.k.shape
        out, state = torch.empty(self.v.shape, dtype=torch.double), self.state.double().clone()
        for t in range(tokens):
            for head in range(value_heads):
                shared = head // (value_heads // key_heads)
                q, k = (x[t, shared].double() for x in (self.q, self.k))
                q = q / (q @ q + 1e-6).sqrt() / key_dim**0.5
                k = k / (k @ k + 1e-6).sqrt()
                decayed = state[head] * self.g[t, head].double().exp().view(-1, 1)
                written = self.beta[t, head] * (self.v[t, head] - k @ decayed)
                state[head] = decayed + torch.outer(k, written)
                out[t, head] = q @ state[head]
        return out.float(), state.float()


@dataclass
class Mamba2:
    """Inputs of Mamba2, (tokens, heads, ...); `skip` is D."""

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    g: Tensor
    skip: Tensor
    state: Tensor

    @classmethod
    def random(cls, tokens: int, strongest: float = 1.0) -> Mamba2:
        dt = torch.rand(tokens, HEADS.values)
        return cls(
            x=torch.randn(tokens, HEADS.values, HEADS.value_dim),
            b=torch.randn(tokens, HEADS.keys, HEADS.key_dim),
            c=torch.randn(tokens, HEADS.keys, HEADS.key_dim),
            dt=dt,
            g=-dt * torch.linspace(0.01, strongest, HEADS.values),
            skip=torch.randn(HEADS.values),
            state=torch.randn(HEADS.state_shape),
        )

    @property
    def channels(self) -> Tensor:
        return torch.cat([y.flatten(1) for y in (self.x, self.b, self.c)], dim=-1)

    def part(self, tokens: slice) -> Mamba2:
        x, b, c, dt, g = (y[tokens] for y in (self.x, self.b, self.c, self.dt, self.g))
        return replace(self, x=x, b=b, c=c, dt=dt, g=g)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Outputs and the last state."""
        out, state = torch.empty(self.x.shape, dtype=torch.double), self.state.double().clone()
        for t in range(len(self.x)):
            for head in range(HEADS.values):
                b, c = (y[t, head // HEADS.group].double() for y in (self.b, self.c))
                x = self.x[t, head].double()
                state[head] = state[head] * self.g[t, head].double().exp() + self.dt[t, head] * torch.outer(b, x)
                out[t, head] = c @ state[head] + self.skip[head] * x
        return out.float(), state.float()
