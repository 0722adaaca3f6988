"""Write a run's weights for other code bases.

`python -m launch.export --checkpoint RUN --format diffusers --out DIR`
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit.errors import CheckpointError, ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment
from launch.argument_types import command_parser, file_size

if TYPE_CHECKING:
    from torch import Tensor

    from dit.convert.diffusers_format import LatentSize, TrainedModel
    from dit.convert.rules import RuleBook
    from dit.models.base import ModelConfig
    from dit.objectives.base import Objective
    from dit.run_config import RunConfig

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
    parser.add_argument(
        "--format", required=True, choices=(*FORMATS, PIPELINE, *ADAPTER_FORMATS), help="format to write"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="PATH",
        help="new folder (diffusers, pipeline, diffusers-lora), .safetensors (comfyui-lora, dit) or .pt file (dit)",
    )
    parser.add_argument("--vae", metavar="PATH", help="autoencoder of a pipeline, if not that of the run's data")
    parser.add_argument(
        "--text-encoder", metavar="[ENTRY=]NAME", help="text encoder of a pipeline, if not that of the run's data"
    )
    parser.add_argument(
        "--max-shard-size", type=file_size, metavar="SIZE", help="largest file of diffusers' weights (default: 10GB)"
    )
    return parser


def run(args: argparse.Namespace) -> list[str]:
    """Write the file or folder; return a sentence for each difference of the other code base."""
    folder, out = Path(args.checkpoint), Path(args.out)
    if not folder.is_dir():
        raise CheckpointError(f"--checkpoint {folder} is no folder; give a run folder, or one checkpoint folder in it")
    if out.exists():
        raise ConfigError(f"--out {out} already exists and is not changed; choose another or remove it")
    if args.format != PIPELINE and (args.vae or args.text_encoder):
        raise ConfigError(f"--vae and --text-encoder are for --format {PIPELINE}, not {args.format}; leave them out")
    if args.format not in ("diffusers", PIPELINE) and args.max_shard_size:
        raise ConfigError(f"--max-shard-size is for --format diffusers and {PIPELINE}, not {args.format}; leave it out")
    environment.prepare()
    environment.quiet_libraries()
    from dit.checkpoint.reading import find_checkpoint

    with ExitStack() as reading:
        return _write(args, find_checkpoint(folder, reading)[0], out)


def _write(args: argparse.Namespace, checkpoint: Path, out: Path) -> list[str]:
    """Write the file or folder of a checkpoint; see `run`."""
    from dit.checkpoint.base_model import read_run
    from dit.checkpoint.reading import read_settings, slot_of

    config, metadata = read_settings(checkpoint)
    if config.objective.reconstructs:
        config.model = with_latent_scale(config.model, checkpoint, raw_weights=args.raw_weights)
    slot = slot_of(checkpoint, config, "raw" if args.raw_weights else "ema")
    trained = with_one_shift(trained_model(config, metadata))
    if args.format in ADAPTER_FORMATS:
        return write_adapters(args.format, checkpoint, slot, config, trained, out)
    merged = [] if config.model.adapters is None else ["the adapters (LoRA) are merged into the weights"]
    weights = partial(read_run, checkpoint, config, slot)
    if args.format == "dit":
        return merged + write_original(trained, weights, out)
    if args.format == "diffusers":
        return merged + write_diffusers_folder(trained, weights, out, args.max_shard_size)
    from dit.encoders.text_config import check_text_encoder
    from launch.export_pipeline import write_pipeline

    if args.text_encoder is not None:
        trained = replace(trained, text_encoder=check_text_encoder(args.text_encoder).recorded)
    return merged + write_pipeline(
        trained,
        weights,
        out,
        autoencoder=args.vae or trained.autoencoder,
        max_shard_bytes=args.max_shard_size,
    )


def write_adapters(
    form_name: str, folder: Path, slot: str, config: "RunConfig", trained: "TrainedModel", out: Path
) -> list[str]:
    """Write the adapters of a run, without the base's weights; return the notes."""
    from dit.checkpoint.full_weights import read_full_weights
    from dit.convert.diffusers_format import format_of_model
    from dit.convert.lora import comfyui_tensors, to_external_layers, write_adapter_folder
    from dit.convert.state_files import write_tensors
    from dit.parallel.build import parameter_shapes

    if config.model.adapters is None:
        raise ConfigError(
            f"--format {form_name}: {folder} has a full model and no adapters (LoRA); use diffusers or dit"
        )
    form = format_of_model(trained.model)
    rules = form.rules(trained.model, parameter_shapes(trained.model), trained.latent_size)
    layers = to_external_layers(rules, read_full_weights(folder, slot), config.model.adapters.scale)
    if form_name == "diffusers-lora":
        write_adapter_folder(layers, form, trained.model, out)
    elif out.suffix != ".safetensors":
        raise ConfigError(f"--out {out} must end in .safetensors")
    else:
        write_tensors(comfyui_tensors(layers, form.comfyui_name), out)
    return [f"{len(layers)} layers of {form.class_name}; alpha is their rank, so that their scale is 1"]


def with_latent_scale(model: "ModelConfig", folder: Path, *, raw_weights: bool) -> "ModelConfig":
    """Return an autoencoder's settings with scale and shift of its latents, measured unless it states them."""
    from dit.inference.generator import load_generator
    from dit.inference.latents import measure_latents
    from dit.models.autoencoder.config import AutoencoderConfig

    assert isinstance(model, AutoencoderConfig)
    if model.scaling_factor is not None:
        return model
    mean, deviation = measure_latents(load_generator(folder, weights="raw" if raw_weights else "ema"))
    shift = None if model.quantizes else mean if model.shift_factor is None else model.shift_factor
    return replace(model, scaling_factor=1 / deviation, shift_factor=shift)


def trained_model(config: "RunConfig", metadata: dict[str, Any]) -> "TrainedModel":
    """Return the model with the metadata that are written with its weights."""
    from dit.convert.diffusers_format import TrainedModel

    frames, height, width = metadata["latent_size"]
    clean = {
        "reference": config.data.references_setting(),
        "first_frame": getattr(config.data, "clean_first_frame", 0.0),
    }
    return TrainedModel(
        model=config.model.without_adapters(),
        objective=config.objective,
        latent_size=(frames, height, width),
        sampling=asdict(config.sampling),
        # A data set may have classes that the model does not use.
        class_names=None if config.model.condition("label") is None else metadata["class_names"],
        text_encoder=metadata.get("text_encoder"),
        autoencoder=config.sampling.vae or metadata.get("autoencoder"),
        max_text_tokens=config.data.longest_text or metadata.get("max_text_tokens"),
        attributions=metadata.get("attributions", []),
        fps=metadata.get("fps"),
        clean_parts=metadata.get("clean_parts") or [name for name, setting in clean.items() if setting],
    )


def with_one_shift(trained: "TrainedModel") -> "TrainedModel":
    """Return a model with the time shift of its latent size; other code bases have none that depends on the size."""
    objective = trained.objective
    if getattr(objective, "shift_dimension", None) is None:
        return trained
    return replace(trained, objective=objective.at_size(math.prod(trained.latent_size), trained.model.in_channels))


def write_original(trained: "TrainedModel", weights: Callable[[], dict[str, "Tensor"]], out: Path) -> list[str]:
    """Write a state dict of facebookresearch/DiT; return the notes."""
    from dit.convert.diffusers_sampling import how_to_sample
    from dit.convert.original_dit import trained_objective
    from dit.convert.run_record import METADATA_KEY, to_record
    from dit.convert.state_files import write_tensors

    rules = original_rules(trained.model, trained.latent_size)
    write_tensors(rules.to_external(weights()), out, {METADATA_KEY: json.dumps(to_record(trained))})
    notes = note_objective(trained.objective, trained_objective(trained.model))
    if notes:
        notes += how_to_sample(trained)
    if out.suffix == ".pt":
        notes.append(
            "a .pt file cannot store objective, class names and sampling defaults: give its importer --objective, "
            "or write a .safetensors"
        )
    return notes


def write_diffusers_folder(
    trained: "TrainedModel",
    weights: Callable[[], dict[str, "Tensor"]],
    out: Path,
    max_shard_bytes: Optional[int] = None,
) -> list[str]:
    """Write a folder in the diffusers layout, scheduler and page included; return the notes."""
    from dit.convert.diffusers_format import format_of_model
    from dit.convert.diffusers_sampling import PAGE, SCHEDULER_CONFIG, num_steps_of, page, scheduler_config, steps_notes
    from dit.convert.run_record import CONFIG_KEY, to_record
    from dit.convert.state_files import to_json, write_diffusers
    from dit.models.autoencoder.config import AutoencoderConfig
    from dit.parallel.build import parameter_shapes

    form = format_of_model(trained.model)
    settings, notes = form.write_settings(trained.model, trained.latent_size)
    rules = form.rules(trained.model, parameter_shapes(trained.model), trained.latent_size)
    notes += [*rules.export_notes(), *steps_notes(trained)]
    texts = {PAGE: page(trained, form.class_name, has_loop=form.samples_by_class, notes=notes)}
    scheduler = scheduler_config(trained.objective, num_steps_of(trained))
    if scheduler is not None:
        texts[SCHEDULER_CONFIG] = to_json(scheduler)
    record = {CONFIG_KEY: to_record(trained)}
    tensors = rules.to_external(weights())
    write_diffusers({**settings, **record}, tensors, out, texts=texts, max_shard_bytes=max_shard_bytes)
    published = form.read_settings(settings).objective
    use = "encode and decode" if isinstance(trained.model, AutoencoderConfig) else "sample"
    return [*notes, *note_objective(trained.objective, published), f"{out / PAGE} says how to {use} with diffusers"]


def note_objective(objective: "Objective", published: "Objective") -> list[str]:
    """Return a note if the weights need another scheduler than the published ones of the same class."""
    if objective == published or objective.reconstructs:
        return []
    from dit.convert.run_record import name_of

    ours, theirs = ({"objective": name_of(part), **asdict(part)} for part in (objective, published))  # type: ignore[call-overload]
    names = [name for name in ours if ours[name] != theirs.get(name)]
    if "objective" in names:
        names = ["objective"]
    differences = ", ".join(f"{name}={ours[name]} (published: {theirs[name]})" for name in names)
    return [f"published weights of this class were trained with other settings: {differences}; sample with ours"]


def original_rules(model: "ModelConfig", latent_size: "LatentSize") -> "RuleBook":
    """Return the rules between facebookresearch/DiT and one of our models."""
    from dit.convert import original_dit
    from dit.models.dit.config import DiTConfig
    from dit.parallel.build import parameter_shapes

    if type(model) is not DiTConfig:
        raise ConfigError(
            f"--format dit is for the class-conditional DiT (DiTConfig), not {type(model).__name__}; "
            "try --format diffusers"
        )
    return original_dit.rules(model, parameter_shapes(model), latent_size)


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
