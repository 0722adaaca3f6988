"""What warm-up and clipping do for a training on the edge: `python -m benchmarks.stability`, on CPU in minutes.

Every arm trains the same network on the same samples, noise and initial weights. The grid has all combinations of
warm-up, clipping, learning rates and batch sizes. Three more arms meet an outlier batch, whose latents are scaled, or
none. An arm has diverged where its loss or gradient is not finite, or where its running loss is far above its lowest.

The question is that of a latent-diffusion training whose gradients exploded near step 400 without the two. It states no
learning rate, batch or length; these are ours. What happened is reported, whether or not it exploded.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Optional

from benchmarks.step import revision
from dit.errors import EXIT_OK, ConfigError, NotFiniteError, one_line_errors
from dit.terminal import echo
from launch import cli, environment
from launch.train import resolve

if TYPE_CHECKING:
    from dit.backends.process_groups import ProcessGroups
    from dit.batch import PackedBatch
    from dit.run_config import RunConfig

WINDOW = 20
"""Steps of the running loss."""
FAR_ABOVE = 3.0
"""A running loss this many times the lowest one before is a divergence."""
LAST = 50
"""Steps of the final loss, a median."""


@dataclass(frozen=True)
class Arm:
    """One training of the study.

    Attributes:
        rate: peak learning rate.
        batch: samples of a step.
        warmup: steps of the warm-up; 0 for none.
        clip: largest gradient norm; 0 for no clipping.
        outlier: step whose latents are scaled; None for none.
    """

    rate: float
    batch: int
    warmup: int
    clip: float
    outlier: Optional[int] = None

    @property
    def name(self) -> str:
        """The arm in words."""
        kind = {(0, 0): "neither", (1, 0): "warm-up", (0, 1): "clipping", (1, 1): "both"}
        return kind[bool(self.warmup), bool(self.clip)]


@dataclass
class Curve:
    """Measurements of an arm, by step.

    Attributes:
        losses, norms: of every step; the gradient norm before clipping. A step that is not finite ends them.
        weights: norm of all weights after every step.
        not_finite: the step at which the loss or the gradient was not finite; None if there was none.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    not_finite: Optional[int] = None

    def diverged_at(self, outlier: Optional[int] = None) -> Optional[int]:
        """Return the first step at which the arm had diverged; None if it never did.

        Args:
            outlier: a step whose own loss does not count: it is that of the scaled batch.
        """
        lowest, recent = math.inf, list[float]()
        for step, loss in enumerate(self.losses, 1):
            if step == outlier:
                continue
            recent = [*recent[1 - WINDOW :], loss]
            if len(recent) < WINDOW:
                continue
            mean = sum(recent) / WINDOW
            if mean > FAR_ABOVE * lowest:
                return step
            lowest = min(lowest, mean)
        return self.not_finite

    @property
    def final(self) -> Optional[float]:
        """The median loss of the last steps; None for an arm that ended early."""
        return None if self.not_finite is not None else median(self.losses[-LAST:])

    def clipped_share(self, clip: float) -> float:
        """Return the share of steps whose gradient was above the limit."""
        return sum(norm > clip for norm in self.norms) / max(1, len(self.norms)) if clip else 0.0


class ScaledOnce(Iterator["PackedBatch"]):
    """Yields the micro-batches of a run, those of one step with scaled latents.

    Args:
        batches: the `DeviceBatches` of a run.
        scale: of the latents.
        micro_batches: of a step.
        step: counted from 1.
    """

    def __init__(self, batches: Any, scale: float, micro_batches: int, step: int) -> None:
        self.batches, self.scale = batches, scale
        self.count, self.scaled = 0, range((step - 1) * micro_batches, step * micro_batches)

    def __next__(self) -> "PackedBatch":
        batch: PackedBatch = next(self.batches)
        self.count += 1
        if self.count - 1 not in self.scaled:
            return batch
        return replace(batch, latents_TC=self.scale * batch.latents_TC)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def config_of(factory: str, overrides: Sequence[str], arm: Arm, steps: int, run_dir: str) -> "RunConfig":
    """Return the settings of an arm."""
    from launch import config_file

    own = [
        *("schedule=constant", f"schedule.warmup_steps={arm.warmup}", f"optimizer.lr={arm.rate}"),
        *(f"optimizer.clip_grad={arm.clip}", f"training.global_batch_size={arm.batch}"),
        *(f"training.micro_batch_size={arm.batch}", f"training.num_steps={steps}", f"training.run_dir={run_dir}"),
        "data.num_streams=1",
        *("training.ema_decay=none", "training.precision=fp32", "logging.tensorboard=False", "logging.wandb=False"),
    ]
    return config_file.built(resolve(cli.Options(factory=factory, overrides=[*overrides, *own])))


def train(config: "RunConfig", groups: "ProcessGroups", arm: Arm, scale: float) -> Curve:
    """Train an arm on one rank until its last step, or until a step that is not finite."""
    import torch

    from dit.training.pretrain import Run
    from dit.training.rates import mean_loss

    dims, spec = config.check_here()
    run, curve = Run(config, dims, spec, groups, quiet=True), Curve()
    if arm.outlier is not None:
        run.batches = ScaledOnce(run.batches, scale, dims.micro_batches, arm.outlier)  # type: ignore[assignment]
    for step in range(1, config.training.num_steps + 1):
        sums = torch.zeros(len(config.objective.logged) + 1, device=run.device)
        try:
            norm = run.step(sums)
        except NotFiniteError:
            curve.not_finite = step
            break
        curve.losses.append(mean_loss(config.objective, sums, groups))
        curve.norms.append(norm)
        curve.weights.append(float(torch.stack([shard.main.norm() for shard in run.state.shards]).norm()))
        run.batches.reset()
    run.close()
    return curve


def study(args: argparse.Namespace) -> list[tuple[Arm, Curve]]:
    """Train every arm, one after the other."""
    from dit.backends import process_groups
    from dit.parallel.dims import ParallelConfig

    switches = list(product((0, args.warmup), (0.0, args.clip)))
    grid = [Arm(*sizes, *switch) for sizes in product(args.rates, args.batches) for switch in switches]
    least, first = min(args.rates), args.batches[0]
    with_outlier = [Arm(least, first, 0, clip, args.outlier) for clip in (0.0, args.clip)]
    arms = [(arm, args.steps) for arm in grid]
    arms += [(arm, args.outlier + args.after) for arm in (Arm(least, first, 0, 0.0), *with_outlier)]
    groups = process_groups.initialize(ParallelConfig())
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (arm, steps) in enumerate(arms):
            config = config_of(args.factory, args.overrides, arm, steps, f"{folder}/{i}")
            curve = train(config, groups, arm, args.scale)
            results.append((arm, curve))
            echo(row(arm, curve), flush=True)
    process_groups.destroy()
    return results


def row(arm: Arm, curve: Curve) -> str:
    """Return an arm as a row of the table."""
    diverged = curve.diverged_at(arm.outlier)
    cells = [
        f"{arm.rate:g}",
        arm.batch,
        arm.name,
        "-" if arm.outlier is None else arm.outlier,
        len(curve.losses),
        "no" if diverged is None else f"step {diverged}" + (", not finite" if curve.not_finite == diverged else ""),
        f"{max(curve.losses, default=math.nan):.3g}",
        f"{max(curve.norms, default=math.nan):.3g}",
        f"{curve.clipped_share(arm.clip):.0%}" if arm.clip else "-",
        "-" if curve.final is None else f"{curve.final:.4f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def report(args: argparse.Namespace, results: Sequence[tuple[Arm, Curve]], seconds: float) -> str:
    """Return the page: what ran, the table, and what happened in sentences."""
    import torch

    grid, outliers = results[:-3], results[-3:]
    diverged = [arm for arm, curve in grid if curve.diverged_at() is not None]
    by_name = {
        name: (sum(arm.name == name for arm in diverged), sum(arm.name == name for arm, _ in grid))
        for name in ("neither", "warm-up", "clipping", "both")
    }
    clean, open_end, clipped = (curve.final for _, curve in outliers)
    near = [arm for arm, curve in grid if (at := curve.diverged_at()) is not None and 350 <= at <= 450]
    return "\n".join(
        [
            "# Stability",
            "",
            f"`{' '.join(['python -m benchmarks.stability --factory', args.factory, *args.overrides])}` on CPU, "
            f"torch {torch.__version__}, revision {revision()}, {seconds:.0f} s. AdamW, fp32, "
            f"synthetic data; warm-up {args.warmup} steps, clipping at "
            f"{args.clip:g}. Learning rates, batches and lengths are ours.",
            "",
            "| rate | batch | with | outlier | steps | diverged | highest loss | highest norm | clipped | final loss |",
            "| ---: | ---: | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
            *(row(arm, curve) for arm, curve in results),
            "",
            f"Diverged: the running loss of {WINDOW} steps is more than {FAR_ABOVE:g} times its lowest, or a number is "
            f"not finite. The final loss is the median of the last {LAST} steps. The last three rows are the same "
            f"training without an outlier, and with latents scaled by {args.scale:g} at step {args.outlier}.",
            "",
            "* Diverged of the grid: "
            + ", ".join(f"{count} of {total} with {name}" for name, (count, total) in by_name.items())
            + ".",
            f"* An explosion between steps 350 and 450: {len(near)} of {len(grid)} arms.",
            f"* After the outlier the final loss is {_shown(open_end)} without clipping and {_shown(clipped)} with it; "
            f"{_shown(clean)} without an outlier.",
            "",
        ]
    )


def _shown(loss: Optional[float]) -> str:
    return "none (not finite)" if loss is None else f"{loss:.4f}"


def plot(results: Sequence[tuple[Arm, Curve]], path: Path) -> None:
    """Draw the losses: the grid at its highest rate and first batch, and the arms with an outlier."""
    from matplotlib.figure import Figure

    grid, outliers = results[:-3], results[-3:]
    highest, first = max(arm.rate for arm, _ in grid), grid[0][0].batch
    shown = [(arm.name, curve) for arm, curve in grid if arm.rate == highest and arm.batch == first]
    labels = ("no outlier", "outlier, no clipping", "outlier, clipping")
    panels = {
        f"rate {highest:g}, batch {first}": shown,
        f"rate {outliers[0][0].rate:g}, outlier": list(zip(labels, (curve for _, curve in outliers), strict=True)),
    }
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for label, curve in curves:
            axes.plot(range(1, len(curve.losses) + 1), curve.losses, label=label, linewidth=0.8)
        axes.set(title=title, xlabel="step", ylabel="loss", yscale="log")
        axes.legend()
    figure.savefig(path, dpi=100, metadata={"Software": None})


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; overrides are parsed by the recipe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stability", description=__doc__)
    parser.add_argument("--factory", default="tiny_ldm_unet", help="recipe to train (%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 3.2e-2, 0.5], help="learning rates")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32], help="samples of a step")
    parser.add_argument("--steps", type=int, default=150, help="of an arm of the grid (%(default)s)")
    parser.add_argument("--warmup", type=int, default=50, help="steps of the warm-up (%(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm (%(default)s)")
    parser.add_argument("--outlier", type=int, default=400, help="step of the outlier batch (%(default)s)")
    parser.add_argument("--after", type=int, default=100, help="steps after it (%(default)s)")
    parser.add_argument("--scale", type=float, default=1000.0, help="of its latents (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of page and plot")
    parser.add_argument("--record", type=Path, help="also write every step of every arm to this JSONL file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the study and write `stability.md` and `stability.png`."""
    args = build_parser().parse_args(argv)
    if min(args.steps, args.outlier, args.after, args.warmup, *args.batches) < 1 or min(args.clip, *args.rates) <= 0:
        raise ConfigError("--steps, --outlier, --after, --warmup, --batches, --clip and --rates must be above 0")
    environment.prepare()
    cli.check_factory(args.factory)
    began = time.monotonic()
    results = study(args)
    args.out.mkdir(parents=True, exist_ok=True)
    page = report(args, results, time.monotonic() - began)
    (args.out / "stability.md").write_text(page, encoding="utf-8")
    if args.record:
        lines = [json.dumps({**asdict(arm), **asdict(curve)}) + "\n" for arm, curve in results]
        args.record.write_text("".join(lines), encoding="utf-8")
    plot(results, args.out / "stability.png")
    echo(page)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
