"""The edit probe: its prompts, tables and pictures alone; the whole experiment on the real server."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ServerProcess
from tools import edit_probe
from tools.edit_probe import (
    WORDS,
    Curve,
    EditMeasurement,
    Measurement,
    ProbeError,
    Report,
    Row,
    Server,
    Settings,
    TokenPrompts,
    WordPrompts,
    draw,
    main,
    make_prompts,
    parse_sweep,
    probe,
    render,
)

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class FakeServer:
    """A server with a prefix cache that resumes on multiples of `page`; a word is as many tokens as it has vowels."""

    def __init__(
        self,
        *,
        page: int = 10,
        encodes: bool = True,
        takes_ids: bool = True,
        usage: bool = True,
        fault: str | None = None,
    ) -> None:
        self.page = page
        self.encodes = encodes
        self.takes_ids = takes_ids
        self.usage = usage
        self.fault = fault  # "status" or "stream": how a completion or a load fails
        self.prompts: list[list[int]] = []
        self.loads: list[dict[str, Any]] = []
        self.requests: list[httpx.Request] = []

    def connect(self, **keys: str) -> Server:
        return Server("http://server/v1/", "model", transport=httpx.MockTransport(self.answer), **keys)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.url.path == "/v1/model":
            parameters = {"chunk_size": 512, "recurrent_checkpoint_interval": 256, "max_seq_len": 4096}
            return httpx.Response(200, json={"id": "model", "parameters": parameters})
        body = json.loads(request.content)
        if request.url.path == "/v1/token/encode":
            if not self.encodes:
                return httpx.Response(404)
            return httpx.Response(200, json={"tokens": self.encode(body["text"], body.get("add_bos_token", True))})
        if self.fault == "status":
            return httpx.Response(503, json={"error": {"message": "nothing is loaded"}})
        if self.fault == "stream":
            return self.stream({"error": {"message": "out of memory"}})
        if request.url.path == "/v1/model/load":
            self.loads.append(body)
            return self.stream({"model_type": "model", "module": 1, "modules": 1, "status": "finished"})
        assert request.url.path == "/v1/completions"
        return self.complete(body)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        ids = [1] if add_bos else []
        for word in text.split():
            ids += [10 * WORDS.index(word) + i + 100 for i in range(sum(map(word.count, "aeiou")))]
        return ids

    def complete(self, body: dict[str, Any]) -> httpx.Response:
        prompt = body["prompt"]
        if isinstance(prompt, list) and not self.takes_ids:
            return httpx.Response(422, json={"detail": "prompt must be text"})
        ids = prompt if isinstance(prompt, list) else self.encode(prompt)
        common = max((common_prefix(ids, earlier) for earlier in self.prompts), default=0)
        self.prompts.append(ids)
        usage = {
            "prompt_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": min(common, len(ids) - 1) // self.page * self.page},
        }
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [], "usage": usage})
        assert body["stream_options"] == {"include_usage": True}
        events = [{"choices": [{"text": ""}]}, {"choices": [{"text": "a", "finish_reason": "length"}]}]
        return self.stream(*events, *([{"choices": [], "usage": usage}] if self.usage else []))

    @staticmethod
    def stream(*events: dict[str, Any]) -> httpx.Response:
        frames = [": ping", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]
        return httpx.Response(200, text="".join(f"{frame}\r\n\r\n" for frame in frames))


def common_prefix(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


# --- prompts --------------------------------------------------------------------------------------------------------


def test_an_edit_of_token_ids_changes_that_token_only() -> None:
    prompts = TokenPrompts(range(7), length=50, rng=random.Random(1))
    for position in (0, 17, 49):
        prompt = prompts.fresh()
        changed = prompts.edited(prompt, position)
        assert [i for i in range(50) if prompt[i] != changed[i]] == [position]


def test_an_edit_of_text_lands_on_the_first_word_at_the_position() -> None:
    server = FakeServer(takes_ids=False)
    prompts = make_prompts(server.connect(), 300, random.Random(2))
    assert isinstance(prompts, WordPrompts)
    assert prompts.exact
    prompt = prompts.fresh()
    assert isinstance(prompt, str)
    ids = server.encode(prompt)
    starts = [len(server.encode(" ".join(prompt.split()[:count]))) for count in range(len(prompt.split()))]
    for position in (1, 40, 123, 250):
        changed = prompts.edited(prompt, position)
        assert isinstance(changed, str)
        assert common_prefix(ids, server.encode(changed)) == min(start for start in starts if start >= position)


def test_positions_are_estimates_where_the_server_cannot_count() -> None:
    server = FakeServer(encodes=False)
    report = probe(server.connect(), "http://server", prompt_tokens=400, edits=[200], repeat=1)
    assert not report.positions_exact
    assert "Positions are estimates: this server has no /v1/token/encode." in render(report)
    (edit,) = report.rows[0].edits
    assert edit.tokens is not None
    assert abs(400 - edit.tokens - 200) < 40


def test_a_server_that_counts_nothing_is_refused() -> None:
    with pytest.raises(ProbeError, match="reports no usage"):
        probe(FakeServer(encodes=False, usage=False).connect(), "http://server")


# --- the experiment on a fake ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_ids", [True, False])
def test_every_edit_is_measured_on_a_prompt_of_its_own(takes_ids: bool) -> None:
    server = FakeServer(takes_ids=takes_ids)
    report = probe(server.connect(), "http://server", prompt_tokens=200, edits=[35, 36, 120], repeat=2, seed=7)
    (row,) = report.rows
    assert row.settings == Settings(chunk_size=512, interval=256)
    assert report.positions_exact
    assert row.cold.tokens is not None
    length = row.cold.tokens + 1
    assert [edit.position for edit in row.edits] == [35, 36, 120]
    # Prompts of words differ a little in length.
    tolerance = 0 if takes_ids else 20
    processed = [length, *(edit.tokens or 0 for edit in row.edits), row.unedited.tokens]
    assert processed == pytest.approx([200, 199 - 30, 199 - 30, 199 - 120, 199 - 190], abs=tolerance)


def test_without_usage_the_tokens_are_unknown() -> None:
    report = probe(FakeServer(usage=False).connect(), "http://server", prompt_tokens=100, edits=[50], repeat=1)
    assert report.rows[0].edits[0].tokens is None
    assert "?" in render(report)


def test_a_sweep_loads_each_row_and_keeps_the_sizes() -> None:
    server = FakeServer()
    sweep = parse_sweep("1024:2048:-,-:-:-")
    report = probe(
        server.connect(api_key="user", admin_key="admin"),
        "http://server",
        prompt_tokens=50,
        edits=[9],
        repeat=1,
        sweep=sweep,
    )
    assert server.loads == [
        {"model_name": "model", "chunk_size": 1024, "recurrent_checkpoint_interval_pp": 2048, "max_seq_len": 4096},
        {"model_name": "model", "max_seq_len": 4096},
    ]
    loads = [request for request in server.requests if request.url.path == "/v1/model/load"]
    assert {request.headers["X-Admin-Key"] for request in loads} == {"admin"}
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer user"}
    # What the server says is in force counts.
    assert [row.settings for row in report.rows] == [Settings(512, 2048, 256), Settings(512, None, 256)]


@pytest.mark.parametrize(
    ("fault", "message"), [("status", "answered 503.*nothing is loaded"), ("stream", "out of memory")]
)
def test_a_server_error_ends_the_probe_with_its_words(fault: str, message: str) -> None:
    server = FakeServer(fault=fault, encodes=False)
    with pytest.raises(ProbeError, match=message):
        probe(server.connect(), "http://server", sweep=parse_sweep("256:256:256"))


def test_no_server_is_an_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", "http://127.0.0.1:9", "--model", "m"]) == 1
    assert "edit_probe: " in capsys.readouterr().err


# --- output ---------------------------------------------------------------------------------------------------------

REPORT = Report(
    base_url="http://server",
    model="tiny",
    prompt_tokens=5266,
    seed=1,
    repeat=2,
    positions_exact=True,
    rows=(
        Row(
            Settings(1024, 2048, None),
            cold=Measurement(10.04, 5265),
            unedited=Measurement(1.2, 145),
            edits=(EditMeasurement(10.2, 5265, position=276), EditMeasurement(6.8, 3217, position=2639)),
        ),
        Row(
            Settings(),
            cold=Measurement(10.0, None),
            unedited=Measurement(1.2, None),
            edits=(EditMeasurement(10.2, None, position=276), EditMeasurement(9.9, None, position=2639)),
        ),
    ),
)


def test_the_tables_show_both_figures_side_by_side() -> None:
    assert render(REPORT) == (
        "Time to first token in seconds, median of 2\n"
        "chunk, pp, interval         cold  unedited   @276  @2639\n"
        "1024, 2048, default        10.04      1.20  10.20   6.80\n"
        "default, default, default  10.00      1.20  10.20   9.90\n"
        "\n"
        "Tokens processed again\n"
        "chunk, pp, interval        cold  unedited  @276  @2639\n"
        "1024, 2048, default        5265       145  5265   3217\n"
        "default, default, default     ?         ?     ?      ?\n"
    )


@pytest.mark.parametrize("rows", [1, 2])
def test_the_plot_is_a_png(tmp_path: Path, rows: int) -> None:
    report = Report(**{**vars(REPORT), "rows": REPORT.rows[:rows]})
    edit_probe.plot(tmp_path / "plot.png", report)
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG_SIGNATURE)


def test_computed_curves_need_no_seconds(tmp_path: Path) -> None:
    draw(tmp_path / "plot.png", [Curve("a", [0, 1, 2], [9, 9, 4], computed=True)], "title", 10)
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_missing_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ProbeError, match="pip install matplotlib"):
        edit_probe.plot(tmp_path / "plot.png", REPORT)


# --- command line ---------------------------------------------------------------------------------------------------


def test_sweep_rows_are_chunk_pp_interval() -> None:
    assert parse_sweep("1024:2048:-,-:512:256") == [Settings(1024, 2048, None), Settings(None, 512, 256)]


@pytest.mark.parametrize(
    "option",
    ["--sweep=1024:2048", "--sweep=1024:2048:many", "--edits=10,9999", "--edits=-1", "--edits=a", "--repeat=0"],
)
def test_bad_options_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--base-url", "http://127.0.0.1:9", "--model", "m", option])
    assert refused.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


# --- the real server ------------------------------------------------------------------------------------------------

# Row of a sweep -> the settings then in force, and the tokens processed again on the tiny hybrid at EDITS.
EDIT_COST = {
    "1024:-:-": ((1024, 32768, 2048), [5265, 5265, 5265, 5265, 5265, 1169]),
    "1024:2048:-": ((1024, 2048, 2048), [5265, 5265, 5265, 3217, 3217, 1169]),
    "1024:1024:-": ((1024, 1024, 2048), [5265, 4241, 4241, 3217, 2193, 2193]),
    "1024:1024:1024": ((1024, 1024, 1024), [5265, 4241, 4241, 3217, 2193, 1169]),
    "2048:-:-": ((2048, 32768, 2048), [5265, 5265, 5265, 3217, 3217, 1169]),
    "512:512:512": ((512, 512, 512), [5265, 4241, 3729, 2705, 1681, 1169]),
    "256:256:256": ((256, 256, 256), [5009, 3985, 3473, 2705, 1681, 913]),
}
# The same of short prompts, so that no row takes long.
SHORT_PROMPT_TOKENS = 1400
SHORT_EDITS = (276, 800, 1300)
SHORT_EDIT_COST = {
    "256:-:-": ((256, 32768, 2048), [1399, 1399, 119]),
    "256:512:256": ((256, 512, 256), [1399, 887, 119]),
}


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [*SHORT_EDIT_COST])
def test_on_the_tiny_hybrid_every_edit_costs_what_it_must(
    real_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], sweep: str
) -> None:
    settings, tokens = SHORT_EDIT_COST[sweep]
    short = ("--prompt-tokens", str(SHORT_PROMPT_TOKENS), "--edits", ",".join(map(str, SHORT_EDITS)))
    row = probed(real_server, tmp_path, capsys, "--sweep", sweep, *short)
    assert tuple(row["settings"].values()) == settings
    assert [edit["position"] for edit in row["edits"]] == list(SHORT_EDITS)
    assert [edit["tokens"] for edit in row["edits"]] == tokens
    assert row["cold"]["tokens"] == SHORT_PROMPT_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("sweep", EDIT_COST)
def test_on_the_tiny_hybrid_every_cell_of_the_table_is_met(
    real_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], sweep: str
) -> None:
    """Each row prefills some 60,000 tokens."""
    settings, tokens = EDIT_COST[sweep]
    row = probed(real_server, tmp_path, capsys, "--sweep", sweep)
    assert tuple(row["settings"].values()) == settings
    assert [edit["position"] for edit in row["edits"]] == list(edit_probe.EDITS)
    assert [edit["tokens"] for edit in row["edits"]] == tokens
    assert row["cold"]["tokens"] == edit_probe.PROMPT_TOKENS - 1
    assert row["unedited"]["tokens"] == 145


def probed(server: ServerProcess, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """The only row of a report, after a look at what is printed and drawn."""
    status = main(
        [
            *("--base-url", server.base_url, "--model", str(server.model)),
            *("--api-key", server.api_key, "--admin-key", server.admin_key),
            *("--repeat", "1", *options),
            *("--json", str(folder / "report.json"), "--plot", str(folder / "plot.png")),
        ]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "Positions are estimates" not in printed.out
    assert (folder / "plot.png").read_bytes().startswith(PNG_SIGNATURE)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["positions_exact"]
    (row,) = report["rows"]
    assert ", ".join(str(value) for value in row["settings"].values()) in printed.out
    return row
