"""Clients of a server that take as little of the machine as they can, since the server runs on it too.

Started by `benchmarks.serving`. Reads of a stream no more than where its events begin and end.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from http.client import HTTPConnection
from time import perf_counter, process_time, sleep
from urllib.parse import urlsplit

from benchmarks.drivers import Answer, Answers, Job, Probe, serve_jobs

END_OF_EVENT = b"\r\n\r\n"
PATH = "/v1/chat/completions"
TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Stream(asyncio.Protocol):
    """One request for a stream, and what comes of it."""

    def __init__(self, request: bytes, began: float) -> None:
        self._request = request
        self._began = began
        self._rest = b""
        self._sent = self._headers = 0.0
        self._texts: list[float] = []
        self._pings: list[float] = []
        self._tokens = 0
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent = perf_counter() - self._began
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = perf_counter() - self._began
        *events, self._rest = (self._rest + data).split(END_OF_EVENT)
        for event in events:
            if b'"content":"' in event:
                if b'"content":""' not in event:  # as in the piece that names the role
                    self._texts.append(now)
            elif b": ping" in event:
                self._pings.append(now)
            elif b'"usage":{' in event:
                tokens = TOKENS.search(event)
                assert tokens is not None
                self._tokens = int(tokens[1])
            elif b"[DONE]" in event:
                self._transport.close()
                self.answer.set_result(
                    Answer(
                        sent=self._sent,
                        begun=self._headers,
                        texts=self._texts,
                        pings=self._pings,
                        ended=now,
                        tokens=self._tokens,
                    )
                )
            elif event.startswith(b"HTTP/1.1 "):
                assert event.startswith(b"HTTP/1.1 200"), event
                self._headers = now

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(error or ConnectionError(f"The stream broke off: {self._rest!r}"))


class Client:
    def __init__(self, base_url: str, key: str) -> None:
        address = urlsplit(base_url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._key = key

    async def work(self, job: Job) -> Answers:
        if isinstance(job, Probe):
            return self._probe(job)
        began, cpu = perf_counter(), process_time()
        asked = zip(job.prompts, job.max_tokens, job.starts, strict=True)
        answers = await asyncio.gather(*(self._ask(began, *one) for one in asked))
        return Answers(answers=answers, cpu=process_time() - cpu)

    async def _ask(self, began: float, prompt: str, max_tokens: int, start: float) -> Answer:
        if start:
            await asyncio.sleep(start)
        request = self._request(prompt, max_tokens)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(request, began), self._host, self._port)
        return await stream.answer

    def _request(self, prompt: str, max_tokens: int) -> bytes:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _probe(self, probe: Probe) -> Answers:
        connection = HTTPConnection(self._host, self._port)
        latencies: list[float] = []
        began, cpu = perf_counter(), process_time()
        while perf_counter() - began < probe.seconds:
            asked = perf_counter()
            connection.request("GET", probe.path)
            response = connection.getresponse()
            response.read()
            latencies.append(perf_counter() - asked)
            assert response.status == 200, response.status
            sleep(probe.pause)
        connection.close()
        return Answers(answers=[], cpu=process_time() - cpu, latencies=latencies)


if __name__ == "__main__":
    asyncio.run(serve_jobs(Client(*sys.argv[1:]).work))
