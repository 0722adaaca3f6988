"""Write a run's weights for other code bases.

`python -m launch.export --checkpoint RUN --format diffusers --out DIR`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from dit.errors import CheckpointError, ConfigError, told_in_one_line
from launch import environment

FORMATS = ("diffusers", "dit")
DESCRIPTION = "Write a run's averaged weights as a folder of diffusers, or as a state dict of facebookresearch/DiT."
EXAMPLES = """\
examples
  python -m launch.export --checkpoint runs/dit_xl2_imagenet --format diffusers --out DiT-XL-2/transformer
  python -m launch.export --checkpoint runs/dit_xl2_imagenet --format dit --out DiT-XL-2.safetensors
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.export",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="run folder, or one checkpoint in it")
    parser.add_argument("--raw-weights", action="store_true", help="the raw weights instead of their average (EMA)")
    parser.add_argument("--format", required=True, choices=FORMATS, help="whose layout to write")
    parser.add_argument(
        "--out", required=True, metavar="PATH", help="new folder (diffusers), or new .safetensors or .pt file (dit)"
    )
    return parser


def run(args: argparse.Namespace) -> list[str]:
    """Write the file or folder.

    Returns:
        What the other code base computes otherwise, a sentence each.

    Raises:
        CheckpointError: there is no valid checkpoint, or it holds no average.
        ConfigError: the format cannot hold this model, or the output cannot be written.
    """
    folder, out = Path(args.checkpoint), Path(args.out)
    if not folder.is_dir():
        raise CheckpointError(f"--checkpoint {folder} is no folder; give a run folder, or one checkpoint folder in it")
    if out.exists():
        raise ConfigError(f"--out {out} exists already and is left alone; choose another or remove it")
    environment.prepare()
    environment.quiet_libraries()
    from dit.convert.state_files import write_diffusers, write_tensors
    from dit.training.generator import find_checkpoint, read_settings, slot_of
    from dit.training.whole_weights import read_whole_weights

    found, _ = find_checkpoint(folder)
    config, facts = read_settings(found)
    model, latent_size = config["model"], tuple(facts["latent_size"])
    slot = slot_of(found, config, "raw" if args.raw_weights else "ema")
    if args.format == "dit":
        from dit.convert.class_dit import trained_objective

        rules = original_rules(model, latent_size)
        write_tensors(rules.to_theirs(read_whole_weights(found, slot)), out)
        return note_objective(config["objective"], trained_objective())
    from dit.convert.diffusers_format import format_of_model
    from dit.parallel.parallelize import parameter_shapes

    form = format_of_model(model)
    settings, notes = form.write_settings(model, latent_size)
    rules = form.rules(model, parameter_shapes(model), latent_size)
    write_diffusers(settings, rules.to_theirs(read_whole_weights(found, slot)), out)
    published = form.read_settings(settings).objective
    return [*notes, *rules.left_behind(), *note_objective(config["objective"], published)]


def note_objective(own: Any, published: Any) -> list[str]:
    """Say that the weights want another scheduler than the published ones of the same class, if they do."""
    if own == published:
        return []
    return [f"the weights were trained by {own}, the published ones by {published}: choose the scheduler for the first"]


def original_rules(model: Any, latent_size: Any) -> Any:
    """Return the rules between facebookresearch/DiT and one of our models.

    Raises:
        ConfigError: their code cannot hold it.
    """
    from dit.convert import original_dit
    from dit.models.dit.config import DiTConfig
    from dit.parallel.parallelize import parameter_shapes

    if type(model) is not DiTConfig:
        raise ConfigError(
            f"--format dit holds the class-conditional DiT (DiTConfig), not {type(model).__name__}; "
            "try --format diffusers"
        )
    return original_dit.rules(model, parameter_shapes(model), latent_size)


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
