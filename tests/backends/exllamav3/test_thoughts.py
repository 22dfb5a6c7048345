"""Thoughts of the real engine: every token counted, and ended where their budget is spent."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.engine import Job
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.generation import Constraint, Thoughts
from common.parsing.dialect import CallRules
from common.parsing.formats.base import Tool
from common.parsing.grammar import answer_constraints
from common.parsing.thoughts import ThoughtTracker, dialect_of, ending
from common.sampling import SamplingParameters
from tests.backends.exllamav3.test_generation import PROMPT, assert_logprobs_of_the_model, of_words, words
from tests.containers import Answer, answered, loaded
from tests.models import EOS_ID

MESSAGE = "\nEnough.\n"
THOUGHTS = Thoughts(dialect="tags", start="<think>", end="</think>", inside=True)
# Of the tiny models' vocabulary; the tags above are text to them.
CONTROL_TAGS = Thoughts(dialect="tags", start="<s>", end="</s>", inside=True)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
HOT = SamplingParameters(temperature=1.5, ban_eos_token=True)


def with_budget(budget: int, thoughts: Thoughts = THOUGHTS, **fields: Any) -> Thoughts:
    known = {name: getattr(thoughts, name) for name in thoughts.__struct_fields__}
    return Thoughts(**(known | {"budget": budget, "message": MESSAGE} | fields))


def ending_of(container: ExllamaV3Container, thoughts: Thoughts) -> list[int]:
    return container.encode(ending(thoughts), add_bos=False, encode_special_tokens=True)


def counted(container: ExllamaV3Container, answer: Answer, end: str = "</think>") -> int:
    """Tokens of a thought with which the answer begins: all up to the one that completes the tag."""
    texts = (container.decode(answer.token_ids[:length], decode_special_tokens=True) for length in range(1, 1000))
    return next((index for index, text in enumerate(texts) if end in text), len(answer.token_ids))


# --- counting -------------------------------------------------------------------------------------------------------


async def test_a_thought_that_never_ends_is_all_of_the_answer(llama: ExllamaV3Container) -> None:
    fields: dict[str, Any] = {"sampling": of_words(llama), "max_tokens": 6}
    assert (await answered(llama, PROMPT, thoughts=THOUGHTS, **fields)).finish.usage.reasoning_tokens == 6
    assert (await answered(llama, PROMPT, **fields)).finish.usage.reasoning_tokens == 0


async def test_a_stop_token_is_no_part_of_a_thought(llama: ExllamaV3Container) -> None:
    sampling = of_words(llama, logit_bias={EOS_ID: 1000.0})
    sampling.allowed_tokens.append(EOS_ID)
    answer = await answered(llama, PROMPT, thoughts=with_budget(8), sampling=sampling, min_tokens=3)
    assert answer.finish.eos_reason == "stop_token"
    assert answer.finish.usage.reasoning_tokens == len(answer.token_ids) == 3
    assert answer.finish.usage.completion_tokens == 4


async def test_tokens_of_a_thought_within_a_constrained_text(llama: ExllamaV3Container) -> None:
    text = "So:\n<think>one two</think> three"
    answer = await answered(
        llama, PROMPT, thoughts=with_budget(100, inside=False), constraints=[Constraint("regex", text, "regex")],
        max_tokens=100,
    )  # fmt: skip
    assert answer.text == text
    pieces = [llama.decode(answer.token_ids[:n], decode_special_tokens=True) for n in range(1, 101)]
    inside = [piece for piece in pieces[: len(answer.token_ids)] if "<think>" in piece and "</think>" not in piece]
    assert answer.finish.usage.reasoning_tokens == len(inside) > 2


async def test_a_healed_token_counts_as_one_of_the_prompt(llama: ExllamaV3Container) -> None:
    fields: dict[str, Any] = {"sampling": of_words(llama), "max_tokens": 4, "token_healing": True}
    answer = await answered(llama, [*PROMPT, words(llama)[0]], thoughts=THOUGHTS, **fields)
    assert len(answer.token_ids) == 5
    usage = answer.finish.usage
    assert usage.reasoning_tokens == usage.completion_tokens == 4


# --- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thoughts", [THOUGHTS, CONTROL_TAGS], ids=["text", "control"])
@pytest.mark.parametrize("budget", [0, 1, 5])
async def test_a_thought_ends_at_its_budget_and_the_answer_goes_on(
    llama: ExllamaV3Container, budget: int, thoughts: Thoughts
) -> None:
    fields: dict[str, Any] = {"sampling": of_words(llama), "max_tokens": 40}
    thoughts = with_budget(budget, thoughts)
    plain = await answered(llama, PROMPT, **fields)
    answer = await answered(llama, PROMPT, thoughts=thoughts, **fields)
    end = ending_of(llama, thoughts)
    assert answer.token_ids[:budget] == plain.token_ids[:budget]
    assert answer.token_ids[budget : budget + len(end)] == end
    rest = answer.token_ids[budget + len(end) :]
    assert rest
    assert set(rest) <= set(words(llama))
    assert answer.finish.usage.reasoning_tokens == counted(llama, answer, thoughts.end)
    assert answer.finish.usage.completion_tokens == len(answer.token_ids) == 40


@pytest.mark.parametrize("dialect", ["harmony", "glimmer"])
async def test_channels_end_as_their_models_end_them(llama: ExllamaV3Container, dialect: Any) -> None:
    thoughts = Thoughts(dialect=dialect, inside=True, budget=3, message=MESSAGE)
    answer = await answered(llama, PROMPT, thoughts=thoughts, sampling=of_words(llama), max_tokens=100)
    end = ending_of(llama, thoughts)
    assert answer.token_ids[3 : 3 + len(end)] == end
    tracker = ThoughtTracker(thoughts)
    tracker.feed(answer.text.encode())
    assert not tracker.thinking


async def test_the_model_opens_thoughts_and_the_second_has_what_is_left(llama: ExllamaV3Container) -> None:
    opening = Constraint("regex", r"<think>[^<]*</think>\n\nyes<think>(?s:.*)", "regex")
    thoughts = with_budget(4, inside=False)
    sampling = of_words(llama)
    sampling.allowed_tokens.extend(llama.encode("<think>yes", add_bos=False, encode_special_tokens=True))
    answer = await answered(
        llama, PROMPT, thoughts=thoughts, constraints=[opening], sampling=sampling, max_tokens=120, logprobs=0
    )
    end = ending(thoughts)
    _, first, second = answer.text.split("<think>")
    assert first.endswith(f"{end}yes")
    assert second.startswith(end)
    thought = llama.encode(first.removesuffix(f"{end}yes"), add_bos=False, encode_special_tokens=True)
    assert 1 <= len(thought) <= 3  # of four tokens, the first is that of the tag


async def test_the_limit_of_tokens_may_cut_the_ending(llama: ExllamaV3Container) -> None:
    thoughts = with_budget(3)
    answer = await answered(llama, PROMPT, thoughts=thoughts, sampling=of_words(llama), max_tokens=5)
    assert answer.token_ids[3:] == ending_of(llama, thoughts)[:2]
    assert answer.finish.reason == "length"
    assert answer.finish.usage.reasoning_tokens == 5


async def test_a_stop_string_in_the_message_ends_the_answer(llama: ExllamaV3Container) -> None:
    answer = await answered(
        llama, PROMPT, thoughts=with_budget(2), sampling=of_words(llama), max_tokens=60, stop_strings=["nough"]
    )
    assert answer.text.endswith("\nE")
    assert (answer.finish.reason, answer.finish.stop_sequence) == ("stop", "nough")


async def test_no_token_is_healed_beside_a_budget(llama: ExllamaV3Container) -> None:
    fields: dict[str, Any] = {"thoughts": with_budget(2), "sampling": of_words(llama), "max_tokens": 30}
    prompt = [*PROMPT, words(llama)[0]]
    healed = await answered(llama, prompt, token_healing=True, **fields)
    assert healed.token_ids == (await answered(llama, prompt, **fields)).token_ids


async def test_the_prompt_may_be_a_text(llama: ExllamaV3Container) -> None:
    answer = await answered(
        llama, "Why?<think>", thoughts=with_budget(0), sampling=of_words(llama), max_tokens=40, echo=True
    )
    assert answer.text.startswith(ending(with_budget(0)))


# --- before a constrained answer ------------------------------------------------------------------------------------


def special_tokens(container: ExllamaV3Container) -> dict[str, int]:
    return {token.text: token.token_id for token in container.info().control_tokens if token.special}


@pytest.mark.parametrize("thoughts", [THOUGHTS, CONTROL_TAGS], ids=["text", "control"])
@pytest.mark.parametrize("draft", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_json_after_a_thought_that_was_ended(tiny_llama: Path, thoughts: Thoughts, draft: bool) -> None:
    draft_model = DraftModelConfig(draft_mode="ngram") if draft else None
    async with loaded(tiny_llama, draft_model=draft_model) as container:
        thoughts = with_budget(5, thoughts)
        constraints = answer_constraints(
            dialect_of(thoughts), [Constraint("json_schema", json.dumps(SCHEMA), "response_format")], None,
            in_thought=True, special_tokens=special_tokens(container),
        )  # fmt: skip
        prompt = [300, 301, 301] * 60
        answer = await answered(container, prompt, thoughts=thoughts, constraints=constraints, max_tokens=250)
        thought, content = answer.text.split(ending(thoughts))
        assert answer.finish.reason == "stop"
        assert json.loads(content) in ({"ok": True}, {"ok": False})
        assert container.encode(thought, add_bos=False, encode_special_tokens=True)
        assert answer.finish.usage.reasoning_tokens == counted(container, answer, thoughts.end)


async def test_blanks_after_the_tag_are_left_out_where_there_is_no_room(llama: ExllamaV3Container) -> None:
    constraint = Constraint("regex", r"[^<]*</think>yes", "regex")
    answer = await answered(llama, PROMPT, thoughts=with_budget(3), constraints=[constraint], max_tokens=60)
    assert answer.text.endswith(MESSAGE + "</think>yes")
    assert answer.finish.reason == "stop"


async def test_a_required_call_follows_a_thought_that_was_ended(llama: ExllamaV3Container) -> None:
    """What ends a thought leads to text for the user, and is left as soon as the call leads elsewhere."""
    thoughts = Thoughts(dialect="harmony", inside=True, budget=3, message=MESSAGE)
    calls = CallRules([Tool("ls", {"properties": {"all": {"type": "boolean"}}, "required": ["all"]})], True, False)
    constraints = answer_constraints(
        dialect_of(thoughts), [], calls, in_thought=True, special_tokens=special_tokens(llama)
    )
    (letter,) = llama.encode("c", add_bos=False, encode_special_tokens=True)
    sampling = SamplingParameters(temperature=0.0, logit_bias={letter: 1000.0})  # into the channel of calls
    answer = await answered(
        llama, PROMPT, thoughts=thoughts, constraints=constraints, sampling=sampling, max_tokens=250
    )
    _, call = answer.text.split(MESSAGE + "<|end|><|start|>assistant")
    assert re.match(r"<\|channel\|>commentary to=functions.ls <\|constrain\|>json<\|message\|>\{\s*\"all\"", call)


# --- beside everything else that a request may ask for --------------------------------------------------------------


async def test_every_token_of_the_ending_has_its_log_probability(llama: ExllamaV3Container) -> None:
    answer = await answered(llama, PROMPT, thoughts=with_budget(4), logprobs=3, sampling=of_words(llama), max_tokens=40)
    assert_logprobs_of_the_model(llama, PROMPT, answer)


@pytest.mark.parametrize("logprobs", [pytest.param(None, marks=pytest.mark.slow), 1])
async def test_drafts_change_nothing(tiny_llama: Path, logprobs: int | None) -> None:
    prompt = [300, 301, 301] * 60
    fields: dict[str, Any] = {
        "thoughts": with_budget(16), "sampling": SamplingParameters(allowed_tokens=[300, 301]),
        "seed": 3, "max_tokens": 60, "logprobs": logprobs,
    }  # fmt: skip
    async with loaded(tiny_llama) as container:
        plain = await answered(container, prompt, **fields)
    async with loaded(tiny_llama, draft_model=DraftModelConfig(draft_mode="ngram")) as container:
        drafted = await answered(container, prompt, **fields)
        end = ending_of(container, with_budget(16))
        assert drafted.finish.usage.accepted_draft_tokens > 0
        assert drafted.finish.usage.rejected_draft_tokens > 0
        assert drafted.token_ids == plain.token_ids
        assert drafted.token_ids[16 : 16 + len(end)] == end
        assert drafted.finish.usage.reasoning_tokens == plain.finish.usage.reasoning_tokens
        assert plain.finish.usage.reasoning_tokens == counted(container, plain)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_hybrid"])
async def test_strings_taken_back_do_not_count(request: pytest.FixtureRequest, model: str) -> None:
    async with loaded(request.getfixturevalue(model)) as container:
        fields: dict[str, Any] = {"sampling": of_words(container), "max_tokens": 60, "logprobs": 0}
        plain = await answered(container, PROMPT, thoughts=with_budget(8), **fields)
        # One that ends in the thought, one that the ending holds, and one that the ending begins.
        banned = [plain.text[3:12], "ough", "</think>"]
        answer = await answered(container, PROMPT, thoughts=with_budget(8), banned_strings=banned, **fields)
        assert banned[0].lower() not in answer.text.lower()
        end = ending_of(container, with_budget(8))
        assert answer.token_ids[8 : 8 + len(end)] == end
        assert answer.finish.usage.reasoning_tokens == counted(container, answer)
        assert len(answer.token_ids) == 60
        assert_logprobs_of_the_model(container, PROMPT, answer)


async def test_strings_are_banned_again_after_the_ending(llama: ExllamaV3Container) -> None:
    fields: dict[str, Any] = {"thoughts": with_budget(3), "sampling": of_words(llama), "max_tokens": 40}
    plain = await answered(llama, PROMPT, **fields)
    start = plain.text.index("</think>") + len("</think>\n\n")
    banned = plain.text[start + 3 : start + 12]
    answer = await answered(llama, PROMPT, banned_strings=[banned], **fields)
    assert answer.text[:start] == plain.text[:start]
    assert banned.lower() not in answer.text.lower()


async def test_a_thought_ends_across_a_new_reservation(
    llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[int] = []
    prepare_for_requeue = Job.prepare_for_requeue

    def requeue(job: Job) -> Job:
        requeued.append(len(job.sequences[0].sequence_ids))
        return prepare_for_requeue(job)

    monkeypatch.setattr(Job, "prepare_for_requeue", requeue)
    prompt = [5 + i * 11 % 900 for i in range(257)]
    thoughts = with_budget(253)
    fields: dict[str, Any] = {"sampling": HOT, "seed": 5, "max_tokens": 290, "banned_strings": ["Enough"]}
    answer = await answered(llama, prompt, thoughts=thoughts, logprobs=0, **fields)
    end = ending_of(llama, thoughts)
    (at,) = requeued
    assert 257 + 253 < at < 257 + 253 + len(end)
    assert answer.token_ids[253 : 253 + len(end)] == end
    assert len(answer.token_ids) == 290
    assert answer.finish.usage.reasoning_tokens == counted(llama, answer)
    assert_logprobs_of_the_model(llama, prompt, answer)


async def test_equal_seeds_give_equal_texts_whatever_else_runs(llama: ExllamaV3Container) -> None:
    async def one(seed: int, budget: int) -> list[int]:
        fields: dict[str, Any] = {"sampling": HOT, "max_tokens": 40}
        return (await answered(llama, PROMPT, seed=seed, thoughts=with_budget(budget), **fields)).token_ids

    alone = [await one(1, 6), await one(1, 9)]
    crowded = await asyncio.gather(one(1, 6), one(1, 9), one(2, 3))
    assert list(crowded) == [*alone, await one(2, 3)]
    assert alone[0][:6] == alone[1][:6]


async def test_what_goes_wrong_reaches_its_own_request_only(
    llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = ThoughtTracker.feed

    def fail(tracker: ThoughtTracker, raw: bytes, **options: Any) -> None:
        if tracker._budget == 7 and raw:
            raise RuntimeError("a defect of ours")
        feed(tracker, raw, **options)

    monkeypatch.setattr(ThoughtTracker, "feed", fail)
    fields: dict[str, Any] = {"sampling": of_words(llama), "max_tokens": 30}
    other = asyncio.create_task(answered(llama, PROMPT, thoughts=with_budget(2), **fields))
    with pytest.raises(RuntimeError, match="a defect of ours"):
        await answered(llama, PROMPT, thoughts=with_budget(7), **fields)
    assert "</think>" in (await other).text
