from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from common.errors import InvalidRequest, NotFound
from common.sampling import PRESET_DIR, SamplerPresets, SamplingFields, SamplingParameters


def fields(**values: object) -> SamplingFields:
    return SamplingFields.model_validate(values)


def presets(tmp_path: Path, text: str) -> SamplerPresets:
    (tmp_path / "mine.yml").write_text(text, encoding="utf-8")
    found = SamplerPresets(tmp_path)
    found.select("mine")
    return found


def test_nothing_given_is_neutral() -> None:
    assert fields().parameters() == SamplingParameters()
    assert fields(**dict.fromkeys(SamplingFields.model_fields)).parameters() == SamplingParameters()


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("max_completion_tokens", "max_tokens", 5),
        ("max_length", "max_tokens", 5),
        ("max_new_tokens", "max_tokens", 5),
        ("n_predict", "max_tokens", 5),
        ("min_length", "min_tokens", 5),
        ("stop_sequence", "stop", ["x"]),
        ("stopping_strings", "stop", ["x"]),
        ("bad_words", "banned_strings", ["x"]),
        ("add_special_tokens", "add_bos_token", False),
        ("custom_token_bans", "banned_tokens", [1]),
        ("allowed_token_ids", "allowed_tokens", [1]),
        ("rep_pen", "repetition_penalty", 1.5),
        ("repeat_penalty", "repetition_penalty", 1.5),
        ("repeat_last_n", "penalty_range", 5),
        ("repetition_range", "penalty_range", 5),
        ("repetition_penalty_range", "penalty_range", 5),
        ("rep_pen_range", "penalty_range", 5),
        ("dry_penalty_last_n", "dry_range", 5),
        ("ignore_eos", "ban_eos_token", True),
        ("typical_p", "typical", 0.5),
        ("tfs_z", "tfs", 0.5),
        ("nsigma", "top_n_sigma", 1.0),
        ("mirostat", "mirostat_mode", 2),
        ("dynatemp_low", "min_temp", 0.5),
        ("dynatemp_high", "max_temp", 2.0),
        ("dynatemp_exponent", "temp_exponent", 2.0),
    ],
)
def test_names_that_clients_use(alias: str, name: str, value: object) -> None:
    assert getattr(fields(**{alias: value}), name) == value
    assert getattr(fields(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", -0.1), ("temperature", 10.1), ("temperature", float("nan")), ("top_k", -2), ("top_p", 1.1),
        ("min_p", -0.1), ("repetition_penalty", 0), ("presence_penalty", float("inf")), ("max_tokens", -2),
        ("repetition_penalty", 1e39), ("repetition_penalty", 1e-320), ("frequency_penalty", 1e39),
        ("dry_multiplier", 1e39),
        ("dry_multiplier", -1), ("dry_base", -1), ("dry_range", -2), ("top_k", 2**31), ("loop_detect_window", 10**30),
        ("stop", [-1]),
        ("stop", [10**30]),
        ("logit_bias", {str(10**30): 1}), ("logit_bias", {"1": 1e39}), ("banned_tokens", "99999999999"),
        ("dry_sequence_breakers", "[" * 100_000),
        ("min_tokens", -1), ("logit_bias", {"x": 1}), ("logit_bias", {"1": float("nan")}), ("banned_tokens", [-1]),
        ("dry_sequence_breakers", "[a"), ("stop", [1.5]), ("stop", [True]), ("top_logprobs", 21),
        ("seed", 2**63), ("seed", "x"), ("logit_bias", [[1]]), ("logit_bias", [["Hello", -1]]), ("banned_strings", 5),
    ],
)  # fmt: skip
def test_values_out_of_range(name: str, bad: object) -> None:
    with pytest.raises(ValidationError):
        fields(**{name: bad})


def test_lists_in_a_string() -> None:
    given = fields(banned_tokens=" 1,2 ,x, 3", banned_strings="a", dry_sequence_breakers='"\\n", ":"', stop="END")
    assert given.banned_tokens == [1, 2, 3]
    assert given.banned_strings == ["a"]
    assert given.dry_sequence_breakers == ["\n", ":"]
    assert given.stop_strings == ["END"]
    assert fields(dry_sequence_breakers='["a"]').dry_sequence_breakers == ["a"]
    assert fields(dry_sequence_breakers="a, :").dry_sequence_breakers == ["a", ":"]
    assert fields(dry_sequence_breakers="").dry_sequence_breakers == []


@pytest.mark.parametrize("name", ["stop", "banned_strings"])
def test_an_empty_string_stands_everywhere_and_is_dropped(name: str) -> None:
    assert getattr(fields(**{name: ["", "x"]}), name) == ["x"]
    assert getattr(fields(**{name: ""}), name) == []


def test_forms_of_a_logit_bias() -> None:
    assert fields(logit_bias={"5": -100, "6": None}).logit_bias == {5: -100.0}
    assert fields(logit_bias=[[5, 1.5], [6, False], [7, None]]).logit_bias == {5: 1.5, 6: -1000.0}


def test_any_seed_is_no_seed() -> None:
    assert [fields(seed=seed).seed for seed in (-1, None, 0, -2)] == [None, None, 0, -2]


def test_the_newer_of_openais_names_counts() -> None:
    assert fields(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert fields(max_tokens=5, max_completion_tokens=None).max_tokens == 5


def test_adaptive_p_is_off_below_zero() -> None:
    assert fields(adaptive_target=-0.01).parameters() == SamplingParameters()


@pytest.mark.parametrize(("least", "most", "allowed"), [(5, 4, False), (5, 5, True), (5, 0, True), (5, -1, True)])
def test_min_tokens_against_max_tokens(least: int, most: int, allowed: bool) -> None:
    given = fields(min_tokens=least, max_tokens=most)
    if allowed:
        given.parameters()
    else:
        with pytest.raises(InvalidRequest, match="min_tokens"):
            given.parameters()


def test_samplers_that_do_not_exist_are_named() -> None:
    assert fields(tfs=0.5, mirostat=2, min_temp=0.5).without_effect() == [
        "tfs",
        "mirostat_mode",
        "min_temp",
        "max_temp",
    ]
    assert fields(dynatemp_range=0.5, nsigma=1).without_effect() == ["dynatemp_range", "top_n_sigma"]


@pytest.mark.parametrize("neutral", [
    {"tfs": 1, "typical": 1, "min_temp": 0.5, "max_temp": 0.5}, {"tfs": 0, "typical_p": 0, "nsigma": 0, "num_beams": 0},
    {"mirostat_tau": 5, "mirostat_eta": 0.1}, {"smoothing_factor": 0, "guidance_scale": 1, "use_beam_search": False},
])  # fmt: skip
def test_samplers_that_are_off_are_not(neutral: dict[str, object]) -> None:
    assert fields(**neutral).without_effect() == []


def test_a_preset_gives_defaults(tmp_path: Path) -> None:
    mine = presets(tmp_path, "temperature: {override: 0.5}\nmax_tokens: {override: 7}\n")
    assert mine.apply(fields()).temperature == 0.5
    assert mine.apply(fields(temperature=1.0)).temperature == 1.0
    assert mine.apply(fields(temperature=None)).temperature == 0.5
    assert mine.apply(fields(max_completion_tokens=3)).max_tokens == 3


def test_a_preset_forces_falsy_values_too(tmp_path: Path) -> None:
    mine = presets(tmp_path, "top_k: {override: 0, force: true}\nban_eos_token: {override: false, force: true}\n")
    applied = mine.apply(fields(top_k=40, ban_eos_token=True))
    assert (applied.top_k, applied.ban_eos_token) == (0, False)


def test_a_preset_adds_to_lists(tmp_path: Path) -> None:
    mine = presets(
        tmp_path, "stop: {override: [a], additive: true}\nbanned_tokens: {override: '1,2', additive: true}\n"
    )
    applied = mine.apply(fields(stop=["b"]))
    assert (applied.stop, applied.banned_tokens) == (["a", "b"], [1, 2])


def test_force_beats_additive(tmp_path: Path) -> None:
    mine = presets(tmp_path, "stop: {override: [a], additive: true, force: true}\n")
    assert mine.apply(fields(stop=["b"])).stop == ["a"]


def test_applying_leaves_the_request_as_it_was(tmp_path: Path) -> None:
    mine = presets(tmp_path, "top_k: {override: 5, force: true}\n")
    given = fields(top_k=1)
    mine.apply(given)
    assert given.top_k == 1


@pytest.mark.parametrize(
    "text",
    [
        "temperature: {override: 99}",
        "temperature: 0.5",
        "temperature: {override: 0.5, force: often}",
        "- a",
        "a: [",
        "a\tb",
    ],
)
def test_a_preset_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="mine"):
        presets(tmp_path, text)


def test_unknown_parameters_and_empty_overrides_are_left_out(tmp_path: Path) -> None:
    mine = presets(tmp_path, "temprature: {override: 0.5}\ntop_p: {override: }\nmin_p: {override: 0.1}\n")
    assert set(mine.overrides) == {"min_p"}


@pytest.mark.parametrize("name", ["absent", "../mine", "", "x" * 5000])
def test_only_names_of_presets_are_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.yml").write_text("", encoding="utf-8")
    with pytest.raises(NotFound):
        SamplerPresets(tmp_path / "sub").select(name)


def test_a_refused_preset_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    mine = presets(tmp_path, "top_k: {override: 5}")
    with pytest.raises(NotFound):
        mine.select("absent")
    with pytest.raises(InvalidRequest):
        mine.replace({"top_k": {"override": -7}})
    assert mine.selected == "mine"
    assert mine.overrides["top_k"].override == 5


@pytest.mark.parametrize("name", SamplerPresets(PRESET_DIR).names())
def test_shipped_presets_load(name: str) -> None:
    shipped = SamplerPresets(PRESET_DIR)
    shipped.select(name)
    assert shipped.overrides
