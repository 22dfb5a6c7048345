"""What each sampling parameter does to the tokens of the real engine, and what hostile ones cannot do to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import ValidationError

from backends.exllamav3.engine import CustomSampler, Tensor
from backends.exllamav3.model import ExllamaV3Container
from common.errors import InvalidRequest
from common.sampling import SamplingFields, SamplingParameters
from tests.containers import GREEDY, Answer, answered, loaded, raw_text
from tests.models import BOS_ID, EOS_ID, VOCABULARY

PROMPT = [5 + i * 7 % 900 for i in range(40)]
PLAIN = SamplingParameters()
LIKELY, UNLIKELY = 300, 301


def two(**parameters: Any) -> SamplingParameters:
    """Only two tokens are left, and one is more likely: 0.97 against 0.03 or so."""
    return SamplingParameters(allowed_tokens=[LIKELY, UNLIKELY], logit_bias={LIKELY: 4.0}, **parameters)


async def tokens(container: ExllamaV3Container, sampling: SamplingParameters, **fields: Any) -> list[int]:
    return (await answered(container, fields.pop("prompt", PROMPT), sampling=sampling, **fields)).token_ids


# --- the shape of the distribution ----------------------------------------------------------------------------------


async def test_temperature_decides_between_the_likeliest_and_any(llama: ExllamaV3Container) -> None:
    greedy = await tokens(llama, GREEDY)
    assert await tokens(llama, SamplingParameters(temperature=1e-40)) == greedy
    assert await tokens(llama, SamplingParameters(temperature=1e-3), seed=1) == greedy
    assert await tokens(llama, SamplingParameters(temperature=2.0), seed=1) != greedy


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}], ids=str)
async def test_the_narrowest_truncation_leaves_the_likeliest(
    llama: ExllamaV3Container, sampling: dict[str, Any]
) -> None:
    assert await tokens(llama, SamplingParameters(temperature=5.0, **sampling)) == await tokens(llama, GREEDY)


async def test_top_k_beyond_the_vocabulary_and_minus_one_are_off(llama: ExllamaV3Container) -> None:
    plain = await tokens(llama, PLAIN, seed=1)
    assert await tokens(llama, SamplingParameters(top_k=2**31 - 1), seed=1) == plain
    assert await tokens(llama, SamplingFields.model_validate({"top_k": -1}).parameters(), seed=1) == plain
    assert await tokens(llama, SamplingParameters(top_k=2), seed=1) != plain


async def test_temperature_last_truncates_what_the_model_says(llama: ExllamaV3Container) -> None:
    """The likeliest token has about 2 %, and as much as fifteen others once the temperature has flattened it."""
    flat = SamplingParameters(temperature=10.0, top_p=0.01)
    greedy = await tokens(llama, GREEDY)
    assert await tokens(llama, replace(flat, temperature_last=True), seed=1) == greedy
    assert await tokens(llama, flat, seed=1) != greedy


async def test_xtc_excludes_the_top_choice(llama: ExllamaV3Container) -> None:
    assert LIKELY in await tokens(llama, two(), seed=1)
    excluding = two(xtc_probability=1.0, xtc_threshold=1e-4)
    assert await tokens(llama, excluding, seed=1) == [UNLIKELY] * 8
    assert await tokens(llama, replace(excluding, xtc_threshold=0.0), seed=1) == [UNLIKELY] * 8
    alone = replace(excluding, allowed_tokens=[LIKELY], xtc_threshold=0.0)  # what is banned is no choice
    assert await tokens(llama, alone, seed=1) == [LIKELY] * 8
    assert LIKELY in await tokens(llama, replace(excluding, xtc_threshold=0.5), seed=1)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_adaptive_p_aims_at_a_probability(llama: ExllamaV3Container, temperature: float) -> None:
    sampling = two(temperature=temperature)
    low = await tokens(llama, replace(sampling, adaptive_target=0.02), seed=1, max_tokens=24)
    high = await tokens(llama, replace(sampling, adaptive_target=0.98), seed=1, max_tokens=24)
    assert low.count(UNLIKELY) > 12 > high.count(UNLIKELY)


async def test_a_negative_target_switches_adaptive_p_off(llama: ExllamaV3Container) -> None:
    for target in (-1.0, -1e308, 1.0, 1e308):
        assert await tokens(llama, SamplingParameters(adaptive_target=target), seed=1) == await tokens(
            llama, PLAIN, seed=1
        )


# --- penalties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
async def test_penalties_keep_from_repeating_and_negative_ones_make_repeat(
    llama: ExllamaV3Container, penalty: str
) -> None:
    def with_penalty(value: float, **parameters: Any) -> SamplingParameters:
        return replace(GREEDY, **({penalty: value} | parameters))

    repeating = await tokens(llama, with_penalty(-1000.0), prompt=[LIKELY])
    assert set(repeating) <= {LIKELY, BOS_ID}
    varied = await tokens(llama, with_penalty(1000.0), max_tokens=24)
    assert len(set(varied)) == 24
    assert not set(varied) & set(PROMPT)
    out_of_range = with_penalty(-1000.0, penalty_range=1)
    assert await tokens(llama, out_of_range, prompt=[LIKELY, UNLIKELY]) == [UNLIKELY] * 8
    assert await tokens(llama, with_penalty(1000.0, penalty_range=0)) == await tokens(llama, GREEDY)


async def test_a_penalty_fades_over_its_decay(llama: ExllamaV3Container) -> None:
    sampling = SamplingParameters(
        temperature=0.0, allowed_tokens=[LIKELY, UNLIKELY], logit_bias={LIKELY: 50.0}, presence_penalty=100.0
    )
    prompt = [LIKELY, *[500] * 10]
    assert (await tokens(llama, sampling, prompt=prompt, max_tokens=1)) == [UNLIKELY]
    assert (await tokens(llama, replace(sampling, penalty_range=1), prompt=prompt, max_tokens=1)) == [LIKELY]
    fading = replace(sampling, penalty_range=1, repetition_decay=12)  # a penalty of 17 is left
    assert (await tokens(llama, fading, prompt=prompt, max_tokens=1)) == [LIKELY]
    fading = replace(sampling, penalty_range=1, repetition_decay=100)  # of 90
    assert (await tokens(llama, fading, prompt=prompt, max_tokens=1)) == [UNLIKELY]


async def test_repetition_penalty(llama: ExllamaV3Container) -> None:
    sampling = SamplingParameters(temperature=0.0, allowed_tokens=[LIKELY, UNLIKELY], logit_bias={LIKELY: 50.0})
    assert (await tokens(llama, sampling, prompt=[LIKELY], max_tokens=1)) == [LIKELY]
    punished = replace(sampling, repetition_penalty=100.0, logit_bias={LIKELY: 50.0, UNLIKELY: 30.0})
    assert (await tokens(llama, punished, prompt=[LIKELY], max_tokens=1)) == [UNLIKELY]
    rewarded = replace(sampling, repetition_penalty=0.01, logit_bias={LIKELY: 30.0, UNLIKELY: 50.0})
    assert (await tokens(llama, rewarded, prompt=[LIKELY], max_tokens=1)) == [LIKELY]


async def test_dry_breaks_a_repetition_unless_a_breaker_stands_in_it(llama: ExllamaV3Container) -> None:
    first, second, third = 400, 401, LIKELY
    fields: dict[str, Any] = {"prompt": [*[first, second, third] * 6, first, second], "max_tokens": 1}
    copying = SamplingParameters(temperature=0.0, allowed_tokens=[third, UNLIKELY], logit_bias={third: 50.0})
    assert await tokens(llama, copying, **fields) == [third]
    dry = replace(copying, dry_multiplier=100.0, dry_sequence_breakers=["\x00"])
    assert await tokens(llama, dry, **fields) == [UNLIKELY]
    assert await tokens(llama, replace(dry, dry_allowed_length=30), **fields) == [third]
    assert await tokens(llama, replace(dry, dry_range=2), **fields) == [third]
    assert await tokens(llama, replace(dry, dry_base=0.0), **fields) == [third]  # below 1 it is off
    piece = llama.tokenizer.get_id_to_piece_list(True)[second]
    assert await tokens(llama, replace(dry, dry_sequence_breakers=[piece]), **fields) == [third]


# --- which tokens ---------------------------------------------------------------------------------------------------


async def test_bias_bans_and_allowed_tokens(llama: ExllamaV3Container) -> None:
    greedy = await tokens(llama, GREEDY)
    assert await tokens(llama, replace(GREEDY, logit_bias={LIKELY: 1000.0})) == [LIKELY] * 8
    for limits in ({"logit_bias": {greedy[0]: -1000.0}}, {"banned_tokens": [greedy[0]]}):
        assert greedy[0] not in await tokens(llama, replace(GREEDY, **limits))
    assert set(await tokens(llama, replace(PLAIN, allowed_tokens=[7, 8, 9]), seed=1)) <= {7, 8, 9}


@pytest.mark.parametrize(
    "given_tokens",
    [
        {"stop_tokens": [1_000_000], "min_tokens": 3},
        {"sampling": SamplingParameters(temperature=0.0, logit_bias={1_000_000: 1.0})},
        {"sampling": SamplingParameters(temperature=0.0, banned_tokens=[1_000_000])},
        {"sampling": SamplingParameters(temperature=0.0, allowed_tokens=[*range(VOCABULARY), 1_000_000])},
    ],
)
async def test_token_ids_of_another_model_change_nothing(
    llama: ExllamaV3Container, given_tokens: dict[str, Any]
) -> None:
    """Clients send fixed lists of them. The engine must not meet them: it would end for every request."""
    assert (await answered(llama, PROMPT, **given_tokens)).token_ids == await tokens(llama, GREEDY)


ENDING = SamplingParameters(temperature=0.0, logit_bias={EOS_ID: 1000.0})


async def test_stop_tokens_wait_for_min_tokens(llama: ExllamaV3Container) -> None:
    ended = await answered(llama, PROMPT, sampling=ENDING)
    assert (ended.text, ended.token_ids, ended.finish.eos_reason) == ("", [], "stop_token")
    later = await answered(llama, PROMPT, sampling=ENDING, min_tokens=5)
    assert len(later.token_ids) == 5
    assert later.finish.eos_reason == "stop_token"
    beyond = await answered(llama, PROMPT, sampling=ENDING, min_tokens=2**31 - 1)  # more than there is room for
    assert (len(beyond.token_ids), beyond.finish.reason) == (8, "length")


async def test_a_banned_end_does_not_come(llama: ExllamaV3Container) -> None:
    answer = await answered(llama, PROMPT, sampling=replace(ENDING, ban_eos_token=True))
    assert (len(answer.token_ids), answer.finish.reason) == (8, "length")


async def test_a_loop_ends_the_answer(llama: ExllamaV3Container) -> None:
    looping = replace(GREEDY, logit_bias={LIKELY: 1000.0}, loop_detect_window=12)
    answer = await answered(llama, PROMPT, sampling=looping, max_tokens=20)
    assert (len(answer.token_ids), answer.finish.eos_reason) == (12, "loop_detected")
    for window in (0, 1, 2, 13, 10**9):
        answer = await answered(llama, PROMPT, sampling=replace(looping, loop_detect_window=window), max_tokens=12)
        assert (len(answer.token_ids), answer.finish.eos_reason) == (12, "max_new_tokens")


# --- token healing --------------------------------------------------------------------------------------------------


def growing_pair(container: ExllamaV3Container) -> tuple[int, int, str]:
    """A token, a longer one that begins like it, and what that adds."""
    pieces = container.tokenizer.get_id_to_piece_list(True)
    return pieces.index(" fo"), pieces.index(" forest"), "rest"


async def test_healing_samples_the_last_token_again(llama: ExllamaV3Container) -> None:
    short, long, rest = growing_pair(llama)
    sampling = replace(GREEDY, logit_bias={long: 1000.0})
    fields: dict[str, Any] = {"sampling": sampling, "max_tokens": 2, "logprobs": 1}
    plain = await answered(llama, [*PROMPT, short], **fields)
    assert plain.text.startswith(" forest")
    healed = await answered(llama, [*PROMPT, short], token_healing=True, **fields)
    assert healed.text == rest + " forest" * 2
    assert healed.token_ids == [long] * 3
    assert [entry.raw.decode() for entry in healed.logprobs] == [rest, " forest", " forest"]
    assert healed.finish.usage.prompt_tokens == len(PROMPT) + 1
    assert healed.prefills[-1].done_tokens == len(PROMPT) + 1


async def test_text_after_a_healed_token_that_waits_for_the_next(llama: ExllamaV3Container) -> None:
    """The engine decodes held tokens together, and then has the healed part of the prompt in the answer as well."""
    short, long, rest = growing_pair(llama)
    half = 100  # the first byte of a character
    sampling = replace(GREEDY, logit_bias={long: 1000.0, half: 900.0}, frequency_penalty=1000.0, penalty_range=2)
    fields: dict[str, Any] = {"sampling": sampling, "max_tokens": 1, "logprobs": 1, "stop_strings": [rest + "!"]}
    answer = await answered(llama, [*PROMPT, short], token_healing=True, **fields)
    assert answer.token_ids == [long, half]
    assert answer.text == rest + "\ufffd" == raw_text(answer.logprobs)


@pytest.mark.parametrize("prompt", [[300], [300, EOS_ID], [300, 100]], ids=["one token", "control token", "half"])
async def test_a_last_token_that_cannot_be_healed_stays(llama: ExllamaV3Container, prompt: list[int]) -> None:
    assert "\ufffd" in llama.tokenizer.get_id_to_piece_list(True)[100]
    plain, healing = [await answered(llama, prompt, token_healing=healed, logprobs=0) for healed in (False, True)]
    assert healing.token_ids == plain.token_ids
    assert raw_text(healing.logprobs) == healing.text == plain.text


# --- nothing left to sample, and what cannot be done ----------------------------------------------------------------


async def serves_on(container: ExllamaV3Container) -> bool:
    return not container.broken() and len((await answered(container, PROMPT, max_tokens=2)).token_ids) == 2


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParameters(allowed_tokens=[5], banned_tokens=[5]), "allowed_tokens"),
        (SamplingParameters(allowed_tokens=[EOS_ID], ban_eos_token=True), "allowed_tokens"),
        (SamplingParameters(banned_tokens=list(range(VOCABULARY))), "banned_tokens"),
    ],
)
async def test_a_request_that_may_sample_no_token_is_refused(
    llama: ExllamaV3Container, sampling: SamplingParameters, param: str
) -> None:
    with pytest.raises(InvalidRequest, match="no token") as raised:
        await answered(llama, PROMPT, sampling=sampling)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParameters(allowed_tokens=[EOS_ID]), "min_tokens": 2},
        {"sampling": SamplingParameters(allowed_tokens=[600, 601]), "banned_strings": list("0123456789")},
        {"sampling": SamplingParameters(allowed_tokens=[601], temperature=0.0), "token_healing": True},
    ],
    ids=["min_tokens", "banned_strings", "token_healing"],
)
async def test_an_answer_with_no_token_left_on_its_way_ends_alone(
    llama: ExllamaV3Container, fields: dict[str, Any]
) -> None:
    pieces = llama.tokenizer.get_id_to_piece_list(True)
    assert all(piece.isdigit() for piece in (pieces[600], pieces[601]))
    with pytest.raises(InvalidRequest, match="every token is ruled out"):
        await answered(llama, PROMPT, **fields)
    assert await serves_on(llama)


async def test_banned_strings_that_the_answer_keeps_running_into_end_it(
    llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.exllamav3.generation.MOST_REWINDS", 20)
    with pytest.raises(InvalidRequest, match="banned strings") as raised:
        await answered(llama, PROMPT, banned_strings=[chr(code) for code in range(0x21, 0x7F)])
    assert raised.value.param == "banned_strings"
    assert await serves_on(llama)


async def test_banned_strings_too_long_for_a_sliding_window_are_refused(tiny_sliding: Path) -> None:
    async with loaded(tiny_sliding) as container:
        with pytest.raises(InvalidRequest, match="Banned string"):
            await answered(container, PROMPT, banned_strings=["the river " * 400])
        assert await serves_on(container)


async def test_a_step_that_fails_ends_its_own_request(
    llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CustomSampler, logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
        raise ArithmeticError("a step of the chain")

    with monkeypatch.context() as patch:
        patch.setattr(CustomSampler, "forward", fail)
        with pytest.raises(ArithmeticError, match="a step of the chain"):
            await answered(llama, PROMPT)
    assert await serves_on(llama)


# --- anything that a client may send --------------------------------------------------------------------------------

WILD = st.floats(allow_nan=False, allow_infinity=False)
TOKENS = st.lists(st.integers(0, 2 * VOCABULARY), max_size=5)
COUNTS = st.sampled_from([0, 1, 2, 3, 255, 2**31 - 1])
FRACTIONS = st.sampled_from([0.0, 1e-45, 1e-9, 0.1, 0.5, 1.0])
BIASES = st.sampled_from([-1000.0, -2.0, 0.0, 1e-45, 2.0, 1000.0])
HOSTILE = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-45, 1e-5, 1.0, 10.0]),
        "temperature_last": st.booleans(),
        "top_k": st.sampled_from([-1, 0, 1, 5, VOCABULARY, 2**31 - 1]),
        "top_p": FRACTIONS,
        "min_p": FRACTIONS,
        "xtc_probability": FRACTIONS,
        "xtc_threshold": FRACTIONS,
        "repetition_penalty": st.sampled_from([0.01, 1.0, 1.2, 100.0]),
        "frequency_penalty": BIASES,
        "presence_penalty": BIASES,
        "penalty_range": st.one_of(COUNTS, st.just(-(2**31) + 1)),
        "repetition_decay": COUNTS,
        "dry_multiplier": st.sampled_from([0.0, 1e-45, 0.8, 1000.0]),
        "dry_base": st.sampled_from([0.0, 1.0, 1.0000001, 1.75, 1000.0]),
        "dry_allowed_length": COUNTS,
        "dry_range": COUNTS,
        "dry_sequence_breakers": st.lists(st.text(max_size=3), max_size=3),
        "adaptive_target": st.one_of(FRACTIONS, WILD),
        "adaptive_decay": FRACTIONS,
        "logit_bias": st.dictionaries(st.integers(0, 2 * VOCABULARY), BIASES, max_size=4),
        "banned_tokens": TOKENS,
        "allowed_tokens": TOKENS,
        "ban_eos_token": st.booleans(),
        "loop_detect_window": COUNTS,
        "min_tokens": COUNTS,
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(st.one_of(st.text(max_size=3), st.integers(0, 2 * VOCABULARY)), max_size=3),
        "banned_strings": st.lists(st.one_of(st.text(max_size=2), st.just("long " * 5000)), max_size=3),
        "token_healing": st.booleans(),
        "logprobs": st.integers(0, 3),
    },
)


async def hostile(container: ExllamaV3Container, body: dict[str, Any], prompt: list[int]) -> Answer | None:
    """None where it is refused, by validation or by the engine; every other error fails the test."""
    try:
        fields = SamplingFields.model_validate(body)
        return await answered(
            container,
            prompt,
            sampling=fields.parameters(),
            max_tokens=6,
            min_tokens=fields.min_tokens,
            seed=fields.seed,
            stop_strings=fields.stop_strings,
            stop_tokens=fields.stop_tokens,
            banned_strings=fields.banned_strings,
            token_healing=fields.token_healing,
            logprobs=body.get("logprobs"),
        )
    except (ValidationError, InvalidRequest):
        return None


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=HOSTILE, prompt=st.sampled_from([[300], [300, 301], PROMPT, [7] * 300]))
async def test_any_request_ends_and_leaves_the_engine_to_others(
    llama: ExllamaV3Container, body: dict[str, Any], prompt: list[int]
) -> None:
    answer = await hostile(llama, body, prompt)
    if answer is not None:
        assert answer.finish.reason in ("stop", "length")
        if "logprobs" in body:
            assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
            assert raw_text(answer.logprobs) == answer.text
            assert all(-200000 < entry.logprob <= 0 for entry in answer.logprobs)
    assert await serves_on(llama)
