"""What the server costs beside the bare engine, over HTTP, on the real engine.

    OMP_NUM_THREADS=1 python -m benchmarks.serving [--quick] [--pairs 9] [--streams 1 4 8 32] [--seconds 4]

Models with random weights are made in a temporary folder: the tiny Llama of the tests and the tiny hybrid. `main.py`
serves one as a user starts it, and a second process drives the engine alone (`bare_engine.py`), with the same settings
and sampler. Both answer the same prompts, in turns, each side first in every second pair; what is told are medians with
the least and the greatest, and of ratios those of the pairs. A third process is the client (`stream_client.py`); on two
cores the engine, the server and the client share them, and the bare engine has one for itself.

One torch thread on both sides, unless OMP_NUM_THREADS says otherwise. CPU time of the server's processes is read from
/proc; where there is none, it is left out.

--quick takes the Llama only, and three pairs. --seconds is about how long the bare engine answers in each run; what a
request costs by itself weighs the more, the shorter that is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.drivers import Answer, Answers, Ask, Driver, Probe, driver
from tests.models import SPECIAL_TOKENS, corpus, make_hybrid, make_llama
from tests.serving import API_KEY, ServerProcess, served

MODEL = {"cache_size": 32768, "max_seq_len": 16384, "max_batch_size": 32}
STREAMS = (1, 4, 8, 32)
TOGETHER = 8  # requests that arrive at once
PROMPT_CHARACTERS = {"short prompts": 200, "prompts of 500 tokens": 1400}
PREFILL_TOKENS = 5000
PING_SECONDS = 1
CORES = 2  # that are kept busy while latencies are measured

TARGETS = {  # in words, beside what is measured
    "speed": "0.95 at 1 and 8",
    "frames": "1.00",
    "first token": "worst: 1.3",
    "health": "p99 under 50 ms",
    "ping": "within 0.2 s",
}


# --- processes ------------------------------------------------------------------------------------------------------


class Bench:
    """A server with its engine process, the bare engine, and the client, all with the same model."""

    def __init__(self, server: ServerProcess, client: Driver, prober: Driver, bare: Driver) -> None:
        self.client = client
        self.prober = prober
        self.bare = bare
        self.server_pid = server.process.pid
        self.engine_pid = _only_child(self.server_pid)
        self._texts = _texts()

    def prompts(self, count: int, characters: int) -> list[str]:
        """Another text each, of which no cache has the beginning."""
        return [next(self._texts)(characters) for _ in range(count)]


@contextmanager
def bench(directory: Path, folder: Path) -> Iterator[Bench]:
    options = [item for name, value in MODEL.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--sse-ping-interval", str(PING_SECONDS)]
    with (
        served(folder, *options, model=directory) as server,
        driver("benchmarks.stream_client", server.base_url, API_KEY) as client,
        driver("benchmarks.stream_client", server.base_url, API_KEY) as prober,
        driver("benchmarks.bare_engine", str(directory), json.dumps(MODEL)) as bare,
    ):
        yield Bench(server, client, prober, bare)


def _texts() -> Iterator[Callable[[int], str]]:
    rng = random.Random(0)
    words = sorted({word for line in corpus() for word in line.split() if word.isalpha()})
    while True:
        yield lambda characters: " ".join(rng.choices(words, k=characters // 6))[:characters]


def _only_child(pid: int) -> int | None:
    try:
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(child)


def _cpu_seconds(pid: int | None) -> float:
    """Of a process so far; not a number where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int | None) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return float("nan")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextmanager
def busy_core() -> Iterator[None]:
    """Another program that takes a core, as far as it can have one."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- a pair of runs -------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """
    Attributes:
        server, engine, client: seconds of CPU time.
    """

    answers: Answers
    server: float
    engine: float
    client: float

    @property
    def speed(self) -> float:
        return self.answers.tokens / self.answers.seconds

    def per_token(self, seconds: float) -> float:
        """Milliseconds."""
        return 1000 * seconds / self.answers.tokens

    @property
    def frames(self) -> int:
        return sum(len(answer.texts) for answer in self.answers.answers)

    @property
    def first_tokens(self) -> list[float]:
        return [answer.texts[0] - answer.sent for answer in self.answers.answers]


class Pair(NamedTuple):
    bare: Run
    http: Run


def run_bare(bench: Bench, ask: Ask) -> Run:
    answers = bench.bare.run(ask)
    return Run(answers, 0.0, answers.cpu, 0.0)


def run_http(bench: Bench, ask: Ask) -> Run:
    before = _cpu_seconds(bench.server_pid), _cpu_seconds(bench.engine_pid)
    answers = bench.client.run(ask)
    after = _cpu_seconds(bench.server_pid), _cpu_seconds(bench.engine_pid)
    return Run(answers, after[0] - before[0], after[1] - before[1], answers.cpu)


def pairs(bench: Bench, count: int, ask: Callable[[], Ask]) -> list[Pair]:
    result = []
    for number in range(count):
        asked = ask()
        if number % 2:
            http = run_http(bench, asked)
            result.append(Pair(run_bare(bench, asked), http))
        else:
            result.append(Pair(run_bare(bench, asked), run_http(bench, asked)))
    return result


def together(prompts: Sequence[str], max_tokens: int) -> Ask:
    return Ask(prompts=list(prompts), max_tokens=[max_tokens] * len(prompts), starts=[0.0] * len(prompts))


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    return f"{form.format(median(values))} ({form.format(min(values))} - {form.format(max(values))})"


def percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


# --- what is measured -----------------------------------------------------------------------------------------------


def speed_table(bench: Bench, streams: Sequence[int], count: int, seconds: float) -> Table:
    table = Table(
        "Streams",
        "engine, tokens/s",
        "HTTP, tokens/s",
        f"ratio ({TARGETS['speed']})",
        f"frames per engine step ({TARGETS['frames']})",
        "CPU ms per token: bare",
        "engine process adds",
        "server process adds",
        "(client)",
        title=f"Tokens per second, {count} pairs",
    )
    for number in streams:
        speed = run_bare(bench, together(bench.prompts(number, 200), 64)).speed
        max_tokens = max(32, int(speed * seconds / number))
        run_http(bench, together(bench.prompts(number, 200), 32))
        found = pairs(bench, count, lambda: together(bench.prompts(number, 200), max_tokens))  # noqa: B023
        table.add_row(
            f"{number}",
            spread([pair.bare.speed for pair in found], "{:.0f}"),
            spread([pair.http.speed for pair in found], "{:.0f}"),
            spread([pair.http.speed / pair.bare.speed for pair in found], "{:.3f}"),
            spread([pair.http.frames / pair.bare.frames for pair in found]),
            spread([pair.bare.per_token(pair.bare.engine) for pair in found]),
            spread([pair.http.per_token(pair.http.engine) - pair.bare.per_token(pair.bare.engine) for pair in found]),
            spread([pair.http.per_token(pair.http.server) for pair in found]),
            spread([pair.http.per_token(pair.http.client) for pair in found]),
        )
    return table


def first_token_table(bench: Bench, count: int) -> Table:
    table = Table(
        "",
        "engine, ms: median",
        "worst",
        "HTTP, ms: median",
        "worst",
        "median, ratio",
        f"worst, ratio ({TARGETS['first token']})",
        title=f"Time to first token of {TOGETHER} requests that arrive together, {count} pairs",
    )
    for name, characters in PROMPT_CHARACTERS.items():
        found = pairs(bench, count, lambda: together(bench.prompts(TOGETHER, characters), 16))  # noqa: B023
        columns: list[str] = []
        for side in ("bare", "http"):
            for choose in (median, max):
                columns.append(spread([1000 * choose(getattr(pair, side).first_tokens) for pair in found], "{:.0f}"))
        for choose in (median, max):
            columns.append(spread([choose(pair.http.first_tokens) / choose(pair.bare.first_tokens) for pair in found]))
        table.add_row(name, *columns)
    return table


def prefill_table(bench: Bench, count: int) -> Table:
    """A stream, beside which a long prompt is processed, on cores that are all busy."""
    speed = run_bare(bench, together(bench.prompts(1, 200), 64)).speed
    characters = int(PREFILL_TOKENS * 2.8)

    def ask() -> Ask:
        stream, prompt = *bench.prompts(1, 200), *bench.prompts(1, characters)
        return Ask(prompts=[stream, prompt], max_tokens=[int(3 * speed), 16], starts=[0.0, 0.3])

    gaps: dict[str, list[float]] = {"engine": [], "HTTP": []}
    prefills: list[float] = []
    latencies: list[float] = []
    pings: list[float] = []
    for _ in range(count):
        asked = ask()
        with busy_core():
            gaps["engine"].append(_longest_gap(bench.bare.run(asked).answers[0]))
            bench.client.start(asked)
            time.sleep(0.3)
            # About as long as the prefill takes.
            bench.prober.start(Probe(path="/health", seconds=2.0, pause=0.005))
            stream, prompt = bench.client.result().answers
            latencies += bench.prober.result().latencies
        gaps["HTTP"].append(_longest_gap(stream))
        prefills.append(prompt.texts[0] - prompt.sent)
        pings += [late for answer in (stream, prompt) for late in _lateness(answer)]
    table = Table("", "", "target", title=f"While {PREFILL_TOKENS:,} tokens are processed, {count} times")
    table.add_row("seconds until their first token", spread(prefills), "")
    table.add_row(
        "/health, ms: median, p99, worst",
        ", ".join(f"{1000 * value:.1f}" for value in (median(latencies), percentile(latencies, 99), max(latencies)))
        + f" of {len(latencies)}",
        TARGETS["health"],
    )
    for side, values in gaps.items():
        table.add_row(f"longest gap of a stream, ms: {side}", spread([1000 * value for value in values], "{:.0f}"), "")
    if pings:
        table.add_row(
            "pings late by, ms: median, worst",
            f"{1000 * median(pings):.0f}, {1000 * max(pings):.0f} of {len(pings)}",
            TARGETS["ping"],
        )
    return table


def _longest_gap(answer: Answer) -> float:
    return max(later - earlier for earlier, later in zip(answer.texts, answer.texts[1:], strict=False))


def _lateness(answer: Answer) -> list[float]:
    """Of a stream's pings, each against its place in a row that begins with the stream; missing ones count as late."""
    due = [answer.begun + PING_SECONDS * number for number in range(1, int(answer.ended - answer.begun) + 1)]
    came = [*answer.pings, *[answer.ended] * len(due)]
    return [abs(at - when) for at, when in zip(came, due, strict=False)]


def rest_table(directory: Path, folder: Path, bench: Bench, count: int) -> Table:
    """Start-up and memory."""
    table = Table("", "bare engine", "server", title="Start-up and memory")
    starts: dict[str, list[float]] = {"bare": [], "http": []}
    for number in range(count):
        own = folder / f"start-{number}"
        own.mkdir()
        began = time.perf_counter()
        with driver("benchmarks.bare_engine", str(directory), json.dumps(MODEL)) as bare:
            bare.run(together(["Hello"], 1))
            starts["bare"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with (
            driver("benchmarks.stream_client", "http://127.0.0.1:1", API_KEY),
            served(own, model=directory) as server,
            driver("benchmarks.stream_client", server.base_url, API_KEY) as client,
        ):
            client.run(together(["Hello"], 1))
            starts["http"].append(time.perf_counter() - began)
    table.add_row("seconds to the first answer", *(spread(seconds) for seconds in starts.values()))
    table.add_row(
        "MB resident: engine process, server process",
        f"{_resident_mb(bench.bare.process.pid):.0f}",
        f"{_resident_mb(bench.engine_pid):.0f}, {_resident_mb(bench.server_pid):.0f}",
    )
    return table


# --- all of it ------------------------------------------------------------------------------------------------------


def make_model(make: Callable[[Path], Path], directory: Path) -> Path:
    """A model that writes whole characters only.

    Half of one is held back, and tried again with each token that follows: random models would write little else.
    """
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    make(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    path = directory / "model.safetensors"
    weights: dict[str, Any] = load_file(path)
    for token_id in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size()):
        if not tokenizer.decode([token_id]).isprintable():
            weights["lm_head.weight"][token_id] = 0.0
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def main() -> None:
    options = argparse.ArgumentParser(description="Measure what the server costs beside the bare engine.")
    options.add_argument("--pairs", type=int, help="pairs of runs (default: 9, with --quick 3)")
    options.add_argument("--quick", action="store_true", help="the Llama only, with few repetitions")
    options.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="numbers of streams side by side")
    options.add_argument("--seconds", type=float, default=4.0, help="of the bare engine in each run")
    arguments = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=max(150, Console().width))
    count = arguments.pairs or (3 if arguments.quick else 9)
    began = time.perf_counter()
    makers = {"tiny Llama": make_llama} | ({} if arguments.quick else {"tiny hybrid": make_hybrid})
    with tempfile.TemporaryDirectory() as name:
        for number, (title, make) in enumerate(makers.items()):
            folder = Path(name) / f"server-{number}"
            folder.mkdir()
            directory = make_model(make, Path(name) / f"model-{number}")
            console.rule(title)
            with bench(directory, folder) as running:
                console.print(speed_table(running, arguments.streams, count, arguments.seconds))
                console.print(first_token_table(running, count))
                console.print(prefill_table(running, max(2, count // 3)))
                console.print(rest_table(directory, folder, running, max(1, count // 3)))
    console.print(f"{time.perf_counter() - began:.0f} s in all; load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
