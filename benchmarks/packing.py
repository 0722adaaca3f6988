"""Compare ways to pack samples of many lengths: `python -m benchmarks.packing`.

For each mix of lengths: the share of padding in packs that are filled up to their capacity, the imbalance of work over
data-parallel ranks that take one pack each and wait for the slowest, and the tokens that they train per unit of that
time, relative to first-fit-decreasing. The work of a sample of n tokens is n + n^2 / `--attention`. Packs have a random
order, as in training. A second table has the pixels lost with aspect buckets and packs (`benchmarks.buckets`);
`--pictures N` prints only this table.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import buckets
from benchmarks.rows import markdown
from dit.errors import EXIT_OK
from dit.terminal import echo
from energon_data.packing import CostLimit, balanced_packs, greedy_knapsack
from launch.argument_types import at_least_one

Bins = list[list[int]]
Packer = Callable[[Sequence[int], int], Bins]
ATTENTION = 24_576
"""Tokens whose attention costs as much as the rest: 6 x hidden size of a layer with an MLP of 4 x hidden (7B: 4096)."""
PICTURES = 10_000
BASELINE = "first-fit-decreasing"


def images_and_clips(rng: np.random.Generator, count: int) -> list[int]:
    """Return tokens of 256 px images (half of the samples) and of clips of 2 to 32 latent frames; at most 8,192."""
    frames = np.where(rng.random(count) < 0.5, 1, rng.integers(2, 33, count))
    return [256 * int(f) for f in frames]


def many_resolutions(rng: np.random.Generator, count: int) -> list[int]:
    """Return tokens of images of 256 to 2,048 px a side, in patches of 16 px; at most 16,384."""
    height, width = (np.exp2(rng.uniform(4, 7, count)).astype(int) for _ in range(2))
    return [int(n) for n in height * width]


def lognormal(rng: np.random.Generator, count: int) -> list[int]:
    """Return lengths exp(N(6.5, 1)) between 16 and 8,192."""
    return [int(n) for n in np.clip(np.exp(rng.normal(6.5, 1.0, count)), 16, 8192)]


MIXES: dict[str, tuple[Callable[[np.random.Generator, int], list[int]], int]] = {
    "256 px images and clips": (images_and_clips, 8192),
    "many resolutions": (many_resolutions, 16_384),
    "lognormal": (lognormal, 8192),
}


def next_fit(lengths: Sequence[int], capacity: int) -> Bins:
    """Close the open pack when a sample does not fit."""
    bins, room = [[0]], capacity - lengths[0]
    for i in range(1, len(lengths)):
        if lengths[i] > room:
            bins.append([])
            room = capacity
        bins[-1].append(i)
        room -= lengths[i]
    return bins


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """Put each sample, the longest first, into the first pack with room; the room is recomputed each time."""
    bins: Bins = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for items in bins:
            if sum(lengths[k] for k in items) + lengths[i] <= capacity:
                items.append(i)
                break
        else:
            bins.append([i])
    return bins


def two_budgets(lengths: Sequence[int], capacity: int, *, longer: float, attention: int) -> Bins:
    """Fill packs of up to `longer` x capacity, none with more work than a sample as long as the capacity."""
    return balanced_packs(lengths, int(longer * capacity), CostLimit(capacity, attention))


def packers(attention: int) -> dict[str, Packer]:
    """Return the ways to pack, by name."""
    return {
        "next-fit": next_fit,
        BASELINE: first_fit_decreasing,
        "greedy (data.max_tokens_per_pack)": greedy_knapsack,
        "two budgets (data.pack_cost_tokens)": partial(two_budgets, longer=1.25, attention=attention),
    }


def synchronous(costs: Sequence[float], ranks: int) -> tuple[float, float]:
    """Return the mean of (largest / mean) over steps, and the time of all steps, of `ranks` packs each."""
    steps = [costs[i : i + ranks] for i in range(0, len(costs) - ranks + 1, ranks)]
    return mean(max(step) / mean(step) for step in steps), sum(max(step) for step in steps)


def measure(mix: str, buffer: int, buffers: int, ranks: int, attention: int) -> list[dict[str, Any]]:
    """Pack the buffers of one mix in each way, and return a row for each."""
    lengths_of, capacity = MIXES[mix]
    rng = np.random.default_rng(0)
    data = [lengths_of(rng, buffer) for _ in range(buffers)]
    ways = packers(attention)
    packed: dict[str, list[list[int]]] = {name: [] for name in ways}  # lengths in each pack
    for lengths in data:
        for name, pack in ways.items():
            packed[name] += [[lengths[i] for i in items] for items in pack(lengths, capacity)]
    rows: list[dict[str, Any]] = []
    for name, packs in packed.items():
        order = np.random.default_rng(1).permutation(len(packs))
        costs = [sum(n + n * n / attention for n in packs[i]) for i in order]
        imbalance, duration = synchronous(costs, ranks)
        num_packs = len(packs) // ranks * ranks
        tokens = sum(sum(packs[i]) for i in order[:num_packs])
        rows.append(
            {
                "mix": mix,
                "way": name,
                "padding": 1 - sum(map(sum, packs)) / (len(packs) * capacity),
                "imbalance": imbalance,
                "tokens_per_time": tokens / duration,
            }
        )
    base = next(row for row in rows if row["way"] == BASELINE)
    for row in rows:
        row["throughput"] = row["tokens_per_time"] / base["tokens_per_time"]
    return rows


def table(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """Return the rows as Markdown."""
    heads = ["mix", "way", "padding", f"work, largest / mean of {ranks} ranks", "tokens per time"]
    lines = []
    for row in rows:
        padding = f"{row['padding']:.2%}" if row["padding"] >= 0 else "none"
        lines.append([row["mix"], row["way"], padding, f"{row['imbalance']:.2f}", f"{row['throughput']:.2f}"])
    return markdown(heads, lines, 3)


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__.split("\n")[0])
    parser.add_argument("--buffer", type=at_least_one, default=1000, help="samples from which packs are filled (1000)")
    parser.add_argument("--buffers", type=at_least_one, default=20, help="buffers of each mix (20)")
    parser.add_argument("--ranks", type=at_least_one, default=64, help="data-parallel ranks (64)")
    parser.add_argument("--attention", type=at_least_one, default=ATTENTION, help=f"tokens of equal work ({ATTENTION})")
    parser.add_argument("--pictures", type=at_least_one, metavar="N", help="print only the pixels lost from N pictures")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args(argv)
    losses = buckets.measure(args.pictures or PICTURES)
    if args.pictures is not None:
        echo(buckets.table(losses))
        return EXIT_OK
    rows = [row for mix in MIXES for row in measure(mix, args.buffer, args.buffers, args.ranks, args.attention)]
    echo(table(rows, args.ranks), buckets.table(losses), sep="\n\n")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
