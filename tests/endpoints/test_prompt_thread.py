"""Prompts are written beside the loop: others are served meanwhile, and what nobody waits for any more is not begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest

from endpoints.prompt_thread import PromptThread, prompt_owner
from tests.endpoints.running import CHATML, RunningServer, eventually, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import Play, Script

pytestmark = pytest.mark.anyio


@pytest.fixture
def prompts() -> Iterator[PromptThread]:
    thread = PromptThread()
    yield thread
    thread.close()


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


async def test_work_is_done_in_order_in_one_other_thread(prompts: PromptThread) -> None:
    done: list[tuple[int, int]] = []

    def work(number: int) -> None:
        done.append((number, threading.get_ident()))

    waited_for = prompts.run(lambda: work(1))
    first = asyncio.ensure_future(waited_for)
    await asyncio.sleep(0)
    prompts.later(lambda: work(2))
    await prompts.run(lambda: work(3))
    await first
    assert [number for number, _ in done] == [1, 2, 3]
    assert len({thread for _, thread in done}) == 1
    assert done[0][1] != threading.get_ident()


async def test_work_that_nobody_waits_for_any_more_is_not_begun(prompts: PromptThread) -> None:
    blocked, begun = threading.Event(), threading.Event()
    first = asyncio.ensure_future(prompts.run(blocked.wait))
    second = asyncio.ensure_future(prompts.run(begun.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    blocked.set()
    await first
    await prompts.run(lambda: None)
    assert not begun.is_set()


async def test_owners_take_turns(prompts: PromptThread) -> None:
    """Who has much to be done keeps nobody else waiting."""
    blocked, done = threading.Event(), list[str]()
    prompts.later(partial(wait_for, blocked))
    for name in ("a1", "a2", "a3", "b1", "c1", "a4", "b2"):
        prompt_owner.set(name[0])
        prompts.later(partial(done.append, name))
    blocked.set()
    prompt_owner.set("a")
    await prompts.run(lambda: None)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_what_fails_later_is_logged(prompts: PromptThread, log_lines: list[str]) -> None:
    def fail() -> None:
        raise KeyError("the turn")

    prompts.later(fail)
    await prompts.run(lambda: None)
    assert any("the end of an answer has failed" in line and "the turn" in line for line in log_lines)
    with pytest.raises(KeyError):
        await prompts.run(fail)


# --- served -----------------------------------------------------------------------------------------------------------

SLOW = "{% for a in range(99999) %}{% for b in range(999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One whose model takes its time over a chat that says SLOW."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("slow"))
    engine.add_model("alpha")
    engine.write(Script(plays=[Play(chunks=["yes"])]))
    with running_server(engine).running() as server:
        template = "{% if messages[-1].content == 'SLOW' %}" + SLOW + "{% endif %}" + CHATML
        (engine.model_dir / "alpha" / "chat_template.jinja").write_text(template, encoding="utf-8")
        server.load("alpha")
        yield server


def test_others_are_served_while_a_prompt_is_written(
    slow_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.sandbox.MAX_SECONDS", 1.0)
    answers: list[tuple[int, str]] = []

    def chat() -> None:
        response = slow_server.http.post("/v1/chat/completions", json={"messages": [{"content": "SLOW"}]})
        answers.append((response.status_code, response.text))

    slow = threading.Thread(target=chat)
    slow.start()
    served = 0
    while not answers:
        for path in ("/health", "/v1/model"):
            assert slow_server.admin.get(path).status_code == 200
            served += not answers
    slow.join()
    assert served >= 4
    [(status, text)] = answers
    assert status == 400
    assert "chat_template was stopped: it ran for more than 1 s" in text
    response = slow_server.http.post("/v1/chat/completions", json={"messages": [{"content": "hi"}]})
    assert response.json()["choices"][0]["message"]["content"] == "yes"


def test_the_next_turn_finds_the_answer_before_it(slow_server: RunningServer) -> None:
    """The answer is kept in the thread, so a client that is as fast as can be still meets it."""
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(5):
        body = slow_server.http.post("/v1/chat/completions", json={"messages": messages}).json()
        messages += [body["choices"][0]["message"], {"role": "user", "content": "more"}]
    eventually(slow_server.idle)
    prompts = [str(request.prompt) for request in slow_server.engine.history()[-5:]]
    assert all(after.startswith(before + "yes") for before, after in pairwise(prompts))
