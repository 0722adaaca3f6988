"""Print which implementation of each op this machine uses, and why not the others: `python -m launch.kernels`.

A run stores the same in its `env.json`. `--verify` first runs tests/gpu, which takes about a minute; `auto` then also
selects the fused kernels and the attention packages that have passed.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Optional

from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.terminal import echo, quiet_libraries
from launch.argument_types import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser(
        "launch.kernels", "Print which implementation of each op this machine uses by itself, and why not the others."
    )
    flag = parser.add_argument
    flag("--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the run (%(default)s)")
    flag("--verify", action="store_true", help="test the kernels on this GPU first; runs here use those that pass")
    return parser


def verify() -> int:
    """Run tests/gpu, which records the kernels that pass, and return pytest's exit code."""
    from dit.backends.device import use_cuda

    repository = Path(__file__).parents[1]
    if not use_cuda():
        raise ConfigError(
            "--verify tests kernels on a GPU, and this process sees none; there is nothing to verify on a CPU"
        )
    if not (repository / "tests" / "gpu").is_dir():
        raise ConfigError(f"--verify runs tests/gpu, which {repository} lacks; run it in a clone of the repository")
    if find_spec("pytest") is None:
        raise ConfigError(
            "--verify needs pytest, which is not installed; pip install -e '.[dev]' in the repository's folder"
        )
    words = ["-m", "pytest", "tests/gpu", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    return subprocess.run([sys.executable, *words], cwd=repository, check=False).returncode


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    quiet_libraries()
    code = verify() if args.verify else EXIT_OK
    from dit.backends.device import describe, local_device
    from dit.backends.sharding import in_columns
    from dit.kernels.choice import Target, table
    from dit.parallel.implementations import DTYPES, OPS
    from dit.parallel.verified_kernels import verified_here

    rows = [("op", "implementation", "")]
    target = Target(local_device(), DTYPES[args.precision], frozenset(), verified_here())
    for op, selected in table(OPS, target, {}).items():
        rows.append((op, selected.name, "selected"))
        rows += [("", name, why) for name, why in selected.others.items()]
    echo(f"{describe()}, {args.precision}\n{in_columns(rows)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
