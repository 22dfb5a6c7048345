from __future__ import annotations

from typing import Any

import pytest

from tests.endpoints.running import RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Script
from tests.serving import ServerProcess

USER = {"role": "user", "content": "hi"}
CHATML = "<|im_start|>user\nhi<|im_end|>\n"
TOOL = {"type": "function", "function": {"name": "ls"}}


def encoded(server: RunningServer, **body: object) -> str:
    """The text that was encoded; a token of the scripted engine is a character."""
    response = server.http.post("/v1/token/encode", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["length"] == len(answer["tokens"])
    return "".join(map(chr, answer["tokens"]))


def tokenized(server: RunningServer, **body: object) -> Any:
    response = server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_text_and_back(server: RunningServer) -> None:
    answer = server.http.post("/v1/token/encode", json={"text": "hé"}).json()
    assert answer == {"tokens": [104, 233], "length": 2}
    assert server.http.post("/v1/token/decode", json={"tokens": answer["tokens"]}).json() == {"text": "hé"}


def test_messages_are_rendered_without_a_generation_prompt(server: RunningServer) -> None:
    assert encoded(server, text=[USER], chat_template_kwargs={"x": 1}) == CHATML
    assert encoded(server, messages=[USER]) == CHATML
    assert encoded(server, messages=[USER], add_generation_prompt=True) == CHATML + "<|im_start|>assistant\n"


def test_messages_are_rendered_as_for_a_completion(scripted: ScriptedEngine) -> None:
    source = "{{ tools }} {{ a }} {{ b }} {{ reasoning_effort }} {{ messages[0].content }}"
    folder = scripted.add_model("gamma")
    scripted.write(Script())
    with running_server(scripted).running() as server:
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        server.load("gamma", template_vars_default={"a": 1, "b": 2}, template_vars_force={"b": 3})
        body: dict[str, object] = {
            "messages": [USER],
            "tools": [TOOL],
            "template_vars": {"a": 4, "b": 5},
            "reasoning_effort": "low",
            "response_prefix": "Yes",
        }
        server.http.post("/v1/chat/completions", json=body)
        prompt = server.engine.history()[-1].prompt
        assert "4 3 low hi" in str(prompt)
        assert "'ls'" in str(prompt)
        assert str(prompt).endswith("Yes")
        assert encoded(server, **body, add_generation_prompt=True) == prompt
        assert "".join(map(chr, tokenized(server, **body)["tokens"])) == prompt
        assert server.http.post("/apply-template", json=body).json() == {"prompt": prompt}


def test_the_last_message_can_be_gone_on_from(server: RunningServer) -> None:
    messages = [USER, {"role": "assistant", "content": "Ye"}]
    text = encoded(server, messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nYe")


@pytest.mark.parametrize("body", [{}, {"text": None}, {"messages": None}, {"text": 5}])
def test_what_is_no_text(server: RunningServer, body: dict[str, object]) -> None:
    response = server.http.post("/v1/token/encode", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text")


@pytest.mark.parametrize("body", [{"text": []}, {"messages": []}, {"messages": [5]}])
def test_what_are_no_messages(server: RunningServer, body: dict[str, object]) -> None:
    response = server.http.post("/v1/token/encode", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("messages", "messages.0")


def test_what_are_no_tokens(server: RunningServer) -> None:
    for path in ("/v1/token/decode", "/detokenize"):
        response = server.http.post(path, json={"tokens": [1, -1]})
        assert response.json()["error"]["param"] == "tokens.1"
        assert server.http.post(path, json={}).json()["error"]["param"] == "tokens"


# --- the shapes of other servers --------------------------------------------------------------------------------------


def test_as_llama_cpp_asks(server: RunningServer) -> None:
    assert tokenized(server, content="hé")["tokens"] == [104, 233]
    assert tokenized(server, content="")["tokens"] == []
    pieces = tokenized(server, content="hé", add_special=True, with_pieces=True)["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 233, "piece": "é"}]
    assert server.http.post("/detokenize", json={"tokens": [104, 233]}).json()["content"] == "hé"


def test_as_vllm_asks(server: RunningServer) -> None:
    answer = tokenized(server, model="alpha", prompt="hé", return_token_strs=True)
    assert answer == {"tokens": [104, 233], "count": 2, "max_model_len": 4096, "token_strs": ["h", "é"]}
    assert tokenized(server, prompt="hé")["token_strs"] is None
    assert tokenized(server, messages=[USER])["count"] == len(CHATML + "<|im_start|>assistant\n")
    assert tokenized(server, messages=[USER], add_generation_prompt=False)["count"] == len(CHATML)
    assert server.http.post("/detokenize", json={"model": "alpha", "tokens": [104]}).json()["prompt"] == "h"


def test_nothing_to_tokenize(server: RunningServer) -> None:
    response = server.http.post("/tokenize", json={"model": "alpha"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "content")


# --- the real engine --------------------------------------------------------------------------------------------------


def test_pieces_are_the_bytes_of_the_text(real_server: ServerProcess) -> None:
    text = "Unicode 媽 and 🤗"
    with real_server.client() as http:
        tokens = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
        ids = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert [token["id"] for token in tokens] == ids
    pieces = [token["piece"] for token in tokens]
    raw = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert raw.decode() == text


def test_the_count_is_that_of_a_completion(real_server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "say <|im_end|> twice"}]}
    with real_server.client() as http:
        usage = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]
        count = http.post("/tokenize", json=body).json()["count"]
        length = http.post("/v1/token/encode", json={**body, "add_generation_prompt": True}).json()["length"]
    assert count == length == usage["prompt_tokens"]


def test_nothing_is_no_tokens(real_server: ServerProcess) -> None:
    with real_server.client() as http:
        assert http.post("/detokenize", json={"tokens": []}).json() == {"content": "", "prompt": ""}
        answer = http.post("/tokenize", json={"content": "", "with_pieces": True}).json()
        assert (answer["tokens"], answer["count"]) == ([], 0)


def test_an_id_outside_the_vocabulary(real_server: ServerProcess) -> None:
    with real_server.client() as http:
        for path in ("/v1/token/decode", "/detokenize"):
            response = http.post(path, json={"tokens": [10**8]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
