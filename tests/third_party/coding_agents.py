"""Coding agents of the npm registry, each started headless against our server on a task that writes a file.

    python -m tests.third_party.coding_agents [NAME ...]

runs them and keeps what they printed in `agents/NAME.txt` beside this file. The scripted engine plays the model: a call
of the agent's own tool for writing a file, then an answer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from backends.messages import ControlToken
from tests.endpoints.running import API_KEY, running_server
from tests.scripted import ScriptedEngine
from tests.scripted_worker import ModelScript, Play, Script
from tests.third_party.suites import PackageCache, SuiteError

TRANSCRIPTS: Final = Path(__file__).parent / "agents"
NODE: Final = "node@22.23.3"
TASK: Final = "Write the file note.txt"
CONTENT: Final = "written by the agent"
ANSWER: Final = "The file is there."
MODEL: Final = "alpha"
SECONDS: Final = 180
# What an agent may know of the machine that it runs on.
_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE")
# In what agents print, and what is kept instead: colours, ids, and how long something took.
_OTHER_EACH_TIME: Final = {
    r"\x1b\[[0-9;?]*[a-zA-Z]": "",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "ID",
    r"\d+ms": "0ms",
}
_TEMPLATE: Final = Path(__file__).parents[1] / "common" / "chat_templates" / "qwen3.jinja"

Variables: TypeAlias = dict[str, str]


@dataclass(frozen=True)
class Agent:
    """
    Attributes:
        package: name@version on npm.
        command: the program and its options; the task comes last.
        prepare: writes the agent's settings, given its home, its working directory and the server's address, and gives
            environment variables.
        tool: that writes a file.
        arguments: of a call of it, for a path.
        route: that it talks to.
    """

    package: str
    command: tuple[str, ...]
    prepare: Callable[[Path, Path, str], Variables]
    tool: str
    arguments: Callable[[Path], dict[str, Any]]
    route: str


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        status: of the agent's process.
        printed: by the agent, without colours, and with plain names for what is another each time: its folders, ids,
            and how long something took.
        file: what is in the file that it was to write; None where there is none.
        prompts: that reached the engine.
    """

    status: int
    printed: str
    file: str | None
    prompts: list[str]


def run_agent(agent: Agent, packages: PackageCache, folder: Path) -> Run:
    """Have an agent do the task.

    Args:
        folder: empty; everything that is written lies in it.

    Raises:
        SuiteError: it cannot be had, or does not end.
    """
    programs = packages.npm_programs(agent.package, NODE)
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    file = work / "note.txt"
    engine = ScriptedEngine(folder / "engine")
    engine.add_model(MODEL)
    engine.write(script(agent, file))
    server = running_server(engine)
    (engine.model_dir / MODEL / "chat_template.jinja").write_text(
        _TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8"
    )
    with server.running():
        server.load(MODEL)
        own = agent.prepare(home, work, server.base_url)
        status, printed = _run(agent, programs, home, work, own)
    for path, name in {work: "/project", home: "/home", programs.parents[1]: "/npm"}.items():
        printed = printed.replace(str(path), name)
    for pattern, name in _OTHER_EACH_TIME.items():
        printed = re.sub(pattern, name, printed)
    return Run(
        status,
        printed,
        file.read_text(encoding="utf-8") if file.exists() else None,
        [str(request.prompt) for request in engine.history()],
    )


def script(agent: Agent, file: Path) -> Script:
    """The model: writes the file where it has the tool for it, then says so; answers anything else with a title."""
    call = json.dumps({"name": agent.tool, "arguments": agent.arguments(file)})
    text = f"I write it.\n<tool_call>\n{call}\n</tool_call>"
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    plays = [
        Play(when=CONTENT, chunks=[ANSWER[:8], ANSWER[8:]]),
        Play(when=f'"name": "{agent.tool}"', chunks=pieces),
        Play(chunks=["A title"]),
    ]
    tokens = [ControlToken(text, index, special=True) for index, text in enumerate(("<|im_start|>", "<|im_end|>"), 1)]
    model = ModelScript(max_seq_len=2_000_000, control_tokens=tokens)  # a token is a character
    return Script(plays=plays, models={MODEL: model})


def _run(agent: Agent, programs: Path, home: Path, work: Path, own: Mapping[str, str]) -> tuple[int, str]:
    variables = {name: value for name, value in os.environ.items() if name in _VARIABLES}
    variables |= {"HOME": str(home), "CI": "1", "NO_COLOR": "1", "PATH": f"{programs}{os.pathsep}{variables['PATH']}"}
    try:
        run = subprocess.run(
            [programs / agent.command[0], *agent.command[1:], TASK],
            cwd=work,
            env=variables | dict(own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SuiteError(f"{agent.command[0]} ran for more than {SECONDS} s:\n{error.output}") from error
    return run.returncode, run.stdout


# --- the agents -------------------------------------------------------------------------------------------------------


def _claude_code(home: Path, work: Path, base_url: str) -> Variables:
    return {
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_AUTH_TOKEN": API_KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def _codex(home: Path, work: Path, base_url: str) -> Variables:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""\
model = "{MODEL}"
model_provider = "waypoint"
check_for_update_on_startup = false

[model_providers.waypoint]
name = "Waypoint"
base_url = "{base_url}/v1"
env_key = "WAYPOINT_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
""",
        encoding="utf-8",
    )
    return {"WAYPOINT_API_KEY": API_KEY}


def _qwen_code(home: Path, work: Path, base_url: str) -> Variables:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    return {"OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_API_KEY": API_KEY, "OPENAI_MODEL": MODEL}


def _opencode(library: str, home: Path, work: Path, base_url: str) -> Variables:
    provider = {
        "npm": library,
        "name": "Waypoint",
        "options": {"baseURL": f"{base_url}/v1", "apiKey": API_KEY},
        "models": {MODEL: {"name": MODEL}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {"waypoint": provider},
        "model": f"waypoint/{MODEL}",
        "permission": {"edit": "allow"},
    }
    (work / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def _opencode_over(library: str, route: str) -> Agent:
    return Agent(
        "opencode-ai@1.18.33",
        ("opencode", "run"),
        partial(_opencode, library),
        "write",
        lambda path: {"filePath": str(path), "content": CONTENT},
        route,
    )


AGENTS: Final[dict[str, Agent]] = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code@2.1.332",
        ("claude", "--dangerously-skip-permissions", "--print"),
        _claude_code,
        "Write",
        lambda path: {"file_path": str(path), "content": CONTENT},
        "/v1/messages",
    ),
    "codex": Agent(
        "@openai/codex@0.171.0",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        _codex,
        "exec_command",
        lambda path: {"cmd": f"printf '%s' '{CONTENT}' > {path}"},
        "/v1/responses",
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code@0.24.4",
        ("qwen", "--yolo", "--auth-type", "openai", "--prompt"),
        _qwen_code,
        "write_file",
        lambda path: {"file_path": str(path), "content": CONTENT},
        "/v1/chat/completions",
    ),
    "opencode": _opencode_over("@ai-sdk/openai-compatible", "/v1/chat/completions"),
    "opencode-anthropic": _opencode_over("@ai-sdk/anthropic", "/v1/messages"),
}


def main(names: list[str]) -> None:
    packages = PackageCache(Path(".pytest_cache", "d", "third_party").resolve())
    for name in names or list(AGENTS):
        agent = AGENTS[name]
        with tempfile.TemporaryDirectory() as folder:
            run = run_agent(agent, packages, Path(folder).resolve())
        lines = [
            f"$ {' '.join(agent.command)} '{TASK}'   # {agent.package}, {agent.route}",
            *(line.rstrip() for line in run.printed.strip().splitlines()),
            "$ cat note.txt",
            run.file or "cat: note.txt: No such file or directory",
        ]
        TRANSCRIPTS.mkdir(exist_ok=True)
        (TRANSCRIPTS / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
