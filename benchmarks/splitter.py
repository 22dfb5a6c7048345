"""How fast answers are told apart into thoughts, calls and text, and that the time grows with their length only.

    python -m benchmarks.splitter [--rounds 9]

Every text is read at a length and at four times that, in turns. Each line gives the median speed at the longer one, in
CPU time, with the slowest and the fastest round, and the median, least and greatest ratio of the two times: 4 is
linear, 16 would be quadratic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from common.parsing.answer import AnswerParser
from common.parsing.dialect import Dialect, ReadOptions
from common.parsing.formats.base import Tool, Tools
from common.parsing.formats.registry import FORMATS
from common.parsing.harmony import HarmonyDialect
from common.parsing.tags import TagDialect

TAGS = TagDialect(("<think>", "</think>"), FORMATS)  # all formats at once: the worst case
HARMONY = HarmonyDialect()
OPTIONS = ReadOptions(Tools([Tool("write", {"type": "object", "properties": {"text": {"type": "string"}}})]))
IN_THOUGHT = OPTIONS._replace(in_thought=True)

WORDS = "It was the best of times, it was the worst of times (so it is said); 3 < 4.\n"
CALL = f"<tool_call>\n<function=write>\n<parameter=text>\n{WORDS * 4}\n</parameter>\n</function>\n</tool_call>\n"
MIXED = f"<think>\n{WORDS * 4}</think>\n\n{WORDS * 4}{CALL}"
MESSAGES = (
    f"<|channel|>analysis<|message|>{WORDS * 4}<|end|><|start|>assistant<|channel|>commentary to=functions.write "
    f'<|message|>{{"text": "{WORDS[:-1] * 4}"}}<|end|><|start|>assistant'
)
OPEN_CALL = "<tool_call>\n<function=write>\n<parameter=text>\n"


class Case(NamedTuple):
    """
    Attributes:
        unit: is repeated.
        length: characters of the shorter text.
        chunk: characters fed at a time; 0: all at once.
    """

    name: str
    unit: str
    length: int
    chunk: int = 0
    start: str = ""
    dialect: Dialect = TAGS
    options: ReadOptions = OPTIONS

    def text(self, factor: int) -> str:
        return self.start + self.unit * (factor * self.length // len(self.unit))


CASES = [
    Case("prose", WORDS, 1_000_000),
    Case("prose", WORDS, 50_000, 4),
    Case("prose", WORDS, 15_000, 1),
    Case("thoughts and calls", MIXED, 250_000),
    Case("thoughts and calls", MIXED, 25_000, 4),
    Case("thoughts and calls", MIXED, 15_000, 1),
    Case("Harmony", MESSAGES, 250_000, dialect=HARMONY),
    Case("Harmony", MESSAGES, 25_000, 4, dialect=HARMONY),
    Case("one long argument", WORDS, 25_000, 4, OPEN_CALL),
    Case("one long thought", WORDS, 25_000, 4, "<think>"),
    Case("<", "<", 250_000),
    Case("<", "<", 15_000, 4),
    Case("<tool_call>", "<tool_call>", 25_000),
    Case("<tool_call>", "<tool_call>", 10_000, 4),
    Case("open calls", OPEN_CALL, 250_000),
    Case("open calls in a thought", OPEN_CALL, 100_000, options=IN_THOUGHT),
    Case("open calls in thoughts", f"<think>{OPEN_CALL}</think>", 100_000),
    Case("open calls in JSON", '<tool_call>{"arguments": {"a": "', 25_000),
    Case("calls of undeclared tools", CALL.replace("write", "read"), 100_000),
    Case("<think>", "<think>", 100_000),
    Case("<think></think>", "<think></think>", 100_000),
    Case("</think>", "</think>", 100_000),
    Case("quoted </think>", "`</think>`", 100_000, options=IN_THOUGHT),
    Case("quotes", "`'\"", 250_000),
    Case("blanks", " \n", 250_000),
    Case("blanks", " \n", 15_000, 4),
    Case("brackets", "[{", 10_000),
    Case("Harmony headers", "<|start|>assistant<|channel|>final", 100_000, dialect=HARMONY),
    Case("Harmony tokens", "<|channel|><|message|>", 100_000, dialect=HARMONY),
]


def seconds(case: Case, text: str) -> float:
    parser = AnswerParser(case.dialect, case.options)
    size = case.chunk or len(text)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    started = process_time()
    for chunk in chunks:
        parser.feed(chunk)
    parser.end("cut")
    return process_time() - started


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(median(values))} ({show(min(values))} - {show(max(values))})"


def main() -> None:
    options = argparse.ArgumentParser(description="Measure the splitter of answers.")
    options.add_argument("--rounds", type=int, default=9, help="times that everything is measured (default: 9)")
    rounds: int = options.parse_args().rounds
    texts = [(case.text(1), case.text(4)) for case in CASES]
    times: list[list[tuple[float, float]]] = [[] for _ in CASES]
    for _ in range(rounds):
        for case, (short, long), measured in zip(CASES, texts, times, strict=True):
            measured.append((seconds(case, short), seconds(case, long)))
    table = Table("Text", "Chunks", "Characters", "MB/s", "Time of 4 n / time of n")
    for case, (_, long), measured in zip(CASES, texts, times, strict=True):
        speeds = [len(long.encode()) / 1e6 / whole for _, whole in measured]
        ratios = [whole / part for part, whole in measured]
        table.add_row(
            case.name,
            str(case.chunk or "whole"),
            f"{len(long):,}",
            spread(speeds, "{:.2f}".format),
            spread(ratios, "{:.1f}".format),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
