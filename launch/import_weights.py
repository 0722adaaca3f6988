"""Write a run folder with the weights of another code base.

`python -m launch.import_weights --from DiT-XL-2-256x256.pt --format dit --out runs/dit_xl2`
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Optional, TypeAlias

from dit.errors import ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment
from launch.argument_types import at_least_one, command_parser
from launch.export import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from dit.convert.diffusers_format import TrainedModel
    from dit.convert.rules import RuleBook
    from dit.objectives.base import Objective

Content: TypeAlias = tuple["TrainedModel", "RuleBook", dict[str, "Tensor"]]
"""Model, rules and tensors of the imported files."""
LORA = "lora"
IMPORT_FORMATS = (*FORMATS, LORA)
DESCRIPTION = (
    "Write a run folder with weights from facebookresearch/DiT or diffusers, or with adapters (LoRA) from other code "
    "bases, for sampling or fine-tuning."
)
EXAMPLES = """\
examples
  python -m launch.import_weights --from DiT-XL-2-256x256.pt --format dit --out runs/dit_xl2
  python -m launch.sample --checkpoint runs/dit_xl2 --labels 207
  python -m launch.import_weights --from stable-diffusion-xl-base-1.0 --format diffusers --out runs/sdxl
  python -m launch.import_weights --from PixArt-XL-2/transformer --format diffusers --drop-variance --out runs/pixart
  torchrun ... -m launch.train ... checkpoint.start_from=runs/pixart        (docs/fine-tuning.md)
  python -m launch.import_weights --from my-lora --format lora --base runs/pixart --out runs/lora

Objective, class names, latent size and sampling defaults are read from files of launch.export; otherwise
defaults are assumed and printed. The text encoders, the autoencoder and the noise schedule of a pipeline of Stable
Diffusion v1, v2 or XL (a folder with model_index.json) are imported, too.

Nothing in the files is executed; pickles with other objects than tensors are errors.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("launch.import_weights", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--from", dest="source", required=True, metavar="PATH", help="folder (diffusers, lora), .safetensors or .pt"
    )
    parser.add_argument("--format", required=True, choices=IMPORT_FORMATS, help="format of the files")
    parser.add_argument("--base", metavar="DIR", help="run or diffusers folder that adapters (--format lora) change")
    parser.add_argument("--out", required=True, metavar="DIR", help="run folder to create")
    flag = parser.add_argument
    flag("--drop-variance", action="store_true", help="drop a learned variance: train and sample without it")
    flag(
        "--num-attention-heads", type=at_least_one, metavar="N", help="of a dit file of another width than S, B, L, XL"
    )
    flag(
        "--text-encoder",
        action="append",
        metavar="[ENTRY=]NAME",
        help="if not in the files: text encoder, as in energon_data.prepare; repeat for several",
    )
    flag(
        "--objective",
        metavar="NAME",
        help="if not in the files: objective as in launch.train, such as flow_matching or \"ddpm(prediction='v')\"",
    )
    return parser


def run(args: argparse.Namespace) -> list[str]:
    """Write the run folder; return sentences about differences of our network and the source of the metadata."""
    source = Path(args.source)
    if args.format not in ("dit", LORA) and args.num_attention_heads is not None:
        raise ConfigError("--num-attention-heads is for --format dit; config.json has it")
    if (args.format == LORA) != (args.base is not None):
        raise ConfigError(f"--format {LORA} and --base DIR belong together: adapters change another model")
    environment.prepare(quiet=True)
    if args.format == LORA:
        return write_adapter_run(source, args)
    from dit.convert.original_dit import drop_variance
    from dit.encoders.text_config import check_text_encoder

    objective = None if args.objective is None else read_objective(args.objective)
    trained, rules, tensors = read_original(source, args) if args.format == "dit" else read_diffusers_folder(source)
    weights = rules.from_external(tensors)
    if args.drop_variance:
        trained, weights = drop_variance(trained, weights)
    trained, notes = settle(trained, objective)
    if args.text_encoder is not None:
        trained = replace(trained, text_encoder=check_text_encoder(",".join(args.text_encoder)).recorded)
    elif trained.text_encoder is None and any(c.null == "empty text" for c in trained.model.conditions()):
        notes.append("guidance needs the embedding of the empty text: give --text-encoder, or sample without guidance")
    write_run(args, weights, trained)
    zeros = [f"{name} is imported as zeros: {why}" for name, why in rules.unmatched.items()]
    return [*trained.notes, *zeros, *notes]


def write_adapter_run(source: Path, args: argparse.Namespace) -> list[str]:
    """Write a run folder with imported adapters for the weights of a run or folder; return the notes."""
    from dit.checkpoint.base_model import base_entry, find_start
    from dit.checkpoint.diffusers_folder import Network
    from dit.checkpoint.reading import read_settings
    from dit.convert.diffusers_format import format_of_model
    from dit.convert.lora_import import read_adapters
    from dit.models.lora import A_WEIGHT
    from dit.models.lora_config import LoRAConfig
    from dit.parallel.build import parameter_shapes
    from launch.export_weights import trained_model

    flags = ("drop_variance", "num_attention_heads", "text_encoder", "objective")
    if flag := next((name for name in flags if getattr(args, name)), None):
        raise ConfigError(f"--{flag.replace('_', '-')} is a property of the model in --base; leave it out")
    start = find_start(args.base, setting="--base")
    if start.base is not None:
        raise ConfigError(f"--base {args.base} already has adapters; give the run of the full model")
    trained = start.trained if isinstance(start, Network) else trained_model(*read_settings(start.folder))
    model, form = trained.model, format_of_model(trained.model)
    rules = form.rules(model, parameter_shapes(model), trained.latent_size)
    adapted = parameter_shapes(model.with_adapters(LoRAConfig(rank=1, targets=["*"])))
    linears = [name.removesuffix(A_WEIGHT) for name in adapted if name.endswith(A_WEIGHT)]
    adapters = read_adapters(source, form, model, rules, linears)
    trained = replace(trained, model=model.with_adapters(adapters.config))
    write_run(args, adapters.tensors, trained, base_entry(args.base, start))
    return adapters.notes


def write_run(
    args: argparse.Namespace,
    weights: dict[str, "Tensor"],
    trained: "TrainedModel",
    base: Optional[dict[str, str]] = None,
) -> None:
    """Write the run folder of `--out`; `base` names the model of adapters."""
    from dit.checkpoint.full_weights import write_imported
    from dit.convert.run_record import build
    from dit.monitoring.run_lock import RunLock
    from dit.settings import SamplingConfig

    sampling = build(SamplingConfig, trained.sampling, "the record's sampling")
    with RunLock(args.out, setting="--out") as lock:
        lock.check()
        origin = f"{args.format}: {Path(args.source).resolve()}"
        write_imported(Path(args.out), weights, trained, sampling, origin, base=base)


def settle(trained: "TrainedModel", objective: Optional["Objective"]) -> tuple["TrainedModel", list[str]]:
    """Return the model with its objective, and notes on the source of the metadata."""
    origin = "recorded with the weights" if trained.recorded else "that of the published weights of this class"
    notes = []
    if objective is None:
        verb = "read" if trained.recorded else "assumed"
        notes.append(f"{verb} objective: {trained.objective} ({origin})")
        if not trained.recorded:
            notes[-1] += "; give --objective if these were trained with another"
    elif objective != trained.objective:
        notes.append(f"--objective: {objective} is used, not {trained.objective} ({origin})")
        trained = replace(trained, objective=objective, sampling={})
    label = trained.model.condition("label")
    if trained.class_names is None and label is not None and label.num_classes is not None:
        notes.append(f"the files have no class names; classes are 0 to {label.num_classes - 1}")
    elif trained.class_names is not None:
        notes.append(f"read {len(trained.class_names)} class names")
    notes.append(f"latents of {' x '.join(map(str, trained.latent_size))} (frames x height x width)")
    return trained, notes


def read_objective(text: str) -> "Objective":
    """Build the objective of `--objective`, with the names and defaults of `objective=` in `launch.train`."""
    import fiddle

    from dit.objectives.base import Objective
    from launch.overrides import parse_value

    objective: Objective = fiddle.build(parse_value(text, Objective, "--objective"))
    return objective


def read_original(source: Path, args: argparse.Namespace) -> Content:
    """Read a state dict of facebookresearch/DiT."""
    from dit.convert.original_dit import read_sizes
    from dit.convert.run_record import METADATA_KEY, read_json_record
    from dit.convert.state_files import read_metadata, read_tensors
    from dit.models.dit.config import DiTConfig
    from launch.export_weights import original_rules

    tensors = read_tensors(source)
    record = read_metadata(source).get(METADATA_KEY)
    if record is None:
        trained = read_sizes(tensors, args.num_attention_heads)
        trained.model.validate()
    else:
        trained = read_json_record(record, DiTConfig)
        assert isinstance(trained.model, DiTConfig)
        heads = trained.model.num_attention_heads
        if args.num_attention_heads not in (None, heads):
            raise ConfigError(
                f"--num-attention-heads {args.num_attention_heads}: {source} records {heads}; leave the flag out"
            )
    return trained, original_rules(trained.model, trained.latent_size), tensors


def read_diffusers_folder(source: Path) -> Content:
    """Read a folder in the diffusers layout: of a network, or of a pipeline."""
    from dit.checkpoint.diffusers_folder import read_network
    from dit.convert.pipeline_import import network_folder
    from dit.convert.sliced_weights import StoredTensors
    from dit.convert.state_files import index_of, read_tensors, weights_file
    from dit.pipeline_folder import name_a_part

    folder = network_folder(source)
    if message := name_a_part(folder, "transformer", "unet", "vae", "vqvae"):
        raise ConfigError(message)
    network = read_network(source)
    is_pickle = not index_of(folder).exists() and weights_file(folder).suffix == ".bin"
    tensors = read_tensors(weights_file(folder)) if is_pickle else StoredTensors(folder).read_all()
    return network.trained, network.rules(network.trained.model), tensors


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
