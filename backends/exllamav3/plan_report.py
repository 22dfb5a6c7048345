"""The plan of a prompt's checkpoints for people: as text and as a picture.

Neither torch nor the engine is imported, so the server process can use it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from backends.exllamav3.checkpoints import (
    BUDGET_KEY,
    CHUNK_KEY,
    INTERVAL_KEY,
    INTERVAL_PP_KEY,
    MIB,
    CheckpointPlan,
    plan_for,
    readable_bytes,
)
from common.caching import PlanBasis
from common.config_models import PAGE_TOKENS
from common.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS_SHOWN = 16
EDITS_SHOWN = 10

# Okabe and Ito's, which people who see fewer colours can tell apart.
BLUE, ORANGE, VERMILION, GREEN, GREY = "#0072b2", "#e69f00", "#d55e00", "#009e73", "#666666"


# --- text -----------------------------------------------------------------------------------------------------------


def describe_plan(model: str, basis: PlanBasis, plan: CheckpointPlan, boundaries: Sequence[int] = ()) -> str:
    """Marks, what they take, and a table of what edits cost.

    Args:
        basis: what the plan was made with, all of it.
        boundaries: as for `plan`; edits there are part of the table.
    """
    lines = [
        f"{model}, a prompt of {plan.prompt_tokens:,} tokens, {CHUNK_KEY} {basis.chunk_size:,}, "
        f"{INTERVAL_KEY} {basis.interval:,}, {INTERVAL_PP_KEY} {basis.interval_pp:,}",
        "",
        *_describe_marks(plan),
        f"One takes {readable_bytes(plan.checkpoint_bytes)} of host RAM, {len(plan.marks):,} take "
        f"{readable_bytes(plan.bytes)}; memory.{BUDGET_KEY} ({plan.budget_bytes // MIB} MB) holds {plan.capacity:,}.",
        _describe_passes(plan, plan_for(basis, plan.prompt_tokens)),
        f"An edit has at most {plan.worst_overhead:,} unchanged tokens processed again, on top of what follows it.",
        "",
        *_table(plan, boundaries),
    ]
    return "\n".join(lines)


def describe_without_checkpoints(model: str) -> str:
    return f"{model} has no recurrent layers and needs no checkpoints: an edit costs what follows it."


def _describe_marks(plan: CheckpointPlan) -> Iterator[str]:
    if not plan.marks:
        yield "No checkpoints: there is no full page before the last token."
        return
    note = ", at boundaries those with *" if plan.anchors else ""
    yield f"Checkpoints{note}: {_positions(plan, plan.marks)}"
    if len(plan.kept) < len(plan.marks):
        kept = f"only those at {_positions(plan, plan.kept)} are kept" if plan.kept else "none is kept"
        yield f"There is no room for all {len(plan.marks):,}: {kept}."


def _positions(plan: CheckpointPlan, marks: Sequence[int]) -> str:
    texts = [f"{mark:,}{'*' if mark in plan.anchors else ''}" for mark in marks]
    if len(texts) > MARKS_SHOWN:
        texts[MARKS_SHOWN // 2 : -MARKS_SHOWN // 2] = ["…"]
    return "; ".join(texts)


def _describe_passes(plan: CheckpointPlan, plain: CheckpointPlan) -> str:
    more = plan.passes - plain.passes
    passes = f"{plan.passes:,} {'pass' if plan.passes == 1 else 'passes'}"
    return f"Prefill takes {passes}{f', {more:,} of them for the boundaries' if more else ''}."


def _table(plan: CheckpointPlan, boundaries: Sequence[int]) -> Iterator[str]:
    spread = {plan.prompt_tokens * part // EDITS_SHOWN for part in range(EDITS_SHOWN)}
    edits = sorted(edit for edit in {*spread, *boundaries} if edit < plan.prompt_tokens)
    rows = [("edit at token", "resumed from", "tokens processed", "the least possible")]
    for edit in [*edits, plan.prompt_tokens]:
        name = f"{edit:,}" if edit < plan.prompt_tokens else "none"
        rows.append((name, f"{plan.resume(edit):,}", f"{plan.replay(edit):,}", f"{plan.floor(edit):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.rjust, row, widths))


# --- a picture ------------------------------------------------------------------------------------------------------


def draw_plan(model: str, plan: CheckpointPlan) -> bytes:
    """A PNG: tokens processed again over the position of an edit, the least possible, and the checkpoints.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    picture = BytesIO()
    plan_figure(model, plan).savefig(picture, format="png")
    return picture.getvalue()


def plan_figure(model: str, plan: CheckpointPlan) -> Figure:
    """As `draw_plan`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("The plot needs matplotlib: pip install matplotlib") from error

    # A step goes on to the next position, the last one to the end of the prompt.
    pages = [*range(0, plan.prompt_tokens, PAGE_TOKENS), plan.prompt_tokens]
    floors = [plan.floor(page) for page in (*pages[:-1], pages[-2])]
    replays = [plan.replay(page) for page in (*pages[:-1], pages[-2])]
    figure = Figure(figsize=(9, 5.6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        pages,
        floors,
        drawstyle="steps-post",
        color=GREY,
        linewidth=1,
        label="the least possible: the edit's page and what follows it",
    )
    axes.plot(
        pages, replays, drawstyle="steps-post", color=BLUE, linewidth=2.2, zorder=3, label="tokens processed again"
    )
    axes.fill_between(pages, floors, step="post", color=GREY, alpha=0.15, linewidth=0)
    axes.fill_between(
        pages, floors, replays, step="post", color=ORANGE, alpha=0.3, linewidth=0, label="unchanged tokens among them"
    )
    kept, anchors = set(plan.kept), set(plan.anchors)
    kinds = (
        ("checkpoints dropped for want of room", GREY, "x", sorted({*plan.marks} - kept)),
        ("checkpoints", GREEN, "^", sorted(kept - anchors)),
        ("checkpoints at boundaries", VERMILION, "D", sorted(kept & anchors)),
    )
    for name, colour, marker, marks in kinds:
        if marks:
            axes.plot(
                marks,
                [0] * len(marks),
                label=f"{name}: {len(marks):,}",
                color=colour,
                marker=marker,
                markersize=7 if len(marks) <= MARKS_SHOWN else 4,
                linestyle="",
                clip_on=False,
                zorder=5,
            )
    axes.set(
        xlabel="position of the edit, tokens",
        ylabel="tokens processed again",
        xlim=(0, plan.prompt_tokens),
    )
    axes.set_title(
        f"{model}: what an edit of a prompt of {plan.prompt_tokens:,} tokens costs\n"
        f"checkpoints: {len(plan.kept):,} in {readable_bytes(len(plan.kept) * plan.checkpoint_bytes)} of host RAM",
        pad=12,
        parse_math=False,  # a dollar sign in a name is one
    )
    axes.set_ylim(0, 1.05 * plan.prompt_tokens)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
