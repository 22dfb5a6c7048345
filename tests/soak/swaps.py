"""Ten models behind one server that holds three, asked for at random by eight clients.

    python -m tests.soak.swaps [--minutes 5] [--seed N] [--report FILE]

Every answer is compared with the one that its model gives when it is asked alone. Now and then a client goes away. The
exit status is 1 when something happened that must not: a wrong answer or one of another model, an error, a request that
hangs, a traceback in the log, an engine process that is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import httpx

from tests import models
from tests.serving import ServerProcess, served
from tests.soak.__main__ import ENDED_BY_SIGNAL, connected, tracebacks
from tests.soak.processes import Processes
from tests.soak.questions import CHAT, Question, RightAnswers, learn, questions

KINDS: Final = (models.make_llama, models.make_hybrid, models.make_sliding, models.make_conv, models.make_moe)
# By how many places the output layers of the models of a kind are turned, so that they answer differently.
TURNS: Final = (0, 300)
CLIENTS: Final = 8
ASKED: Final = ("completion 0", "completion 3", "chat of 2, edit none", "chat of 4, edit last")
SETTINGS: Final = """\
model:
  inline_model_loading: true
  max_models: 3
  use_as_default: [max_seq_len]
  max_seq_len: 4096
network:
  sse_ping_interval: 1
"""
GOES_AWAY: Final = 0.1  # probability of a client that does not wait for its answer
REQUEST_SECONDS: Final = 600.0


@dataclass
class Tally:
    """What has happened."""

    answers: Counter[str] = field(default_factory=Counter)  # by model
    seconds: list[float] = field(default_factory=list)
    left: int = 0
    violations: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.swaps")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--report", type=Path, help="file to write the report to as well")
    given = parser.parse_args(argv)
    # Before torch is imported: an engine with more threads than cores left spends its time waiting for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="swaps-") as folder:
        text, passed = soak(Path(folder), given.minutes * 60, given.seed)
    print(text)
    if given.report is not None:
        given.report.write_text(f"seed {given.seed}\n{text}", encoding="utf-8")
    return 0 if passed else 1


def soak(folder: Path, seconds: float, seed: int) -> tuple[str, bool]:
    """Returns the report, and whether nothing happened that must not."""
    model_dir = folder / "models"
    names = make_models(model_dir)
    (folder / "config.yml").write_text(SETTINGS, encoding="utf-8")
    tally = Tally()
    with served(folder, "--model-dir", str(model_dir)) as server:
        processes = Processes(server.process.pid)
        metrics = asyncio.run(run(server, names, seconds, Random(seed), tally))
        engines = processes.of_engines
    if server.process.returncode not in ENDED_BY_SIGNAL:
        tally.violations.append(f"the server ends with status {server.process.returncode}")
    tally.violations += [f"engine process {pid} is left" for pid in engines if Path(f"/proc/{pid}").exists()]
    tally.violations += [f"in the log: {text}" for text in tracebacks(server.log)]
    tally.violations += [] if tally.answers else ["nothing was answered"]
    return report(tally, seconds, metrics), not tally.violations


def make_models(folder: Path) -> list[str]:
    """Makes the models; gives their names."""
    names = []
    for make in KINDS:
        for turn in TURNS:
            name = f"{make.__name__.removeprefix('make_')}-{turn}"
            if turn:
                shutil.copytree(folder / f"{name.rpartition('-')[0]}-0", folder / name)
                turn_output(folder / name / "model.safetensors", turn)
            else:
                make(folder / name)
            names.append(name)
    return names


def turn_output(path: Path, places: int) -> None:
    """Have a model say other tokens, of those that are not special."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    ordinary = weights["lm_head.weight"][len(models.SPECIAL_TOKENS) :]
    ordinary.copy_(ordinary.roll(places, 0))
    save_file(weights, path, metadata={"format": "pt"})


async def run(server: ServerProcess, names: Sequence[str], seconds: float, random: Random, tally: Tally) -> str:
    """Returns the metrics in the end."""
    asked = [question for question in questions() if question.name in ASKED]
    async with connected(server, server.admin_key) as admin:
        right = {}
        for name in names:
            (await admin.post("/v1/model/load", json={"model_name": name})).raise_for_status()
            right[name] = await learn(admin, admin, asked)
            print(f"{name} asked alone", flush=True)
        if same := [name for name in names if list(right.values()).count(right[name]) > 1]:
            tally.violations.append(f"these answer alike, so that nothing is compared: {same}")
        end = time.monotonic() + seconds
        async with connected(server, server.api_key) as http, asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                client = Client(http, asked, right, tally, Random(random.random()))
                clients.create_task(client.work(end))
        return (await admin.get("/metrics")).text


@dataclass
class Client:
    """Asks models at random, one after the other."""

    http: httpx.AsyncClient
    asked: Sequence[Question]
    right: dict[str, RightAnswers]
    tally: Tally
    random: Random

    async def work(self, end: float) -> None:
        while time.monotonic() < end:
            name, question = self.random.choice(list(self.right)), self.random.choice(self.asked)
            body = {**question.body, "model": name, "stream": self.random.random() < 0.5}
            started = time.monotonic()
            try:
                if self.random.random() < GOES_AWAY:
                    await asyncio.wait_for(self._answer(question, body), self.random.uniform(0.05, 5))
                else:
                    await asyncio.wait_for(self._check(name, question, body), REQUEST_SECONDS)
            except TimeoutError:
                self.tally.left += 1
                if time.monotonic() - started >= REQUEST_SECONDS:
                    self.tally.violations.append(f"{name} has not answered {question.name} in {REQUEST_SECONDS} s")

    async def _check(self, name: str, question: Question, body: dict[str, Any]) -> None:
        started = time.monotonic()
        status, model, text = await self._answer(question, body)
        self.tally.seconds.append(time.monotonic() - started)
        self.tally.answers[name] += 1
        if status != 200 or model != name or not self.right[name][question.name].agrees(text):
            expected = self.right[name][question.name].text
            self.tally.violations.append(f"{name} on {question.name}: {status} of {model}: {text!r}, not {expected!r}")

    async def _answer(self, question: Question, body: dict[str, Any]) -> tuple[int, str, str]:
        """Status, model and text of an answer, or what came in its place."""
        response = await self.http.post(question.route, json=body)
        if response.status_code != 200:
            return response.status_code, "", response.text
        if not body["stream"]:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"] if question.route == CHAT else choice["text"]
            return 200, response.json()["model"], text
        *data, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(entry) for entry in data]
        if done != "[DONE]" or any("error" in chunk for chunk in chunks):
            return 200, "", response.text
        pieces = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [piece["delta"].get("content") if question.route == CHAT else piece["text"] for piece in pieces]
        return 200, chunks[0]["model"], "".join(text or "" for text in texts)


def report(tally: Tally, seconds: float, metrics: str) -> str:
    shown = ("waypoint_model_loads_total", "waypoint_model_unloads_total", "waypoint_engine_restarts_total")
    return "\n".join(
        [
            f"{CLIENTS} clients, {len(KINDS) * len(TURNS)} models, 3 at once, {seconds:.0f} s",
            f"answers {tally.answers.total()}, by model: {dict(sorted(tally.answers.items()))}",
            f"seconds to an answer: median {median(tally.seconds):.1f}, longest {max(tally.seconds):.1f}",
            f"requests whose client went away: {tally.left}",
            *(line for line in metrics.splitlines() if line.startswith(shown)),
            f"what must not happen: {len(tally.violations)}",
            *tally.violations,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
