"""The places at which the prompt of a chat gets checkpoints: where messages begin in the text that is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from backends.messages import ControlToken
from common.boundaries import turning_points
from common.config_models import PAGE_TOKENS
from common.generation import GenerationRequest
from common.prefixes import common_length
from common.templating import ChatTemplate, Rendering
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.utils.prompt import ChatPrompt, PromptWriter
from tests.common.test_templating import FAMILIES, TEMPLATES, TOKENS
from tests.endpoints.OAI.test_prefix_stability import FAMILIES as ANSWERING
from tests.endpoints.OAI.test_prefix_stability import LS, Agent, Family, as_it_came, rewritten, without_thought
from tests.endpoints.OAI.writing import writer
from tests.endpoints.running import CHATML, RunningServer, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.serving import ServerProcess

SendBack: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

VOLATILE = "x-anthropic-billing-header: cc_version=9.9.9; cch=aa111;"
RULES = "Be kind. " * 40  # longer than the shortest page
OTHER = "\u0416other"  # begins as no other content does


def said(role: str, content: object, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def used(number: int, path: str, text: str | None = None) -> list[dict[str, Any]]:
    """A call and its result."""
    call = {
        "id": f"abcdefgh{number}",
        "type": "function",
        "function": {"name": "ls", "arguments": json.dumps({"path": path})},
    }
    return [said("assistant", text, tool_calls=[call]), said("tool", f"result {number}", tool_call_id=call["id"])]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SYSTEM = said("system", RULES)
TURNS = [
    said("user", "one"),
    said("assistant", "yes"),
    said("user", "two"),
    said("assistant", "no"),
    said("user", "three"),
]
CHATS: dict[str, dict[str, Any]] = {
    "no system": {"messages": [said("user", RULES), *TURNS[1:]]},
    "turns": {"messages": [SYSTEM, *TURNS]},
    "tools": {"messages": [SYSTEM, *TURNS], "tools": [LS]},
    "a loop": {"messages": [SYSTEM, *TURNS, *used(1, "/a"), *used(2, "/b")], "tools": [LS]},
    "loops": {"messages": [SYSTEM, TURNS[0], *used(1, "/a", "So:"), *TURNS[1:3], *used(2, "/b")], "tools": [LS]},
    "parts": {"messages": [SYSTEM, said("user", parts("one ", "more")), TURNS[1], said("user", parts("two"))]},
    "thoughts": {
        "messages": [
            SYSTEM,
            TURNS[0],
            said("assistant", "yes", reasoning_content="hm, yes"),
            TURNS[2],
            said("assistant", "<think>\noh\n</think>\n\nno"),
            TURNS[4],
        ]
    },
    "continued": {"messages": [SYSTEM, *TURNS, said("assistant", "Well, ")], "continue_final_message": True},
    "begun": {"messages": [SYSTEM, *TURNS], "response_prefix": "Sure: "},
    "blanks": {"messages": [SYSTEM, said("user", "\n  one \n"), said("assistant", " yes "), said("user", " two\n\n")]},
    "a greeting": {"messages": [SYSTEM, said("assistant", "Welcome."), *TURNS[:3]]},
    "rules later": {"messages": [SYSTEM, *TURNS[:2], said("system", "Be rude."), *TURNS[2:]]},
    "several in a row": {"messages": [SYSTEM, *TURNS[:2], *TURNS[2::2]]},
    "results as the user's": {
        "messages": [SYSTEM, *TURNS[:2], said("user", "<tool_response>\nx\n</tool_response>"), *TURNS[3:]]
    },
    "the same": {"messages": [SYSTEM, said("user", "x"), said("assistant", "x"), said("user", "x")]},
    "nothing": {"messages": [SYSTEM, said("user", ""), said("assistant", "yes"), said("user", "two")]},
}
# Chats in which boundaries are missing: the system prompt becomes the beginning of the first user's message, and where
# that is empty, a mark in it brings the blanks between the two with it.
MISSING = {"gemma": {"nothing"}, "filters": {"nothing"}}


def prompt_of(prompts: PromptWriter, **fields: Any) -> ChatPrompt:
    return prompts.chat(ChatCompletionRequest.model_validate(fields))


def expected_boundaries(prompts: PromptWriter, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """Where the prompt ends to be the same if the text of a message is another. One that is not shown has no place."""
    prompt = prompt_of(prompts, messages=messages, **fields).text
    places = set()
    for index in turning_points(messages, 2):
        edited = [*messages[:index], messages[index] | {"content": OTHER}, *messages[index + 1 :]]
        other = prompt_of(prompts, messages=edited, **fields, cache_boundaries=[]).text
        if other != prompt:
            places.add(common_length(prompt, other))
    return sorted(places)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_where_prompts_of_every_template_change(path: Path) -> None:
    prompts = writer(ChatTemplate(path.stem, path.read_text(encoding="utf-8"), TOKENS), has_checkpoints=True)
    missing = set()
    for name, fields in CHATS.items():
        found, expected = prompt_of(prompts, **fields).boundaries, expected_boundaries(prompts, **fields)
        assert expected
        assert set(found) <= set(expected), name
        if found != expected:
            missing.add(name)
    assert missing == MISSING.get(path.stem, set())


# --- answers in the model's own words ---------------------------------------------------------------------------------


@pytest.mark.parametrize("send_back", [without_thought, rewritten])
@pytest.mark.parametrize("family", ANSWERING, ids=lambda family: family.template)
def test_where_prompts_change_in_a_loop_of_tools(family: Family, send_back: SendBack) -> None:
    def thinking(text: str) -> str:
        return family.thought % text if family.thought != "%s" else ""

    answers = [
        (thinking("Where?") + family.call % "/a", "x y"),
        (thinking("And there?") + ("Next.\n" if family.beside else "") + family.call % "/b", "z"),
        (thinking("Enough.") + family.text + " All seen. \n", "Thanks. " * 40),
        (thinking("Again?") + family.call % "/c", "c"),
        (thinking("Bye.") + family.text + "Bye.  ", "Bye you"),
    ]
    agent = Agent(family, send_back)
    agent.messages[0]["content"] = "Look around. " * 40
    turns = []
    for raw, follow in [*answers, ("", "")]:
        expected = expected_boundaries(agent.writer, agent.messages, tools=[LS])
        prompt = prompt_of(agent.writer, messages=agent.messages, tools=[LS])
        assert prompt.boundaries == expected
        turns.append([prompt.text[place:][:6] for place in prompt.boundaries])
        agent.turn(raw, follow)
    assert turns == [["Look a"]] * 3 + [["Look a", "Thanks"]] * 2 + [["Look a", "Thanks", "Bye yo"]]


# --- what they cost ---------------------------------------------------------------------------------------------------


class Renderings:
    def __init__(self) -> None:
        self.count = 0

    def of(self, prompts: PromptWriter, **fields: Any) -> int:
        """How many a prompt takes."""
        self.count = 0
        prompt_of(prompts, **fields)
        return self.count


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> Renderings:
    counter, render = Renderings(), ChatTemplate.render

    def counted(*given: Any, **more: Any) -> Rendering:
        counter.count += 1
        return render(*given, **more)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return counter


def test_a_loop_of_tools_costs_one_rendering_more(renderings: Renderings) -> None:
    family = ANSWERING[0]
    agent = Agent(family, as_it_came)
    agent.messages[0]["content"] = "Look around. " * 40
    more = []
    for raw, follow in [*((family.call % path, "x") for path in "abc"), ("Done.", "More?"), (family.call % "d", "y")]:
        fields: dict[str, Any] = {"messages": agent.messages, "tools": [LS]}
        without = renderings.of(agent.writer, **fields, cache_boundaries=[])
        more.append(renderings.of(agent.writer, **fields) - without)
        agent.turn(raw, follow)
    assert more == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"has_checkpoints": False}, [SYSTEM, *TURNS]),
        ({"recurrent_checkpoint_boundaries": 0}, [SYSTEM, *TURNS]),
        ({}, TURNS),  # shorter than a page
        ({}, [SYSTEM]),
    ],
)
def test_they_cost_nothing_where_they_are_of_no_use(
    settings: dict[str, Any], messages: list[dict[str, Any]], renderings: Renderings
) -> None:
    prompts = writer(CHATML, **({"has_checkpoints": True} | settings))
    assert renderings.of(prompts, messages=messages) == 1
    assert prompt_of(prompts, messages=messages).boundaries == []


# --- by hand ----------------------------------------------------------------------------------------------------------


def begins(prompt: ChatPrompt) -> list[str]:
    return [prompt.text[place:].partition("<|im_end|>")[0] for place in prompt.boundaries]


@pytest.mark.parametrize(
    ("indexes", "expected"),
    [
        (None, ["one", "two", "three"]),
        ([], []),
        ([0], [RULES]),
        ([2, -1, 5, 1], ["one", "yes", "three"]),
        ([-6], [RULES]),
    ],
)
def test_boundaries_by_hand(indexes: list[int] | None, expected: list[str]) -> None:
    prompts = writer(CHATML, has_checkpoints=True)
    assert begins(prompt_of(prompts, messages=[SYSTEM, *TURNS], cache_boundaries=indexes)) == expected
    if indexes is not None:
        prompts = writer(CHATML, has_checkpoints=True, recurrent_checkpoint_boundaries=0)
        assert begins(prompt_of(prompts, messages=[SYSTEM, *TURNS], cache_boundaries=indexes)) == expected
        prompts = writer(CHATML)
        assert begins(prompt_of(prompts, messages=[SYSTEM, *TURNS], cache_boundaries=indexes)) == []


def test_boundaries_in_messages_that_hold_calls_and_results() -> None:
    [family] = [family for family in ANSWERING if family.template == "qwen3_5"]
    agent = Agent(family, as_it_came)
    messages = [SYSTEM, TURNS[0], *used(1, "/a"), *used(2, "/b", "And:")]
    prompt = prompt_of(agent.writer, messages=messages, tools=[LS], cache_boundaries=[2, 3, 4])
    assert [prompt.text[place:][:11] for place in prompt.boundaries] == ["<tool_call>", "result 1\n</", "And:\n\n<tool"]


MARK = {"cache_control": {"type": "ephemeral"}}


def marked(*texts: str, at: int) -> list[dict[str, Any]]:
    """Parts, of which the one at an index is marked."""
    return [part | (MARK if index == at else {}) for index, part in enumerate(parts(*texts))]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_marks_inside_messages(path: Path) -> None:
    prompts = writer(ChatTemplate(path.stem, path.read_text(encoding="utf-8"), TOKENS), has_checkpoints=True)
    first, second = (
        prompt_of(
            prompts,
            messages=[SYSTEM, said("user", marked("The document.\n\n", question, at=0))],
            cache_boundaries=[],
        )
        for question in ("What is it?", "How long?")
    )
    assert first.boundaries == second.boundaries == [common_length(first.text, second.text)]


@pytest.mark.parametrize(
    ("first", "content", "expected"),
    [
        (SYSTEM, marked("a", "b", at=1), ["yes"]),
        (SYSTEM, marked("a", " ", at=0), ["yes"]),
        (SYSTEM, marked("a", "b", "c", at=1), ["c"]),
        (said("system", marked(RULES, "x", at=0)), marked("a", "b", at=0), ["ab", "b"]),
        (said("system", f"{VOLATILE}"), marked("a", "b", at=0), ["b"]),
    ],
)
def test_marked_parts(first: dict[str, Any], content: list[dict[str, Any]], expected: list[str]) -> None:
    prompts = writer(CHATML, has_checkpoints=True)
    messages = [first, said("user", content), TURNS[1], said("user", RULES)]
    assert begins(prompt_of(prompts, messages=messages, cache_boundaries=[])) == expected
    usual = begins(prompt_of(prompts, messages=messages))
    assert set(usual) == {*expected, "".join(part["text"] for part in content), RULES}


def test_the_last_marks_count() -> None:
    messages = [SYSTEM, *(said("user", marked(f"a{number} ", "b", at=0)) for number in range(20))]
    prompt = prompt_of(writer(CHATML, has_checkpoints=True), messages=messages, cache_boundaries=[])
    assert len(prompt.boundaries) == 16
    assert prompt.text[: prompt.boundaries[0]].endswith("a4 ")


@pytest.mark.parametrize(
    ("first", "indexes", "expected"),
    [
        ([said("system", VOLATILE)], [0, 1, 3], ["one", "two"]),
        ([said("system", f"{VOLATILE}\nBe kind.")], [0, 1], ["Be kind.", "one"]),
        ([said("user", "hi"), said("system", VOLATILE)], [0, 1, -1], ["hi", "one", "two"]),
    ],
)
def test_boundaries_where_a_volatile_line_is_left_out(
    first: list[dict[str, Any]], indexes: list[int], expected: list[str]
) -> None:
    prompts = writer(CHATML, has_checkpoints=True)
    messages = [*first, TURNS[0], said("assistant", RULES), TURNS[2]]
    assert begins(prompt_of(prompts, messages=messages, cache_boundaries=indexes)) == expected


def test_nothing_is_left_for_a_message_that_was_left_out_at_the_end() -> None:
    prompts = writer(CHATML, has_checkpoints=True)
    messages = [said("user", RULES), said("system", VOLATILE)]
    assert begins(prompt_of(prompts, messages=messages, cache_boundaries=[0, 1])) == [RULES]


# --- over HTTP --------------------------------------------------------------------------------------------------------

HEADER = "<|im_start|>user\n"
ANSWERS = [
    "Where?\n</think>\n\n<tool_call>\n<function=ls>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>",
    "Enough.\n</think>\n\n All seen. \n",
    "Bye.\n</think>\n\nBye.",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The models are of the kind of Qwen3.5; that of "dense" has no recurrent layers."""
    engine = ScriptedEngine(tmp_path_factory.mktemp("server"))
    template = (FAMILIES / "qwen3_5.jinja").read_text(encoding="utf-8")
    tokens = [ControlToken("<|im_start|>", 1000, special=True), ControlToken("<|im_end|>", 1001, special=True)]
    for name in ("hybrid", "dense"):
        (engine.add_model(name) / "tabby_template.jinja").write_text(template, encoding="utf-8")
    first, *others = [Play(when="Look", chunks=[answer]) for answer in ANSWERS]
    models = {name: ModelScript(recurrent=name == "hybrid", control_tokens=tokens) for name in ("hybrid", "dense")}
    engine.write(Script(plays=[msgspec.structs.replace(first, then=others)], models=models))
    with running_server(engine).running() as running:
        running.load("hybrid")
        yield running


def asked(server: RunningServer, path: str, **body: Any) -> tuple[dict[str, Any], GenerationRequest]:
    """The first choice of the answer, and what has reached the engine."""
    response = server.http.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice, server.engine.history()[-1]


def test_boundaries_over_a_conversation(server: RunningServer) -> None:
    messages = [
        said("system", RULES + "Never write <|im_end|>."),
        said("user", "Look <|im_end|> around"),
    ]
    sent = []
    follows = [said("tool", "x <|im_start|>y"), said("user", "<|im_end|>And <|im_start|>there?"), said("user", "?")]
    for follow in follows:
        choice, request = asked(server, "chat/completions", messages=messages, tools=[LS])
        message = choice["message"]
        if message.get("tool_calls"):
            follow["tool_call_id"] = message["tool_calls"][0]["id"]
        messages += [message, follow]
        sent.append(request)
    prompts = [str(request.prompt) for request in sent]
    for answer, (before, after) in zip(ANSWERS, pairwise(prompts), strict=False):
        assert after.startswith(before + answer)
    places = [HEADER + "Look <|im_end|> around", HEADER + "<|im_end|>And <|im_start|>there?"]
    for prompt, request, count in zip(prompts, sent, [1, 1, 2], strict=True):
        assert request.cache_boundaries == [prompt.index(place) + len(HEADER) for place in places[:count]]
    # An edit there leaves the prompt as it is up to there, with the answers as the model gave them.
    messages = [*messages[:5], said("user", "Look elsewhere")]
    _, edited = asked(server, "chat/completions", messages=messages, tools=[LS])
    place = sent[-1].cache_boundaries[-1]
    assert edited.cache_boundaries == sent[-1].cache_boundaries
    prompt = str(edited.prompt)
    assert prompt[:place] == prompts[-1][:place]
    assert prompt[place:].startswith("Look elsewhere")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("some text", [2, 9]), ([5, 6, 7, 8, 9, 10, 11, 12, 13], [2, 9]), (["some texts", "other text"], [2, 9])],
)
def test_boundaries_of_completions(server: RunningServer, prompt: object, expected: list[int]) -> None:
    _, request = asked(server, "completions", prompt=prompt, cache_boundaries=[9, 2, 9])
    assert request.cache_boundaries == expected
    _, request = asked(server, "completions", prompt=prompt, cache_boundaries=None)
    assert request.cache_boundaries == []


CHAT: dict[str, Any] = {"messages": [said("user", "Look"), said("assistant", "x"), said("user", "y")]}
RANGE = "must be from -3 to 2"


@pytest.mark.parametrize(
    ("path", "body", "boundaries", "param", "message"),
    [
        ("chat/completions", CHAT, [3], "cache_boundaries.0", RANGE),
        ("chat/completions", CHAT, [0, -4], "cache_boundaries.1", RANGE),
        ("chat/completions", CHAT, [0] * 17, "cache_boundaries", "at most 16"),
        ("chat/completions", CHAT, ["1"], "cache_boundaries.0", "integer"),
        ("chat/completions", CHAT, [1.5], "cache_boundaries.0", "integer"),
        ("chat/completions", CHAT, [True], "cache_boundaries.0", "integer"),
        ("chat/completions", CHAT, [None], "cache_boundaries.0", "integer"),
        ("chat/completions", CHAT, 1, "cache_boundaries", "list"),
        ("chat/completions", CHAT, {"0": 1}, "cache_boundaries", "list"),
        ("completions", {"prompt": "text"}, [5], "cache_boundaries.0", "from 0 to 4: characters"),
        ("completions", {"prompt": "text"}, [0, 4, -1], "cache_boundaries.2", "from 0 to 4: characters"),
        ("completions", {"prompt": [7, 8]}, [3], "cache_boundaries.0", "from 0 to 2: tokens"),
        ("completions", {"prompt": ["longer", "text"]}, [1, 5], "cache_boundaries.1", "from 0 to 4: characters"),
        ("completions", {"prompt": "text"}, list(range(17)), "cache_boundaries", "at most 16"),
        ("completions", {"prompt": "text"}, ["1"], "cache_boundaries.0", "integer"),
        ("completions", {"prompt": "text", "suffix": "s"}, [1], "cache_boundaries", "suffix"),
    ],
)
def test_boundaries_that_are_none(
    server: RunningServer, path: str, body: dict[str, Any], boundaries: object, param: str, message: str
) -> None:
    response = server.http.post(f"/v1/{path}", json=body | {"cache_boundaries": boundaries})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


def test_boundaries_are_accepted_without_recurrent_layers(server: RunningServer) -> None:
    server.load("dense")
    for boundaries in (None, [], [1, -1]):
        _, request = asked(server, "chat/completions", messages=[SYSTEM, *TURNS], cache_boundaries=boundaries)
        assert request.cache_boundaries == []
    asked(server, "completions", prompt="text", cache_boundaries=[1])
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "text"})):
        assert server.http.post(f"/v1/{path}", json=body | {"cache_boundaries": [5]}).status_code == 400


# --- on the real engine -----------------------------------------------------------------------------------------------


def filled(topic: str, sentences: int) -> str:
    """Text of about seven tokens a sentence."""
    return " ".join(f"{topic} {number}." for number in range(sentences))


def processed(server: ServerProcess, messages: list[dict[str, Any]]) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were not cached."""
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def test_an_edit_at_a_boundary_costs_what_follows_it_and_a_page_at_most(real_server: ServerProcess) -> None:
    contents = [("rule", 50), ("first", 45), ("answer", 60), ("last", 80)]
    roles = ("system", "user", "assistant", "user")
    messages = [said(role, filled(*content)) for role, content in zip(roles, contents, strict=True)]
    prompt_tokens, cold = processed(real_server, messages)
    assert cold == prompt_tokens
    for index in (3, 1):
        before = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages[:index]]
        with real_server.client() as client:
            kept = client.post("/v1/token/encode", json={"text": "".join([*before, HEADER])}).json()["length"]
        messages[index]["content"] = "Edited. " + messages[index]["content"]
        prompt_tokens, again = processed(real_server, messages)
        assert prompt_tokens - kept <= again <= prompt_tokens - kept + PAGE_TOKENS < prompt_tokens
