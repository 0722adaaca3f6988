"""Table of docs/training-methods.md: planned cost of the recipes of published results.

`python -m tests.support.published_table --write` writes the page in ten minutes; without `--write` it is printed.
"""

import re
import sys
from collections.abc import Sequence
from typing import Optional

from launch import dry_run
from launch.train import call_recipe
from tests.support.generated_page import write_or_print
from tests.support.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "training-methods.md"
HEAD = "| recipe | PFLOP per epoch | steps x batch | hours | published figure |"
EPOCH = 1_281_167
ROWS = {
    "sit_xl2_repa": (400_000, 256, 16, "FID 7.9"),
    "sr_dit_b1_imagenet": (400_000, 256, 16, "FID 3.49"),
    "lightningdit_xl_imagenet": (80_000, 1024, 16, "FID 5.14"),
    "dit_dh_xl_imagenet": (100_000, 1024, 16, "FID 2.16"),
    "jit_b16_imagenet": (750_600, 1024, 16, "FID 3.66 with guidance"),
    "rit_xl_imagenet": (667_200, 1536, 16, "FID 1.45"),
    "prx_256": (100_000, 256, 16, "FID 18.2 with guidance"),
    "edm2_s_imagenet": (1_048_576, 2048, 64, "FID 2.56 at 512 px"),
}
"""By recipe: published steps, samples in a step, tokens per side, and figure."""


def row(name: str) -> str:
    """Return the table row of a recipe."""
    steps, batch, side, figure = ROWS[name]
    report = dry_run.report(call_recipe(name), 8, [1, side, side], device="h100")
    patterns = (r"([\d,.]+) TFLOP per step", r"time +([\d,]+) ms")
    work, ms = (float(re.search(pattern, report)[1].replace(",", "")) for pattern in patterns)
    cost = f"{work / batch * EPOCH / 1e3:,.0f} | {steps:,} x {batch:,} | {steps * ms / 3.6e6:,.1f}"
    return f"| `{name}` | {cost} | {figure} |"


def page() -> str:
    """Return the page with the planned table."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    return "\n".join([before + HEAD, "|---" * 5 + "|", *map(row, ROWS)]) + after[after.index("\n\n") :]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    return write_or_print("tests.support.published_table", page, PAGE, argv)


if __name__ == "__main__":
    sys.exit(main())
