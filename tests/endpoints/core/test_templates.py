from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

HI = {"messages": [{"role": "user", "content": "hi"}]}
OWN = "own: {{ messages[0].content }}"
ALPACA = "### Instruction:\nhi\n\n### Response:\n"


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The model "alpha" has a template of its own, "chat_template"."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("templates"))
    folder = engine.add_model("alpha")
    engine.add_model("beta")
    engine.write(Script(plays=[Play(when="SLOW", delay=0.2)]))
    with running_server(engine).running() as server:
        (folder / "chat_template.jinja").write_text(OWN, encoding="utf-8")
        yield server


@pytest.fixture
def own_template(one_server: RunningServer) -> RunningServer:
    """The model is loaded and uses that template."""
    one_server.load("alpha")
    switch(one_server, "chat_template")
    return one_server


def prompt(server: RunningServer) -> object:
    assert server.http.post("/v1/chat/completions", json=HI).status_code == 200
    return server.engine.history()[-1].prompt


def switch(server: RunningServer, name: str) -> None:
    response = server.admin.post("/v1/template/switch", json={"prompt_template_name": name})
    assert (response.status_code, response.json()) == (200, None)


def test_names_for_administrators_and_the_one_in_force_for_others(own_template: RunningServer) -> None:
    for path in ("/v1/templates", "/v1/template/list"):
        assert own_template.http.get(path).json() == {"object": "list", "data": ["chat_template"]}
        names = own_template.admin.get(path).json()["data"]
        assert {"alpaca", "chatml", "chat_template"} <= set(names)


def test_without_a_model_there_are_only_names(own_template: RunningServer) -> None:
    own_template.admin.post("/v1/model/unload")
    assert own_template.http.get("/v1/templates").json()["data"] == []
    assert {"alpaca", "chatml"} <= set(own_template.admin.get("/v1/templates").json()["data"])
    for path in ("switch", "unload"):
        response = own_template.admin.post(f"/v1/template/{path}", json={"prompt_template_name": "chatml"})
        assert response.json()["error"]["code"] == "model_not_loaded"


def test_switching_takes_effect_at_once_and_back(own_template: RunningServer) -> None:
    assert prompt(own_template) == "own: hi"
    switch(own_template, "alpaca")
    assert prompt(own_template) == ALPACA
    card = own_template.http.get("/v1/model").json()["parameters"]
    assert card["prompt_template"] == "alpaca"
    assert own_template.http.get("/props").json()["chat_template"] == card["prompt_template_content"]
    assert own_template.http.get("/v1/templates").json()["data"] == ["alpaca"]
    switch(own_template, "chat_template")
    assert prompt(own_template) == "own: hi"


def test_a_template_is_gone_with_its_model(own_template: RunningServer) -> None:
    switch(own_template, "alpaca")
    own_template.load("beta")
    own_template.load("alpha")
    assert prompt(own_template) == "own: hi"


@pytest.mark.parametrize("name", ["none-such", "../alpaca", "alpaca.jinja/", "x" * 5000, "", None])
def test_a_name_that_is_none_changes_nothing(own_template: RunningServer, name: str | None) -> None:
    response = own_template.admin.post("/v1/template/switch", json={"prompt_template_name": name})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt_template_name")
    if name == "none-such":
        assert "alpaca" in error["message"]
    assert prompt(own_template) == "own: hi"


def test_without_a_template_chat_says_what_to_do(own_template: RunningServer) -> None:
    assert own_template.admin.post("/v1/template/unload").json() is None
    for path in ("/v1/chat/completions", "/v1/token/encode", "/tokenize", "/apply-template"):
        response = own_template.http.post(path, json=HI)
        assert response.status_code == 400
        assert "/v1/template/switch" in response.json()["error"]["message"]
    assert own_template.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert own_template.http.get("/v1/model").json()["parameters"]["prompt_template"] is None
    assert own_template.http.get("/props").json()["chat_template"] == ""
    switch(own_template, "alpaca")
    assert prompt(own_template) == ALPACA


def test_an_answer_that_is_being_generated_goes_on(own_template: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "SLOW"}], "stream": True}
    with own_template.http.stream("POST", "/v1/chat/completions", json=body) as response:
        switch(own_template, "alpaca")
        own_template.admin.post("/v1/template/unload")
        text = response.read().decode()
    assert "Hello" in text
    assert text.rstrip().endswith("[DONE]")
