"""Real coding agents finish a task on our server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.third_party.coding_agents import AGENTS, ANSWER, CONTENT, run_agent
from tests.third_party.suites import PackageCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_writes_a_file(name: str, packages: PackageCache, tmp_path: Path) -> None:
    run = run_agent(AGENTS[name], packages, tmp_path.resolve())
    assert run.file == CONTENT, run.printed
    assert run.status == 0, run.printed
    assert ANSWER in run.printed
    # The turn after the call goes on from the one before it, so that nothing of it is processed again.
    first, second = [prompt for prompt in run.prompts if f'"name": "{AGENTS[name].tool}"' in prompt]
    assert second.startswith(first)
