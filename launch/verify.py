"""Compare a parallel layout with one rank: `python -m launch.verify --factory RECIPE parallel.KEY=VALUE ...`.

Both train two steps of the recipe's tiny form on gloo ranks of this machine, without a GPU and without data. One rank
trains in fp32, the layout in fp32 and in the recipe's precision; with `training.fp8`, both also quantise.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError, one_line_errors
from dit.terminal import echo
from launch import cli, environment
from launch.argument_types import command_parser

MOST_RANKS = 16
DENSE_EVERY = 4
"""Micro-batches of which one is dense if those of the recipe are."""

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dit.backends.sharding import AxisSizes
    from dit.batch import PackedBatch
    from dit.conditions import Condition
    from dit.data_api import BatchSpec, DataConfig
    from dit.models.base import ModelConfig
    from dit.parallel.dims import ParallelConfig
    from dit.run_config import RunConfig
    from dit.settings import Fp8, OptimizerConfig, TrainingConfig
    from dit.verify.laws import Check
    from dit.verify.report import Verdict
    from dit.verify.trial import Trial
    from energon_data.samples import Clip

DESCRIPTION = "Train two steps of a recipe's tiny form on one rank and under its parallel layout, and compare."
EXAMPLES = """\
examples
  python -m launch.verify --factory pretrain_7b parallel.tensor_model_parallel_size=2 parallel.sequence_parallel=True
  python -m launch.verify --factory tiny_wan parallel.data_parallel=fsdp --world-size 2
  python -m launch.verify --factory "finetune_lora(base='runs/pixart')" parallel.tensor_model_parallel_size=2
  python -m launch.verify --explain --factory flux_12b parallel.pipeline_model_parallel_size=4

The tiny form has the recipe's backbone, objective and options, in small widths, with two layers for each stage.
First, one rank is checked by itself: padding, packs against their samples, their order, accumulation, and the class of
diffusers that computes the same. Then every gradient (with LoRA those of the adapters), the losses, the weights and
their averages after the steps, and the copies of each parameter are compared with the layout's: in fp32, in the
recipe's precision within wider bounds, and with training.fp8 on both sides. The first wrong gradient is named with the
declaration of its parameter, as are settings that are not verified. The exit code is 0 if all are equal, else 70.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("launch.verify", DESCRIPTION, EXAMPLES)
    parser.add_argument("-f", "--factory", metavar="RECIPE", help="recipe, as launch.train takes it")
    parser.add_argument("--yaml", metavar="FILE", help="a saved configuration, or a run folder, instead")
    flag = parser.add_argument
    flag("--world-size", type=int, metavar="N", help="ranks (default: the fewest that the layout needs, at least 2)")
    flag("--explain", action="store_true", help="print over what the real model's parameters are split and reduced")
    flag("overrides", nargs="*", metavar="key.path=value", help="settings of the run, such as parallel.*")
    return parser


@dataclass(frozen=True)
class MockStream:
    """Synthetic micro-batches. The class can be pickled, because ranks are separate processes.

    Attributes:
        data: of packs.
        dense: of micro-batches of two samples, one for every `DENSE_EVERY` micro-batches; None for packs only.
        references: whether samples of every third micro-batch have clean references.
    """

    data: "DataConfig"
    spec: "BatchSpec"
    seed: int
    multiple: Optional[int] = None
    dense: "Optional[DataConfig]" = None
    references: bool = False

    def __call__(self, dp_rank: int, dp_size: int, token_multiple: int) -> "Iterator[PackedBatch]":
        from energon_data.mock import with_references

        spec = replace(self.spec, multiple_of=self.multiple or token_multiple)

        def stream(data: "DataConfig", spec: "BatchSpec") -> "Iterator[PackedBatch]":
            batches = data.build_train(spec, dp_rank=dp_rank, dp_size=dp_size, seed=self.seed, log_dir=None)
            while True:
                yield next(batches)

        streams = [stream(self.data, spec)]
        if self.dense is not None:
            streams.append(stream(self.dense, replace(spec, micro_batch_size=2)))
        # All streams advance, so that a step has the same micro-batches on any number of replicas.
        for number, batches in zip(count(dp_rank, dp_size), zip(*streams)):
            batch = batches[-1 if number % DENSE_EVERY == DENSE_EVERY - 1 else 0]
            yield with_references(batch) if self.references and number % 3 == 1 else batch


@dataclass(frozen=True)
class MockPacks:
    """Synthetic packs of numbered samples, whose shapes differ if the model allows it; picklable, for the ranks."""

    model: "ModelConfig"
    text_tokens: int = 5
    of_loss: "tuple[Condition, ...]" = ()

    def sample(self, number: int, spec: "BatchSpec") -> "Clip":
        """Return the sample of a number."""
        from dit.verify.tiny import tiny_grids
        from energon_data.mock import MockData, MockSource

        t, s = self.model.patch_temporal, self.model.patch_spatial
        shapes = [f"{frames * t}x{height * s}x{width * s}" for frames, height, width in tiny_grids(self.model)]
        data = MockData(shapes=shapes, text_tokens=self.text_tokens)
        return MockSource(data, spec, seed=0, split="train", stream=0, num_streams=1).sample(number)

    def __call__(self, numbers: Sequence[int], *, multiple_of: int = 1, tail: int = 0) -> "PackedBatch":
        """Lay samples side by side, each padded to a multiple, with more padding after the last one."""
        from energon_data.packing import collate, padded_length

        spec = self.model.batch_spec(multiple_of=multiple_of).with_conditions(self.of_loss)
        clips = [self.sample(number, spec) for number in numbers]
        padded = sum(padded_length(clip.num_tokens, multiple_of) for clip in clips)
        return collate(clips, spec, total_tokens=padded + tail)

    def square(self) -> int:
        """Return the number of a sample of the first shape, a square picture."""
        from dit.verify.tiny import tiny_grids

        spec = self.model.batch_spec()
        return next(number for number in count() if self.sample(number, spec).grid == tiny_grids(self.model)[0])


@dataclass(frozen=True)
class Pair:
    """A layout and the one rank that it is compared with.

    Attributes:
        floor: smallest norm that an error is divided by, as a share of the largest norm.
    """

    one: "Trial"
    many: "Trial"
    world_size: int
    sizes: "AxisSizes"
    bounds: Mapping[str, float]
    floor: float = 0.0

    @property
    def precision(self) -> str:
        training = self.many.training
        return training.precision if training.fp8 is None else f"fp8 {training.fp8}"


def world_size_of(parallel: "ParallelConfig", requested: Optional[int]) -> int:
    """Return the requested number of ranks, or the smallest of the layout; at least 2 data-parallel ones under FSDP."""
    from dit.parallel.dims import fewest_ranks

    needed = max(2, fewest_ranks(parallel, sharded=True))
    if requested is None and needed > MOST_RANKS:
        raise ConfigError(
            f"the layout needs {needed} ranks, which is many for one machine; set the sizes of parallel.* to 2, which "
            f"shows the same faults, or start them with --world-size {needed}"
        )
    if requested is not None and requested < 2:
        raise ConfigError(f"--world-size {requested} leaves nothing to compare with one rank; use at least 2")
    return requested or needed


def tiny_optimizer(optimizer: "OptimizerConfig") -> "OptimizerConfig":
    """Return the optimizer of a recipe for two steps in fp32.

    Muon multiplies rounding errors of small singular values by up to 3.4445 ** 5, so its rate is lower.
    """
    from dit.verify.trial import OPTIMIZER

    if optimizer.algorithm == "adamw":
        return OPTIMIZER
    return replace(OPTIMIZER, algorithm="muon", muon_momentum=optimizer.muon_momentum, lr=2e-3, weight_decay=0.5)


def tiny_pair(config: "RunConfig", world_size: int, fp8: "Optional[Fp8]" = None) -> Pair:
    """Return two steps of the tiny form of a run on synthetic packs in fp32, under its layout and on one rank.

    The layout has the offloads of the recipe; one rank keeps everything on its device. With quantised products, both
    pad samples alike, because padding counts in the scales. Without packs, the recipe has dense micro-batches.
    """
    from dit.parallel.dims import ParallelConfig
    from dit.run_config import RunConfig
    from dit.settings import CheckpointConfig, SamplingConfig, TrainingConfig
    from dit.verify.compare import BOUNDS, FLOOR, FP8_BOUNDS, FP32_FLOOR, HALF_BOUNDS
    from dit.verify.report import axis_sizes
    from dit.verify.tiny import (
        multiple_of,
        pack_tokens,
        tiny_grids,
        tiny_model,
        tiny_objective,
        tiny_sides,
    )
    from dit.verify.trial import EMA_DECAY, SEED, Trial
    from energon_data.mock import MockData

    parallel = replace(config.parallel, pipeline_layers=None)  # it counts layers of the full model
    model = tiny_model(config.model, parallel, fp8)
    objective = tiny_objective(config.objective, model)
    multiple, total = pack_tokens(model, parallel, fp8)
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    replicas = world_size // (pp * tp * parallel.context_parallel_size)
    # The interleaved schedule needs a multiple of the stages.
    micro_batches = multiple_of(max(1, replicas) * pp, 4)
    recipe, share = config.training, 0.5 if config.data.levels_setting() and model.supports.levels else 0.0
    t, s, grids = model.patch_temporal, model.patch_spatial, tiny_grids(model, tiny_sides(parallel, fp8))
    shapes = [f"{frames * t}x{height * s}x{width * s}" for frames, height, width in grids]
    data = MockData(
        shapes=shapes,
        text_tokens=5,
        max_tokens_per_pack=total,
        pack_multiple_of=multiple,
        num_streams=micro_batches,
        clean_first_frame=share,
        frame_levels=share,
        inpaint=share,
    )
    stages = pp * (parallel.virtual_pipeline_model_parallel_size or 1)
    recomputed = recipe.recompute_layers
    training = TrainingConfig(
        global_batch_size=micro_batches,
        precision="fp32",
        fp8=fp8,
        seed=SEED,
        recompute=recipe.recompute,
        recompute_layers=None if recomputed is None else min(recomputed, model.megatron_sizes().num_layers // stages),
        ema_decay=None if recipe.ema_decay is None else EMA_DECAY,
        ema_sigma_rel=recipe.ema_sigma_rel,
    )
    dims, spec = RunConfig(
        model=model,
        data=data,
        objective=objective,
        parallel=parallel,
        training=training,
        checkpoint=CheckpointConfig(start_from=config.checkpoint.start_from),
        sampling=SamplingConfig(guidance_scale=1.0),  # as guided targets require
    ).check(world_size)
    dense = replace(data, shapes=shapes[:1], max_tokens_per_pack=None, pack_multiple_of=MockData().pack_multiple_of)
    is_packed = getattr(config.data, "max_tokens_per_pack", None) is not None
    per_token = any(condition.is_per_token for condition in spec.conditions)  # which references have no value of
    stream = MockStream(
        data,
        spec,
        SEED,
        None if fp8 is None else dims.token_multiple,
        dense=None if is_packed else dense,
        references=fp8 is None and model.takes_references and objective.takes_levels and not per_token,
    )
    optimizer = tiny_optimizer(config.optimizer)
    one = Trial(
        model=model,
        parallel=ParallelConfig(data_parallel="ddp"),
        stream=stream,
        objective=objective,
        training=training,
        optimizer=optimizer,
    )
    many = replace(
        one,
        parallel=parallel,
        training=replace(training, ema_offload=recipe.ema_offload),
        optimizer=replace(optimizer, offload=config.optimizer.offload),
        by_rank=True,
    )
    bounds, floor = BOUNDS if fp8 is None else FP8_BOUNDS, FP32_FLOOR
    if fp8 is not None and parallel.sequence_parallel and not model.supports.split_texts:  # which pads a text stream
        bounds, floor = HALF_BOUNDS["bf16"], FLOOR
    return Pair(one, many, world_size, axis_sizes(parallel, dims), bounds, floor)


def in_half(pair: Pair, recipe: "TrainingConfig") -> Pair:
    """Return a pair whose layout trains in the half precision of a recipe; one rank still trains in fp32.

    A dynamic loss scale starts so high that gradients overflow in the first steps.
    """
    from dit.verify.compare import FLOOR, HALF_BOUNDS
    from dit.verify.trial import HALF_OPTIMIZER, LARGE_LOSS_SCALE

    half = replace(pair.many.training, precision=recipe.precision)
    if recipe.precision == "fp16" and recipe.loss_scale is not None:
        half = replace(half, loss_scale=recipe.loss_scale)
    elif recipe.precision == "fp16":
        half = replace(half, initial_loss_scale=max(recipe.initial_loss_scale, LARGE_LOSS_SCALE))
    is_muon = pair.one.optimizer.algorithm == "muon"  # its updates do not depend on the size of gradients
    optimizer = replace(pair.one.optimizer, eps=HALF_OPTIMIZER.eps) if is_muon else HALF_OPTIMIZER
    one = replace(pair.one, optimizer=optimizer)
    many = replace(pair.many, training=half, optimizer=replace(optimizer, offload=pair.many.optimizer.offload))
    return replace(pair, one=one, many=many, bounds=HALF_BOUNDS[recipe.precision], floor=FLOOR)


def pairs_of(config: "RunConfig", world_size: int) -> list[Pair]:
    """Return the pairs to compare: in fp32, in the half precision of the recipe, and with its quantised products."""
    pair, recipe = tiny_pair(config, world_size), config.training
    half = [] if recipe.precision == "fp32" else [in_half(pair, recipe)]
    return [pair, *half, *([] if recipe.fp8 is None else [tiny_pair(config, world_size, recipe.fp8)])]


def changed(config: "DataclassInstance") -> str:
    """Format a configuration with the fields that differ from their defaults."""
    default = type(config)()
    values = ((field.name, getattr(config, field.name)) for field in fields(config))
    text = ", ".join(f"{name}={value!r}" for name, value in values if value != getattr(default, name))
    return f"{type(config).__name__}({text})"


def compare(pair: Pair, one: dict[str, Any], many: dict[str, Any]) -> "Verdict":
    """Compare the results of both worlds."""
    from dit.parallel.build import build_on_meta
    from dit.verify.report import judge

    model = build_on_meta(pair.many.model, auxiliary=pair.many.objective.auxiliary)
    return judge(one, many, model, pair.sizes, pair.bounds, pair.floor)


def check_case(trial: "Trial") -> dict[str, Any]:
    """Return the case of `run_world` that runs the absolute checks of a model."""
    packs = MockPacks(trial.model, of_loss=trial.objective.conditions)
    return {"task": "dit.verify.laws:run_case", "trial": trial, "packs": packs, "square": packs.square()}


@dataclass(frozen=True)
class Outcome:
    """Results of a command."""

    checks: "dict[str, Check]"
    verdicts: "dict[str, Verdict]"

    @property
    def is_right(self) -> bool:
        right = all(verdict.is_equal for verdict in self.verdicts.values())
        return right and not any(check.wrong for check in self.checks.values())

    def text(self) -> str:
        """Format the verdicts up to the first difference."""
        lines = []
        for precision, verdict in self.verdicts.items():
            if precision != "fp32":
                reference = precision if precision.startswith("fp8") else "fp32"
                lines.append(f"\nthe layout in {precision}, one rank in {reference}:")
            lines.append(verdict.text())
            if not verdict.is_equal:
                break
        return "\n".join(lines)


def explain_layout(config: "RunConfig", world_size: Optional[int]) -> str:
    """Return the table of every parameter of the run's real model under its layout."""
    from dit.backends.sharding import explain
    from dit.parallel.build import build_on_meta
    from dit.verify.report import axis_sizes

    dims, _ = config.check(world_size)
    model = build_on_meta(config.model, auxiliary=config.objective.auxiliary)
    return explain(model, axis_sizes(config.parallel, dims))


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_intermixed_args(argv)
    if (args.factory is None) == (args.yaml is None):
        raise ConfigError("give --factory RECIPE (python -m launch.train --list shows all) or --yaml FILE, one of them")
    if args.factory:
        cli.check_factory(args.factory)
    environment.prepare(quiet=True)
    from launch.config_file import built
    from launch.train import resolve

    config = built(resolve(cli.Options(factory=args.factory, yaml=args.yaml, overrides=args.overrides)))
    if args.explain:
        echo(explain_layout(config, args.world_size))
        return EXIT_OK
    began = time.perf_counter()
    world_size = world_size_of(config.parallel, args.world_size)
    try:
        outcome = verify_tiny(config, world_size)
    except ConfigError as error:
        raise ConfigError(f"tiny form of the recipe: {error}") from error
    echo(outcome.text(), f"in {time.perf_counter() - began:.0f} s", sep="\n")
    return EXIT_OK if outcome.is_right else EXIT_UNEXPECTED


def not_verified(config: "RunConfig") -> str:
    """Return a line with the settings that the tiny form lacks and that choose code; empty if there are none."""
    from dit.parallel.dims import ParallelConfig
    from dit.settings import TrainingConfig

    compared = {
        "training": (TrainingConfig(), ("attention", "linears", "kernels", "cuda_graph", "deterministic")),
        "parallel": (ParallelConfig(), ("pipeline_layers",)),
    }
    values = [
        f"{part}.{name}={value}"
        for part, (default, names) in compared.items()
        for name in names
        if (value := getattr(getattr(config, part), name)) != getattr(default, name)
    ]
    return f"settings of the recipe that are not verified: {', '.join(values)}" if values else ""


def adapted_layers(model: "ModelConfig", tiny: "ModelConfig") -> str:
    """Return a line with the tiny layers that stand for the layers with adapters; empty if the patterns are equal."""
    targets, tiny_targets = (", ".join(each.adapters.targets) if each.adapters else "" for each in (model, tiny))
    return f"adapters on {targets} are verified on {tiny_targets} of the tiny form" if targets != tiny_targets else ""


def verify_tiny(config: "RunConfig", world_size: int) -> Outcome:
    """Check the tiny form of a run on one rank, and compare its layout with one rank."""
    from dit.verify.laws import text
    from dit.verify.ranks import run_world

    pairs = pairs_of(config, world_size)
    one, many = pairs[0].one, pairs[0].many
    echo(f"{changed(many.model)}\n{world_size} ranks against one, {changed(many.parallel)}", flush=True)

    def train(trials: "list[Trial]", size: int, folder: Path) -> list[Any]:
        cases = [{"task": "dit.verify.trial:run_case", "trial": trial} for trial in trials]
        return run_world(size, cases, folder)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (checks,) = run_world(1, [check_case(one)], folder / "checks")
        remarks = [adapted_layers(config.model, one.model), not_verified(config)]
        echo(text(checks), *filter(None, remarks), sep="\n", flush=True)
        ones = train([pair.one for pair in pairs], 1, folder / "one")
        manys = train([pair.many for pair in pairs], world_size, folder / "many")
    verdicts = {pair.precision: compare(pair, *results) for pair, *results in zip(pairs, ones, manys, strict=True)}
    return Outcome(checks, verdicts)


if __name__ == "__main__":
    sys.exit(main())
