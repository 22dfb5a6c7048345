"""Control tokens of a model: those that a request must not forge, and those that an answer only spells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, TypeVar

from backends.messages import ControlToken
from common.control_text import ControlStrings, StandIns
from common.conversations import Message
from common.errors import InvalidRequest
from common.generation import TextSpan
from common.templating import ChatTemplate
from endpoints.OAI.types.message import ChatMessage

T = TypeVar("T")

_ROLES: Final = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython", "context", "documents"}
)


class ControlTokens:
    """Keeps what a request says from becoming control tokens.

    An assistant's messages keep the tokens that the tokenizer does not call special, and the tags of thoughts: they
    have to come back as the tokens that the model gave.

    Attributes:
        all: strings of all of them.

    Args:
        thoughts: tags that begin and end a thought.
    """

    def __init__(
        self, template: ChatTemplate, tokens: Sequence[ControlToken] = (), thoughts: Collection[str] = ()
    ) -> None:
        control = [token for token in tokens if _is_control(token, template)]
        special = {token.text: token.token_id for token in control if token.special and token.text not in thoughts}
        self.all = ControlStrings([token.text for token in control])
        self._special = ControlStrings(special)
        self._ids = special
        # Templates make a token such as <|user|> of a role, so a role must not be called as another token is.
        names = {re.sub(r"^\W+|\W+$", "", token.text) for token in control}
        self._reserved = {name for name in names if name.lower() not in _ROLES}

    def check_roles(self, messages: Sequence[ChatMessage], path: str) -> None:
        for index, message in enumerate(messages):
            if message.role in self._reserved:
                raise InvalidRequest(
                    f"{path}.{index}.role {message.role!r} is the name of a control token of the model.",
                    param=f"{path}.{index}.role",
                )

    def hide(self, value: T, stand_ins: StandIns) -> T:
        hidden: T = stand_ins.hide(value, self.all)
        return hidden

    def hide_in_messages(self, messages: Sequence[Message], stand_ins: StandIns) -> list[Message]:
        return [
            stand_ins.hide(message, self._special if message["role"] == "assistant" else self.all)
            for message in messages
        ]

    def spelled(self, text: str, token_ids: Collection[int]) -> list[TextSpan]:
        """Where the text of an answer spells special tokens that are not among those that the model gave."""
        spans = list(self._special.spans(text))
        given = Counter(token_ids) if spans else Counter()
        written = Counter(text[start:end] for start, end in spans)
        # Where there are some of both, all of them count as text: what the model meant cannot be forged then.
        return [(start, end) for start, end in spans if given[self._ids[text[start:end]]] < written[text[start:end]]]


def _is_control(token: ControlToken, template: ChatTemplate) -> bool:
    """Tokenizers also hold runs of blanks and bits of markup that are text like any other, except to the tokenizer."""
    if token.text.isspace():
        return False
    return token.special or token.text.startswith("<|") or token.text in template.source
