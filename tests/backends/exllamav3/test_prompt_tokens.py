"""Control tokens that a user's text spells stay text, and everything else gets the ids that it always gets."""

from __future__ import annotations

import itertools
import json
import shutil
import unicodedata
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from backends.exllamav3 import prompt_tokens
from backends.exllamav3.engine import Tokenizer, token_tensor
from backends.exllamav3.model import ExllamaV3Container
from backends.exllamav3.prompt_tokens import Insert, PromptEncoder
from backends.exllamav3.token_bytes import token_bytes
from common.fim import fim_prompt
from tests.containers import answered, loaded
from tests.models import EOS_ID, corpus, write_tokenizer
from tests.sentencepiece import PrependScheme, sentencepiece_tokenizer

# Each takes part in the search for added tokens in its own way.
ADDED = [
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|im_end|>", special=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("<left>", special=True, lstrip=True, normalized=False),
    AddedToken("<right>", special=True, rstrip=True, normalized=False),
    AddedToken("WORD", special=False, single_word=True, normalized=False),
    AddedToken("<Normal>", special=False, normalized=True),
    AddedToken("<im>", special=True),
    AddedToken("<im><left>", special=True),  # begins with another
    AddedToken("\n\n\n", special=False),  # text, whatever the tokenizer makes of it
    AddedToken("<table>", special=False),
]
PIECES = [token.content for token in ADDED] + [
    " ",
    "  ",
    "\n",
    "Ada measured",
    "the river",
    "é😀",
    "<|im_",
    "end|>",
    "<",
    ">",
    "WORDS",
    "aWORD",
    "<normal>",
    "s",
    "▁",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_level(directory: Path) -> HFTokenizer:
    write_tokenizer(directory)
    tokenizer = HFTokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(ADDED)
    return tokenizer


def byte_level_with_template(directory: Path) -> HFTokenizer:
    """With what Llama 3 has: whole words first, and a BOS token from the post-processor."""
    tokenizer = byte_level(directory)
    described = json.loads(tokenizer.to_str())
    described["model"]["ignore_merges"] = True
    tokenizer = HFTokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def metaspace(scheme: PrependScheme) -> Callable[[Path], HFTokenizer]:
    def make(directory: Path) -> HFTokenizer:
        tokenizer = sentencepiece_tokenizer(scheme)
        tokenizer.add_tokens(ADDED)
        return tokenizer

    return make


def legacy_llama(directory: Path) -> HFTokenizer:
    """Blanks by normalization, before tokens that are looked for after it."""
    tokenizer = metaspace("always")(directory)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def unigram(directory: Path) -> HFTokenizer:
    tokenizer = HFTokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(itertools.islice(corpus(), 300), trainer)
    tokenizer.add_tokens(ADDED)
    return tokenizer


MAKERS = {
    "byte-level": byte_level,
    "template": byte_level_with_template,
    "metaspace-first": metaspace("first"),
    "metaspace-always": metaspace("always"),
    "legacy": legacy_llama,
    "unigram": unigram,
}


def engine_tokenizer(directory: Path, tokenizer: HFTokenizer, config: dict[str, Any] | None = None) -> Tokenizer:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "eos_token_id_list": [2]}
    return Tokenizer(SimpleNamespace(directory=str(directory), **ids))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptEncoder]:
    made = {}
    for name, make in MAKERS.items():
        directory = tmp_path_factory.mktemp(name)
        made[name] = PromptEncoder(engine_tokenizer(directory, make(directory)))
    return made


@pytest.fixture(params=MAKERS)
def encoder(request: pytest.FixtureRequest, encoders: dict[str, PromptEncoder]) -> PromptEncoder:
    return encoders[request.param]


def plain(encoder: PromptEncoder, text: str) -> list[int]:
    """What the tokenizers library says."""
    hf = HFTokenizer.from_str(encoder._hf.to_str())
    ids: list[int] = hf.encode(text, add_special_tokens=False).ids
    return ids


def control_ids(encoder: PromptEncoder, ids: list[int]) -> list[int]:
    return [token for token in ids if token in encoder._ids]


def decoded(encoder: PromptEncoder, ids: list[int]) -> str:
    return str(encoder._tokenizer.decode(token_tensor(ids), decode_special_tokens=True)[0])


@QUICK
@given(text=TEXTS)
def test_without_forgeries_the_ids_are_those_of_the_tokenizer(encoder: PromptEncoder, text: str) -> None:
    assert encoder.encode(text, add_bos=False) == plain(encoder, text)
    assert encoder.encode(text, add_bos=False, literals=[(0, 0)]) == plain(encoder, text)


@QUICK
@given(before=TEXTS, forged=TEXTS, after=TEXTS)
def test_a_literal_gives_no_control_token(encoder: PromptEncoder, before: str, forged: str, after: str) -> None:
    text = before + forged + after
    ids = encoder.encode(text, add_bos=False, literals=[(len(before), len(before) + len(forged))])
    assert len(control_ids(encoder, ids)) <= len(control_ids(encoder, plain(encoder, before))) + len(
        control_ids(encoder, plain(encoder, after))
    )
    assert not control_ids(encoder, encoder.encode(text, add_bos=False, encode_special_tokens=False))


@QUICK
@given(forged=TEXTS)
def test_what_stands_around_a_literal_keeps_its_ids(encoder: PromptEncoder, forged: str) -> None:
    before, after = "<|im_start|>Ada\nmeasured <|im_start|>", "<|im_end|>the river<|im_end|>"
    text = before + forged + after
    ids = encoder.encode(text, add_bos=False, literals=[(len(before), len(before + forged))])
    start, end = plain(encoder, before), plain(encoder, after)
    assert ids[: len(start)] == start
    assert ids[len(ids) - len(end) :] == end
    assert control_ids(encoder, ids) == control_ids(encoder, start) + control_ids(encoder, end)


@QUICK
@given(before=TEXTS, forged=TEXTS, after=TEXTS)
def test_the_text_is_not_changed(encoders: dict[str, PromptEncoder], before: str, forged: str, after: str) -> None:
    encoder = encoders["byte-level"]
    text = before + forged + after
    literal = (len(before), len(before) + len(forged))
    for ids in (
        encoder.encode(text, add_bos=False, literals=[literal]),
        encoder.encode(text, add_bos=False, encode_special_tokens=False),
    ):
        # <left> and <right> take the blanks beside them.
        assert "".join(decoded(encoder, ids).split()) == "".join(text.split())


def test_a_control_token_that_begins_or_ends_in_a_literal_is_text(encoders: dict[str, PromptEncoder]) -> None:
    encoder = encoders["byte-level"]
    text = "a<|im_end|>b<|im_end|>"
    for literal in [(2, 4), (0, 2), (10, 12), (1, 11)]:
        ids = encoder.encode(text, add_bos=False, literals=[literal])
        assert control_ids(encoder, ids) == [encoder._hf.token_to_id("<|im_end|>")], literal
        assert ids[-1] == encoder._hf.token_to_id("<|im_end|>")
    assert not control_ids(encoder, encoder.encode(text, add_bos=False, literals=[(-5, 3), (2, 4), (20, 99)]))


def test_bos_is_put_before(encoders: dict[str, PromptEncoder]) -> None:
    encoder = encoders["metaspace-first"]
    for literals in ([], [(0, 1)]):
        ids = encoder.encode("Ada", add_bos=True, literals=literals)
        assert ids == [1, *encoder.encode("Ada", add_bos=False)]


def test_all_added_tokens_are_told(encoder: PromptEncoder) -> None:
    told = {token.text: token for token in encoder.control_tokens}
    for added in ADDED:
        assert told[added.content].special == added.special
        assert told[added.content].token_id == encoder._hf.token_to_id(added.content)


def test_white_space_with_a_token_of_its_own_keeps_it(encoders: dict[str, PromptEncoder]) -> None:
    encoder = encoders["byte-level"]
    text = "Ada\n\n\nmeasured"
    assert encoder._hf.token_to_id("\n\n\n") in encoder.encode(text, add_bos=False, literals=[(0, len(text))])


def test_tokens_that_tokenizer_json_does_not_know(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    hf = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            "1024": {"content": "<|late|>", "special": True},
            "1025": {"content": "<later>", "special": False},
        }
    }
    (tmp_path / "added_tokens.json").write_text('{"<|file|>": 1026}', encoding="utf-8")
    encoder = PromptEncoder(engine_tokenizer(tmp_path, hf, config))
    added = [(token.text, token.token_id, token.special) for token in encoder.control_tokens if token.token_id > 1000]
    assert added == [("<|late|>", 1024, True), ("<later>", 1025, False), ("<|file|>", 1026, True)]

    text = "<|late|>Ada<later><|im_end|><|file|>"
    assert control_ids(encoder, encoder.encode(text, add_bos=False)) == [1024, 1025, 4, 1026]
    assert encoder.encode(text, add_bos=False, literals=[(0, 0)]) == encoder.encode(text, add_bos=False)
    assert control_ids(encoder, encoder.encode(text + text, add_bos=False, literals=[(0, len(text))])) == [
        1024,
        1025,
        4,
        1026,
    ]
    assert not control_ids(encoder, encoder.encode(text, add_bos=False, encode_special_tokens=False))
    assert decoded(encoder, encoder.encode(text, add_bos=False, encode_special_tokens=False)) == text


# --- inserts ----------------------------------------------------------------------------------------------------------

IMAGE = [10**9, 10**9 + 1]


def insert(start: int, end: int) -> Insert:
    return Insert((start, end), lambda position: [position, *IMAGE])


@QUICK
@given(before=TEXTS, forged=TEXTS, after=TEXTS)
def test_an_insert_stands_for_its_part_of_the_text(
    encoder: PromptEncoder, before: str, forged: str, after: str
) -> None:
    text = f"{before}{forged}<|im_end|>{after}"
    start, end = len(before + forged), len(before + forged) + len("<|im_end|>")
    options: dict[str, Any] = {"literals": [(len(before), start)], "inserts": [insert(start, end)]}
    first = encoder.encode(before + forged, add_bos=True, literals=options["literals"])
    last = encoder.encode(after, add_bos=False)
    ids = encoder.encode(text, add_bos=True, **options)
    assert ids == [*first, len(first), *IMAGE, *last]
    placed, counts = encoder.encode_placed(text, [end, start, len(text), start + 3], add_bos=True, **options)
    assert placed == ids
    assert counts == [len(first), len(first), len(first) + 3, len(ids)]


def test_inserts_beside_each_other_and_alone(encoder: PromptEncoder) -> None:
    ids, counts = encoder.encode_placed("XY", [0, 1, 2], add_bos=False, inserts=[insert(1, 2), insert(0, 1)])
    assert ids == [0, *IMAGE, 3, *IMAGE]
    assert counts == [0, 3, 6]


# --- places -----------------------------------------------------------------------------------------------------------


def comparable(text: str) -> str:
    """What every kind of tokenizer keeps of a text: some change cases, compose characters, or add and take blanks."""
    return "".join(unicodedata.normalize("NFKC", text).lower().replace("▁", " ").split())


def assert_placed(encoder: PromptEncoder, text: str, place: int, *, short: int = 1, **options: Any) -> None:
    """So many tokens say nothing from past the place, and `short` more say all up to it."""
    ids, (count,) = encoder.encode_placed(text, [place], add_bos=False, **options)
    assert ids == encoder.encode(text, add_bos=False, **options)
    assert encoder.encode_placed(text, [place], add_bos=True, **options)[1] in ([count], [count + 1])
    if encoder._tokenizer.unk_token_id in ids:
        return  # what such a token stands for is not in it
    wanted, said = comparable(text[:place]), comparable(decoded(encoder, ids[:count]))
    assert wanted.startswith(said)
    # The library decodes a byte before the first one of a character that is cut off as if it were broken too.
    assert said == wanted or comparable(decoded(encoder, ids[: count + short])).startswith(wanted)


@QUICK
@given(before=TEXTS, literal=TEXTS, after=TEXTS, data=st.data())
def test_places_become_counts_of_tokens(
    encoder: PromptEncoder, before: str, literal: str, after: str, data: st.DataObject
) -> None:
    text = before + literal + after
    place = data.draw(st.integers(0, len(text)))
    assert_placed(encoder, text, place)
    assert_placed(encoder, text, place, literals=[(len(before), len(before + literal))])
    assert_placed(encoder, text, place, encode_special_tokens=False)


def test_places_are_put_in_order_and_those_outside_left_out(encoder: PromptEncoder) -> None:
    text = "<|im_start|>Ada measured<|im_end|>"
    ids, counts = encoder.encode_placed(text, [99, len(text), 12, -1, 0, 12], add_bos=True)
    bos = len(ids) - len(encoder.encode(text, add_bos=False))
    assert counts == sorted(counts)
    assert len(counts) == 4
    assert counts[0] - bos in (0, 1)  # some begin with a blank that no text has
    assert counts[-1] == len(ids)


def test_places_around_tokens_that_tokenizer_json_does_not_know(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    hf = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {"1024": {"content": "<|late|>", "special": True}}}
    encoder = PromptEncoder(engine_tokenizer(tmp_path, hf, config))
    text = "<|late|>s<|late|><|late|>s<|im_end|>"
    for literals in ([], [(text.index("s"), 9)]):
        ids, counts = encoder.encode_placed(text, range(len(text) + 1), add_bos=False, literals=literals)
        assert len(ids) == 6
        ends = [8, 9, 17, 25, 26, 36]
        assert counts == [sum(end <= place for end in ends) for place in range(len(text) + 1)]


@pytest.mark.parametrize("literals", [[], [(12, 60)]])
def test_places_where_tokens_cannot_be_renamed(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch, literals: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(encoder, "_renamed", None)
    text = "<|im_start|>Ada<|im_end|> measured  the river<|im_end|>\nAda measured<|im_end|>Ada"
    for place in range(len(text) + 1):
        assert_placed(encoder, text, place, short=8, literals=literals)


def test_a_tokenizer_that_cannot_be_renamed_is_still_safe(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_renamed", None)
    text = "<|im_start|>Ada<|im_end|><im><left> <think><|im_<|im_end|>end|> WORD<|im_end|>"
    ids = encoder.encode(text, add_bos=False, literals=[(12, len(text) - len("<|im_end|>"))])
    name = encoder._hf.token_to_id
    assert control_ids(encoder, ids) == [name("<|im_start|>"), name("<|im_end|>")]
    assert ids[0] == name("<|im_start|>")
    assert ids[-1] == name("<|im_end|>")


def test_names_of_control_tokens_cannot_be_guessed(encoders: dict[str, PromptEncoder]) -> None:
    names = [encoder._names["<|im_end|>"] for encoder in encoders.values()]
    assert len(set(names)) == len(names)
    assert all(len(name) > 32 for name in names)


def test_answers_show_control_tokens(encoder: PromptEncoder) -> None:
    pieces = encoder._tokenizer.get_id_to_piece_list(True)
    for token in encoder.control_tokens:
        assert pieces[token.token_id] == token.text
        assert decoded(encoder, [token.token_id]) == token.text


def test_ids_equal_transformers(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tiny_llama)
    text = "<|im_start|>user\nAda measured  the river — é😀\n\n<|im_end|>\n"
    tokenizer = engine_tokenizer(tiny_llama.parent / "copy", HFTokenizer.from_file(str(tiny_llama / "tokenizer.json")))
    encoder = PromptEncoder(tokenizer)
    expected = reference.encode(text, add_special_tokens=False)
    assert encoder.encode(text, add_bos=False) == expected
    assert encoder.encode(text, add_bos=False, literals=[(0, 0)]) == expected


@pytest.mark.slow
def test_ids_equal_transformers_for_a_real_tokenizer(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2)
    encoder = _smollm2_encoder(smollm2)
    text = "<|im_start|>user\n1234 naïve  code:\n\tdef f(x):\r\n\n<|im_end|>\n<fim_prefix>é😀日本<|endoftext|>"
    expected = reference.encode(text, add_special_tokens=False)
    assert encoder.encode(text, add_bos=False) == expected
    assert encoder.encode(text, add_bos=False, literals=[(0, 0)]) == expected
    forged = encoder.encode(text + text, add_bos=False, literals=[(0, len(text))])
    assert control_ids(encoder, forged) == control_ids(encoder, expected)
    assert decoded(encoder, forged) == text + text


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(TEXTS, st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))), data=st.data())
def test_places_with_a_real_tokenizer(smollm2: Path, text: str, data: st.DataObject) -> None:
    encoder = _smollm2_encoder(smollm2)
    place = data.draw(st.integers(0, len(text)))
    literal = data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text))))
    for options in ({}, {"literals": [literal]}, {"encode_special_tokens": False}):
        ids, (count,) = encoder.encode_placed(text, [place], add_bos=False, **options)
        assert ids == encoder.encode(text, add_bos=False, **options)
        known = token_bytes(encoder._tokenizer)
        assume(b"".join(known[token] for token in ids) == text.encode())  # it has no tokens for some rare bytes
        said, more = (b"".join(known[token] for token in ids[:end]) for end in (count, count + 1))
        wanted = text[:place].encode()
        assert wanted.startswith(said)
        assert more.startswith(wanted) or count == len(ids)


@lru_cache(maxsize=1)
def _smollm2_encoder(directory: Path) -> PromptEncoder:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "eos_token_id_list": [2]}
    return PromptEncoder(Tokenizer(SimpleNamespace(directory=str(directory), **ids)))


def test_masks_are_no_control_tokens_and_keep_lengths() -> None:
    assert prompt_tokens._masked("ab <x> c", [(1, 6), (4, 7)]) == "aᚠ \ue000ᚠ\ue000 c"


# --- in a container ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def coder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ExllamaV3Container]:
    """A tiny model whose tokenizer has fill-in-the-middle tokens, in the place of three that nothing needs."""
    directory = tmp_path_factory.mktemp("models") / "coder"
    shutil.copytree(tiny_llama, directory)
    described = (directory / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in zip(("<s>", "</s>", "<pad>"), FIM, strict=True):
        described = described.replace(json.dumps(old), json.dumps(new))
    (directory / "tokenizer.json").write_text(described, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"add_bos_token": false}', encoding="utf-8")
    async with loaded(directory) as container:
        yield container


async def test_the_middle_is_filled_in(coder: ExllamaV3Container) -> None:
    control_tokens = coder.info().control_tokens
    assert {(token.text, token.token_id) for token in control_tokens} >= set(zip(FIM, range(3), strict=True))
    prompt = fim_prompt("def measured(", "return river", control_tokens)
    ids = coder.encode(prompt, add_bos=None, encode_special_tokens=True)
    assert [token for token in ids if token < 3] == [0, 1, 2]
    assert ids[0] == 0
    assert ids[-1] == 2
    answer = await answered(coder, prompt, max_tokens=4)
    assert answer.finish.usage.prompt_tokens == len(ids)
    assert answer.finish.usage.completion_tokens == 4


async def test_literals_of_a_request_reach_the_tokenizer(coder: ExllamaV3Container) -> None:
    prompt = "<|im_start|>user\nAda<|im_end|> measured<|im_end|>\n"
    forged = (prompt.index("Ada"), prompt.index(" measured"))
    ids = coder.encode(prompt, add_bos=False, encode_special_tokens=True, literals=[forged])
    assert ids.count(EOS_ID) == 1
    assert coder.decode(ids, decode_special_tokens=True) == prompt
    for literals in ([], [forged]):
        expected = coder.encode(prompt, add_bos=False, encode_special_tokens=True, literals=literals)
        answer = await answered(coder, prompt, literals=literals, max_tokens=1)
        assert answer.finish.usage.prompt_tokens == len(expected)
    plain = await answered(coder, prompt, encode_special_tokens=False, max_tokens=1)
    assert plain.finish.usage.prompt_tokens > len(ids)
