"""Draws docs/images/edit-cost.png: what an edit costs, computed from the engine's checkpoint schedule.

python -m tools.plot_checkpoints [FILE.png]
"""

import argparse
from pathlib import Path

from backends.exllamav3.checkpoints import DEFAULT_INTERVAL, DEFAULT_INTERVAL_PP, plan
from tools.edit_probe import PROMPT_TOKENS, Curve, draw

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "edit-cost.png"

# chunk_size, recurrent_checkpoint_interval_pp, recurrent_checkpoint_interval
ROWS = (
    (1024, DEFAULT_INTERVAL_PP, DEFAULT_INTERVAL),
    (2048, DEFAULT_INTERVAL_PP, DEFAULT_INTERVAL),
    (1024, 1024, DEFAULT_INTERVAL),
    (1024, 1024, 1024),
    (256, 256, 256),
)
# Only bytes and capacity depend on these; every mark fits.
CHECKPOINT_BYTES = 148 * 1024**2
BUDGET_BYTES = 4096 * 1024**2


def curve(chunk_size: int, interval_pp: int, interval: int) -> Curve:
    computed = plan(
        PROMPT_TOKENS,
        chunk_size,
        interval,
        interval_pp,
        checkpoint_bytes=CHECKPOINT_BYTES,
        budget_bytes=BUDGET_BYTES,
    )
    positions = range(PROMPT_TOKENS)
    return Curve(
        label=f"{chunk_size}, {interval_pp}, {interval}",
        positions=positions,
        tokens=[computed.replay(position) for position in positions],
        computed=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", type=Path, default=IMAGE, metavar="FILE.png")
    image: Path = parser.parse_args().image
    image.parent.mkdir(parents=True, exist_ok=True)
    draw(
        image,
        [curve(*row) for row in ROWS],
        f"Computed: one edit in a prompt of {PROMPT_TOKENS:,} tokens",
        PROMPT_TOKENS,
    )


if __name__ == "__main__":
    main()
