"""The presets that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.sampling import ForeignSamplers, SamplerPresets, SamplingFields

FOLDER = Path(__file__).resolve().parents[2] / "sampler_overrides"


@pytest.fixture
def presets(log_lines: list[str]) -> SamplerPresets:
    return SamplerPresets(FOLDER)


def request(**fields: float) -> SamplingFields:
    return SamplingFields.model_validate(fields)


def test_names(presets: SamplerPresets) -> None:
    assert presets.names() == ["safe_defaults", "sample_preset"]


def test_safe_defaults_give_way_to_the_request(presets: SamplerPresets, log_lines: list[str]) -> None:
    presets.select("safe_defaults")
    fields = presets.apply(request())
    assert (fields.temperature, fields.top_p) == (0.8, 0.9)
    assert presets.apply(request(temperature=0.1)).temperature == 0.1
    assert log_lines == []


def test_sample_changes_nothing_but_the_length(presets: SamplerPresets, log_lines: list[str]) -> None:
    presets.select("sample_preset")
    assert presets.apply(request()) == request(max_tokens=150)
    assert log_lines == []


def test_sample_shows_every_parameter_of_the_engine(presets: SamplerPresets) -> None:
    presets.select("sample_preset")
    neutral = request()
    # Without a neutral value to show, or recognised for other servers' clients only.
    left_out = {name for name in SamplingFields.model_fields if getattr(neutral, name) is None}
    left_out |= set(ForeignSamplers.model_fields)
    assert set(presets.overrides) == set(SamplingFields.model_fields) - left_out
