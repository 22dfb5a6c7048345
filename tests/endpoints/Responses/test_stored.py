"""Responses that are kept: to go on from, to be asked for again, and generated while nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from common.config_models import Settings
from endpoints.Responses.utils.store import ResponseStore
from tests.endpoints.Responses.asking import LS, ask, prompts, refused, streamed
from tests.endpoints.running import RunningServer, eventually


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def shown(server: RunningServer, id: str) -> dict[str, Any]:
    response = server.http.get(f"/v1/responses/{id}")
    assert response.status_code == 200, response.text
    stored: dict[str, Any] = response.json()
    return stored


# --- asked for again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["THINK", "LOOK"])
def test_a_response_can_be_asked_for_again(server: RunningServer, client: OpenAI, text: str) -> None:
    response = client.responses.create(input=text, tools=[LS])  # type: ignore[list-item]  # a plain object
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match=response.id):
        client.responses.retrieve(response.id)


def test_a_streamed_response_is_kept_before_its_end_is_told(server: RunningServer) -> None:
    whole = streamed(server, "COUNT")[-1]["response"]
    assert shown(server, whole["id"]) == whole
    failed = streamed(server, "FAIL")[-1]["response"]
    assert shown(server, failed["id"])["status"] == "failed"


def test_only_what_shall_be_kept_is(server: RunningServer) -> None:
    response = ask(server, "COUNT", store=False)
    assert response["store"] is False
    assert server.http.get(f"/v1/responses/{response['id']}").status_code == 404
    assert refused(server, input="x", previous_response_id=response["id"])["code"] == "previous_response_not_found"


def test_what_another_key_has_stored_is_not_there(server: RunningServer) -> None:
    id = ask(server, "COUNT")["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert server.other.request(method, f"/v1/responses/{id}{path}").status_code == 404
        assert server.admin.request(method, f"/v1/responses/{id}{path}").status_code == 404
        assert server.anonymous.request(method, f"/v1/responses/{id}{path}").status_code == 401
    body = {"input": "x", "previous_response_id": id}
    assert server.other.post("/v1/responses", json=body).json()["error"]["code"] == "previous_response_not_found"
    reference = [{"type": "item_reference", "id": shown(server, id)["output"][0]["id"]}]
    assert server.other.post("/v1/responses", json={"input": reference}).status_code == 404


def test_a_stored_response_is_not_streamed(server: RunningServer) -> None:
    id = ask(server, "COUNT")["id"]
    assert server.http.get(f"/v1/responses/{id}?stream=true").json()["error"]["code"] == "unsupported"


def test_items_of_an_input(server: RunningServer, client: OpenAI) -> None:
    typed = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    items: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        typed,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a b"},
        {"role": "user", "content": "COUNT"},
    ]
    first = client.responses.create(input=items, instructions="Never listed.")  # type: ignore[arg-type]  # plain
    listed = list(client.responses.input_items.list(first.id, order="asc", limit=3))
    assert [item.type for item in listed] == [str(item.get("type", "message")) for item in items]
    assert len({item.id for item in listed}) == len(items)
    assert listed[2].id == "rs_1"
    again = list(client.responses.input_items.list(first.id, limit=100))
    assert again == listed[::-1]
    page = client.responses.input_items.list(first.id, order="asc", after=str(listed[4].id), limit=1)
    assert (page.data, page.has_more) == ([listed[5]], True)

    second = client.responses.create(input="THINK", previous_response_id=first.id)
    longer = client.responses.input_items.list(second.id, order="asc", limit=100).data
    assert [item.id for item in longer[:8]] == [*(item.id for item in listed), first.output[0].id]
    missing = server.http.get(f"/v1/responses/{first.id}/input_items?after=x")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "after")


def test_an_empty_list(server: RunningServer) -> None:
    id = ask(server, "COUNT")["id"]
    last = server.http.get(f"/v1/responses/{id}/input_items").json()["last_id"]
    empty = server.http.get(f"/v1/responses/{id}/input_items?after={last}").json()
    assert empty == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


# --- gone on from -------------------------------------------------------------------------------------------------


def test_a_conversation_that_the_server_keeps(server: RunningServer) -> None:
    first = ask(server, "LOOK", tools=[LS], instructions="Be brief.")
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    question = {"role": "user", "content": "FINALLY"}
    then = {"previous_response_id": first["id"], "tools": [LS], "instructions": "Be brief."}
    second = ask(server, [result, question], **then)
    assert second["previous_response_id"] == first["id"]
    before, after = prompts(server)[-2:]
    assert after.startswith(before)
    assert "I look." in after
    # The same conversation, sent as a whole, makes the same prompt.
    ask(server, [{"role": "user", "content": "LOOK"}, *first["output"], result, question], store=False, tools=[LS],
        instructions="Be brief.")  # fmt: skip
    assert prompts(server)[-1] == after


def test_instructions_are_those_of_the_request(server: RunningServer) -> None:
    first = ask(server, "COUNT", instructions="Speak Latin.")
    ask(server, "THINK", previous_response_id=first["id"], instructions="Speak Greek.")
    assert "Latin" not in prompts(server)[-1]
    assert prompts(server)[-1].count("Greek") == 1


def test_two_ways_to_go_on_from_one_response(server: RunningServer) -> None:
    first = ask(server, "COUNT")
    for text in ("THINK", "EMPTY"):
        ask(server, text, previous_response_id=first["id"])
    one, other = prompts(server)[-2:]
    assert "THINK" in one
    assert "THINK" not in other
    assert "one two three" in other


def test_a_conversation_outlives_its_beginning(server: RunningServer) -> None:
    first = ask(server, "COUNT")
    second = ask(server, "THINK", previous_response_id=first["id"])
    assert server.http.delete(f"/v1/responses/{first['id']}").json() == {
        "id": first["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    ask(server, "EMPTY", previous_response_id=second["id"])
    assert "one two three" in prompts(server)[-1]


def test_references_to_items(server: RunningServer) -> None:
    first = ask(server, "COUNT")
    [asked] = server.http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    references = [{"type": "item_reference", "id": asked["id"]}, {"id": first["output"][0]["id"]}]
    ask(server, [*references, {"role": "user", "content": "THINK"}])
    by_reference = prompts(server)[-1]
    ask(server, "THINK", previous_response_id=first["id"])
    assert prompts(server)[-1] == by_reference


def test_an_item_is_referred_to_once(server: RunningServer) -> None:
    """Else a small request could stand for a conversation of any length."""
    reference = {"type": "item_reference", "id": ask(server, "COUNT")["output"][0]["id"]}
    error = refused(server, input=[reference, {"role": "user", "content": "x"}, reference])
    assert (error["param"], "more than once" in error["message"]) == ("input", True)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "outcome": {"type": "exit"}}]},
        {"type": "local_shell_call_output", "id": "c", "output": [1, None]},
        {"type": "mcp_call", "output": ["x"], "content": [2]},
    ],
)
def test_items_whose_lists_are_no_content(server: RunningServer, item: dict[str, Any]) -> None:
    id = ask(server, [item, {"role": "user", "content": "COUNT"}])["id"]
    listed = server.http.get(f"/v1/responses/{id}/input_items?order=asc").json()["data"]
    assert {name: listed[0][name] for name in item} == item
    ask(server, "COUNT", previous_response_id=id)


# --- in the background --------------------------------------------------------------------------------------------


def test_a_response_in_the_background(server: RunningServer, client: OpenAI) -> None:
    response = client.responses.create(input="THINK", background=True)
    assert response.status == "queued"
    eventually(lambda: client.responses.retrieve(response.id).status not in ("queued", "in_progress"))
    done = client.responses.retrieve(response.id)
    assert (done.status, done.output_text, done.background) == ("completed", "Hi you.", True)
    assert client.responses.cancel(response.id) == done
    ask(server, "COUNT", previous_response_id=response.id)
    assert "Hi you." in prompts(server)[-1]


def test_a_background_response_that_is_cancelled(server: RunningServer, client: OpenAI) -> None:
    response = client.responses.create(input="SLOWLY", background=True)
    eventually(lambda: client.responses.retrieve(response.id).status == "in_progress")
    error = refused(server, input="x", previous_response_id=response.id)
    assert "still being generated" in error["message"]
    assert client.responses.cancel(response.id).status == "cancelled"
    eventually(server.idle)
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_a_background_response_that_is_deleted(server: RunningServer, client: OpenAI) -> None:
    response = client.responses.create(input="SLOWLY", background=True)
    client.responses.delete(response.id)
    eventually(server.idle)
    assert server.http.get(f"/v1/responses/{response.id}").status_code == 404


@pytest.mark.parametrize(("text", "code"), [("FAIL", "server_error"), ("x" * 5000, "context_length_exceeded")])
def test_a_background_response_that_fails(server: RunningServer, client: OpenAI, text: str, code: str) -> None:
    id = server.http.post("/v1/responses", json={"input": text, "background": True}).json()["id"]
    eventually(lambda: shown(server, id)["status"] not in ("queued", "in_progress"))
    assert shown(server, id)["error"]["code"] == code


def test_a_mistake_of_ours_in_the_background(
    server: RunningServer, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("httpx.ASGITransport.handle_async_request", fail)
    response = client.responses.create(input="THINK", background=True)
    eventually(lambda: client.responses.retrieve(response.id).status == "failed")
    error = client.responses.retrieve(response.id).error
    assert error is not None
    assert "a mistake" not in error.message


def test_others_cannot_be_cancelled(server: RunningServer, client: OpenAI) -> None:
    response = client.responses.create(input="COUNT")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(response.id)


# --- no store -----------------------------------------------------------------------------------------------------


def test_a_server_that_keeps_nothing(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.state, "responses", ResponseStore(0))
    response = ask(server, "x", store=True)
    assert response["store"] is False
    error = refused(server, input="x", previous_response_id=response["id"])
    assert error["code"] == "previous_response_not_found"
    assert "network.response_store_mb is 0" in error["message"]
    assert refused(server, input="x", background=True)["code"] == "unsupported"


def test_the_setting() -> None:
    assert Settings.model_validate({}).network.response_store_mb > 0
    assert not ResponseStore(0).is_on
