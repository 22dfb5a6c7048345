"""What a soak has shown, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Final

from tests.soak.processes import Curve, Processes
from tests.soak.record import Record

# How much larger the last quarter may be than the first, which begins with empty caches, and from which number of
# samples on that says anything.
MEMORY_FACTOR: Final = 1.10
MEMORY_SLACK: Final = 16.0  # MB
FILES_SLACK: Final = 4
JUDGED_SAMPLES: Final = 30
VIOLATIONS_SHOWN: Final = 40


def judge(record: Record, processes: Processes, files_before: int, files_after: int) -> None:
    """Add violations that only the whole shows."""
    server = processes.of_server
    if files_after > files_before + FILES_SLACK:
        record.violation(
            f"the server has {files_after} descriptors open after the end, {files_before} before the start"
        )
    if len(server.samples) >= JUDGED_SAMPLES:
        first, last = server.quarters("memory")
        if last > first * MEMORY_FACTOR + MEMORY_SLACK:
            record.violation(f"memory of the server grows: {first:.0f} MB in the first quarter, {last:.0f} in the last")
    if not any(asked.outcome == "right" for asked in record.asked):
        record.violation("no request was answered")


def report(record: Record, processes: Processes, files_before: int, files_after: int, log: list[str]) -> str:
    return "\n".join(_lines(record, processes, files_before, files_after, log)) + "\n"


def _lines(record: Record, processes: Processes, files_before: int, files_after: int, log: list[str]) -> Iterator[str]:
    outcomes = Counter(asked.outcome for asked in record.asked)
    inside = [asked for asked in record.asked if record.windows_of(asked) - {"burst"}]
    yield f"Soak of {record.now / 60:.1f} minutes: {len(record.asked)} requests"
    yield ""
    yield "Outcomes: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    yield f"  {len(record.asked) - len(inside)} outside of kills, loads and unloads, {len(inside)} within"
    yield f"  wrong: {outcomes['wrong']}, broken: {outcomes['broken']}, hung: {outcomes['hung']}"
    yield f"  after a near tie another text than when asked alone: {record.near_ties}"
    yield "Errors by code and time:"
    codes = Counter(
        (asked.code, ", ".join(sorted(record.windows_of(asked))) or "a quiet time")
        for asked in record.asked
        if asked.outcome == "error"
    )
    yield from (f"  {count:5} {code} ({when})" for (code, when), count in codes.most_common())
    yield "By kind (right, other ends as they should, errors, median seconds):"
    yield from _kinds(record)
    yield ""
    for kind in ("kill", "load", "unload", "burst"):
        took = [window.ended - window.started for window in record.windows if window.kind == kind]
        yield f"{kind}: {len(took)} times, {sum(took):.0f} s in all, longest {max(took, default=0):.1f} s"
    if times := record.recoveries:
        yield f"Ready again after a kill: median {median(times):.1f} s, longest {max(times):.1f} s"
    yield "Loads: " + ", ".join(
        f"{kind}: {end} x {count}" for (kind, end), count in Counter(record.loads).most_common()
    )
    if len(record.health) > 1:
        percentiles = quantiles(record.health, n=100, method="inclusive")
        yield (
            f"/health: {len(record.health)} times, median {percentiles[49] * 1000:.1f} ms, "
            f"p99 {percentiles[98] * 1000:.1f} ms, longest {max(record.health) * 1000:.0f} ms"
        )
    yield ""
    yield "The server's process:"
    yield from _curve(processes.of_server)
    yield f"  descriptors before the first client {files_before}, after the last {files_after}"
    yield "Engine processes, each over its life (MB at first and at last, descriptors at first and at last):"
    for pid, curve in processes.of_engines.items():
        first, last = curve.samples[0], curve.samples[-1]
        yield (
            f"  {pid}: {first.at:6.0f} to {last.at:6.0f} s: {first.memory:.0f} to {last.memory:.0f} MB, "
            f"{first.files} to {last.files}"
        )
    yield ""
    levels = Counter(level for line in log for level in ("WARNING", "ERROR", "CRITICAL") if f" {level}" in line[:24])
    yield f"Log: {len(log)} lines, " + ", ".join(f"{count} {level}" for level, count in levels.items())
    yield ""
    yield f"Violations: {len(record.violations)}"
    yield from (f"  {text}" for text in record.violations[:VIOLATIONS_SHOWN])
    yield "VERDICT: " + ("FAILED" if record.violations else "PASSED")


def _kinds(record: Record) -> Iterator[str]:
    by_kind: dict[str, list[tuple[str, float]]] = {}
    for asked in record.asked:
        by_kind.setdefault(asked.kind.partition(":")[0], []).append((asked.outcome, asked.ended - asked.started))
    for kind, ends in sorted(by_kind.items()):
        outcomes = Counter(outcome for outcome, _ in ends)
        other = outcomes["refused"] + outcomes["left"]
        seconds = median(duration for _, duration in ends)
        yield f"  {kind:24} {outcomes['right']:6} {other:6} {outcomes['error']:6} {seconds:8.2f}"


def _curve(curve: Curve) -> Iterator[str]:
    if not curve.samples:
        yield "  no samples: /proc shows none"
        return
    for what, unit in (("memory", "MB"), ("files", "descriptors")):
        first, last = curve.quarters(what)
        yield f"  {unit}: first quarter {first:.1f}, last quarter {last:.1f}, {curve.slope(what):+.1f} an hour"
        step = max(1, len(curve.samples) // 24)
        yield "    " + " ".join(f"{getattr(sample, what):.0f}" for sample in curve.samples[::step])
