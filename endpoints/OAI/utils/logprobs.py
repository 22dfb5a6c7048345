"""Log-probabilities in the shapes of the two routes, and those of prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from common.generation import Echo, SampledLogprob, TextDelta, TokenLogprob
from endpoints.OAI.types import chat
from endpoints.OAI.types.chat import ChatTokenLogprob
from endpoints.OAI.types.common import PromptLogprob, PromptLogprobs
from endpoints.OAI.types.completion import CompletionLogprobs


def chat_entries(logprobs: Sequence[SampledLogprob], alternatives: int) -> list[ChatTokenLogprob]:
    return [
        ChatTokenLogprob(
            **_chat_token(entry).model_dump(), top_logprobs=[_chat_token(other) for other in entry.top[:alternatives]]
        )
        for entry in logprobs
    ]


def _chat_token(entry: TokenLogprob) -> chat.TokenLogprob:
    return chat.TokenLogprob(token=entry.token, token_id=entry.token_id, logprob=entry.logprob, bytes=list(entry.raw))


def prompt_entries(echo: Echo, alternatives: int) -> PromptLogprobs:
    """One item for each token of a prompt, as vLLM writes them: null where nothing stands before it."""
    return [None if entry is None else _by_token_id(entry, alternatives) for entry in echo.logprobs]


def _by_token_id(entry: SampledLogprob, alternatives: int) -> dict[int, PromptLogprob]:
    ranks = {other.token_id: rank for rank, other in enumerate(entry.top, 1)}
    return {
        token.token_id: PromptLogprob(logprob=token.logprob, rank=ranks.get(token.token_id), decoded_token=token.token)
        for token in (entry, *entry.top[:alternatives])
    }


class LogprobLists:
    """Writes the log-probabilities of one text completion, and of the prompt in front of it.

    A token need not be whole characters, so the place where it begins is counted by the bytes of those before it.
    """

    def __init__(self, alternatives: int) -> None:
        self._alternatives = alternatives
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters

    def prompt(self, echo: Echo) -> CompletionLogprobs:
        text = echo.text.encode()
        known = sum(len(entry.raw) for entry in echo.logprobs if entry is not None)
        written = CompletionLogprobs()
        for entry in echo.logprobs:
            if entry is None:
                first = text[: max(0, len(text) - known)]
                written.add(_text(first), None, None, self._advance(first))
            else:
                self._add(entry, written)
        # A tokenizer may write its tokens a little differently, such as with a space before the first word.
        self._decoder.reset()
        self._offset = len(echo.text)
        return written

    def answer(self, delta: TextDelta) -> CompletionLogprobs | None:
        if not delta.logprobs:
            self._advance(delta.text.encode())
            return None
        written = CompletionLogprobs()
        for entry in delta.logprobs:
            self._add(entry, written)
        return written

    def _add(self, entry: SampledLogprob, written: CompletionLogprobs) -> None:
        # As at OpenAI, the sampled token is there even when it is not among the most likely.
        token = _text(entry.raw)
        top = {token: entry.logprob}
        for other in entry.top[: self._alternatives]:
            top.setdefault(_text(other.raw), other.logprob)
        written.add(token, entry.logprob, top, self._advance(entry.raw))

    def _advance(self, raw: bytes) -> int:
        """Go past some bytes. Returns where they begin."""
        offset = self._offset
        self._offset += len(self._decoder.decode(raw))
        return offset


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
