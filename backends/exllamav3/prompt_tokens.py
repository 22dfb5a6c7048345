"""Prompt text -> token ids, where a user's text cannot forge control tokens.

A prompt is tokenised as one text, so that it gives the ids that it gives anywhere else. What a message says must
nevertheless not become `<|im_end|>` and the like because it spells it. So there is a second tokenizer, the first one
with all its control tokens renamed: in the text, those that are meant get their secret name, the others stay what they
spell, and both then go through it together.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from loguru import logger
from tokenizers import Tokenizer as HFTokenizer

from backends.exllamav3.engine import Tokenizer
from backends.messages import ControlToken
from common.generation import TextSpan

# What stands for a character inside a literal while control tokens are looked for; some need a word's end beside them.
LETTER_MASK, MASK = "\u16a0", "\ue000"


class Insert(NamedTuple):
    """Token ids that a part of a text stands for, which is not read itself.

    Attributes:
        ids_at: the ids, for the position of the first of them in the prompt.
    """

    span: TextSpan
    ids_at: Callable[[int], list[int]]


class PromptEncoder:
    """Encodes for one tokenizer.

    Attributes:
        control_tokens: the strings that become one token wherever they stand in a text, by id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hf: HFTokenizer = tokenizer.tokenizer
        self.control_tokens = _control_tokens(tokenizer)
        _write_control_tokens(tokenizer, self.control_tokens)
        # The tokenizers library finds the inner ones; the engine itself the outer, around what it gives to the library.
        # White space that has a token of its own is text all the same.
        added = {token.content for token in self._hf.get_added_tokens_decoder().values() if not token.content.isspace()}
        self._inner = {token.text: token for token in self.control_tokens if token.text in added}
        self._outer: dict[str, int] = {**tokenizer.missing_special_piece_to_id, **tokenizer.unspecial_piece_to_id}
        self._outer_pattern = re.compile("|".join(map(re.escape, self._outer))) if self._outer else None
        nonce = secrets.token_hex(16)  # nobody may guess a name
        self._names = {text: f"<{nonce}:{token.token_id}>" for text, token in self._inner.items()}
        controlling = {token.token_id for token in self.control_tokens if not token.text.isspace()}
        self._ids = controlling - {tokenizer.unk_token_id}  # unknown characters give it too
        # Takes up to seconds for large vocabularies: now, and not while others wait for their next token.
        self._finder, self._found_tokens = self._make_finder()
        self._renamed = self._make_renamed()

    def encode(
        self,
        text: str,
        *,
        add_bos: bool,
        encode_special_tokens: bool = True,
        literals: Sequence[TextSpan] = (),
        inserts: Sequence[Insert] = (),
    ) -> list[int]:
        """The ids of a text.

        Args:
            add_bos: put a BOS token before it.
            encode_special_tokens: false makes a literal of the whole text.
            literals: spans of the text. A control token's string that overlaps one is ordinary text.
            inserts: what takes the place of parts of the text, which do not overlap.
        """
        ids, _ = self.encode_placed(
            text,
            (),
            add_bos=add_bos,
            encode_special_tokens=encode_special_tokens,
            literals=literals,
            inserts=inserts,
        )
        return ids

    def encode_placed(
        self,
        text: str,
        places: Sequence[int],
        *,
        add_bos: bool,
        encode_special_tokens: bool = True,
        literals: Sequence[TextSpan] = (),
        inserts: Sequence[Insert] = (),
    ) -> tuple[list[int], list[int]]:
        """The ids that `encode` gives, and how many of them end at or before each of some characters.

        So many tokens say the beginning of the text up to the character, or one token less (or some, beside a literal
        that spells a control token, where the tokenizer cannot be renamed).

        Args:
            places: characters, in any order. Those outside the text are left out.

        Returns:
            The ids; token counts in ascending order.
        """
        if not encode_special_tokens:
            literals = [(0, len(text))]
        places = sorted(place for place in places if 0 <= place <= len(text))
        bos: int | None = self._tokenizer.bos_token_id
        ids = [bos] if add_bos and bos is not None else []
        counts: list[int] = []
        begin = 0
        for insert in sorted(inserts, key=itemgetter(0)):
            start, end = insert.span
            before = [place for place in places[len(counts) :] if place < end]
            part_ids, part_counts = self._encode_text(text, begin, start, before, literals)
            counts += [len(ids) + count for count in part_counts]
            ids += part_ids
            ids += insert.ids_at(len(ids))
            begin = end
        part_ids, part_counts = self._encode_text(text, begin, len(text), places[len(counts) :], literals)
        return ids + part_ids, counts + [len(ids) + count for count in part_counts]

    def _encode_text(
        self, text: str, start: int, end: int, places: Sequence[int], literals: Sequence[TextSpan]
    ) -> tuple[list[int], list[int]]:
        """The ids of a part of a text, and how many end at or before each of some characters of the whole."""
        part = text[start:end]
        if not part:
            return [], [0 for _ in places]
        if not literals and not places:
            return self._tokenizer.encode(part, encode_special_tokens=True).flatten().tolist(), []
        masked = _masked(part, [(first - start, last - start) for first, last in literals])
        return self._encode_with_literals(part, masked, [min(place, end) - start for place in places])

    def _encode_with_literals(self, text: str, masked: str, places: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """`places` are in ascending order."""
        ids: list[int] = []
        counts: list[int] = []
        outer = list(self._outer_pattern.finditer(masked)) if self._outer_pattern else []
        position = 0
        for match in [*outer, None]:
            start, end = (len(text), len(text)) if match is None else match.span()
            inside = [place - position for place in places[len(counts) :] if place < end or match is None]
            part, part_counts = self._encode_part(text[position:start], masked[position:start], inside)
            counts += [len(ids) + count for count in part_counts]
            ids += part
            if match is not None:
                ids.append(self._outer[match[0]])
            position = end
        return ids, counts

    def _encode_part(self, text: str, masked: str, places: Sequence[int]) -> tuple[list[int], list[int]]:
        if not text:
            return [], [0 for _ in places]
        found = list(self._meant(masked))
        meant = [token.token_id for token, _, _ in found if token.token_id in self._ids]
        if self._renamed is not None:
            renaming = [(self._names[token.text], start, end) for token, start, end in found]
            encoding = self._renamed.encode("".join(_replaced(text, renaming)), add_special_tokens=False)
            ids: list[int] = encoding.ids
            if [token_id for token_id in ids if token_id in self._ids] == meant:
                offsets: list[TextSpan] = encoding.offsets if places else []
                moved = [_position_after(place, renaming) for place in places]
                return ids, [bisect_right(offsets, place, key=itemgetter(1)) for place in moved]
        if masked == text:
            ids = self._whole(text)
            return ids, [_common(ids, self._whole(text[:place])) for place in places]
        ids = self._encode_apart(text, found)
        beginnings = ((text[:place], [span for span in found if span[2] <= place]) for place in places)
        return ids, [_common(ids, self._encode_apart(*beginning)) for beginning in beginnings]

    def _encode_apart(self, text: str, found: list[tuple[ControlToken, int, int]]) -> list[int]:
        """For tokenizers that cannot be renamed: the text between control tokens in pieces, cut inside forged ones.

        The ids of what stands beside a cut may be others than those of the whole text.
        """
        forgeries = re.compile("|".join(map(re.escape, sorted(self._inner, key=len, reverse=True))))
        ids: list[int] = []
        position = 0
        for token, start, end in [*found, (None, len(text), len(text))]:
            piece_start = position
            for forged in forgeries.finditer(text, position, start) if self._inner else ():
                ids += self._plain(text[piece_start : forged.start() + 1])
                piece_start = forged.start() + 1
            ids += self._plain(text[piece_start:start])
            if token is not None:
                ids.append(token.token_id)
            position = end
        return ids

    def _whole(self, text: str) -> list[int]:
        """A part without literals, where control tokens are meant as they stand."""
        self._hf.encode_special_tokens = False  # as themselves, and not as text
        ids: list[int] = self._hf.encode(text, add_special_tokens=False).ids
        return ids

    def _plain(self, text: str) -> list[int]:
        self._hf.encode_special_tokens = True  # as text, that is
        ids: list[int] = self._hf.encode(text, add_special_tokens=False).ids if text else []
        return [token_id for token_id in ids if token_id not in self._ids]

    def _meant(self, masked: str) -> Iterator[tuple[ControlToken, int, int]]:
        """Control tokens in a text, and where they are spelled."""
        encoding = self._finder.encode(masked, add_special_tokens=False)
        for finder_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._found_tokens.get(finder_id)
            if token is None:
                continue
            # The token may have taken the blanks around it.
            spelled = masked[start:end]
            text = token.text if token.text in spelled else spelled.strip()
            offset = start + spelled.index(text)
            yield token, offset, offset + len(text)

    # --- the two tokenizers ---------------------------------------------------------------------------------------

    def _make_finder(self) -> tuple[HFTokenizer, dict[int | None, ControlToken]]:
        """The tokenizer without its model, which finds added tokens as ever, and nothing else; and its ids."""
        described = json.loads(self._hf.to_str())
        unknown = next(iter(self._names.values()), "") + "?"
        model = {"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown}
        added = [{**token, "id": index} for index, token in enumerate(described["added_tokens"], start=1)]
        described |= {"model": model, "added_tokens": added, "pre_tokenizer": None, "post_processor": None}
        finder = HFTokenizer.from_str(json.dumps(described))
        return finder, {finder.token_to_id(text): token for text, token in self._inner.items()}

    def _make_renamed(self) -> HFTokenizer | None:
        """The tokenizer with secret names for its control tokens; None where that cannot be made."""
        described = json.loads(self._hf.to_str())
        for token in described["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename_in_model(described["model"], self._names)
        described["post_processor"] = None  # it names tokens, and is not used
        try:
            renamed = HFTokenizer.from_str(json.dumps(described))
        except Exception as error:  # the library has no other kind
            logger.warning("Prompts that spell control tokens are tokenised piece by piece: {}", error)
            return None
        known = all(renamed.token_to_id(self._names[text]) == token.token_id for text, token in self._inner.items())
        return renamed if known else None


def _control_tokens(tokenizer: Tokenizer) -> list[ControlToken]:
    found: dict[str, ControlToken] = {}
    for token_id, token in tokenizer.tokenizer.get_added_tokens_decoder().items():
        found[token.content] = ControlToken(token.content, token_id, token.special)
    for text, token_id in tokenizer.missing_special_piece_to_id.items():
        found[text] = ControlToken(text, token_id, True)
    for text, token_id in tokenizer.unspecial_piece_to_id.items():
        found[text] = ControlToken(text, token_id, False)
    return sorted(found.values(), key=lambda token: token.token_id)


def _write_control_tokens(tokenizer: Tokenizer, control_tokens: list[ControlToken]) -> None:
    """Make the engine write all control tokens into texts.

    It learns them from tokenizer_config.json, where transformers 5 no longer lists them, and leaves out the pad token,
    which is the end of a turn to many models.
    """
    pieces: list[str] = tokenizer.get_id_to_piece_list(True)
    for token in control_tokens:
        tokenizer.extended_piece_to_id.setdefault(token.text, token.token_id)
        tokenizer.extended_id_to_piece.setdefault(token.token_id, token.text)
        pieces[token.token_id] = tokenizer.extended_id_to_piece[token.token_id]
    tokenizer.pad_token_id = -1  # none, as the engine has it; nothing here is padded


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """In the `model` of a tokenizer.json; the ids stay."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocabulary.items()}
    else:  # Unigram's: pieces with their scores, by id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not names.keys() & _merged_pieces(merge)]


def _merged_pieces(merge: str | list[str]) -> set[str]:
    """What a merge of BPE takes and makes."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}


def _masked(text: str, literals: Sequence[TextSpan]) -> str:
    """The text with nothing to find inside the literals, as long as before."""
    return "".join(
        _replaced(text, [("".join(map(_mask, text[start:end])), start, end) for start, end in _merged(text, literals)])
    )


def _merged(text: str, spans: Sequence[TextSpan]) -> list[TextSpan]:
    """In order, without overlaps, inside the text."""
    merged: list[TextSpan] = []
    for start, end in sorted(spans):
        start, end = max(start, 0), min(end, len(text))
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def _mask(character: str) -> str:
    if character.isspace():
        return character
    return LETTER_MASK if character.isalnum() or character == "_" else MASK


def _common(ids: list[int], others: list[int]) -> int:
    """How many of the first ids are the same."""
    differing = (index for index, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    return next(differing, min(len(ids), len(others)))


def _position_after(character: int, replacements: Sequence[tuple[str, int, int]]) -> int:
    """Where a character stands after replacements; one inside something replaced, at its beginning."""
    shift = 0
    for replacement, start, end in replacements:
        if end > character:
            return min(character, start) + shift
        shift += len(replacement) - (end - start)
    return character + shift


def _replaced(text: str, replacements: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    position = 0
    for replacement, start, end in replacements:
        yield text[position:start]
        yield replacement
        position = end
    yield text[position:]
