"""The samples of tests/model_answers, through the whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.messages import ControlToken
from tests.endpoints.OAI.test_chat import chat, streamed
from tests.endpoints.running import CHATML, RunningServer, running_server
from tests.samples import TOOLS, ExpectedCall, Sample, SampleFile
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script

WHOLE, BY_THE_CHARACTER, AS_GIVEN = "whole", "by the character", "as given"


class SampleServer:
    """A server with a model for each file of samples, loaded when one of them is next."""

    def __init__(self, server: RunningServer, files: Mapping[str, SampleFile]) -> None:
        self.server = server
        self._files = files
        self._loaded = ""

    def load(self, name: str) -> None:
        if name != self._loaded:
            self.server.load(name, **self._files[name].settings)
            self._loaded = name

    def body(self, name: str, sample: Sample, cut: str) -> dict[str, Any]:
        tools = list(TOOLS) if sample.tools is None else sample.tools
        body: dict[str, Any] = {"messages": [{"role": "user", "content": _mark(name, sample, cut)}], **sample.request}
        if tools:
            body["tools"] = [TOOLS[tool] for tool in tools]
        if sample.cut:
            body["max_tokens"] = len(sample.text)
        return body


def cuts(sample: Sample) -> dict[str, list[str]]:
    """Ways to cut a text into chunks."""
    always = {BY_THE_CHARACTER: list(sample.text), WHOLE: [sample.text]}
    return always | ({AS_GIVEN: sample.chunks} if sample.chunks else {})


def _mark(name: str, sample: Sample, cut: str) -> str:
    return f"[{name}: {sample.name}, {cut}]"


@contextmanager
def serving_samples(files: Mapping[str, SampleFile], folder: Path) -> Iterator[SampleServer]:
    engine = ScriptedEngine(folder)
    for name in files:
        engine.add_model(name)
    plays = [
        Play(when=_mark(name, sample, cut), chunks=chunks)
        for name, file in files.items()
        for sample in file.samples
        for cut, chunks in cuts(sample).items()
    ]
    models = {name: ModelScript(max_seq_len=65536, control_tokens=_tokens(file)) for name, file in files.items()}
    engine.write(Script(plays=plays, models=models))
    server = running_server(engine)
    for name, file in files.items():
        template = engine.model_dir / name / "chat_template.jinja"
        template.write_text(file.chat_template() or CHATML, encoding="utf-8")
    with server.running():
        yield SampleServer(server, files)


def _tokens(file: SampleFile) -> list[ControlToken]:
    return [ControlToken(text, index, special=True) for index, text in enumerate(file.control_tokens, 1)]


# --- answers --------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    content: str
    reasoning: str
    calls: list[ExpectedCall]
    finish_reason: str


@dataclass
class StreamedCall:
    """
    Attributes:
        pieces: of its arguments, with the number of the chunk in which each came.
    """

    name: str
    id: str
    pieces: list[tuple[int, str]] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def complete(self) -> bool:
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True


@dataclass
class StreamedAnswer:
    """
    Attributes:
        calls: by index, with those that turned out to be none.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, StreamedCall] = field(default_factory=dict)
    finish_reason: str = ""

    def joined(self) -> Answer:
        calls = [ExpectedCall(call.name, call.arguments, call.id) for call in self.calls.values() if call.complete]
        return Answer(self.content, self.reasoning, calls, self.finish_reason)


def asked(server: RunningServer, body: dict[str, Any]) -> Answer:
    """A whole answer, whose form is checked."""
    (choice,) = chat(server, body)["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    if not message["content"] and (message.get("tool_calls") or message.get("reasoning_content")):
        assert message["content"] is None
    calls = []
    for call in message.get("tool_calls") or []:
        assert call["type"] == "function"
        calls.append(ExpectedCall(call["function"]["name"], call["function"]["arguments"], call["id"]))
    assert len({call.id for call in calls}) == len(calls)
    return Answer(message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"])


def asked_in_a_stream(server: RunningServer, body: dict[str, Any]) -> StreamedAnswer:
    """A streamed answer, the form of whose chunks is checked."""
    answer = StreamedAnswer()
    for number, event in enumerate(streamed(server, body)):
        (choice,) = event["choices"]
        assert not answer.finish_reason, "nothing comes behind the finish reason"
        delta = choice["delta"]
        answer.content += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls") or []:
            _add_piece(answer, piece, number)
        answer.finish_reason = choice["finish_reason"] or ""
    return answer


def _add_piece(answer: StreamedAnswer, piece: dict[str, Any], number: int) -> None:
    index, function = piece["index"], piece["function"]
    if index not in answer.calls:
        assert index == len(answer.calls)
        assert piece["type"] == "function"
        answer.calls[index] = StreamedCall(function["name"], piece["id"])
    else:
        assert not piece.get("id")
        assert not function.get("name")
        assert index == len(answer.calls) - 1, "calls come one after the other"
    if function.get("arguments"):
        answer.calls[index].pieces.append((number, function["arguments"]))
