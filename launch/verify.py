"""Compare a parallel layout with one rank: `python -m launch.verify --factory RECIPE parallel.KEY=VALUE ...`.

Both train two steps of the recipe's tiny form on gloo ranks of this machine, without a GPU and without data.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from dit.errors import EXIT_OK, EXIT_UNEXPECTED, ConfigError, name_root_cause, one_line_errors
from dit.terminal import echo
from launch import cli, environment

MOST_RANKS = 16

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dit.backends.sharding import AxisSizes
    from dit.batch import PackedBatch
    from dit.data_api import BatchSpec, DataConfig
    from dit.models.base import ModelConfig
    from dit.parallel.dims import ParallelConfig
    from dit.run_config import RunConfig
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
  torchrun --standalone --nproc-per-node 8 -m launch.verify --full --factory dit_xl2_imagenet
  python -m launch.verify --explain --factory flux_12b parallel.pipeline_model_parallel_size=4

The tiny form has the recipe's backbone, objective and options, in small widths, with two layers for each stage; its
samples differ in length if the backbone takes such. First, one rank is checked by itself: padding, packs against their
samples, their order, accumulation, and the class of diffusers that computes the same. Then every gradient (with LoRA
those of the adapters, of the same kinds of layers), the losses, the weights after the steps and the copies of each
parameter are compared with the layout's. The first wrong gradient is named with what is stated of its parameter. Exit
code 0 says equal, 70 different (1 under torchrun, as for every failure).
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.verify",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--factory", metavar="RECIPE", help="recipe, as launch.train takes it")
    parser.add_argument("--yaml", metavar="FILE", help="a saved configuration, or a run folder, instead")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks; default: the fewest that the layout needs, at least 2"
    )
    parser.add_argument(
        "--explain", action="store_true", help="print over what the real model's parameters are split and reduced"
    )
    parser.add_argument(
        "--full", action="store_true", help="under torchrun: the full-size model, on the ranks and GPUs it started"
    )
    parser.add_argument(
        "--scratch", metavar="DIR", help="of --full: where the reference is written, seen by all ranks (default: /tmp)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="settings of the run, such as parallel.*"
    )
    return parser


@dataclass(frozen=True)
class MockStream:
    """Synthetic packs, each rank's with the padding of its own layout; picklable, for the ranks."""

    data: "DataConfig"
    spec: "BatchSpec"
    seed: int

    def __call__(self, dp_rank: int, dp_size: int, token_multiple: int) -> "Iterator[PackedBatch]":
        spec = replace(self.spec, multiple_of=token_multiple)
        stream = self.data.build_train(spec, dp_rank=dp_rank, dp_size=dp_size, seed=self.seed, log_dir=None)
        while True:
            yield next(stream)


@dataclass(frozen=True)
class MockPacks:
    """Synthetic packs of numbered samples, whose shapes differ if the model allows it; picklable, for the ranks."""

    model: "ModelConfig"
    text_tokens: int = 5

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

        spec = self.model.batch_spec(multiple_of=multiple_of)
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
    """A layout and the one rank that it is compared with."""

    one: "Trial"
    many: "Trial"
    world_size: int
    sizes: "AxisSizes"


def world_size_of(parallel: "ParallelConfig", asked: Optional[int]) -> int:
    """Return the ranks of a layout: those asked for, or the fewest, which for plain data parallelism are 2.

    Raises:
        ConfigError: one rank was asked for, or the layout needs many and nobody asked for them.
    """
    from dit.parallel.dims import fewest_ranks

    needed = max(2, fewest_ranks(parallel))
    if asked is None and needed > MOST_RANKS:
        raise ConfigError(
            f"the layout needs {needed} ranks, many for one machine; set the sizes of parallel.* to 2, which shows the "
            f"same faults, or start them nevertheless with --world-size {needed}"
        )
    if asked is not None and asked < 2:
        raise ConfigError(f"--world-size {asked} leaves nothing to compare with one rank; use at least 2")
    return asked or needed


def tiny_pair(config: "RunConfig", world_size: int) -> Pair:
    """Return the tiny form of a run under its layout and on one rank.

    Raises:
        ConfigError: the layout cannot run, for the reasons for which training would refuse it.
    """
    from dit.verify.tiny import tiny_layout, tiny_model

    parallel = tiny_layout(config.parallel)
    return pair_of(replace(config, parallel=parallel, model=tiny_model(config.model, parallel)), world_size)


def pair_of(config: "RunConfig", world_size: int) -> Pair:
    """Return a few steps of a model on synthetic packs of few tokens in fp32, under its layout and on one rank.

    Raises:
        ConfigError: the layout cannot run, for the reasons for which training would refuse it.
    """
    from dit.parallel.dims import ParallelConfig
    from dit.run_config import RunConfig
    from dit.settings import CheckpointConfig, TrainingConfig
    from dit.verify.report import axis_sizes
    from dit.verify.tiny import multiple_of, pack_tokens, tiny_grids
    from dit.verify.trial import SEED, Trial
    from energon_data.mock import MockData

    parallel, model = config.parallel, config.model
    multiple, total = pack_tokens(model, parallel)
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    micro_batches = multiple_of(max(1, world_size // (tp * pp * cp)) * pp, 4)  # as the interleaved schedule takes them
    t, s = model.patch_temporal, model.patch_spatial
    data = MockData(
        shapes=[f"{frames * t}x{height * s}x{width * s}" for frames, height, width in tiny_grids(model)],
        text_tokens=5,
        max_tokens_per_pack=total,
        pack_multiple_of=multiple,
        num_streams=micro_batches,
    )
    recompute = config.training.recompute
    dims, spec = RunConfig(
        model=model,
        data=data,
        objective=config.objective,
        parallel=parallel,
        training=TrainingConfig(
            global_batch_size=micro_batches, precision="fp32", recompute=recompute, compile=config.training.compile
        ),
        checkpoint=CheckpointConfig(start_from=config.checkpoint.start_from),
    ).check(world_size)
    stream = MockStream(data, spec, SEED)
    many = Trial(
        model=model,
        parallel=parallel,
        stream=stream,
        objective=config.objective,
        micro_batches=micro_batches,
        recompute={"recompute": recompute},
        by_rank=True,
    )
    one = replace(many, parallel=ParallelConfig(data_parallel="ddp"), by_rank=False)
    return Pair(one, many, world_size, axis_sizes(parallel, dims))


def changed(config: "DataclassInstance") -> str:
    """Write a configuration with the fields that differ from their defaults."""
    usual = type(config)()
    named = ((field.name, getattr(config, field.name)) for field in fields(config))
    stated = ", ".join(f"{name}={value!r}" for name, value in named if value != getattr(usual, name))
    return f"{type(config).__name__}({stated})"


def compare(pair: Pair, one: dict[str, Any], many: dict[str, Any]) -> "Verdict":
    """Compare what the ranks of both worlds report."""
    from dit.parallel.build import build_on_meta
    from dit.verify.report import judge

    model = build_on_meta(pair.many.model, uncertainty=pair.many.objective.weighting is not None)
    return judge(one, many, model, pair.sizes)


def verify(pair: Pair, folder: Path) -> "Verdict":
    """Train both on ranks of this machine and compare them.

    Raises:
        RuntimeError: a rank failed; the message holds the end of its output.
    """
    from dit.verify.ranks import run_world

    one, many = (
        run_world(size, [{"task": "dit.verify.trial:run_case", "trial": trial}], folder / name)[0]
        for name, size, trial in (("one", 1, pair.one), ("many", pair.world_size, pair.many))
    )
    return compare(pair, one, many)


def check_case(trial: "Trial") -> dict[str, Any]:
    """Return the case of `run_world` that runs the absolute checks of a model."""
    packs = MockPacks(trial.model)
    return {"task": "dit.verify.laws:run_case", "trial": trial, "packs": packs, "square": packs.square()}


def check_one_rank(trial: "Trial", folder: Path) -> "dict[str, Check]":
    """Run the absolute checks of `dit.verify.laws` on one rank of this machine.

    Raises:
        RuntimeError: the rank failed; the message holds the end of its output.
    """
    from dit.verify.ranks import run_world

    return run_world(1, [check_case(trial)], folder)[0]


def verify_full(config: "RunConfig", scratch: Optional[str]) -> Optional["Verdict"]:
    """Compare the full-size model on the ranks that torchrun started; every rank calls this, rank 0 gets the verdict.

    Args:
        scratch: a folder that all ranks see, for the reference; None for the temporary one of this machine.

    Raises:
        ConfigError: torchrun did not start several ranks, the layout cannot run, or the disk is too small.
        RuntimeError: the reference failed.
    """
    from dit.backends.process_groups import world_size_from_environment
    from dit.parallel.build import build_on_meta, count_parameters
    from dit.verify.full import differences, reference_bytes, reference_folder
    from dit.verify.report import judge_differences

    world_size = world_size_from_environment()
    if world_size < 2:
        raise ConfigError(
            "--full compares on the ranks that torchrun starts, and there is one; start it as "
            "torchrun --standalone --nproc-per-node N -m launch.verify --full ..."
        )
    pair = pair_of(config, world_size)
    count, trained = count_parameters(config.model), count_parameters(config.model, trained=True)
    memory, disk = reference_bytes(trained, count - trained)
    with reference_folder(scratch, disk) as folder:
        if os.environ["RANK"] == "0":
            echo(
                f"{world_size} ranks against one, {changed(config.parallel)}; the one has all of the model in fp32, "
                f"{memory / 2**30:.2f} GiB besides activations; meanwhile {folder} holds {disk / 2**30:.2f} GiB",
                flush=True,
            )
        found = differences(pair.one, pair.many, folder)
    if found is None:
        return None
    model = build_on_meta(pair.many.model, uncertainty=pair.many.objective.weighting is not None)
    return judge_differences(found, model, pair.sizes)


def explain_layout(config: "RunConfig", world_size: Optional[int]) -> str:
    """Return the table of every parameter of the run's real model under its layout.

    Raises:
        ConfigError: the settings do not fit together.
    """
    from dit.backends.sharding import explain
    from dit.parallel.build import build_on_meta
    from dit.verify.report import axis_sizes

    dims, _ = config.check(world_size)
    model = build_on_meta(config.model, uncertainty=config.objective.weighting is not None)
    return explain(model, axis_sizes(config.parallel, dims))


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    if (args.factory is None) == (args.yaml is None):
        raise ConfigError("give --factory RECIPE (python -m launch.train --list shows all) or --yaml FILE, one of them")
    if args.factory:
        cli.check_factory(args.factory)
    environment.prepare()
    environment.quiet_libraries()
    from dit.verify.laws import text
    from launch.config_file import built
    from launch.train import resolve

    config = built(resolve(cli.Options(factory=args.factory, yaml=args.yaml, overrides=args.overrides)))
    if args.explain:
        echo(explain_layout(config, args.world_size))
        return EXIT_OK
    began = time.perf_counter()
    if args.full:
        found = verify_full(config, args.scratch)
        if found is None:
            return EXIT_OK
        echo(found.text(), f"in {time.perf_counter() - began:.0f} s", sep="\n")
        if not found.is_equal:
            name_root_cause("error: the layout differs from one rank; rank 0 has said where")
        return EXIT_OK if found.is_equal else EXIT_UNEXPECTED
    pair = tiny_pair(config, world_size_of(config.parallel, args.world_size))
    echo(f"{changed(pair.many.model)}\n{pair.world_size} ranks against one, {changed(pair.many.parallel)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        checks = check_one_rank(pair.one, Path(folder) / "checks")
        echo(text(checks), flush=True)
        verdict = verify(pair, Path(folder))
    echo(verdict.text(), f"in {time.perf_counter() - began:.0f} s", sep="\n")
    is_right = verdict.is_equal and not any(check.wrong for check in checks.values())
    return EXIT_OK if is_right else EXIT_UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
