"""Make a run folder of another code base's weights.

`python -m launch.import_weights --from DiT-XL-2-256x256.pt --format dit --out runs/dit_xl2`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from dit.errors import ConfigError, told_in_one_line
from launch import environment
from launch.export import FORMATS, original_rules
from launch.sample import at_least_one

DESCRIPTION = "Make a run folder of weights from facebookresearch/DiT or diffusers, to sample from or to start from."
EXAMPLES = """\
examples
  python -m launch.import_weights --from DiT-XL-2-256x256.pt --format dit --out runs/dit_xl2
  python -m launch.sample --checkpoint runs/dit_xl2 --label 207
  python -m launch.import_weights --from PixArt-XL-2/transformer --format diffusers --drop-variance --out runs/pixart
  torchrun ... -m launch.train ... checkpoint.start_from=runs/pixart

Nothing in the files is executed; pickles that hold more than tensors are refused.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.import_weights",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--from", dest="source", required=True, metavar="PATH", help="folder (diffusers), or .safetensors or .pt (dit)"
    )
    parser.add_argument("--format", required=True, choices=FORMATS, help="whose layout it is")
    parser.add_argument("--out", required=True, metavar="DIR", help="run folder to make")
    parser.add_argument(
        "--drop-variance", action="store_true", help="leave a learned variance behind, to train on without one"
    )
    parser.add_argument(
        "--num-attention-heads", type=at_least_one, metavar="N", help="of a dit file of another width than S, B, L, XL"
    )
    return parser


def run(args: argparse.Namespace) -> list[str]:
    """Make the run folder.

    Returns:
        What our network computes otherwise, a sentence each.

    Raises:
        ConfigError: the files cannot be read, hold another model than they say, or `--out` cannot be used.
    """
    source = Path(args.source)
    if not source.exists():
        raise ConfigError(f"--from {source} does not exist; give a file of weights or a folder in the diffusers layout")
    if args.format == "diffusers" and args.num_attention_heads is not None:
        raise ConfigError("--num-attention-heads is for --format dit; a config.json says it itself")
    environment.prepare()
    environment.quiet_libraries()
    from dit.convert.variance import drop_variance
    from dit.training.run_lock import RunLock
    from dit.training.settings import SamplingConfig
    from dit.training.whole_weights import write_imported

    imported, rules, theirs = read_original(source, args) if args.format == "dit" else read_diffusers_folder(source)
    model, weights = imported.model, rules.to_ours(theirs)
    if args.drop_variance:
        model, weights = drop_variance(model, weights)
    with RunLock(args.out, setting="--out") as lock:
        lock.check()
        write_imported(
            Path(args.out),
            weights,
            model,
            imported.objective,
            SamplingConfig(**imported.sampling),
            imported.latent_size,
            f"{args.format}: {source.resolve()}",
        )
    return imported.notes


def read_original(source: Path, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the model, the rules and the tensors of a state dict of facebookresearch/DiT."""
    from dit.convert.original_dit import read_sizes
    from dit.convert.state_files import read_tensors

    theirs = read_tensors(source)
    imported = read_sizes(theirs, args.num_attention_heads)
    imported.model.validate()
    return imported, original_rules(imported.model, imported.latent_size), theirs


def read_diffusers_folder(source: Path) -> tuple[Any, Any, Any]:
    """Return the model, the rules and the tensors of a folder in the diffusers layout."""
    from dit.convert.diffusers_format import format_of_settings
    from dit.convert.state_files import read_diffusers
    from dit.parallel.parallelize import parameter_shapes

    settings, theirs = read_diffusers(source)
    form = format_of_settings(settings)
    imported = form.read_settings(settings)
    imported.model.validate()
    return imported, form.rules(imported.model, parameter_shapes(imported.model), imported.latent_size), theirs


@told_in_one_line
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    for note in run(args):
        print(f"note: {note}", file=sys.stderr)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
