"""What tokens add to a text, in bytes: a token may end in the middle of a character."""

from __future__ import annotations

import re
from functools import lru_cache

from backends.exllamav3.engine import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # how SentencePiece names the tokens of single bytes


class TokenBytes:
    """Token id -> bytes, as the engine writes a token into the text of an answer.

    The engine's own text of a token is right unless it had to replace bytes that are no complete character; these are
    read from the name that the vocabulary gives the token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces: list[str] = tokenizer.get_id_to_piece_list(True)
        self._vocabulary = tokenizer.tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        raw = self._known.get(token_id)
        if raw is None:
            raw = self._known[token_id] = self._look_up(token_id)
        return raw

    def _look_up(self, token_id: int) -> bytes:
        if token_id >= len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if REPLACEMENT not in piece:
            return piece.encode()
        name: str = self._vocabulary.id_to_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(byte[1])
        if name and all(letter in _BYTE_OF_LETTER for letter in name):
            return bytes(_BYTE_OF_LETTER[letter] for letter in name)
        return piece.encode()


@lru_cache(maxsize=1)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def _byte_letters() -> dict[str, int]:
    """What byte-level vocabularies, GPT-2's and all since, write for bytes.

    A byte that is a visible Latin-1 character is that character; the others follow from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
