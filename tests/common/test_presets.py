"""Presets beyond their basics: names, types, what is refused, and a model's preset over the one of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import InvalidRequest, NotFound
from common.sampling import SamplerPresets, SamplingFields


class CompletionFields(SamplingFields):
    """A request that has a field which is no sampling parameter."""

    n: int = 1


def fields(**values: object) -> SamplingFields:
    return SamplingFields.model_validate(values)


@pytest.fixture
def presets(tmp_path: Path) -> SamplerPresets:
    return SamplerPresets(tmp_path)


def write(presets: SamplerPresets, name: str, text: str) -> None:
    (presets._directory / f"{name}.yml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "falsy", "given"),
    [
        ("top_k", 0, 40),
        ("temperature", 0.0, 1.0),
        ("ban_eos_token", False, True),
        ("stop", [], ["x"]),
        ("stop", "", ["x"]),
        ("logit_bias", {}, {"1": 2}),
        ("dry_sequence_breakers", "", ["x"]),
    ],
)
def test_falsy_values_are_forced(presets: SamplerPresets, name: str, falsy: object, given: object) -> None:
    presets.replace({name: {"override": falsy, "force": True}})
    assert not getattr(presets.apply(fields(**{name: given})), name)


def test_a_field_is_forced_under_any_name_that_the_request_uses(presets: SamplerPresets) -> None:
    presets.replace({"repetition_penalty": {"override": 1.2, "force": True}, "max_tokens": {"override": 5}})
    assert presets.apply(fields(rep_pen=1.5)).repetition_penalty == 1.2
    assert presets.apply(fields(max_completion_tokens=7)).max_tokens == 7
    assert presets.apply(fields(max_completion_tokens=None, max_tokens=None)).max_tokens == 5


def test_a_preset_may_use_any_name_that_a_request_may(presets: SamplerPresets) -> None:
    presets.replace({"rep_pen": {"override": 1.2}})
    assert presets.apply(fields()).repetition_penalty == 1.2
    with pytest.raises(InvalidRequest, match="another name of repetition_penalty"):
        presets.replace({"rep_pen": {"override": 1.2}, "repetition_penalty": {"override": 1.2}})


def test_values_get_the_types_of_a_request(presets: SamplerPresets) -> None:
    presets.replace({"banned_tokens": {"override": "1, 2", "additive": True}, "stop": {"override": "x"}})
    applied = presets.apply(fields(banned_tokens=[3]))
    assert (applied.banned_tokens, applied.stop) == ([1, 2, 3], ["x"])


@pytest.mark.parametrize(
    "overrides",
    [
        {"top_p": 0.5},
        {"top_p": None},
        {"top_p": {"override": 1.5}},
        {"top_p": {"override": [1]}},
        {"top_k": {"override": -2, "force": True}},
        {"top_p": {"override": 0.5, "force": "often"}},
        {"n": {"override": 0}},
        {"n": {"override": 10**6}},
        {"max_tokens": {"override": 5}, "min_tokens": {"override": 6}},
        [],
        "top_p",
    ],
)
def test_what_no_request_could_give_is_refused_and_changes_nothing(presets: SamplerPresets, overrides: object) -> None:
    presets.replace({"top_k": {"override": 5}})
    with pytest.raises(InvalidRequest, match="overrides") as caught:
        presets.replace(overrides)
    assert caught.value.param == "overrides"
    assert set(presets.overrides) == {"top_k"}


def test_answers_per_prompt_can_have_a_default_only(presets: SamplerPresets, log_lines: list[str]) -> None:
    presets.replace({"n": {"override": 2, "force": True}})
    assert any("n decides" in line for line in log_lines)
    assert presets.apply(CompletionFields.model_validate({})).n == 2
    assert presets.apply(CompletionFields.model_validate({"n": 1})).n == 1
    assert presets.apply(fields()) == fields()  # of an API without n


def test_an_unknown_name_is_told_once_with_the_nearest_known(presets: SamplerPresets, log_lines: list[str]) -> None:
    write(presets, "mine", "temprature: {override: 0.5}\n")
    presets.select("mine")
    presets.apply(fields())
    presets.apply(fields())
    warnings = [line for line in log_lines if "temprature" in line]
    assert len(warnings) == 1
    assert "'mine'" in warnings[0]
    assert "Did you mean temperature?" in warnings[0]


@pytest.mark.parametrize("text", ["top_p: {override: 0.5}\ntop_p: {override: 0.6}\n", "a: [", "a\tb: 1", "\xff"])
def test_a_broken_file_is_named(presets: SamplerPresets, text: str) -> None:
    (presets._directory / "mine.yml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest, match="mine"):
        presets.select("mine")


def test_a_models_preset_wins_parameter_by_parameter(presets: SamplerPresets) -> None:
    write(presets, "all", "temperature: {override: 0.1, force: true}\ntop_k: {override: 5}\n")
    write(presets, "model", "temperature: {override: 0.2}\nmin_p: {override: 0.3}\n")
    presets.select("all")
    applied = presets.apply(fields(), "model")
    assert (applied.temperature, applied.top_k, applied.min_p) == (0.2, 5, 0.3)
    assert presets.apply(fields(temperature=0.9), "model").temperature == 0.9
    assert presets.apply(fields(temperature=0.9)).temperature == 0.1
    presets.clear()
    assert presets.apply(fields(), "model").top_k == 0


def test_a_models_preset_is_read_when_it_is_loaded(presets: SamplerPresets) -> None:
    write(presets, "model", "top_k: {override: 5}\n")
    presets.read_for_model("model")
    write(presets, "model", "top_k: {override: -7}\n")
    assert presets.apply(fields(), "model").top_k == 5
    with pytest.raises(InvalidRequest, match="top_k") as caught:
        presets.read_for_model("model")
    assert caught.value.param == "sampler_preset"
    assert presets.apply(fields(), "model").top_k == 5
    with pytest.raises(NotFound, match="Available: model") as missing:
        presets.read_for_model("../model")
    assert missing.value.param == "sampler_preset"
    presets.read_for_model(None)
