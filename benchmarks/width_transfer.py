"""The best learning rate at several widths, with and without `model.base_width`: `python -m benchmarks.width_transfer`.

Every run trains on the same samples and noise on one CPU rank; the loss is the median of the last 50 steps. Heads have
16 features. The smallest width is the base width, so its runs are the same with and without the setting.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Optional

from dit.errors import EXIT_OK, ConfigError, NotFiniteError, one_line_errors
from dit.terminal import echo
from launch import cli, config_file, environment
from launch.argument_types import at_least_one
from launch.train import resolve

if TYPE_CHECKING:
    from dit.backends.process_groups import ProcessGroups
    from dit.run_config import RunConfig

HEAD_SIZE = 16
LAST = 50
"""Steps of the final loss, a median."""


def settings_of(args: argparse.Namespace, sizes: Sequence[str], rate: float, run_dir: str) -> "RunConfig":
    """Return the settings of a run with a constant rate after the warm-up."""
    shared = [
        *("schedule=constant", f"schedule.warmup_steps={args.warmup}", f"optimizer.lr={rate}"),
        *(f"training.global_batch_size={args.batch}", f"training.micro_batch_size={args.batch}"),
        "optimizer.clip_grad=1.0",
        *(f"training.num_steps={args.steps}", f"training.run_dir={run_dir}", "data.num_streams=1"),
        *("training.ema_decay=none", "training.precision=fp32", "logging.tensorboard=False", "logging.wandb=False"),
    ]
    return config_file.built(resolve(cli.Options(factory=args.factory, overrides=[*args.overrides, *sizes, *shared])))


def final_loss(config: "RunConfig", groups: "ProcessGroups") -> float:
    """Train on one rank; return the median loss of the last steps, infinite if a step was not finite."""
    import torch

    from dit.training.pretrain import Run
    from dit.training.rates import mean_terms
    from dit.training.validate import named_losses

    dims, spec = config.check_here()
    run, losses = Run(config, dims, spec, groups, quiet=True), []
    try:
        for _ in range(config.training.num_steps):
            sums = torch.zeros(len(config.objective.logged) + 1, device=run.device)
            run.step(sums)
            losses.append(named_losses(config.objective, mean_terms(sums, groups))["loss"])
            run.batches.reset()
    except NotFiniteError:
        return math.inf
    finally:
        run.close()
    return median(losses[-LAST:])


def losses_by_rate(
    args: argparse.Namespace, width: int, groups: "ProcessGroups", folder: str, *, scaled: bool
) -> dict[float, float]:
    """Train a width with each rate; return the final losses."""
    sizes = [f"model.hidden_size={width}", f"model.num_attention_heads={width // HEAD_SIZE}"]
    sizes += [f"model.base_width={min(args.widths)}"] if scaled else []
    return {
        rate: final_loss(settings_of(args, sizes, rate, f"{folder}/{width}-{scaled}-{rate}"), groups)
        for rate in args.rates
    }


def row(width: int, scaled: bool, results: dict[float, float], seconds: float) -> str:
    """Return the losses of a width as a row of the table, the best one in bold."""
    best = min(results.values())
    cells = [f"**{loss:.4f}**" if loss == best else f"{loss:.4f}" for loss in results.values()]
    return f"| {width} | {'yes' if scaled else 'no'} | {' | '.join(cells)} | {seconds:.0f} s |"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; overrides are parsed by the recipe."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.width_transfer", description=__doc__)
    parser.add_argument("--factory", default="letters_dit", help="recipe of a transformer (%(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="values of hidden_size")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--batch", type=at_least_one, default=32, help="samples of a step (%(default)s)")
    parser.add_argument("--steps", type=at_least_one, default=150, help="of a run (%(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="steps of the warm-up (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Train all widths and print the table."""
    args = build_parser().parse_intermixed_args(argv)
    wrong = [width for width in args.widths if width % HEAD_SIZE]
    if wrong:
        raise ConfigError(f"--widths {wrong} must be multiples of {HEAD_SIZE}, the features of a head; use others")
    environment.prepare()
    cli.check_factory(args.factory)
    from dit.backends import process_groups
    from dit.parallel.dims import ParallelConfig

    groups = process_groups.initialize(ParallelConfig())
    echo(f"| width | `base_width` | {' | '.join(f'{rate:g}' for rate in args.rates)} | CPU time |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for width in args.widths:
            for scaled in (False, True) if width > min(args.widths) else (False,):
                began = time.process_time()
                results = losses_by_rate(args, width, groups, folder, scaled=scaled)
                echo(row(width, scaled, results, time.process_time() - began), flush=True)
    process_groups.destroy()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
