"""Plans as text (their ordinary form is tested in test_plan_command.py) and as pictures."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from backends.exllamav3.checkpoints import CheckpointPlan, plan_for
from backends.exllamav3.plan_report import describe_plan, draw_plan, plan_figure
from common.caching import PlanBasis
from common.errors import Unsupported

BASIS = PlanBasis(
    chunk_size=256,
    max_seq_len=32768,
    cache_size=32768,
    interval=256,
    interval_pp=256,
    checkpoint_bytes=100,
    budget_bytes=700,
)


def planned(prompt_tokens: int, *boundaries: int) -> CheckpointPlan:
    return plan_for(BASIS, prompt_tokens, boundaries=boundaries)


# --- text -----------------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_said_and_long_lists_are_cut() -> None:
    lines = describe_plan("m", BASIS, planned(32768, 1000), [1000]).splitlines()
    assert lines[2] == (
        "Checkpoints, at boundaries those with *: 256; 512; 768*; 1,024; 1,280; 1,536; 1,792; 2,048; …; 30,720; "
        "30,976; 31,232; 31,488; 31,744; 32,000; 32,256; 32,512"
    )
    assert lines[3] == (
        "There is no room for all 127: only those at 768*; 31,232; 31,488; 31,744; 32,000; 32,256; 32,512 are kept."
    )
    assert lines[5] == "Prefill takes 128 passes."


def test_a_prompt_without_a_full_page() -> None:
    lines = describe_plan("m", BASIS, planned(200)).splitlines()
    assert "No checkpoints: there is no full page before the last token." in lines
    assert "Prefill takes 1 pass." in lines


def test_without_room_for_one() -> None:
    text = describe_plan("m", BASIS, plan_for(BASIS, 1000, budget_mb=0))
    assert "There is no room for all 3: none is kept." in text


# --- pictures -------------------------------------------------------------------------------------------------------


def lines_by_label(figure: Any) -> dict[str, tuple[list[int], list[int]]]:
    (axes,) = figure.axes
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_the_curves_are_the_plan() -> None:
    plan = planned(2600, 700)
    lines = lines_by_label(plan_figure("m", plan))
    pages = [*range(0, 2600, 256)]
    positions, processed = lines.pop("tokens processed again")
    assert positions == [*pages, 2600]
    assert processed == [*map(plan.replay, pages), plan.replay(2599)]
    positions, floors = lines.pop("the least possible: the edit's page and what follows it")
    assert positions == [*pages, 2600]
    assert floors == [*map(plan.floor, pages), plan.floor(2599)]
    marks = {label: xs for label, (xs, _) in lines.items()}
    assert marks == {
        "checkpoints dropped for want of room: 3": [256, 768, 1024],
        "checkpoints: 6": [1280, 1536, 1792, 2048, 2304, 2560],
        "checkpoints at boundaries: 1": [512],
    }


@pytest.mark.parametrize("prompt_tokens", [1, 256, 32768])
def test_any_length_is_drawn(prompt_tokens: int) -> None:
    picture = draw_plan("a $name_with^ signs$ and \\commands{", planned(prompt_tokens))
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match="pip install matplotlib"):
        draw_plan("m", planned(1000))
