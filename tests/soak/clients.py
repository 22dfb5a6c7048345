"""The clients of a soak: they ask, read the answers as clients do, and judge them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import httpx
from openai import APIConnectionError, APIError, AsyncOpenAI

from tests.soak.questions import ANSWER_TOKENS, CHAT, COMPLETIONS, SCHEMA, TOOLS, Question, RightAnswers
from tests.soak.record import Asked, Outcome, Record

# A request that takes longer hangs. The machine may be busy and the queue long.
DEADLINE_SECONDS: Final = 240.0
LONG_PROMPT: Final = "word " * 2000  # more tokens than the models take


class BadRequest(NamedTuple):
    """A request that has to be refused with an error of some code."""

    method: str
    path: str
    body: dict[str, Any] | None
    code: str


_GREEDY: Final = {"prompt": "x", "max_tokens": 2}
BAD_REQUESTS: Final = (
    BadRequest("POST", COMPLETIONS, {**_GREEDY, "temperature": "hot"}, "invalid_request"),
    BadRequest("POST", COMPLETIONS, {**_GREEDY, "n": 100_000}, "invalid_request"),
    BadRequest("POST", COMPLETIONS, {**_GREEDY, "prompt": LONG_PROMPT}, "context_length_exceeded"),
    BadRequest("POST", COMPLETIONS, {**_GREEDY, "prompt": LONG_PROMPT, "stream": True}, "context_length_exceeded"),
    BadRequest("POST", COMPLETIONS, {**_GREEDY, "regex_pattern": "("}, "invalid_request"),
    BadRequest("POST", CHAT, {"max_tokens": 2}, "invalid_request"),
    BadRequest("POST", CHAT, {"messages": [{"role": "user", "content": 7}]}, "invalid_request"),
    BadRequest("POST", "/v1/token/decode", {"tokens": [2**31]}, "invalid_request"),
    BadRequest("POST", "/v1/model/load", {"model_name": "x"}, "invalid_api_key"),
    BadRequest("GET", "/v1/nothing", None, "not_found"),
    BadRequest("GET", CHAT, None, "method_not_allowed"),
)


class Failed(Exception):
    """The server answers with an error, in its envelope."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Broken(Exception):
    """What the server sends is no answer."""


class Wrong(Exception):
    """The answer is not the right one."""


class Left(Exception):
    """The client has gone before the answer came, as it meant to."""


@dataclass
class Answer:
    """
    Attributes:
        texts: by the choice's index, as the next two.
        calls: names and arguments of tool calls.
        logprob_tokens: tokens that log-probabilities were given of.
    """

    model: str
    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    logprob_tokens: int = 0


class Client:
    """A client with a key of its own that asks one thing after the other.

    Args:
        base_url: of the server.
        key: its API key.
        right: the right answers, by the model's name.
        record: where outcomes go.
        random: makes every choice.
        pool: the questions.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        right: dict[str, RightAnswers],
        record: Record,
        random: Random,
        pool: Sequence[Question],
    ) -> None:
        self._right = right
        self._record = record
        self._random = random
        self._pool = pool
        self._key = key
        self._address = httpx.URL(base_url)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers={"Authorization": f"Bearer {key}"}, timeout=DEADLINE_SECONDS + 60
        )
        strict, lenient = (
            AsyncOpenAI(
                base_url=f"{base_url}/v1",
                api_key=key,
                max_retries=0,
                timeout=DEADLINE_SECONDS + 60,
                _strict_response_validation=strictly,
            )
            for strictly in (True, False)
        )
        self._openai = strict
        # Its types forbid the null that OpenAI's own chunks of a completion have as their finish reason.
        self._openai_lenient = lenient
        self._kinds: list[tuple[int, str, Callable[[Asked], Awaitable[None]]]] = [
            (10, "plain", self._plain),
            (10, "stream", self._stream),
            (3, "slow reader", self._slow_reader),
            (4, "openai", self._openai_plain),
            (4, "openai stream", self._openai_stream),
            (3, "n", self._several),
            (3, "stop", self._stop),
            (3, "logprobs", self._logprobs),
            (2, "regex", self._regex),
            (2, "json_schema", self._json_schema),
            (2, "tool call", self._tool_call),
            (4, "tokens", self._tokens),
            (3, "explain", self._explain),
            (3, "look around", self._look_around),
            (5, "bad request", self._bad_request),
            (2, "leaves before the head", self._leave_early),
            (3, "leaves in prefill", self._leave_in_prefill),
            (3, "leaves a stream", self._leave_stream),
        ]

    async def close(self) -> None:
        await self._http.aclose()
        await self._openai.close()
        await self._openai_lenient.close()

    async def work(self, until: Callable[[], bool]) -> None:
        while not until():
            [(_, kind, ask)] = self._random.choices(self._kinds, [weight for weight, *_ in self._kinds])
            outcome = await self.ask(kind, ask)
            # While the model comes and goes, as clients do that are told to try again.
            await asyncio.sleep(2 if outcome == "error" else self._random.choice([0, 0, 0.05, 0.5]))

    async def burst(self) -> None:
        """A short request, of which many come at once."""
        await self.ask("burst", self._random.choice([self._plain, self._stream]))

    async def ask(self, kind: str, ask: Callable[[Asked], Awaitable[None]]) -> Outcome:
        """Ask once, within the deadline, and record what became of it."""
        asked = Asked(kind)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await ask(asked)
            asked.outcome = "right"
        except TimeoutError:
            asked.outcome, asked.detail = "hung", f"nothing for {DEADLINE_SECONDS} s"
        except Failed as failure:
            refused = kind == "bad request" and failure.code == asked.code
            asked.outcome, asked.code, asked.detail = "refused" if refused else "error", failure.code, str(failure)
        except Left:
            asked.outcome = "left"
        except Wrong as wrong:
            asked.outcome, asked.detail = "wrong", str(wrong)
        except (Broken, httpx.HTTPError, OSError, ValueError, LookupError) as error:
            asked.outcome, asked.detail = "broken", f"{type(error).__name__}: {error}"
        self._record.end(asked)
        return asked.outcome

    # --- questions with one right answer ------------------------------------------------------------------------

    async def _plain(self, asked: Asked) -> None:
        question = self._question(asked)
        self._judge(question, await self._fetch(asked, question.route, question.body))

    async def _stream(self, asked: Asked) -> None:
        question = self._question(asked)
        self._judge(question, await self._fetch_stream(asked, question.route, question.body))

    async def _slow_reader(self, asked: Asked) -> None:
        question = self._question(asked)
        pause = self._random.choice([0.05, 0.3])
        self._judge(question, await self._fetch_stream(asked, question.route, question.body, pause=pause))

    async def _several(self, asked: Asked) -> None:
        question = self._question(asked)
        fetch = self._random.choice([self._fetch, self._fetch_stream])
        answer = await fetch(asked, question.route, {**question.body, "n": 3})
        if set(answer.texts) != {0, 1, 2}:
            raise Wrong(f"{len(answer.texts)} of 3 answers")
        self._judge(question, answer, answers=3)

    async def _stop(self, asked: Asked) -> None:
        question = self._question(asked)
        # One string that ends either model's answer where it has to, or none.
        model = self._random.choice(list(self._right))
        stop = self._right[model][question.name].stop(self._random)
        fetch = self._random.choice([self._fetch, self._fetch_stream])
        answer = await fetch(asked, question.route, {**question.body, "stop": [stop or "\ue000"]})
        right = self._right[answer.model][question.name]
        if stop is not None and stop in right.text[: right.certain]:
            if answer.texts[0] != right.text[: right.text.index(stop)] or answer.finishes[0] != "stop":
                raise Wrong(f"{question.name} until {stop!r}: {answer.texts[0]!r}, not {right.text!r}")
        elif stop is None or (stop not in right.text and right.certain == len(right.text)):
            self._judge(question, answer)

    async def _logprobs(self, asked: Asked) -> None:
        question = self._question(asked)
        logprobs = {"logprobs": True, "top_logprobs": 3} if question.route == CHAT else {"logprobs": 3}
        fetch = self._random.choice([self._fetch, self._fetch_stream])
        answer = await fetch(asked, question.route, {**question.body, **logprobs})
        if answer.logprob_tokens != ANSWER_TOKENS:
            raise Wrong(f"log-probabilities of {answer.logprob_tokens} tokens, not {ANSWER_TOKENS}")
        self._judge(question, answer)

    async def _openai_plain(self, asked: Asked) -> None:
        question = self._question(asked)
        try:
            if question.route == CHAT:
                chat = await self._openai.chat.completions.create(model="any", stream=False, **question.body)
                answer = answer_of(chat.model_dump(), question.route)
            else:
                completion = await self._openai.completions.create(model="any", stream=False, **question.body)
                answer = answer_of(completion.model_dump(), question.route)
        except APIError as error:
            raise failure_of(error) from error
        self._judge(question, answer)

    async def _openai_stream(self, asked: Asked) -> None:
        question = self._question(asked)
        fields: dict[str, Any] = {**question.body, "model": "any", "stream": True}
        fields["stream_options"] = {"include_usage": True}
        chat, completions = self._openai.chat.completions, self._openai_lenient.completions
        create = chat.create if question.route == CHAT else completions.create
        answer = Answer("")
        try:
            async for chunk in await create(**fields):
                add_chunk(answer, chunk.model_dump(), question.route)
                asked.state = f"text {answer.texts!r}"
        except APIError as error:
            raise failure_of(error) from error
        self._judge(question, answer)

    # --- answers of a shape -------------------------------------------------------------------------------------

    async def _regex(self, asked: Asked) -> None:
        fetch = self._random.choice([self._fetch, self._fetch_stream])
        body = {"prompt": "The quick brown", "regex_pattern": "(fox|dog) [0-9]{3}", "max_tokens": 30}
        answer = await fetch(asked, COMPLETIONS, body)
        if not re.fullmatch("(fox|dog) [0-9]{3}", answer.texts[0]) or answer.finishes[0] != "stop":
            raise Wrong(f"{answer.texts[0]!r} ({answer.finishes[0]})")

    async def _json_schema(self, asked: Asked) -> None:
        fetch = self._random.choice([self._fetch, self._fetch_stream])
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": "Which?"}], "response_format": form, "max_tokens": 40}
        answer = await fetch(asked, CHAT, body)
        if answer.finishes[0] == "stop":
            check_object(answer.texts[0], {"animal": ("fox", "dog"), "quick": (True, False)})

    async def _tool_call(self, asked: Asked) -> None:
        fetch = self._random.choice([self._fetch, self._fetch_stream])
        messages = [{"role": "user", "content": "Look."}]
        answer = await fetch(
            asked, CHAT, {"messages": messages, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40}
        )
        if answer.finishes[0] == "tool_calls":
            for name, arguments in answer.calls[0]:
                if name != "look":
                    raise Wrong(f"a call of {name!r}")
                check_object(arguments, {"where": ("left", "right"), "far": (True, False)})

    # --- other routes -------------------------------------------------------------------------------------------

    async def _tokens(self, asked: Asked) -> None:
        text = self._random.choice(["Ada measured the river", "Prüfung é 🦊", "<|im_end|> as text", ""])
        encoded = await self._json(asked, "POST", "/v1/token/encode", {"text": text, "add_bos_token": False})
        if text:
            decoded = await self._json(asked, "POST", "/v1/token/decode", {"tokens": encoded["tokens"]})
            if decoded["text"] != text:
                raise Wrong(f"{text!r} comes back as {decoded['text']!r}")
        tokenized = await self._json(asked, "POST", "/tokenize", {"content": text, "with_pieces": True})
        if [piece["id"] for piece in tokenized["tokens"]] != encoded["tokens"]:
            raise Wrong(f"/tokenize and /v1/token/encode disagree about {text!r}")

    async def _explain(self, asked: Asked) -> None:
        question = self._question(asked)
        explanation = await self._json(asked, "POST", "/v1/cache/explain", question.body)
        told = explanation["prompt_tokens"]
        if told not in {answers[question.name].prompt_tokens for answers in self._right.values()}:
            raise Wrong(f"{question.name} has {told} tokens")

    async def _look_around(self, asked: Asked) -> None:
        paths = ["/v1/models", "/v1/model", "/v1/cache", "/v1/cache/plan?prompt_tokens=3000", "/props", "/v1/templates"]
        await self._json(asked, "GET", self._random.choice(paths), None)

    async def _bad_request(self, asked: Asked) -> None:
        bad = self._random.choice(BAD_REQUESTS)
        asked.code = bad.code
        await self._json(asked, bad.method, bad.path, bad.body)
        raise Wrong(f"{bad.method} {bad.path} with {str(bad.body)[:100]} is served")

    # --- clients that go away -----------------------------------------------------------------------------------

    async def _leave_early(self, asked: Asked) -> None:
        """In the middle of the head or the body, or right after it; in order or with a reset."""
        body = json.dumps({"prompt": "Ada", "max_tokens": 20}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        data = head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        _, writer = await asyncio.open_connection(self._address.host, self._address.port)
        writer.write(data[: self._random.choice([20, len(head), len(data) - 5, len(data)])])
        await writer.drain()
        if self._random.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        raise Left

    async def _leave_in_prefill(self, asked: Asked) -> None:
        question = self._random.choice([question for question in self._pool if "long" in question.name])
        # A prompt of its own, of which nothing is cached.
        prompt = f"{self._random.random()} {question.body['prompt']}"
        body = {**question.body, "prompt": prompt, "stream": self._random.random() < 0.5}
        await self._leave_after(asked, self._http.post(question.route, json=body), self._random.uniform(0, 1.5))

    async def _leave_stream(self, asked: Asked) -> None:
        question = self._question(asked)
        body = {**question.body, "stream": True, "max_tokens": 200}
        async with self._http.stream("POST", question.route, json=body) as response:
            await check_status(response)
            left = self._random.randrange(1, 6)
            async for line in response.aiter_lines():
                left -= line.startswith("data: ")
                if not left:
                    break
        raise Left

    async def _leave_after(self, asked: Asked, request: Awaitable[httpx.Response], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await check_status(await request)
        except TimeoutError:
            pass
        raise Left

    # --- requests -----------------------------------------------------------------------------------------------

    def _question(self, asked: Asked) -> Question:
        question = self._random.choice(self._pool)
        asked.kind = f"{asked.kind}: {question.name}"
        return question

    async def _json(self, asked: Asked, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        asked.state = f"{method} {path} sent"
        response = await self._http.request(method, path, json=body)
        await check_status(response)
        asked.state = f"{method} {path} answered"
        if response.headers["content-type"].startswith("text/event-stream"):
            return check_events(response.text.splitlines())
        return response.json()

    async def _fetch(self, asked: Asked, route: str, body: Mapping[str, Any]) -> Answer:
        return answer_of(await self._json(asked, "POST", route, body), route)

    async def _fetch_stream(self, asked: Asked, route: str, body: Mapping[str, Any], *, pause: float = 0.0) -> Answer:
        fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
        asked.state = "sent"
        lines = []
        async with self._http.stream("POST", route, json=fields) as response:
            await check_status(response)
            asked.state = "the head is there"
            async for line in response.aiter_lines():
                lines.append(line)
                asked.state = f"{len(lines)} lines, the last at {self._record.now:.1f} s: {line[:200]}"
                await asyncio.sleep(pause)
        answer = Answer("")
        for event in check_events(lines):
            add_chunk(answer, event, route)
        return answer

    def _judge(self, question: Question, answer: Answer, answers: int = 1) -> None:
        right = self._right[answer.model][question.name]
        for text in answer.texts.values():
            if not right.agrees(text):
                raise Wrong(
                    f"{question.name} of {answer.model}: {text!r}, not {right.text!r} ({right.certain} certain)"
                )
            self._record.near_ties += text != right.text
        if any(finish != "length" for finish in answer.finishes.values()) or len(answer.finishes) != len(answer.texts):
            raise Wrong(f"{question.name} ends with {answer.finishes}")
        usage = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
        if usage != (right.prompt_tokens, ANSWER_TOKENS * answers):
            raise Wrong(f"{question.name}: usage {usage}, not {right.prompt_tokens, ANSWER_TOKENS * answers}")


# --- reading answers --------------------------------------------------------------------------------------------------


async def check_status(response: httpx.Response) -> None:
    """Raises `Failed` for an error in its envelope and `Broken` for any other."""
    if response.status_code == 200:
        return
    await response.aread()
    try:
        error = response.json()["error"]
        failure = Failed(error["code"], error["message"])
    except (ValueError, LookupError, TypeError):
        raise Broken(f"status {response.status_code}: {response.text[:500]}") from None
    raise failure


def check_events(lines: list[str]) -> list[dict[str, Any]]:
    """Events of a stream before its terminator. Raises `Failed` for one that says so and `Broken` for one cut off."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise Broken(f"the stream ends without its terminator after {events[-1:]}")
    payloads: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    for payload in payloads:
        if "error" in payload:
            raise Failed(payload["error"]["code"], payload["error"]["message"])
    return payloads


def answer_of(body: dict[str, Any], route: str) -> Answer:
    answer = Answer(body["model"], usage=body["usage"] or {})
    for choice in body["choices"]:
        index = choice["index"]
        answer.finishes[index] = choice["finish_reason"]
        if route == CHAT:
            message = choice["message"]
            answer.texts[index] = message["content"] or ""
            calls = [call["function"] for call in message.get("tool_calls") or []]
            answer.calls[index] = [(call["name"], call["arguments"]) for call in calls]
            answer.logprob_tokens += len((choice.get("logprobs") or {}).get("content") or [])
        else:
            answer.texts[index] = choice["text"]
            answer.logprob_tokens += len((choice.get("logprobs") or {}).get("tokens") or [])
    return answer


def add_chunk(answer: Answer, chunk: dict[str, Any], route: str) -> None:
    answer.model = chunk["model"]
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        index = choice["index"]
        delta = choice["delta"] if route == CHAT else {"content": choice["text"]}
        answer.texts[index] = answer.texts.get(index, "") + (delta.get("content") or "")
        calls = answer.calls.setdefault(index, [])
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = name, arguments + (call["function"].get("arguments") or "")
        logprobs = choice.get("logprobs") or {}
        answer.logprob_tokens += len(logprobs.get("content") or logprobs.get("tokens") or [])
        if choice.get("finish_reason"):
            answer.finishes[index] = choice["finish_reason"]


def failure_of(error: APIError) -> Exception:
    if isinstance(error, APIConnectionError):
        return Broken(f"{type(error).__name__}: {error.__cause__ or error}")
    return Failed(str(error.code), error.message)


def check_object(text: str, allowed: dict[str, tuple[object, ...]]) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        raise Wrong(f"{text!r} is no JSON") from None
    if value.keys() != allowed.keys() or any(value[name] not in values for name, values in allowed.items()):
        raise Wrong(f"{text!r} is of another shape")
