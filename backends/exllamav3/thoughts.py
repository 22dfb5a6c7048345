"""The end of a thought that has spent its budget, written in the model's place."""

from __future__ import annotations

from backends.exllamav3.engine import Filter, Tokenizer
from backends.exllamav3.token_bytes import TokenBytes
from common.generation import Thoughts
from common.parsing.thoughts import ThoughtTracker

_NO_TOKEN = -1


class ThoughtBudget(Filter):  # type: ignore[misc] # the engine has no annotations
    """Watches the tokens of a job, and names the next one while a thought is being ended.

    The engine tells its filters of a token as soon as it is accepted, before the next one is sampled, also within a
    draft, and of tokens that it takes back. This one masks nothing: the sampler asks for `forced_token()` and returns
    that instead of one of its own. So a thought ends at the exact token, a draft that says otherwise is rejected like
    any other, the filters that constrain the answer follow the end as if the model had written it, one random number is
    drawn for each token as ever, and every token has its log-probability. The engine's `constrain_output_now()` gives
    none of these: it comes a step after the results, turns filters off for good, and passes the sampler by.

    Banned strings are not looked for in the end of a thought, which could not be written again another way.

    Like the other filters it runs in a loop that an exception would end for everybody, so that `check()` raises it.
    """

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts, ending: list[int], tokens: TokenBytes) -> None:
        """`ending`: the tokens that end a thought."""
        # A filter that waits for a token to begin with gives no masks, and keeps the engine from sampling all the
        # positions of a draft at once.
        super().__init__(tokenizer, trigger_token=_NO_TOKEN, prefix_str=None, eos_after_completed=False)
        self._thoughts = thoughts
        self._ending = ending
        self._tokens = tokens
        self._banned_strings: list[str] = []  # of the job, while it must not look for them
        self._failure: Exception | None = None
        self.reset()

    # --- what the engine calls ------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._start_from([])

    def feed(self, token: int) -> bool:
        try:
            self._accept(token)
        except Exception as error:
            self._failure = self._failure or error
        return False

    def rewind(self, num_tokens: int) -> None:
        try:
            self._start_from(self._accepted[: len(self._accepted) - num_tokens])
        except Exception as error:
            self._failure = self._failure or error

    # --- what the sampler and the owner of the job call -----------------------------------------------------------

    def forced_token(self) -> int | None:
        """The token that has to come next; None where the model decides. Asked before each token is sampled."""
        assert self.job is not None
        if self._left and self.job.banned_strings:
            self._banned_strings = self.job.banned_strings
            self.job.set_banned_strings(None)
        elif not self._left and self._banned_strings:
            self.job.set_banned_strings(self._banned_strings)
            self._banned_strings = []
        return self._left[0] if self._left else None

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure

    # --- the state ------------------------------------------------------------------------------------------------

    def _start_from(self, accepted: list[tuple[int, int]]) -> None:
        """`accepted`: tokens, with the count of those of thoughts after each."""
        self._accepted = accepted
        self._tracker = ThoughtTracker(self._thoughts, tokens=accepted[-1][1] if accepted else 0)
        self._tracker.feed(b"".join(self._tokens[token] for token, _ in accepted), counts=False)
        self._left = self._ending if self._tracker.spent else []  # what is still to come of the ending

    def _accept(self, token: int) -> None:
        self._tracker.feed(self._tokens[token])
        self._accepted.append((token, self._tracker.tokens))
        self._left = self._left[1:] if self._left and token == self._left[0] else []
        if not self._left and self._tracker.spent:
            self._left = self._ending
