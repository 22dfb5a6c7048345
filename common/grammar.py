"""Constrained output: what a request may ask an answer to match, checked before anything is generated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from loguru import logger

from common.errors import InvalidRequest, Unsupported
from common.generation import Constraint, ConstraintKind

PROJECT_ROOT = Path(__file__).resolve().parent.parent
MOST_CHARACTERS = 256 * 1024
# Many times what a text within the compiler's own limit takes, so that a busy machine does not refuse it.
MOST_SECONDS = 20.0

NAMES: dict[ConstraintKind, str] = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}
# What llguidance says of a text that is right but beyond it.
_BEYOND = re.compile(r"nimplemented|not supported|Unknown format|cannot be enforced|too (large|complex)|fuel|limit")


def check_constraint(constraint: Constraint, name: str | None = None) -> None:
    """Raise for what cannot be compiled or enforced. Blocks, for a moment where the text is new.

    Only what hangs on the model's tokenizer is left to the engine, such as a grammar that names its special tokens.

    Args:
        name: of what the user has given, where that is something else than the constraint.

    Raises:
        InvalidRequest: the text is wrong.
        Unsupported: it is right, but asks for what cannot be enforced, or for too much.
    """
    name = name or NAMES[constraint.kind]
    length = len(constraint.text) + len(constraint.frame or "")
    if length > MOST_CHARACTERS:
        raise Unsupported(
            f"{constraint.param}: a {name} may have up to {MOST_CHARACTERS} characters; this one has {length}.",
            param=constraint.param,
        )
    try:
        problem = _problem(constraint.kind, constraint.text, constraint.frame)
    except subprocess.TimeoutExpired:
        problem = "it is too complex: it takes too long to compile."
    if problem:
        leaf = Unsupported if _BEYOND.search(problem) else InvalidRequest
        raise leaf(f"{constraint.param}: this {name} cannot be used: {problem}", param=constraint.param)


def json_object_constraint(param: str) -> Constraint:
    """Any JSON object."""
    return Constraint("json_schema", '{"type": "object"}', param)


def choice_constraint(choices: Sequence[str], param: str) -> Constraint:
    """One of some texts.

    Raises:
        InvalidRequest: there are none.
    """
    if not choices:
        raise InvalidRequest(f"{param} is empty: name the texts to choose from.", param=param)
    # Lark's strings are JSON's.
    return Constraint("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices), param)


@lru_cache(maxsize=256)  # clients send the same few over and over
def _problem(kind: ConstraintKind, text: str, frame: str | None) -> str:
    """What is wrong, in one line; nothing where all is well. Raises `subprocess.TimeoutExpired`, which is not kept."""
    compiler = subprocess.run(
        [sys.executable, "-m", "common.grammar_compiler"],
        input=json.dumps([kind, text, frame]).encode(),
        capture_output=True,
        cwd=PROJECT_ROOT,
        timeout=MOST_SECONDS,
        check=False,
    )
    if compiler.returncode != 0:  # out of memory or stack
        errors = compiler.stderr.decode(errors="replace")
        logger.error("The grammar compiler ended with status {}: {}", compiler.returncode, errors.strip()[-500:])
        return "it is too complex: the compiler failed on it."
    return _readable(compiler.stdout.decode(errors="replace"))


def _readable(problem: str) -> str:
    """Without the excerpts that llguidance adds, of a text that it has changed, and its hint at an option."""
    problem = problem.partition(" Enable 'coerce_one_of'")[0]
    reason = re.search(r"^error: (.+)$", problem, re.MULTILINE)
    lines = [line for line in problem.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    text = reason[1] if reason else " ".join(line.strip() for line in lines)
    return re.sub(r"^at \d+\(\d+\): ", "", text).strip().rstrip(".")[:500] + ("." if text.strip() else "")
