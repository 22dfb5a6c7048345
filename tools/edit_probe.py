"""Measures what an edit of a long prompt costs on a running server: time to first token, and tokens processed again.

    python tools/edit_probe.py --base-url http://127.0.0.1:5000 --model NAME --api-key KEY
    python tools/edit_probe.py ... --admin-key KEY --sweep 2048:-:-,1024:1024:1024 --plot edit-cost.png

Works with any server that has an OpenAI-compatible `/v1/completions` with streaming. For each edit a new random prompt
is served (`cold`), served again (`unedited`), then served with one token or word changed. The next edit gets another
prompt, so no measurement profits from an earlier one.

Tokens processed again are `prompt_tokens - cached_tokens - 1` of the server's usage record, at least 0: the last token
of a prompt is never part of prefill, it is the input of the first generation step.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import httpx

# The reference experiment: a prompt of this length, and one change at each of these positions.
PROMPT_TOKENS = 5266
EDITS = (276, 1321, 2024, 2639, 3769, 4373)
REPEAT = 2

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito's

WORDS = (
    *("apple", "bridge", "candle", "dinner", "engine", "forest", "garden", "harbor", "island", "jacket", "kitchen"),
    *("ladder", "market", "needle", "orange", "pencil", "quarter", "river", "silver", "table", "umbrella", "valley"),
    *("window", "yellow", "zebra", "anchor", "bottle", "carpet", "desert", "eagle", "finger", "glass", "hammer"),
    *("iron", "jungle", "kettle", "lemon", "mirror", "north", "ocean", "paper", "quiet", "rabbit", "shadow"),
)
CALIBRATION_WORDS = 400

# Settings of the loaded model that a sweep leaves as they are.
KEPT_SETTINGS = ("max_seq_len", "cache_size", "cache_mode")

Prompt: TypeAlias = str | list[int]


class ProbeError(Exception):
    """The measurement cannot go on; the message is for the user."""


# --- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What decides where checkpoints lie, in tokens; None: the server's default, or not known."""

    chunk_size: int | None = None
    interval_pp: int | None = None
    interval: int | None = None

    @property
    def label(self) -> str:
        return ", ".join("default" if value is None else str(value) for value in asdict(self).values())


@dataclass(frozen=True)
class Measurement:
    seconds: float  # to the first token
    tokens: int | None  # processed; None: the server does not say


@dataclass(frozen=True)
class EditMeasurement(Measurement):
    position: int  # of the changed token


@dataclass(frozen=True)
class Row:
    """One pass over all edits. Every figure is the median of the repetitions."""

    settings: Settings
    cold: Measurement
    unedited: Measurement
    edits: tuple[EditMeasurement, ...]


@dataclass(frozen=True)
class Report:
    base_url: str
    model: str
    prompt_tokens: int  # asked for; met exactly where positions are exact
    seed: int
    repeat: int
    positions_exact: bool  # False: estimated from the average length of a word
    rows: tuple[Row, ...]


# --- the server -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    seconds: float  # to the first token
    prompt_tokens: int | None
    cached_tokens: int | None

    @property
    def processed(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return max(0, self.prompt_tokens - self.cached_tokens - 1)


class Server:
    """The routes of an OpenAI-compatible server that the probe uses."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        admin_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._admin_headers = {"X-Admin-Key": admin_key} if admin_key else {}
        # A long prefill is silent on some servers, so reading has no time limit.
        root = base_url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=root, headers=headers, timeout=httpx.Timeout(10, read=None), transport=transport
        )

    def close(self) -> None:
        self._client.close()

    def encode(self, text: str, *, add_bos: bool) -> list[int] | None:
        """Token ids of a text; None where the server cannot tell."""
        body: dict[str, Any] = {"text": text}
        if not add_bos:
            body["add_bos_token"] = False
        response = self._client.post("/v1/token/encode", json=body)
        if response.status_code in (404, 405, 501):
            return None
        _check(response)
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def takes_token_ids(self, ids: list[int]) -> bool:
        body = {"model": self.model, "prompt": ids, "max_tokens": 1}
        return self._client.post("/v1/completions", json=body).is_success

    def serve(self, prompt: Prompt) -> Served:
        """Have one token generated after the prompt."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin = time.perf_counter()
        first: float | None = None
        usage: dict[str, Any] = {}
        with self._stream("/v1/completions", body) as events:
            for event in events:
                usage = event.get("usage") or usage
                choices = event.get("choices") or []
                # A token without text (end of sequence, part of a character) shows in the finish only.
                if first is None and any(choice.get("text") or choice.get("finish_reason") for choice in choices):
                    first = time.perf_counter()
        if first is None:
            raise ProbeError("the server's stream ended without a token.")
        details = usage.get("prompt_tokens_details") or {}
        return Served(first - begin, usage.get("prompt_tokens"), details.get("cached_tokens"))

    def settings(self) -> tuple[Settings, dict[str, Any]]:
        """Settings in force, and those to keep in a load; empty where the server has no `GET /v1/model`."""
        response = self._client.get("/v1/model")
        if not response.is_success:
            return Settings(), {}
        parameters = response.json().get("parameters") or {}
        settings = Settings(
            chunk_size=parameters.get("chunk_size"),
            interval_pp=parameters.get("recurrent_checkpoint_interval_pp"),
            interval=parameters.get("recurrent_checkpoint_interval"),
        )
        return settings, {key: parameters[key] for key in KEPT_SETTINGS if parameters.get(key) is not None}

    def load(self, settings: Settings, kept: dict[str, Any]) -> None:
        body = {
            "model_name": self.model,
            "chunk_size": settings.chunk_size,
            "recurrent_checkpoint_interval_pp": settings.interval_pp,
            "recurrent_checkpoint_interval": settings.interval,
            **kept,
        }
        body = {key: value for key, value in body.items() if value is not None}
        with self._stream("/v1/model/load", body, self._admin_headers) as events:
            for _ in events:
                pass  # progress

    @contextmanager
    def _stream(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Iterator[Iterator[Any]]:
        with self._client.stream("POST", path, json=body, headers=headers) as response:
            _check(response)
            yield _events(response)


def _check(response: httpx.Response) -> None:
    if not response.is_success:
        response.read()
        raise ProbeError(f"{response.request.url.path} answered {response.status_code}: {response.text}")


def _events(response: httpx.Response) -> Iterator[Any]:
    """The JSON payloads of a stream of server-sent events."""
    for line in response.iter_lines():
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        event = json.loads(payload)
        if event.get("error"):
            raise ProbeError(f"{response.request.url.path} failed: {event['error'].get('message')}")
        yield event


# --- prompts --------------------------------------------------------------------------------------------------------


class PromptMaker(Protocol):
    exact: bool  # whether an edit lands on the token asked for

    def fresh(self) -> Prompt:
        """A prompt that shares no beginning with an earlier one."""
        ...

    def edited(self, prompt: Any, position: int) -> Prompt:
        """The prompt with the token at `position` changed."""
        ...


class TokenPrompts:
    """Prompts of token ids: length and position are exact."""

    exact = True

    def __init__(self, vocabulary: Sequence[int], length: int, rng: random.Random) -> None:
        self._vocabulary = sorted(set(vocabulary))
        self._length = length
        self._rng = rng

    def fresh(self) -> list[int]:
        return self._rng.choices(self._vocabulary, k=self._length)

    def edited(self, prompt: list[int], position: int) -> list[int]:
        others = [token for token in self._vocabulary if token != prompt[position]]
        return [*prompt[:position], self._rng.choice(others), *prompt[position + 1 :]]


class WordPrompts:
    """Prompts of words, for servers that take text only.

    Args:
        tokens_per_word: on average.
        encode: text -> token ids as the server counts them; None: positions are estimated.
    """

    def __init__(
        self, length: int, tokens_per_word: float, rng: random.Random, encode: Callable[[str], list[int]] | None = None
    ) -> None:
        self.exact = encode is not None
        self._words = max(1, round(length / tokens_per_word))
        self._tokens_per_word = tokens_per_word
        self._rng = rng
        self._encode = encode

    def fresh(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._words))

    def edited(self, prompt: str, position: int) -> str:
        words = prompt.split()
        index = int(position / self._tokens_per_word) if self._encode is None else self._find(words, position)
        index = min(index, len(words) - 1)
        return self._change(words, index)

    def _find(self, words: list[str], position: int) -> int:
        """The first word whose change shows at `position` or later."""
        assert self._encode is not None
        encode = self._encode
        tokens = encode(" ".join(words))

        def first_difference(index: int) -> int:
            changed = encode(self._change(words, index))
            return next((i for i, (a, b) in enumerate(zip(tokens, changed, strict=False)) if a != b), len(tokens))

        return bisect.bisect_left(range(len(words)), position, key=first_difference)

    def _change(self, words: list[str], index: int) -> str:
        other = WORDS[(WORDS.index(words[index]) + 1) % len(WORDS)]
        return " ".join([*words[:index], other, *words[index + 1 :]])


def make_prompts(server: Server, length: int, rng: random.Random) -> PromptMaker:
    """The most exact kind of prompt that the server takes."""
    vocabulary = server.encode(" ".join(WORDS), add_bos=False)
    if vocabulary is not None and server.takes_token_ids(vocabulary[:8]):
        return TokenPrompts(vocabulary, length, rng)

    sample = " ".join(rng.choices(WORDS, k=CALIBRATION_WORDS))
    if vocabulary is None:
        tokens = server.serve(sample).prompt_tokens
        if tokens is None:
            raise ProbeError("the server reports no usage and has no /v1/token/encode, so prompts cannot be measured.")
        return WordPrompts(length, tokens / CALIBRATION_WORDS, rng)

    def encode(text: str) -> list[int]:
        return server.encode(text, add_bos=True) or []

    return WordPrompts(length, len(encode(sample)) / CALIBRATION_WORDS, rng, encode)


# --- the experiment -------------------------------------------------------------------------------------------------


def measure(
    server: Server,
    prompts: PromptMaker,
    settings: Settings,
    edits: Sequence[int],
    repeat: int,
    show: Callable[[str], None],
) -> Row:
    """Serve every edit `repeat` times, each time on a prompt of its own."""
    server.serve(prompts.fresh())  # the first prompt pays for what is set up late
    cold: list[Served] = []
    unedited: list[Served] = []
    edited: dict[int, list[Served]] = {position: [] for position in edits}
    for turn in range(repeat):
        for position in edits:
            show(f"{settings.label}: run {turn + 1} of {repeat}, edit @{position}")
            prompt = prompts.fresh()
            cold.append(server.serve(prompt))
            # Resumes from the last checkpoint and adds none, so the edit meets what the cold run left.
            unedited.append(server.serve(prompt))
            edited[position].append(server.serve(prompts.edited(prompt, position)))
    return Row(
        settings=settings,
        cold=_median(cold),
        unedited=_median(unedited),
        edits=tuple(EditMeasurement(**asdict(_median(edited[position])), position=position) for position in edits),
    )


def _median(runs: list[Served]) -> Measurement:
    tokens = [run.processed for run in runs if run.processed is not None]
    return Measurement(
        seconds=statistics.median(run.seconds for run in runs),
        tokens=statistics.median_low(tokens) if len(tokens) == len(runs) else None,
    )


def probe(
    server: Server,
    base_url: str,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    edits: Sequence[int] = EDITS,
    repeat: int = REPEAT,
    sweep: Sequence[Settings] = (),
    seed: int | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> Report:
    """The whole experiment.

    Args:
        prompt_tokens: length of every prompt.
        edits: token positions, from 0.
        repeat: runs per position, of which the median counts.
        sweep: settings to load the model with, one row each; empty: one row with the model as it is.
        seed: of the random prompts. One that was used before meets prompts that the server may still have cached.
        show: called with a line about progress.

    Raises:
        ProbeError: the server refused or lacks something.
    """
    seed = secrets.randbits(32) if seed is None else seed
    rng = random.Random(seed)
    rows = []
    exact = True
    kept = server.settings()[1] if sweep else {}
    wanted_rows: Sequence[Settings | None] = sweep or (None,)
    for wanted in wanted_rows:
        if wanted is not None:
            show(f"loading {server.model} with {wanted.label}")
            server.load(wanted, kept)
        in_force = server.settings()[0]
        settings = in_force if wanted is None else _known(wanted, in_force)
        prompts = make_prompts(server, prompt_tokens, rng)
        exact = exact and prompts.exact
        rows.append(measure(server, prompts, settings, edits, repeat, show))
    return Report(base_url, server.model, prompt_tokens, seed, repeat, exact, tuple(rows))


def _known(wanted: Settings, in_force: Settings) -> Settings:
    known = {key: value for key, value in asdict(in_force).items() if value is not None}
    return replace(wanted, **known)


# --- output ---------------------------------------------------------------------------------------------------------


def render(report: Report) -> str:
    """The tables, as text."""
    lines = []
    if not report.positions_exact:
        lines.append("Positions are estimates: this server has no /v1/token/encode.\n")
    median = f"median of {report.repeat}" if report.repeat > 1 else "one run"
    lines.append(_table(f"Time to first token in seconds, {median}", report, lambda m: f"{m.seconds:.2f}"))
    lines.append(_table("Tokens processed again", report, lambda m: "?" if m.tokens is None else str(m.tokens)))
    return "\n".join(lines)


def _table(title: str, report: Report, cell: Callable[[Measurement], str]) -> str:
    positions = [f"@{edit.position}" for edit in report.rows[0].edits]
    table = [["chunk, pp, interval", "cold", "unedited", *positions]]
    for row in report.rows:
        table.append([row.settings.label, *map(cell, (row.cold, row.unedited, *row.edits))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [title]
    for first, *others in table:
        lines.append("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Curve:
    """One line of the plot. A panel for which a curve lacks values is left out."""

    label: str
    positions: Sequence[int]
    tokens: Sequence[int | None]
    seconds: Sequence[float] = ()
    computed: bool = False  # drawn as steps; a measured one has a marker per point


def draw(path: Path, curves: Sequence[Curve], title: str, prompt_tokens: int) -> None:
    """Write a PNG: edit position against tokens processed again and, where measured, against seconds.

    Raises:
        ProbeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ProbeError("the plot needs matplotlib: pip install matplotlib") from error

    panels: list[tuple[str, list[Sequence[float]]]] = []
    tokens = [[count for count in curve.tokens if count is not None] for curve in curves]
    if all(len(counts) == len(curve.positions) for counts, curve in zip(tokens, curves, strict=True)):
        panels.append(("tokens processed again", [*tokens]))
    if all(curve.seconds for curve in curves):
        panels.append(("time to first token, seconds", [curve.seconds for curve in curves]))

    figure = Figure(figsize=(2 + 5.5 * len(panels), 5.2), dpi=120, layout="constrained")
    for number, (name, values) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        for index, (curve, heights) in enumerate(zip(curves, values, strict=True)):
            # Curves run over each other where they cost the same: the earlier ones are wider and stay visible.
            extra = len(curves) - 1 - index
            axes.plot(
                curve.positions,
                heights,
                label=curve.label,
                color=COLOURS[index % len(COLOURS)],
                linewidth=1.5 + 1.2 * extra,
                drawstyle="steps-post" if curve.computed else "default",
                marker="" if curve.computed else "o",
                markersize=4 + 2 * extra,
            )
        if name.startswith("tokens"):
            axes.fill_between([0, prompt_tokens], [prompt_tokens, 0], color="#999999", alpha=0.2, linewidth=0, zorder=0)
            axes.annotate(
                "after the edit:\nneeded in any case", (0.03, 0.04), xycoords="axes fraction", color="#666666"
            )
        axes.set(xlabel="position of the edit, tokens", ylabel=name, xlim=(0, prompt_tokens))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.legend(
        handles=figure.axes[0].get_lines(),
        loc="outside lower center",
        ncols=2 * len(panels),
        frameon=False,
        title="chunk_size, recurrent_checkpoint_interval_pp, recurrent_checkpoint_interval",
    )
    figure.savefig(path, format="png")


def plot(path: Path, report: Report) -> None:
    curves = [
        Curve(
            label=row.settings.label,
            positions=[edit.position for edit in row.edits],
            tokens=[edit.tokens for edit in row.edits],
            seconds=[edit.seconds for edit in row.edits],
        )
        for row in report.rows
    ]
    title = f"Measured: one edit in a prompt of {report.prompt_tokens:,} tokens, {report.model}"
    draw(path, curves, title, report.prompt_tokens)


# --- command line ---------------------------------------------------------------------------------------------------


def parse_sweep(text: str) -> list[Settings]:
    """`1024:2048:-,2048:-:-` -> settings; `-` is the server's default."""
    return [_parse_row(row) for row in text.split(",")]


def _parse_row(text: str) -> Settings:
    fields = text.split(":")
    if len(fields) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not CHUNK:PP:INTERVAL")
    try:
        return Settings(*(None if field == "-" else int(field) for field in fields))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: each of CHUNK:PP:INTERVAL is a number or -") from None


def _parse_positions(text: str) -> list[int]:
    return sorted(int(position) for position in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edit_probe.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", required=True, metavar="URL", help="of the server, with or without /v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="as the server knows it")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--admin-key", metavar="KEY", help="for --sweep (default: the API key)")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--edits",
        type=_parse_positions,
        default=list(EDITS),
        metavar="P,…",
        help="default: " + ",".join(map(str, EDITS)),
    )
    parser.add_argument(
        "--repeat", type=int, default=REPEAT, metavar="N", help="runs per position (default: %(default)s)"
    )
    parser.add_argument(
        "--sweep",
        type=parse_sweep,
        default=[],
        metavar="CHUNK:PP:INTERVAL,…",
        help="load the model anew for each of these (chunk_size, recurrent_checkpoint_interval_pp, "
        "recurrent_checkpoint_interval; - is the default); the last one stays loaded. Everything else but the sizes of "
        "context and cache is as the server's configuration says",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is standard output")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random prompts (default: a new one each time)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.repeat < 1 or options.edits[0] < 0 or options.edits[-1] >= options.prompt_tokens:
        parser.error("--repeat must be at least 1, and every position of --edits inside the prompt")
    server = Server(options.base_url, options.model, options.api_key, options.admin_key or options.api_key)
    try:
        report = probe(
            server,
            options.base_url,
            prompt_tokens=options.prompt_tokens,
            edits=options.edits,
            repeat=options.repeat,
            sweep=options.sweep,
            seed=options.seed,
            show=lambda line: print(line, file=sys.stderr),
        )
        # Standard output holds nothing but JSON when JSON goes there.
        print(render(report), file=sys.stderr if options.json == "-" else sys.stdout)
        if options.json:
            text = json.dumps(asdict(report), indent=2) + "\n"
            if options.json == "-":
                sys.stdout.write(text)
            else:
                Path(options.json).write_text(text, encoding="utf-8")
        if options.plot:
            plot(options.plot, report)
    except (ProbeError, httpx.HTTPError) as error:
        print(f"edit_probe: {error or type(error).__name__}", file=sys.stderr)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
