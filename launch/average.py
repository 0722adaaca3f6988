"""Reconstruct a weight average of another length from the averages in a run's checkpoints (post-hoc EMA).

`python -m launch.average --checkpoint RUN --sigma-rel 0.12 --out DIR`

Source: Karras et al. 2024, arXiv:2312.02696, section 3.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from dit.errors import CheckpointError, one_line_errors
from dit.ranges import RELATIVE_LENGTH
from dit.terminal import counted, echo
from launch import environment
from launch.argument_types import command_parser, number_in

if TYPE_CHECKING:
    from torch import Tensor

DESCRIPTION = (
    "Combine the power-function averages (training.ema_sigma_rel) in the checkpoints of a run to an average of "
    "another length, and write it as a run folder. More checkpoints (checkpoint.keep_every) make it more exact."
)
EXAMPLES = """\
examples
  python -m launch.average --checkpoint runs/mine --sigma-rel 0.12 --out runs/mine_0.12
  python -m launch.sample --checkpoint runs/mine_0.12 --labels 0,1,2 --out grid.png
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("launch.average", DESCRIPTION, EXAMPLES)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="run folder with checkpoints")
    parser.add_argument(
        "--sigma-rel",
        required=True,
        type=number_in(RELATIVE_LENGTH),
        metavar="X",
        help="length of the average relative to the steps, from 0.01 to 0.28",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="new run folder")
    return parser


def weighted_sum(weights: Sequence[float], tensors: Sequence["Tensor"]) -> "Tensor":
    """Return the sum of tensors with weights, computed in float64, as float32."""
    total = tensors[0].double() * weights[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total.float()


def run(args: argparse.Namespace) -> str:
    """Write the run folder; return a line with the largest error of the combined profile."""
    environment.prepare(quiet=True)
    from dit.auxiliary import PREFIXES
    from dit.checkpoint.full_weights import write_imported
    from dit.checkpoint.manifest import read_manifest
    from dit.checkpoint.reading import candidates, find_checkpoint, no_checkpoint, read_settings
    from dit.checkpoint.state_files import SlotWeights, read_full
    from dit.optimizer.ema import combination, exponent_of, power_slot
    from launch.export_weights import trained_model

    with ExitStack() as reading:
        by_step = {step: folder for folder, step in (find_checkpoint(f, reading) for f in candidates(args.checkpoint))}
        if not by_step:
            raise no_checkpoint(args.checkpoint)
        steps = sorted(by_step)
        last = steps[-1]
        config, metadata = read_settings(by_step[last])
        runs = [(step, read_settings(by_step[step])[0].training) for step in steps]
        snapshots = [(step, length) for step, training in runs for length in training.ema_sigma_rel or ()]
        if not snapshots:
            raise CheckpointError(
                f"{args.checkpoint} has no power-function averages; train with training.ema_sigma_rel=[0.05,0.1]"
            )
        profiles = [(float(step), exponent_of(length)) for step, length in snapshots]
        weights, error = combination(profiles, (float(last), exponent_of(args.sigma_rel)))
        sources = [SlotWeights(by_step[step], power_slot(length)) for step, length in snapshots]
        names = [name for name in sources[0].shapes if not name.startswith(PREFIXES)]
        combined = {name: weighted_sum(weights, [read_full(source, name) for source in sources]) for name in names}
        source = f"the average of sigma_rel={args.sigma_rel:g} at step {last}, from {args.checkpoint}, steps {steps}"
        trained = replace(trained_model(config, metadata), model=config.model)  # with adapters, if it has some
        base = read_manifest(by_step[last]).base
        write_imported(Path(args.out), combined, trained, config.sampling, source, base=base)
    return (
        f"combined {counted(len(snapshots), 'average')} of steps {steps[0]} to {last} to sigma_rel={args.sigma_rel:g} "
        f"at step {last}; its cumulative weights of the steps differ from the exact ones by at most {100 * error:.2g} %"
    )


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    echo(run(args), file=sys.stderr)
    echo(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
