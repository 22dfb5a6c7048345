from __future__ import annotations

from tests.endpoints.running import RunningServer


def test_text_and_back(server: RunningServer) -> None:
    encoded = server.http.post("/v1/token/encode", json={"text": "hé"}).json()
    assert encoded == {"tokens": [104, 233], "length": 2}
    assert server.http.post("/v1/token/decode", json={"tokens": encoded["tokens"]}).json() == {"text": "hé"}


def test_messages_are_rendered_without_a_generation_prompt(server: RunningServer) -> None:
    body = {"text": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"x": 1}}
    tokens = server.http.post("/v1/token/encode", json=body).json()["tokens"]
    assert "".join(map(chr, tokens)) == "<|im_start|>user\nhi<|im_end|>\n"


def test_what_is_no_text(server: RunningServer) -> None:
    bodies: list[dict[str, object]] = [{"text": 5}, {"text": []}, {}]
    for body in bodies:
        response = server.http.post("/v1/token/encode", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "text")
    response = server.http.post("/v1/token/decode", json={"tokens": [1, -1]})
    assert response.json()["error"]["param"] == "tokens.1"
