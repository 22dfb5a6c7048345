"""Constraints -> a filter that lets the engine sample only what keeps to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from backends.exllamav3.engine import Filter, Tokenizer
from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint
from common.grammar_compiler import LIMITS, to_llguidance

BITS = 32  # of a word of a mask


class GrammarFilter(Filter):  # type: ignore[misc] # the engine has no annotations
    """Several constraints at once, as the one filter of a job.

    The engine runs the filters of all jobs in one loop, which an exception would end for everybody. So whatever goes
    wrong is kept for `check()`, which the owner of the job calls. Where nothing is allowed the engine samples a token
    all the same; the sampler notices, and says so in its own `check()`.

    An answer ends as soon as nothing may follow it. Where something may, the model decides with an end-of-sequence
    token; if that is ruled out (`ignore_eos`, `min_tokens`), the answer goes on for as long as it can.
    """

    def __init__(
        self, tokenizer: Tokenizer, constraints: Sequence[Constraint], eos_token_ids: list[int], banned: list[int]
    ) -> None:
        """Compile the constraints.

        Args:
            banned: tokens that the sampler rules out.

        Raises:
            InvalidRequest: a constraint does not fit the tokenizer, see `common.grammar.check_constraint` for the rest.
            Unsupported: the tokenizer is of a kind that llguidance does not know.
        """
        super().__init__(tokenizer, trigger_token=None, prefix_str=None, eos_after_completed=True)
        vocabulary = _vocabulary(tokenizer, tuple(eos_token_ids))
        self._prototypes = [_matcher(vocabulary, constraint) for constraint in constraints]
        self._matchers = [prototype.deep_copy() for prototype in self._prototypes]
        self._words = -(-vocabulary.vocab_size // BITS)
        self._not_eos = self._all_but(eos_token_ids)
        self._not_banned = self._all_but(banned)
        self._eos_is_banned = set(eos_token_ids) <= set(banned)
        self._mask = self._not_eos  # of the latest token
        self._complete = False
        self._failure: str | None = None

    # --- what the engine calls ------------------------------------------------------------------------------------

    def use_background_worker(self) -> bool:
        return False  # computed while the GPU works, and no second thread beside the one that calls torch

    def reset(self) -> None:
        self._matchers = [prototype.deep_copy() for prototype in self._prototypes]
        self._complete = False

    def accept_token(self, token: int) -> None:
        for matcher in self._matchers:
            if not matcher.consume_token(token) and self._was_allowed(token):
                self._fail(matcher)
        if self._failure is None:
            self._complete = self._nothing_may_follow()

    def rollback_tokens(self, num_tokens: int) -> bool:
        return all(matcher.rollback(num_tokens) for matcher in self._matchers)

    def get_next_logit_mask(self) -> Tensor:
        self._mask = self._allowed()
        return torch.from_numpy(self._mask.view(np.int32)).unsqueeze(0)

    def is_completed(self) -> bool:
        return self._complete or self._failure is not None

    # --- what the owner of the job calls --------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the answer matches as it is and nothing may follow."""
        return self._complete

    def check(self) -> None:
        """Raise what went wrong.

        Raises:
            InvalidRequest: the constraints cannot be met, or are too complex to be followed.
        """
        if self._failure is not None:
            raise InvalidRequest(f"The answer cannot go on: {self._failure}")

    # --- the state ------------------------------------------------------------------------------------------------

    def _nothing_may_follow(self) -> bool:
        if not all(matcher.is_accepting() for matcher in self._matchers):
            return False
        if any(matcher.is_stopped() for matcher in self._matchers):
            return True
        at_least = 0 if self.job is None else self.job.min_new_tokens - self.job.new_tokens - 1
        if not self._eos_is_banned and at_least <= 0:
            return False
        return not np.any(self._allowed() & self._not_eos & self._not_banned)

    def _allowed(self) -> NDArray[np.uint32]:
        """The tokens that may come next, a bit each."""
        allowed = np.full(self._words, 0xFFFFFFFF, dtype=np.uint32)
        for matcher in self._matchers:
            # A word longer where the vocabulary fills the last one.
            allowed &= np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[: self._words]
            if matcher.is_error():
                self._fail(matcher)
        if self._failure is not None:
            return np.zeros_like(allowed)
        if not all(matcher.is_accepting() for matcher in self._matchers):
            allowed &= self._not_eos
        return allowed

    def _was_allowed(self, token: int) -> bool:
        """Whether a token was sampled from the mask, and not for want of any that is allowed."""
        return bool(self._mask[token // BITS] >> np.uint32(token % BITS) & 1)

    def _fail(self, matcher: LLMatcher) -> None:
        _compiled.cache_clear()  # all copies of a matcher share a lexer, which gives up for good
        if self._failure is None:
            self._failure = f"it no longer fits the schema or grammar ({matcher.get_error().strip()})."

    def _all_but(self, tokens: list[int]) -> NDArray[np.uint32]:
        mask = np.full(self._words, 0xFFFFFFFF, dtype=np.uint32)
        for token in tokens:
            if 0 <= token < self._words * BITS:
                mask[token // BITS] &= ~np.uint32(1 << token % BITS)
        return mask


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Takes about a second for 150,000 tokens."""
    try:
        return LLTokenizer(
            tokenizer.tokenizer.to_str(), n_vocab=tokenizer.actual_vocab_size, eos_token=list(eos_token_ids)
        )
    except Exception as error:  # whatever the library raises, it is this tokenizer that it cannot use
        raise Unsupported(f"Constrained output is not possible with the tokenizer of this model: {error}") from error


def _matcher(vocabulary: LLTokenizer, constraint: Constraint) -> LLMatcher:
    matcher = _compiled(vocabulary, constraint)
    if matcher.is_error():
        raise InvalidRequest(f"{constraint.param}: {matcher.get_error()}", param=constraint.param)
    return matcher


@lru_cache(maxsize=16)  # clients send the same few over and over
def _compiled(vocabulary: LLTokenizer, constraint: Constraint) -> LLMatcher:
    try:
        grammar = to_llguidance(constraint.kind, constraint.text, constraint.frame)
    except ValueError as error:
        raise InvalidRequest(f"{constraint.param}: {error}", param=constraint.param) from error
    return LLMatcher(vocabulary, grammar, limits=LIMITS, log_level=0)
