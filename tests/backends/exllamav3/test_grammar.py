"""Constrained answers of the real engine: always valid, and never at the cost of others."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.exllamav3.grammar import GrammarFilter, _compiled
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.errors import InvalidRequest
from common.generation import Constraint, ConstraintKind, Thoughts
from common.grammar import choice_constraint, json_object_constraint
from common.parsing.answer import AnswerParser
from common.parsing.dialect import CallRules, ReadOptions
from common.parsing.formats.base import Tool, Tools
from common.parsing.formats.registry import format_named
from common.parsing.grammar import answer_constraints
from common.parsing.pieces import CallArguments, CallBegin, CallEnd
from common.parsing.tags import TagDialect
from common.sampling import SamplingParameters
from tests.containers import Answer, answered, loaded
from tests.models import EOS_ID, SPECIAL_TOKENS
from tests.sentencepiece import sentencepiece_tokenizer

SAMPLED = SamplingParameters(temperature=1.0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def constraint(kind: ConstraintKind, text: str | dict[str, Any]) -> Constraint:
    return Constraint(kind, text if isinstance(text, str) else json.dumps(text), "p")


async def constrained(
    container: ExllamaV3Container, *constraints: Constraint, prompt: str = "Ada measured", **fields: Any
) -> Answer:
    fields = {"sampling": SAMPLED, "seed": 1, "max_tokens": 200} | fields
    return await answered(container, prompt, constraints=list(constraints), **fields)


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert 1 <= len(person["name"]) <= 12
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 130
    assert len(person["tags"]) <= 3
    assert set(person["tags"]) <= {"a", "b", None}


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
async def test_a_model_that_knows_nothing_writes_what_its_schema_asks_for(llama: ExllamaV3Container, seed: int) -> None:
    answer = await constrained(llama, constraint("json_schema", PERSON), seed=seed)
    check_person(answer.text)
    assert answer.finish.reason == "stop"
    assert answer.finish.eos_reason == "end_filter"


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-f]{3}-\d{2}", r"[a-f]{3}-\d{2}"),
        ("regex", "naïve — 日本|naïve — 語", "naïve — 日本|naïve — 語"),
        ("lark", 'start: "x" word+\nword: / [aeiou]{2}/', "x( [aeiou]{2})+"),
        ("gbnf", 'root ::= item ("," item){2}\nitem ::= [0-9]{2} | "\\u00e9"', "(?:\\d\\d|é)(,(?:\\d\\d|é)){2}"),
    ],
)
async def test_every_kind_of_constraint_holds(
    llama: ExllamaV3Container, kind: ConstraintKind, text: str, pattern: str
) -> None:
    answer = await constrained(llama, constraint(kind, text), max_tokens=400)
    assert re.fullmatch(pattern, answer.text)
    assert answer.finish.reason == "stop"


async def test_json_mode_gives_an_object(llama: ExllamaV3Container) -> None:
    # "}" is likely enough to be met, and strings are short.
    bias = dict.fromkeys(pieces_with(llama, '}"'), 3.0)
    sampling = SamplingParameters(temperature=1.0, logit_bias=bias)
    answer = await constrained(llama, json_object_constraint("response_format"), sampling=sampling, max_tokens=1000)
    assert isinstance(json.loads(answer.text), dict)
    assert answer.finish.eos_reason == "end_filter"


def pieces_with(container: ExllamaV3Container, letters: str) -> list[int]:
    pieces = container.tokenizer.get_id_to_piece_list(False)
    return [token for token, piece in enumerate(pieces) if piece and set(piece) <= set(letters)]


async def test_choices(llama: ExllamaV3Container) -> None:
    choices = ["yes", "no", 'no "way"\n', "是"]
    texts = {(await constrained(llama, choice_constraint(choices, "c"), seed=seed)).text for seed in range(12)}
    assert texts <= set(choices)
    assert len(texts) > 1


async def test_an_answer_that_is_cut_says_so(llama: ExllamaV3Container) -> None:
    answer = await constrained(llama, constraint("regex", "a{100}"), max_tokens=3)
    assert answer.finish.reason == "length"


async def test_an_answer_that_is_complete_with_its_last_token_is_not_cut(llama: ExllamaV3Container) -> None:
    whole = await constrained(llama, constraint("regex", "abc[0-9]"))
    answer = await constrained(llama, constraint("regex", "abc[0-9]"), max_tokens=whole.finish.usage.completion_tokens)
    assert answer.finish.reason == "stop"
    assert answer.finish.eos_reason == "end_filter"


async def test_several_constraints_hold_at_once(llama: ExllamaV3Container) -> None:
    answer = await constrained(llama, constraint("regex", "[a-m]{6}"), constraint("regex", "[h-z]+"))
    assert re.fullmatch("[h-m]{6}", answer.text)
    assert answer.finish.eos_reason == "end_filter"


async def test_with_drafts(tiny_llama: Path) -> None:
    draft = DraftModelConfig(draft_mode="ngram", draft_num_tokens=4, ngram_match_min=2)
    async with loaded(tiny_llama, draft_model=draft) as container:
        answer = await constrained(container, constraint("regex", "(abc ){12}"), prompt="abc abc abc abc abc abc")
        check = await constrained(container, constraint("json_schema", PERSON))
    assert answer.text == "abc " * 12
    assert answer.finish.usage.accepted_draft_tokens > 0
    check_person(check.text)


async def test_when_banned_strings_are_taken_back(llama: ExllamaV3Container) -> None:
    answer = await constrained(llama, constraint("regex", "([a-c] ){10}"), banned_strings=["a ", "b c"])
    assert re.fullmatch("([bc] ){10}", answer.text)
    assert "b c" not in answer.text


async def test_over_more_output_than_is_reserved_at_a_time(llama: ExllamaV3Container) -> None:
    answer = await constrained(llama, constraint("regex", "(-[a-z]){150}"), max_tokens=400)
    assert re.fullmatch("(-[a-z]){150}", answer.text)
    assert answer.finish.usage.completion_tokens > 256


async def test_a_healed_token_does_not_slip_past(llama: ExllamaV3Container) -> None:
    answer = await constrained(llama, constraint("regex", "[0-9]{3}"), token_healing=True)
    assert re.fullmatch("[0-9]{3}", answer.text)


async def test_no_control_token_stands_inside_a_string(llama: ExllamaV3Container) -> None:
    bias = dict.fromkeys(range(len(SPECIAL_TOKENS)), 50.0)
    answer = await constrained(
        llama,
        constraint("json_schema", {"type": "string", "minLength": 40, "maxLength": 60}),
        sampling=SamplingParameters(temperature=1.0, logit_bias=bias),
    )
    assert 40 <= len(json.loads(answer.text)) <= 60
    assert not set(answer.token_ids) & set(bias)


async def test_an_open_end_is_the_models_choice(llama: ExllamaV3Container) -> None:
    sampling = SamplingParameters(temperature=1.0, logit_bias={EOS_ID: 50.0})
    answer = await constrained(llama, constraint("regex", "ab*"), sampling=sampling)
    assert answer.text == "a"
    assert answer.finish.eos_reason == "stop_token"


@pytest.mark.parametrize(
    "fields", [{"sampling": SamplingParameters(temperature=0.0, ban_eos_token=True)}, {"min_tokens": 100}]
)
async def test_an_answer_that_may_not_end_goes_on_while_it_can(
    llama: ExllamaV3Container, fields: dict[str, Any]
) -> None:
    answer = await constrained(llama, constraint("regex", "(x |y |z ){0,20}"), **fields)
    assert len(answer.text) == 40
    assert answer.finish.reason == "stop"


async def test_a_complete_answer_ends_where_only_banned_tokens_could_follow(llama: ExllamaV3Container) -> None:
    banned = [EOS_ID, *pieces_with(llama, "b")]
    sampling = SamplingParameters(temperature=0.0, banned_tokens=banned)
    answer = await constrained(llama, constraint("regex", "ab*"), sampling=sampling)
    assert answer.text == "a"
    assert answer.finish.reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParameters(allowed_tokens=[300, 301])},
        {"constraints": [Constraint("regex", "[a-z]+", "p"), Constraint("regex", "[0-9]+", "q")]},
    ],
)
async def test_contradictions_end_one_request_and_leave_the_others(
    llama: ExllamaV3Container, fields: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"constraints": [Constraint("regex", "#{3}[a-z]+", "p")], "sampling": SAMPLED} | fields
    other = asyncio.create_task(constrained(llama, constraint("json_schema", PERSON), seed=3))
    with pytest.raises(InvalidRequest, match="every token is ruled out"):
        await answered(llama, "Ada", **request)
    check_person((await other).text)
    assert llama.generator is not None
    assert llama.generator.error is None


async def test_a_grammar_that_becomes_too_complex_ends_one_request(
    llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GrammarFilter._allowed
    steps = 0

    def failing(self: GrammarFilter) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            self._matchers[0].consume_token(EOS_ID)  # which is wrong here, and leaves the matcher in error
        return plain(self)

    monkeypatch.setattr(GrammarFilter, "_allowed", failing)
    with pytest.raises(InvalidRequest, match="no longer fits"):
        await constrained(llama, constraint("regex", "a{50}"))
    monkeypatch.undo()
    assert _compiled.cache_info().currsize == 0  # what went wrong is not kept for others
    assert (await constrained(llama, constraint("regex", "a{50}"))).text == "a" * 50


@pytest.mark.parametrize("text", ["start: <|unknown|>", "start: <[99999]>"])
def test_what_only_the_tokenizer_can_tell_is_refused_at_the_start(llama: ExllamaV3Container, text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        GrammarFilter(llama.tokenizer, [Constraint("lark", text, "grammar")], [EOS_ID], [])
    assert raised.value.param == "grammar"


async def test_a_grammar_may_name_control_tokens(llama: ExllamaV3Container) -> None:
    answer = await constrained(llama, constraint("lark", 'start: "a" <|im_start|> "b"'))
    assert answer.text == "a<|im_start|>b"


THINK = ("<think>", "</think>")


def special_tokens(container: ExllamaV3Container) -> dict[str, int]:
    return {token.text: token.token_id for token in container.encoder.control_tokens if token.special}


def after_thought(container: ExllamaV3Container, *, in_thought: bool) -> list[Constraint]:
    return answer_constraints(
        TagDialect(THINK, []),
        [constraint("regex", "[0-9]{4}")],
        None,
        in_thought=in_thought,
        special_tokens=special_tokens(container),
    )


async def test_a_thought_that_the_prompt_has_opened_is_free(llama: ExllamaV3Container) -> None:
    thoughts = Thoughts(dialect="tags", start=THINK[0], end=THINK[1], inside=True, budget=5)
    answer = await constrained(llama, *after_thought(llama, in_thought=True), prompt="Hm <think>", thoughts=thoughts)
    thought, tag, text = answer.text.partition("</think>")
    assert thought
    assert tag
    assert re.fullmatch(r"\s*[0-9]{4}", text)
    assert answer.finish.eos_reason == "end_filter"
    assert answer.finish.usage.reasoning_tokens >= 5


@pytest.mark.parametrize("opened", [True, False])
async def test_a_thought_that_the_model_opens_is_free(llama: ExllamaV3Container, opened: bool) -> None:
    likely = dict.fromkeys(pieces_with(llama, "<" if opened else "12"), 50.0)
    thoughts = Thoughts(dialect="tags", start=THINK[0], end=THINK[1], budget=9)
    answer = await constrained(
        llama,
        *after_thought(llama, in_thought=False),
        sampling=SamplingParameters(temperature=1.0, logit_bias=likely),
        thoughts=thoughts,
    )
    assert re.fullmatch(r"<think><+\s*</think>\s*[0-9]{4}" if opened else "[12]{4}", answer.text)
    assert answer.finish.eos_reason == "end_filter"


@pytest.mark.parametrize("seed", range(3))
async def test_a_model_that_knows_nothing_makes_the_call_that_it_has_to(llama: ExllamaV3Container, seed: int) -> None:
    format = format_named("hermes")
    assert format is not None
    tools = [Tool("save", PERSON), Tool("stop", {"type": "object", "additionalProperties": False})]
    dialect = TagDialect(None, [format])
    rules = CallRules(tools, required=True, many=False)
    constraints = answer_constraints(dialect, [], rules, in_thought=False, special_tokens=special_tokens(llama))
    answer = await constrained(llama, *constraints, seed=seed)
    parser = AnswerParser(dialect, ReadOptions(Tools(tools)))
    begin, *arguments, end = [*parser.feed(answer.text), *parser.end("complete")]
    assert isinstance(begin, CallBegin)
    assert end == CallEnd(complete=True)
    written = "".join(piece.text for piece in arguments if isinstance(piece, CallArguments))
    if begin.name == "save":
        check_person(written)
    else:
        assert json.loads(written) == {}
    assert answer.finish.eos_reason == "end_filter"


async def test_a_frame_is_part_of_what_is_compiled_once(llama: ExllamaV3Container) -> None:
    digits = constraint("regex", "[0-9]{2}")
    for open, close in ("()", "[]"):
        framed = msgspec.structs.replace(digits, frame=f'start: "{open}" @answer "{close}"')
        answer = await constrained(llama, framed)
        assert re.fullmatch(re.escape(open) + "[0-9]{2}" + re.escape(close), answer.text)
    assert re.fullmatch("[0-9]{2}", (await constrained(llama, digits)).text)


@pytest.fixture
def sentencepiece_llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """Its tokens carry the blank before a word, and the first of a text has one that decoding leaves out."""
    directory = tmp_path / "sentencepiece"
    shutil.copytree(tiny_llama, directory)
    sentencepiece_tokenizer().save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    return directory


async def test_blanks_of_a_sentencepiece_tokenizer_count(sentencepiece_llama: Path) -> None:
    async with loaded(sentencepiece_llama) as container:
        for seed in range(3):
            answer = await constrained(container, constraint("regex", "( ?[a-z]){20}"), seed=seed)
            assert re.fullmatch("( ?[a-z]){20}", answer.text)
            check_person((await constrained(container, constraint("json_schema", PERSON), seed=seed)).text)
