"""Rewrite the checkpoints of an earlier version's run.

`python -m launch.convert_checkpoints RUN`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from dit.errors import CheckpointError, one_line_errors
from dit.terminal import echo
from launch import environment

DESCRIPTION = """\
Rewrite the checkpoints of a run that an earlier version saved (Megatron-Core's torch_dist) in the current format, to
the bit and in place. Each old checkpoint is verified first, and removed when the new one is complete. Needs the disk
space
of one more checkpoint and the memory of one tensor."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.convert_checkpoints",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="run folder (training.run_dir)")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    run_dir = Path(build_parser().parse_args(argv).run)
    if not (run_dir / "checkpoints").is_dir():
        raise CheckpointError(f"{run_dir} is no run folder with checkpoints; give the training.run_dir of a run")
    environment.prepare()
    environment.quiet_libraries()
    from dit.checkpoint.torch_dist import rewrite_run
    from dit.monitoring.run_lock import RunLock

    with RunLock(run_dir, setting="RUN") as lock:
        lock.check()
        rewritten = rewrite_run(run_dir)
    for folder in rewritten:
        echo(folder)
    if not rewritten:
        echo(f"nothing to do: the checkpoints of {run_dir} are in the current format", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
