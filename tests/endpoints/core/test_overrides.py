from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.errors import SettingsError
from endpoints.server import create_app
from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script

COLD = "temperature: {override: 0.25}\ntop_k: {override: 0, force: true}\nstop: {override: [END], additive: true}\n"


@pytest.fixture
def presets(scripted: ScriptedEngine) -> Iterator[RunningServer]:
    scripted.write(Script())
    server = running_server(scripted, presets={"cold": COLD}, sampling={"override_preset": "cold"})
    with server.running():
        server.load("alpha")
        yield server


def test_the_preset_of_the_settings_is_in_force(presets: RunningServer) -> None:
    presets.http.post("/v1/completions", json={"prompt": "x", "top_k": 40, "stop": "x"})
    request = presets.engine.history()[-1]
    assert (request.sampling.temperature, request.sampling.top_k) == (0.25, 0)
    assert request.stop_strings == ["END", "x"]


def test_switching_and_clearing(presets: RunningServer) -> None:
    listed = presets.admin.get("/v1/sampling/overrides").json()
    assert (listed["selected_preset"], listed["presets"]) == ("cold", ["cold"])
    assert presets.http.get("/v1/sampling/override/list").json()["presets"] == []

    switch = {"overrides": {"min_p": {"override": 0.1}}}
    assert presets.admin.post("/v1/sampling/override/switch", json=switch).json() is None
    listed = presets.http.get("/v1/sampling/overrides").json()
    assert listed["selected_preset"] is None
    assert set(listed["overrides"]) == {"min_p"}

    presets.admin.post("/v1/sampling/override/unload")
    assert presets.http.get("/v1/sampling/overrides").json()["overrides"] == {}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"preset": "none-such"}, 404),
        ({"preset": "../cold"}, 404),
        ({"overrides": {"top_p": 0.5}}, 400),
        ({"overrides": {"temperature": {"override": 99}}}, 400),
    ],
)
def test_a_refused_switch_changes_nothing(presets: RunningServer, body: dict[str, object], status: int) -> None:
    assert presets.admin.post("/v1/sampling/override/switch", json=body).status_code == status
    assert presets.admin.get("/v1/sampling/overrides").json()["selected_preset"] == "cold"


def test_a_model_can_have_a_preset_of_its_own(presets: RunningServer) -> None:
    (presets.engine.root / "presets" / "warm.yml").write_text("temperature: {override: 1.5}", encoding="utf-8")
    (presets.engine.model_dir / "beta" / "tabby_config.yml").write_text(
        "model:\n  sampler_preset: warm\n", encoding="utf-8"
    )
    presets.load("beta")
    presets.http.post("/v1/completions", json={"prompt": "x", "top_k": 40})
    sampling = presets.engine.history()[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (1.5, 0)
    listed = presets.http.get("/v1/sampling/overrides").json()
    assert (listed["selected_preset"], listed["model_preset"]) == ("cold", "warm")
    assert listed["model_overrides"]["temperature"]["override"] == 1.5
    presets.load("alpha", sampler_preset="cold")
    assert presets.http.get("/v1/sampling/overrides").json()["model_preset"] == "cold"


def test_a_model_with_a_broken_preset_is_not_loaded(presets: RunningServer) -> None:
    (presets.engine.root / "presets" / "torn.yml").write_text("temperature: {override: 99}", encoding="utf-8")
    response = presets.admin.post("/v1/model/load", json={"model_name": "beta", "sampler_preset": "torn"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "sampler_preset")
    assert "temperature" in error["message"]
    assert presets.http.get("/v1/model").json()["id"] == "alpha"


def test_a_preset_that_is_missing_stops_the_start(scripted: ScriptedEngine) -> None:
    server = running_server(scripted, sampling={"override_preset": "none-such"})
    with pytest.raises(SettingsError, match=r"sampling\.override_preset.*none-such"):
        create_app(server.settings, server.manager, None)
