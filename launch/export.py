"""Write a run's weights for other code bases.

`python -m launch.export --checkpoint RUN --format diffusers --out DIR`
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Optional

from dit.errors import ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment
from launch.argument_types import command_parser

FORMATS = ("diffusers", "dit")
PIPELINE = "pipeline"
ADAPTER_FORMATS = ("diffusers-lora", "comfyui-lora")
DESCRIPTION = (
    "Write a run's averaged weights as a model or a complete pipeline of diffusers, or as a state dict of "
    "facebookresearch/DiT; its adapters (LoRA) alone for diffusers and peft, or for ComfyUI."
)
EXAMPLES = """\
examples
  python -m launch.export --checkpoint runs/dit_xl2_imagenet --format diffusers --out DiT-XL-2/transformer
  python -m launch.export --checkpoint runs/dit_xl2_imagenet --format pipeline --out DiT-XL-2
  python -m launch.export --checkpoint runs/dit_xl2_imagenet --format dit --out DiT-XL-2.safetensors
  python -m launch.export --checkpoint runs/finetune_lora --format diffusers-lora --out my-lora
  python -m launch.export --checkpoint runs/finetune_lora --format comfyui-lora --out my-lora.safetensors

diffusers, pipeline and dit are full models: the adapters of a run that trained some are merged into the weights. A
pipeline holds scheduler, autoencoder, text encoder and tokenizer, too, and draws what launch.sample draws, except for
the differences in the notes that are printed.

Objective, class names, latent size and sampling defaults are written with the weights (in config.json, or in the header
of the .safetensors file), and launch.import_weights reads them. A README.md next to diffusers' files has a sampling
example.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("launch.export", DESCRIPTION, EXAMPLES)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="run folder, or one checkpoint in it")
    parser.add_argument("--raw-weights", action="store_true", help="the raw weights instead of their average (EMA)")
    flag = parser.add_argument
    flag("--format", required=True, choices=(*FORMATS, PIPELINE, *ADAPTER_FORMATS), help="format to write")
    flag("--out", required=True, metavar="PATH", help="new folder; .safetensors (comfyui-lora, dit) or .pt file (dit)")
    flag("--vae", metavar="PATH", help="autoencoder of a pipeline, if not that of the run's data")
    flag("--text-encoder", metavar="[ENTRY=]NAME", help="text encoder of a pipeline, if not that of the run's data")
    return parser


def run(args: argparse.Namespace) -> list[str]:
    """Write the file or folder; return a sentence for each difference of the other code base."""
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out {out} already exists and is not changed; choose another or remove it")
    if args.format != PIPELINE and (args.vae or args.text_encoder):
        raise ConfigError(f"--vae and --text-encoder are for --format {PIPELINE}, not {args.format}; leave them out")
    environment.prepare(quiet=True)
    from dit.checkpoint.reading import find_checkpoint

    with ExitStack() as reading:
        return _write(args, find_checkpoint(args.checkpoint, reading)[0], out)


def _write(args: argparse.Namespace, checkpoint: Path, out: Path) -> list[str]:
    """Write the file or folder of a checkpoint; see `run`."""
    from dit.checkpoint.base_model import read_run
    from dit.checkpoint.reading import read_settings, slot_of
    from dit.encoders.text_config import check_text_encoder
    from launch import export_weights

    config, metadata = read_settings(checkpoint)
    if config.objective.reconstructs:
        config.model = export_weights.with_latent_scale(config.model, checkpoint, raw_weights=args.raw_weights)
    slot = slot_of(checkpoint, config, "raw" if args.raw_weights else "ema")
    trained = export_weights.with_one_shift(export_weights.trained_model(config, metadata))
    if args.format in ADAPTER_FORMATS:
        return export_weights.write_adapters(args.format, checkpoint, slot, config, trained, out)
    merged = [] if config.model.adapters is None else ["the adapters (LoRA) are merged into the weights"]
    weights = partial(read_run, checkpoint, config, slot)
    if args.format == "dit":
        return merged + export_weights.write_original(trained, weights, out)
    if args.format == "diffusers":
        return merged + export_weights.write_diffusers_folder(trained, weights, out)
    if args.text_encoder is not None:
        trained = replace(trained, text_encoder=check_text_encoder(args.text_encoder).recorded)
    autoencoder = args.vae or trained.autoencoder
    return merged + export_weights.write_pipeline(trained, weights, out, autoencoder=autoencoder)


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    for note in run(args):
        echo(f"note: {note}", file=sys.stderr)
    echo(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
