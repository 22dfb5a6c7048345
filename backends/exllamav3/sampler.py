"""Sampling parameters -> the engine's sampler."""

from __future__ import annotations

from typing import Any

import torch

from backends.exllamav3.engine import (
    SS_DRY,
    SS_XTC,
    CustomSampler,
    SS_AdaptiveP,
    SS_Argmax,
    SS_BanTokens,
    SS_Base,
    SS_LogitBias,
    SS_MinP,
    SS_Normalize,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Sort,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
    Tensor,
    Tokenizer,
    dry_sequence_breaker_tokens,
    token_tensor,
)
from backends.exllamav3.logprobs import Scores, log_distribution, score
from backends.exllamav3.thoughts import ThoughtBudget
from common.errors import InvalidRequest
from common.sampling import SamplingParameters

WHOLE_CONTEXT = 10**8  # tokens; the engine's penalties know no "everything", and add such numbers in 32 bits
# A lower one is greedy: logits divided by it would no longer be numbers.
LOWEST_TEMPERATURE = 1e-5
# Below it, XTC would take tokens for choices that are none, or be left without any by rounding.
LOWEST_XTC_THRESHOLD = 1e-5
BITS = 32  # of a word of a packed mask


def build_sampler(
    parameters: SamplingParameters,
    tokenizer: Tokenizer,
    eos_token_ids: list[int],
    *,
    top_logprobs: int | None = None,
    budget: ThoughtBudget | None = None,
) -> JobSampler:
    """The chain of steps, in TabbyAPI's order, with DRY beside the other penalties.

    Steps with neutral values are dropped by the engine. Adaptive-P chooses by itself, also at temperature 0, where it
    sees the distribution as it is.

    Args:
        top_logprobs: record log-probabilities, of so many alternatives as well; None does not.
        budget: ends thoughts, with tokens that none of the steps can rule out.

    Raises:
        InvalidRequest: no token may be sampled.
    """
    p = parameters
    banned = _banned(p, tokenizer, eos_token_ids)
    adaptive = is_adaptive(p)
    return JobSampler(
        CustomSampler(_steps(p, tokenizer, banned, adaptive)),
        banned=banned,
        top_logprobs=top_logprobs,
        # Adaptive-P learns from each token that it chooses, which must be one that stays in the text.
        one_by_one=adaptive,
        budget=budget,
    )


def is_adaptive(parameters: SamplingParameters) -> bool:
    """Whether adaptive-P chooses the tokens: a negative target switches it off, as in llama.cpp, and so does 1."""
    return 0.0 <= parameters.adaptive_target < 1.0


def _steps(p: SamplingParameters, tokenizer: Tokenizer, banned: list[int], adaptive: bool) -> list[SS_Base]:
    penalty_range = WHOLE_CONTEXT if p.penalty_range < 0 else min(p.penalty_range, WHOLE_CONTEXT)
    decay = min(p.repetition_decay, WHOLE_CONTEXT)
    breakers = (
        dry_sequence_breaker_tokens(tokenizer, tuple(p.dry_sequence_breakers)) if p.dry_sequence_breakers else None
    )
    allowed_length = min(p.dry_allowed_length, WHOLE_CONTEXT)
    penalties: list[SS_Base] = [
        SS_LogitBias(p.logit_bias),
        SS_RepP(p.repetition_penalty, penalty_range, decay),
        SS_PresFreqP(p.presence_penalty, p.frequency_penalty, penalty_range, decay),
        SS_DRY(p.dry_multiplier, p.dry_base, allowed_length, p.dry_range, breakers, tokenizer),
        SS_BanTokens(banned),
    ]
    greedy = p.temperature < LOWEST_TEMPERATURE
    if greedy and not adaptive:
        return [*penalties, SS_Argmax()]

    temperature = 1.0 if greedy else p.temperature
    # The engine samples from these after sorting; from the others it does in the order of the vocabulary.
    sorts = adaptive or p.xtc_probability > 0.0 or (p.min_p > 0.0 and (p.top_k > 0 or p.top_p < 1.0))
    return [
        *penalties,
        SS_Temperature(1.0 if p.temperature_last else temperature),
        SS_TopK(p.top_k if p.top_k < tokenizer.actual_vocab_size else 0),
        SS_TopP(p.top_p),
        SS_MinP(p.min_p),
        SS_Temperature(temperature if p.temperature_last else 1.0),
        SS_XTC(p.xtc_probability, max(p.xtc_threshold, LOWEST_XTC_THRESHOLD), tokenizer=tokenizer),
        *([InVocabularyOrder()] if sorts else []),
        SS_AdaptiveP(p.adaptive_target, p.adaptive_decay) if adaptive else SS_Sample(),
    ]


def _banned(parameters: SamplingParameters, tokenizer: Tokenizer, eos_token_ids: list[int]) -> list[int]:
    vocabulary = range(tokenizer.actual_vocab_size)
    banned = set(parameters.banned_tokens)
    if parameters.ban_eos_token:
        banned.update(eos_token_ids)
    if parameters.allowed_tokens:
        banned.update(set(vocabulary).difference(parameters.allowed_tokens))
    if banned.issuperset(vocabulary):
        field = "allowed_tokens" if parameters.allowed_tokens else "banned_tokens"
        raise InvalidRequest(f"{field} leaves no token that is not banned.", param=field)
    return sorted(banned)


class InVocabularyOrder(SS_Base):  # type: ignore[misc]  # the engine's classes are Any to mypy
    """Put sorted probabilities back in the order of token ids before one is drawn.

    The random number that decides over a token belongs to its place. Sorted, two tokens whose probabilities are all but
    equal change places with the last bits of the logits, which differ between batch sizes; and with them the text of a
    seed would change.
    """

    def prep(self, in_state: Any) -> list[type[SS_Base]]:
        return [SS_Normalize, SS_Sort]  # whatever came before: probabilities with the ids that they belong to

    def run(self, state: Any) -> None:
        state.probs = torch.zeros_like(state.probs).scatter_(-1, state.indices, state.probs)
        state.indices = torch.arange(state.dim, device=state.probs.device).expand_as(state.indices)


class JobSampler:
    """The sampler of one job; what the engine expects of its `Sampler`.

    Records what the model thought of each token. And since the engine samples for every job in one loop, which an
    exception would end for all of them, whatever goes wrong here is kept for `check()`, which the owner of the job
    calls.

    Attributes:
        reqs_past_ids: whether `forward()` gets the tokens before the one to be sampled; the engine then also samples
            the positions of a draft one after the other, as far as they are accepted, instead of all at once.
        banned: tokens that are never sampled.
    """

    def __init__(
        self,
        steps: CustomSampler,
        *,
        banned: list[int],
        top_logprobs: int | None,
        one_by_one: bool,
        budget: ThoughtBudget | None,
    ) -> None:
        self.reqs_past_ids: bool = steps.reqs_past_ids or one_by_one or top_logprobs is not None
        self._steps = steps
        self.banned = banned
        self._banned: Tensor | None = token_tensor(banned)[0] if banned else None
        self._top_logprobs = top_logprobs
        self._budget = budget
        self._scores: dict[int, Scores] = {}
        self._failure: Exception | None = None
        self._stuck: Tensor | None = None  # whether a token was sampled that may not be

    def forward(
        self,
        logits: Tensor,
        sequence_ids: Tensor | None = None,
        rand_u32: int | None = None,
        tokenizer: Tokenizer | None = None,
        logit_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """A token id, (1, 1), for logits (1, 1, padded vocabulary)."""
        assert tokenizer is not None
        vocab_size = tokenizer.actual_vocab_size
        try:
            # Before the steps, which may write into the logits.
            distribution = None if self._top_logprobs is None else log_distribution(logits, vocab_size)
            token = self._forced(logits, logit_mask)
            if token is None:
                token = self._steps.forward(logits, sequence_ids, rand_u32, tokenizer, logit_mask, **options)
                self._watch(token, logit_mask)
            if distribution is not None and self._top_logprobs is not None:
                assert sequence_ids is not None
                self._scores[sequence_ids.shape[-1]] = score(distribution, token, self._top_logprobs)
        except Exception as error:
            self._failure = self._failure or error
            return logits[..., :vocab_size].argmax(-1)
        return token

    def scores(self, position: int) -> Scores | None:
        """Of the token at an index of prompt and answer together; None where it was not sampled. Forgets them."""
        return self._scores.pop(position, None)

    def check(self) -> None:
        """Raise what went wrong since the last call.

        Raises:
            InvalidRequest: everything was banned at some place of the answer.
        """
        if self._failure is not None:
            raise self._failure
        stuck, self._stuck = self._stuck, None
        if stuck is not None and bool(stuck):
            raise InvalidRequest(
                "The answer cannot go on: at this place, every token is ruled out. Loosen what limits them: "
                "banned_tokens, banned_strings, allowed_tokens, ban_eos_token, min_tokens, token_healing, or the "
                "schema or grammar."
            )

    def _forced(self, logits: Tensor, mask: Tensor | None) -> Tensor | None:
        """The next token of the end of a thought, if the constraints have room for it.

        They have for all that belongs to the thought. What follows it is left to the model where they say otherwise:
        blanks, or the beginning of a text for the user in place of a call.
        """
        if self._budget is None or (forced := self._budget.forced_token()) is None:
            return None
        token = torch.full((1, 1), forced, device=logits.device)
        if mask is not None and bool(_is_ruled_out(token.view(-1), mask)):
            return None
        return token

    def _watch(self, token: Tensor, mask: Tensor | None) -> None:
        """Note on the device, without waiting for it, whether the token is one of those ruled out.

        That happens when all of them are: the engine then takes any.
        """
        if mask is not None:
            self._note(_is_ruled_out(token.view(-1), mask))
        if self._banned is not None:
            self._banned = self._banned.to(token.device)
            self._note((self._banned == token).any().view(1))

    def _note(self, stuck: Tensor) -> None:
        self._stuck = stuck if self._stuck is None else self._stuck | stuck


def _is_ruled_out(index: Tensor, mask: Tensor) -> Tensor:
    """For token ids, (1,), and one of the engine's masks, additive or packed."""
    if mask.dtype.is_floating_point:
        return mask[0, index].isneginf()
    return (mask[0, index // BITS] >> (index % BITS)) & 1 == 0
