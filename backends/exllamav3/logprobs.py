"""Log-probabilities as the model gives them: natural, over its vocabulary, before any sampler, bias or mask."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.exllamav3.engine import Model, token_tensor
from backends.exllamav3.token_bytes import TokenBytes
from common.errors import Unsupported
from common.generation import SampledLogprob, TokenLogprob

# Stands in where a model's logits are no numbers, or say "never".
LOWEST_LOGPROB = -1000.0
# Logits that one pass over a prompt may return: 128 MiB in fp16. The engine budgets memory for a few rows only.
PASS_LOGITS = 2**26
# Rows of logits that are turned into fp32 log-probabilities at a time.
SCORED_ROWS = 64


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of tokens and of their alternatives, one row a token."""

    chosen: Tensor  # (rows,) fp32
    top_ids: Tensor  # (rows, k)
    top: Tensor  # (rows, k) fp32, falling

    def entries(self, token_ids: list[int], raws: list[bytes], tokens: TokenBytes) -> list[SampledLogprob]:
        """One record for each row.

        Args:
            token_ids: of the rows.
            raws: what these tokens add to the text, which can be less than all their bytes.
            tokens: the bytes of the alternatives.
        """
        rows = zip(token_ids, raws, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        return [
            SampledLogprob(
                token_id,
                raw.decode(errors="replace"),
                raw,
                logprob,
                [
                    TokenLogprob(top_id, tokens[top_id].decode(errors="replace"), tokens[top_id], top_logprob)
                    for top_id, top_logprob in zip(top_ids, top_logprobs, strict=True)
                ],
            )
            for token_id, raw, logprob, top_ids, top_logprobs in rows
        ]


def log_distribution(logits: Tensor, vocab_size: int) -> Tensor:
    """(rows, vocab_size) in fp32, of logits (..., padded vocabulary), which stay as they are."""
    return logits.reshape(-1, logits.shape[-1])[:, :vocab_size].float().log_softmax(-1)


def score(distribution: Tensor, chosen: Tensor, top: int) -> Scores:
    """Pick the tokens `chosen`, one a row, and the `top` most likely."""
    best = distribution.topk(min(top, distribution.shape[-1]), dim=-1)
    return Scores(_finite(distribution.gather(-1, chosen.view(-1, 1)).view(-1)), best.indices, _finite(best.values))


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)


async def prompt_logprobs(
    model: Model, ids: list[int], vocab_size: int, top: int, tokens: TokenBytes
) -> list[SampledLogprob | None]:
    """Of every token of a prompt, given those before it; None for the first.

    The engine's jobs keep no logits of a prompt, so the model runs over it once more, outside the generator and
    without a cache: nothing that other requests hold is touched. Where the logits of all tokens would be too large,
    several passes over growing parts of the prompt return a slice each; between two of them other requests go on.

    Raises:
        Unsupported: this model cannot run without a cache, or there is no memory to do so.
    """
    rows = max(1, PASS_LOGITS // vocab_size)
    entries: list[SampledLogprob | None] = [None]
    while len(entries) < len(ids):
        start = len(entries)
        end = min(start + rows, len(ids))
        scores = _pass(model, ids[:end], end - start, vocab_size, top)
        for offset, part in enumerate(scores):
            first = start + offset * SCORED_ROWS
            part_ids = ids[first : first + len(part.chosen)]
            entries += part.entries(part_ids, [tokens[token_id] for token_id in part_ids], tokens)
        await asyncio.sleep(0)
    return entries


@torch.inference_mode()
def _pass(model: Model, ids: list[int], rows: int, vocab_size: int, top: int) -> list[Scores]:
    """Scores of the last `rows` tokens, in parts of SCORED_ROWS. The model never needs to see the last one."""
    try:
        logits = model.forward(token_tensor(ids[:-1]), {"attn_mode": "flash_attn_nc", "last_tokens_only": rows})
        targets = token_tensor(ids)[0, -rows:].to(logits.device)
        return [
            score(log_distribution(part, vocab_size), chosen, top)
            for part, chosen in zip(logits[0].split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True)
        ]
    except (AssertionError, NotImplementedError) as error:  # how the engine says that a layer needs its cache
        raise Unsupported(
            f"This model cannot give log-probabilities of a prompt ({error}). Leave out echo or logprobs.",
            param="logprobs",
        ) from error
    except torch.OutOfMemoryError as error:
        raise Unsupported(
            "There is not enough memory for the log-probabilities of this prompt. Shorten it, or leave out logprobs.",
            param="logprobs",
        ) from error
