"""One request over the real engine: what it says of its tokens, its prompt, its progress and its end."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.exllamav3.engine import Job, token_tensor
from backends.exllamav3.generation import cut_to_length
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.errors import Unsupported
from common.sampling import SamplingParameters
from tests.containers import Answer, answered, loaded, raw_text
from tests.logits import reference_logits
from tests.models import EOS_ID, VOCABULARY

PROMPT = [5 + i * 7 % 900 for i in range(40)]
BYTE_TOKENS = list(range(5, 261))  # the alphabet of the tiny models' vocabulary
# Far from neutral in everything that could colour a log-probability.
COLOURED = SamplingParameters(
    temperature=0.5, top_k=40, top_p=0.9, logit_bias={9: 3.0}, repetition_penalty=1.3, presence_penalty=-1.0
)


def words(container: ExllamaV3Container) -> list[int]:
    """Tokens that are letters only."""
    pieces = container.tokenizer.get_id_to_piece_list(True)
    return [token for token, piece in enumerate(pieces) if piece.isascii() and piece.strip().isalpha()]


def of_words(container: ExllamaV3Container, **parameters: Any) -> SamplingParameters:
    """Greedy, and the text is made of letters."""
    return SamplingParameters(temperature=0.0, allowed_tokens=words(container), **parameters)


def plain_logprobs(container: ExllamaV3Container, ids: list[int]) -> Tensor:
    """Row i is about token i + 1, from one pass of the model over all tokens."""
    with torch.inference_mode():
        logits: Tensor = container.model.forward(token_tensor(ids), {"attn_mode": "flash_attn_nc"})
    return logits[0, :, :VOCABULARY].float().log_softmax(-1)


def assert_logprobs_of_the_model(container: ExllamaV3Container, prompt: list[int], answer: Answer) -> None:
    """One entry a token, with the model's own values; their bytes are those of the text."""
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert raw_text(answer.logprobs) == answer.text
    expected = plain_logprobs(container, prompt + answer.token_ids)[len(prompt) - 1 :]
    for entry, row in zip(answer.logprobs, expected, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=0.02)
        for alternative in entry.top:
            assert alternative.logprob == pytest.approx(row[alternative.token_id].item(), abs=0.02)
        assert all(a.logprob >= b.logprob for a, b in pairwise(entry.top))
        if entry.top:
            assert entry.top[0].logprob == pytest.approx(row.max().item(), abs=0.02)


# --- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_hybrid", "tiny_sliding"])
async def test_logprobs_and_echo_are_the_models_own(request: pytest.FixtureRequest, fixture: str) -> None:
    directory: Path = request.getfixturevalue(fixture)
    async with loaded(directory) as container:
        answer = await answered(container, PROMPT, logprobs=5, sampling=COLOURED, seed=1, max_tokens=16)
        assert_logprobs_of_the_model(container, PROMPT, answer)
        assert all(len(entry.top) == 5 for entry in answer.logprobs)

        ids = PROMPT + answer.token_ids
        echo = (await answered(container, ids, logprobs=2, echo=True, prompt_only=True)).echo
        assert echo is not None
        assert echo.token_ids == ids
        first, *rest = echo.logprobs
        assert first is None
        reference = reference_logits(directory, token_tensor(ids))[0].log_softmax(-1)
        for token, entry, row in zip(ids[1:], rest, reference, strict=False):
            assert entry is not None
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(row[token].item(), abs=0.15)  # the engine computes in fp16
            assert [top.logprob for top in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=0.15)
        # What was said while generating, with a cache, is said again of the same tokens as a prompt.
        generated = [entry.logprob for entry in answer.logprobs]
        assert [entry.logprob for entry in rest[-16:] if entry] == pytest.approx(generated, abs=0.02)


async def test_logprobs_of_drafted_tokens(tiny_llama: Path) -> None:
    prompt = [5 + i % 40 for i in range(200)]
    fields: dict[str, Any] = {"logprobs": 1, "sampling": SamplingParameters(presence_penalty=-30.0), "seed": 3}
    async with loaded(tiny_llama, draft_model=DraftModelConfig(draft_mode="ngram")) as container:
        answer = await answered(container, prompt, max_tokens=40, **fields)
        assert answer.finish.usage.rejected_draft_tokens > 0
        assert_logprobs_of_the_model(container, prompt, answer)


async def test_logprobs_go_on_where_output_is_reserved_anew(
    llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[Job] = []
    prepare_for_requeue = Job.prepare_for_requeue

    def requeue(job: Job) -> Job:
        requeued.append(job)
        return prepare_for_requeue(job)

    monkeypatch.setattr(Job, "prepare_for_requeue", requeue)
    prompt = [5 + i * 11 % 900 for i in range(257)]
    sampling = SamplingParameters(ban_eos_token=True)
    answer = await answered(llama, prompt, logprobs=0, sampling=sampling, seed=5, max_tokens=262, stop_strings=["qqq"])
    assert len(requeued) == 1
    assert answer.finish.usage.completion_tokens == 262 == len(answer.token_ids)
    assert_logprobs_of_the_model(llama, prompt, answer)
    assert {event.total_tokens for event in answer.prefills} == {257}


@pytest.mark.parametrize("seed", range(4))
async def test_bytes_of_half_characters_add_up_to_the_text(llama: ExllamaV3Container, seed: int) -> None:
    sampling = SamplingParameters(temperature=5.0, allowed_tokens=BYTE_TOKENS)
    answer = await answered(llama, PROMPT, logprobs=1, sampling=sampling, seed=seed, max_tokens=60)
    assert_logprobs_of_the_model(llama, PROMPT, answer)
    assert any("\ufffd" in entry.token for entry in answer.logprobs)
    assert all(len(entry.raw) == 1 for entry in answer.logprobs)


async def test_logprobs_of_characters_that_take_several_tokens(llama: ExllamaV3Container) -> None:
    """Each byte token is chosen by bias in turn: a snowman, held back until it is whole."""
    snowman = llama.encode("☃", add_bos=False, encode_special_tokens=False)
    assert len(snowman) == 3
    answer = Answer()
    for index, token in enumerate(snowman):
        sampling = SamplingParameters(temperature=0.0, logit_bias={token: 1000.0})
        part = await answered(llama, PROMPT + snowman[:index], logprobs=0, sampling=sampling, max_tokens=1)
        answer.deltas += part.deltas
    assert raw_text(answer.logprobs) == "☃"
    assert [entry.token for entry in answer.logprobs] == ["\ufffd"] * 3


async def test_a_banned_string_leaves_no_entry(llama: ExllamaV3Container) -> None:
    plain = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=6)
    banned = plain.text[2:9]
    answer = await answered(
        llama, PROMPT, sampling=of_words(llama), max_tokens=12, logprobs=2, banned_strings=[banned.upper()]
    )
    assert banned not in answer.text
    assert_logprobs_of_the_model(llama, PROMPT, answer)


async def test_as_many_alternatives_as_there_are_tokens_at_most(llama: ExllamaV3Container) -> None:
    answer = await answered(llama, PROMPT, logprobs=10 * VOCABULARY, max_tokens=1)
    assert len(answer.logprobs[0].top) == VOCABULARY


# --- stopping -------------------------------------------------------------------------------------------------------


async def test_a_stop_string_across_tokens_cuts_text_and_entries(llama: ExllamaV3Container) -> None:
    plain = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=8, logprobs=0)
    pieces = [entry.token for entry in plain.logprobs]
    stop = pieces[2][-1] + pieces[3] + pieces[4][:1]
    expected = plain.text[: plain.text.index(stop)]
    answer = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=8, logprobs=0, stop_strings=[stop])
    assert answer.text == expected
    assert raw_text(answer.logprobs) == expected
    assert len(answer.logprobs) == len(answer.token_ids) <= 3
    finish = answer.finish
    assert (finish.reason, finish.eos_reason, finish.stop_sequence) == ("stop", "stop_string", stop)


async def test_a_stop_string_after_half_a_character_is_cut_off(llama: ExllamaV3Container) -> None:
    """The engine decodes what it has held back once more, and gives the text with the stop string."""
    halves = BYTE_TOKENS[-60:]
    sampling = SamplingParameters(temperature=0.0, allowed_tokens=words(llama) + halves, presence_penalty=20.0)
    plain = await answered(llama, PROMPT, sampling=sampling, max_tokens=40)
    match = re.search("\ufffd([A-Za-z]{2})", plain.text)
    assert match is not None
    stop = match[1]
    answer = await answered(llama, PROMPT, sampling=sampling, max_tokens=40, logprobs=0, stop_strings=[stop])
    assert answer.text == plain.text[: plain.text.index(stop)]
    assert raw_text(answer.logprobs) == answer.text
    assert (answer.finish.eos_reason, answer.finish.stop_sequence) == ("stop_string", stop)


async def test_a_stop_string_that_ends_with_the_last_token_allowed(llama: ExllamaV3Container) -> None:
    """The engine only says that the limit is reached."""
    plain = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=4, logprobs=0)
    stop = plain.logprobs[-1].token
    answer = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=4, logprobs=0, stop_strings=[stop])
    assert answer.text == plain.text[: plain.text.index(stop)]
    assert raw_text(answer.logprobs) == answer.text
    assert (answer.finish.reason, answer.finish.stop_sequence) == ("stop", stop)


async def test_a_banned_string_that_ends_with_the_last_token_allowed(llama: ExllamaV3Container) -> None:
    plain = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=4, logprobs=0)
    banned = plain.logprobs[-1].token.upper()
    fields: dict[str, Any] = {"sampling": of_words(llama), "max_tokens": 4, "logprobs": 0}
    answer = await answered(llama, PROMPT, banned_strings=[banned], **fields)
    assert banned.lower() not in answer.text.lower()
    assert raw_text(answer.logprobs) == answer.text
    assert answer.finish.reason == "length"


@pytest.mark.parametrize(
    ("raws", "length", "expected"),
    [
        ([b"ab", b"cd"], 0, []),
        ([b"ab", b"cd"], 2, [b"ab"]),
        ([b"ab", b"", b"cd"], 3, [b"ab", b"", b"c"]),
        ([b"\xe2\x98", b"\x83x"], 1, [b"\xe2\x98", b"\x83"]),
        ([b"a\xe2", b"bc"], 2, [b"a\xe2"]),  # a broken character, then the one that shows it
        ([b"a\xe2", b"bc"], 3, [b"a\xe2", b"b"]),
        ([b"a", b"\xff\xff", b"b"], 2, [b"a", b"\xff"]),
    ],
)
def test_tokens_are_cut_to_the_characters_before_a_stop(raws: list[bytes], length: int, expected: list[bytes]) -> None:
    assert cut_to_length(raws, length) == expected


async def test_text_held_back_for_a_stop_string_is_not_lost_at_the_end(llama: ExllamaV3Container) -> None:
    """The engine drops it when a stop token comes first."""
    ending = SamplingParameters(temperature=0.0, allowed_tokens=[*words(llama), EOS_ID], logit_bias={EOS_ID: 1000.0})
    plain = await answered(llama, PROMPT, sampling=ending, min_tokens=3)
    assert plain.finish.eos_reason == "stop_token"
    assert len(plain.token_ids) == 3
    answer = await answered(
        llama, PROMPT, sampling=ending, min_tokens=3, logprobs=0, stop_strings=[plain.text + " and on"]
    )
    assert answer.text == plain.text
    assert [entry.token_id for entry in answer.logprobs] == plain.token_ids
    assert (answer.finish.reason, answer.finish.stop_sequence) == ("stop", "<|im_end|>")


async def test_a_stop_token_is_no_part_of_the_answer(llama: ExllamaV3Container) -> None:
    plain = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=6, logprobs=0)
    stop = plain.token_ids[3]
    answer = await answered(llama, PROMPT, sampling=of_words(llama), max_tokens=6, logprobs=0, stop_tokens=[stop])
    count = plain.token_ids.index(stop)
    assert answer.token_ids == plain.token_ids[:count]
    assert len(answer.logprobs) == count
    assert answer.finish.eos_reason == "stop_token"
    assert answer.finish.stop_sequence == plain.logprobs[3].token


async def test_a_stop_string_in_the_echo_stops_nothing(llama: ExllamaV3Container) -> None:
    fields: dict[str, Any] = {"sampling": of_words(llama), "max_tokens": 4}
    answer = await answered(llama, "The river ZZ flows", echo=True, stop_strings=["ZZ"], **fields)
    assert answer.echo is not None
    assert answer.echo.text == "The river ZZ flows"
    assert answer.finish.eos_reason == "max_new_tokens"
    assert len(answer.token_ids) == 4


# --- echo -----------------------------------------------------------------------------------------------------------


async def test_echo_of_a_text_has_the_text_and_the_ids(llama: ExllamaV3Container) -> None:
    answer = await answered(llama, "naïve ☃", echo=True, logprobs=0, max_tokens=1)
    echo = answer.echo
    assert echo is not None
    assert echo.text == "naïve ☃"
    assert echo.token_ids == llama.encode("naïve ☃", add_bos=True, encode_special_tokens=True)
    assert raw_text(entry for entry in echo.logprobs if entry) == echo.text  # all but the BOS token
    assert len(answer.token_ids) == 1


async def test_echo_without_logprobs_has_no_limit(llama: ExllamaV3Container) -> None:
    answer = await answered(llama, [300] * 1000, echo=True, prompt_only=True)
    assert answer.echo is not None
    assert answer.echo.token_ids == [300] * 1000
    assert answer.echo.logprobs == []


async def test_logprobs_of_a_prompt_longer_than_a_pass_are_refused(llama: ExllamaV3Container) -> None:
    answer = await answered(llama, [300] * 256, echo=True, prompt_only=True, logprobs=0)
    assert answer.echo is not None
    with pytest.raises(Unsupported, match="up to 256 tokens") as raised:
        await answered(llama, [300] * 257, echo=True, logprobs=0)
    assert raised.value.param == "logprobs"


async def test_several_passes_say_the_same_as_one(llama: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"echo": True, "prompt_only": True, "logprobs": 1}
    prompt = [5 + i * 13 % 900 for i in range(200)]
    whole = (await answered(llama, prompt, **fields)).echo
    monkeypatch.setattr("backends.exllamav3.logprobs.PASS_LOGITS", 70 * VOCABULARY)
    monkeypatch.setattr("backends.exllamav3.logprobs.SCORED_ROWS", 16)
    parts = (await answered(llama, prompt, **fields)).echo
    assert whole is not None
    assert parts is not None
    assert len(parts.logprobs) == 200
    for one, other in zip(whole.logprobs[1:], parts.logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=0.02)


@pytest.mark.parametrize("echo", [False, True])
async def test_a_prompt_alone_generates_nothing(llama: ExllamaV3Container, echo: bool) -> None:
    answer = await answered(llama, [300], prompt_only=True, echo=echo, logprobs=3)
    assert (answer.echo is not None) == echo
    assert answer.deltas == []
    assert answer.finish.reason == "length"
    assert (answer.finish.usage.prompt_tokens, answer.finish.usage.completion_tokens) == (1, 0)


# --- progress -------------------------------------------------------------------------------------------------------


async def test_prefill_counts_the_prompt_and_shows_what_was_cached(llama: ExllamaV3Container) -> None:
    prompt = [700 - i % 400 for i in range(1000)]
    cold, warm = [await answered(llama, prompt, max_tokens=2) for _ in range(2)]
    for answer in (cold, warm):
        done = [event.done_tokens for event in answer.prefills]
        assert done == sorted(done)
        assert done[-1] == 1000
        assert {event.total_tokens for event in answer.prefills} == {1000}
        assert all(event.cached_tokens <= event.done_tokens for event in answer.prefills)
    assert (cold.prefills[0].done_tokens, cold.prefills[0].cached_tokens) == (0, 0)
    assert len(cold.prefills) == 5
    assert warm.prefills[0].done_tokens == warm.prefills[0].cached_tokens >= 768
    assert warm.prefills[-1].cached_tokens == warm.finish.usage.cached_tokens


async def test_tokens_processed_again_after_a_banned_string_are_no_progress(tiny_hybrid: Path) -> None:
    """A recurrent state goes back to a checkpoint, and the engine reports the way from there as prefill."""
    async with loaded(tiny_hybrid) as container:
        plain = await answered(container, PROMPT, sampling=of_words(container), max_tokens=8)
        answer = await answered(
            container, PROMPT, sampling=of_words(container), max_tokens=8, banned_strings=[plain.text[5:12]]
        )
        assert answer.text != plain.text
        assert len(answer.prefills) == len(plain.prefills)


# --- seeds ----------------------------------------------------------------------------------------------------------

HOT = SamplingParameters(temperature=1.5)
SEEDED = [
    HOT,
    SamplingParameters(xtc_probability=0.5, xtc_threshold=0.005),
    # Of two tokens, what adaptive-P remembers of the last ones decides.
    SamplingParameters(adaptive_target=0.5, allowed_tokens=[300, 301], logit_bias={300: 2.0}),
    SamplingParameters(top_p=0.8, min_p=0.01, dry_multiplier=0.8, frequency_penalty=0.5),
]


@pytest.mark.parametrize("sampling", SEEDED, ids=["temperature", "xtc", "adaptive-p", "penalties"])
async def test_equal_seeds_give_equal_texts_whatever_else_runs(
    llama: ExllamaV3Container, sampling: SamplingParameters
) -> None:
    prompt = [900 - i % 300 for i in range(300)]  # the first run finds nothing cached

    async def text(seed: int) -> str:
        return (await answered(llama, prompt, seed=seed, sampling=sampling, max_tokens=16)).text

    alone = await text(1)
    crowded = await asyncio.gather(text(1), *(answered(llama, PROMPT, sampling=HOT, max_tokens=24) for _ in range(2)))
    assert crowded[0] == alone
    assert await text(2) != alone
    assert await text(-1) == await text(-1)


async def test_without_a_seed_texts_differ(llama: ExllamaV3Container) -> None:
    first, second = [await answered(llama, PROMPT, sampling=HOT, max_tokens=16) for _ in range(2)]
    assert first.text != second.text


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SEEDED, ids=["temperature", "xtc", "adaptive-p", "penalties"])
async def test_drafts_do_not_change_a_seeded_text(tiny_llama: Path, sampling: SamplingParameters) -> None:
    prompt = [5 + i % 40 for i in range(100)]
    fields: dict[str, Any] = {"seed": 7, "sampling": sampling, "max_tokens": 24}
    async with loaded(tiny_llama) as container:
        plain = await answered(container, prompt, **fields)
    async with loaded(tiny_llama, draft_model=DraftModelConfig(draft_mode="ngram")) as container:
        drafted = await answered(container, prompt, **fields)
    assert drafted.finish.usage.rejected_draft_tokens > 0
    assert drafted.text == plain.text
