"""The bytes of tokens, in both kinds of vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.exllamav3.engine import Config, Tokenizer
from backends.exllamav3.token_bytes import TokenBytes
from tests.models import EOS_ID


def read_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_config(Config.from_directory(str(directory)))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_bos=False, encode_special_tokens=False)[0].tolist()
    return ids


@pytest.fixture(scope="module")
def byte_level(tiny_llama: Path) -> Tokenizer:
    return read_tokenizer(tiny_llama)


def make_sentence_piece(directory: Path) -> None:
    """As Llama 2 has it: U+2581 for blanks, and a token for each byte that no piece covers."""
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, normalizers

    control = ["<unk>", "<s>", "</s>"]
    pieces = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abehlot", "\u2581t", "\u2581th", "he"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("h", "e")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = HFTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {str(index): {"content": piece, "special": True} for index, piece in enumerate(control)}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="module")
def sentence_piece(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentence-piece")
    config = json.loads((tiny_llama / "config.json").read_text(encoding="utf-8"))
    config |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    make_sentence_piece(directory)
    return read_tokenizer(directory)


@settings(deadline=None, max_examples=50)
@given(text=st.text())
def test_bytes_of_byte_level_tokens_add_up_to_the_text(byte_level: Tokenizer, text: str) -> None:
    tokens = TokenBytes(byte_level)
    assert b"".join(tokens[token] for token in encode(byte_level, text)) == text.encode()


@settings(deadline=None, max_examples=50)
@given(
    text=st.text(
        st.one_of(st.sampled_from("the lab"), st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))
    )
)
def test_bytes_of_sentence_piece_tokens_add_up_to_the_text(sentence_piece: Tokenizer, text: str) -> None:
    tokens = TokenBytes(sentence_piece)
    ids = encode(sentence_piece, text)
    assert b"".join(tokens[token] for token in ids) == (b" " + text.encode() if text else b"")


def test_single_bytes_of_sentence_piece(sentence_piece: Tokenizer) -> None:
    tokens = TokenBytes(sentence_piece)
    assert [tokens[3 + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_control_tokens_and_ids_without_a_name(byte_level: Tokenizer) -> None:
    tokens = TokenBytes(byte_level)
    assert tokens[EOS_ID] == b"<|im_end|>"
    assert tokens[10**6] == b""
