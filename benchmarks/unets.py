"""Time UNets with equal channels, ours, diffusers' and imagen-pytorch's, interleaved: `python -m benchmarks.unets`.

A step is a forward and a backward pass of pictures with texts, in fp32 on one CPU thread or in bf16 on a GPU. Our
latent-diffusion UNet and diffusers' `UNet2DConditionModel` are the same network. imagen-pytorch's `Unet` has the
channels of our regular UNet, but other blocks, with the channels of the previous level; it is compared with the variant
of ours with the most similar number of operations. Other packages are compared if they are installed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Optional

from benchmarks.rows import append, markdown
from benchmarks.step import revision
from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment
from launch.argument_types import at_least_one

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.backends.process_groups import ProcessGroups
    from dit.batch import PackedBatch
    from dit.models.base import ModelConfig

CHANNELS, LEVELS, HEAD = 64, 3, 64
"""Channels of the first level, doubled at each of the next ones; attention at the last level, heads of this size."""
TEXT_TOKENS, TEXT_WIDTH = 16, 128


@dataclass(frozen=True)
class Pictures:
    """Inputs of every network.

    Attributes:
        batch: noised pictures as tokens of one pixel, and their texts of equal length.
        time_N: in [0, 1].
        cotangent_TC: gradient of the output, of the shape of the tokens.
    """

    batch: "PackedBatch"
    time_N: "Tensor"
    cotangent_TC: "Tensor"

    def dense(self, values_TC: "Tensor") -> "Tensor":
        """Return tokens as pictures `[N, C, H, W]`, channels-last in memory."""
        _, height, width = self.batch.grids[0]
        return values_TC.view(len(self.batch.grids), height, width, -1).permute(0, 3, 1, 2)

    @property
    def noised_NCHW(self) -> "Tensor":
        return self.dense(self.batch.latents_TC)

    @property
    def texts_NLE(self) -> "Tensor":
        return self.batch.conditions["context"].values.unflatten(0, (len(self.batch.grids), -1))


@dataclass(frozen=True)
class Arm:
    """A network to be timed.

    Attributes:
        name: in the table.
        compared_with: name of the arm for comparison.
        network: has the parameters.
        step: runs forward and backward.
    """

    name: str
    compared_with: str
    network: "nn.Module"
    step: Callable[[Pictures], None]


@dataclass(frozen=True)
class Row:
    """Measurements of an arm.

    Attributes:
        parameters: of the network.
        gflop: matrix products and convolutions of a step, per picture.
        seconds: median time of a step; process time on CPU.
        images_per_s: pictures per second.
        ratio: of its time to that of the arm for comparison, the median over rounds.
    """

    name: str
    parameters: int
    gflop: float
    seconds: float
    images_per_s: float
    ratio: float


def ours(name: str, compared_with: str, model: "ModelConfig", groups: "ProcessGroups", **training: Any) -> Arm:
    """Build a network of this project; `training` are fields of `TrainingConfig`."""
    from dit.backends.device import use_cuda
    from dit.parallel.build import build_model
    from dit.parallel.dims import ParallelConfig
    from dit.settings import TrainingConfig

    settings = TrainingConfig(precision="bf16" if use_cuda() else "fp32", **training)
    (network,) = build_model(model, ParallelConfig(), settings, groups)

    def step(pictures: Pictures) -> None:
        batch = pictures.batch
        network(batch.latents_TC, pictures.time_N, batch).backward(pictures.cotangent_TC)

    return Arm(name, compared_with, network, step)


def theirs(name: str, compared_with: str, network: "nn.Module", predict: Callable[[Pictures], "Tensor"]) -> Arm:
    """Compare a network on pictures `[N, C, H, W]`."""
    import torch

    from dit.backends.device import local_device, use_cuda

    network.to(local_device(), torch.bfloat16 if use_cuda() else torch.float32)

    def step(pictures: Pictures) -> None:
        predict(pictures).backward(pictures.dense(pictures.cotangent_TC))

    return Arm(name, compared_with, network, step)


def imagen_arms(groups: "ProcessGroups", *, compiled: bool = True) -> Iterator[Arm]:
    """Yield our regular UNet of Imagen with each of its options, and imagen-pytorch's where it is installed.

    Args:
        compiled: with `training.kernels=compile`, whose first step takes minutes on CPU.
    """
    from dit.models.unet.config import UNetConfig

    fused = UNetConfig(
        hidden_size=CHANNELS,
        channel_multipliers=[2**level for level in range(LEVELS)],
        num_res_blocks=[2] * LEVELS,
        attention_levels=[LEVELS - 1],
        head_size=HEAD,
        context_size=TEXT_WIDTH,
        condition_size=TEXT_WIDTH,
    )
    stacked = replace(fused, attention_type="stacked")
    name = "Imagen"
    yield ours(name, name, fused, groups)
    yield ours(f"{name}, stable attention", name, replace(fused, stable_attention=True), groups)
    yield ours(f"{name}, stacked attention", name, stacked, groups)
    yield ours(f"{name}, checkpointed", name, fused, groups, recompute="full")
    if compiled:
        yield ours(f"{name}, compiled", name, fused, groups, kernels="compile")
    single = f"{name}, one block of a level, stacked attention"
    yield ours(single, single, replace(stacked, num_res_blocks=[1] * LEVELS), groups)
    if find_spec("imagen_pytorch"):
        from imagen_pytorch import Unet

        attended = tuple(level == LEVELS - 1 for level in range(LEVELS))
        network = Unet(
            dim=CHANNELS,
            dim_mults=tuple(fused.channel_multipliers),
            num_resnet_blocks=1,  # in addition to the first block of each level
            text_embed_dim=TEXT_WIDTH,
            cond_dim=TEXT_WIDTH,
            max_text_len=TEXT_TOKENS,
            layer_attns=attended,
            layer_cross_attns=attended,
            attn_dim_head=HEAD,
            attn_heads=fused.channels[-1] // HEAD,
        )

        def predict(x: Pictures) -> "Tensor":
            out: Tensor = network(x.noised_NCHW, x.time_N, text_embeds=x.texts_NLE, cond_drop_prob=0.0)
            return out

        yield theirs("imagen-pytorch Unet", single, network, predict)


def latent_arms(groups: "ProcessGroups") -> Iterator[Arm]:
    """Yield our latent-diffusion UNet, and the same network as diffusers builds it where it is installed."""
    from dit.models.ldm_unet.config import LDMUNetConfig

    model = LDMUNetConfig(
        in_channels=3,
        block_out_channels=[CHANNELS * 2**level for level in range(LEVELS)],
        transformer_layers=[0] * (LEVELS - 1) + [1],
        num_attention_heads=CHANNELS * 2 ** (LEVELS - 1) // HEAD,
        context_size=TEXT_WIDTH,
    )
    name = "latent diffusion"
    yield ours(name, name, model, groups)
    yield ours(f"{name}, checkpointed", name, model, groups, recompute="full")
    if find_spec("diffusers"):
        import torch
        from diffusers import UNet2DConditionModel

        from dit.convert.diffusers_unet import DiffusersUNet

        settings, _ = DiffusersUNet().write_settings(model, (1, 64, 64))
        for suffix, layout in (("", torch.contiguous_format), (", channels-last", torch.channels_last)):
            network = UNet2DConditionModel.from_config(settings).train().to(memory_format=layout)

            def predict(x: Pictures, network: "nn.Module" = network, layout: Any = layout) -> "Tensor":
                pictures = x.noised_NCHW.contiguous(memory_format=layout)
                out: Tensor = network(pictures, 999 * x.time_N, x.texts_NLE).sample
                return out

            yield theirs(f"diffusers UNet2DConditionModel{suffix}", name, network, predict)


def random_pictures(side: int, count: int) -> Pictures:
    """Return random pictures with texts of equal length."""
    import torch

    from dit.backends.device import local_device
    from dit.conditions import Entry
    from dit.layout import SequenceLayout
    from dit.models.unet.config import UNetConfig
    from energon_data.mock import MockData, MockSource
    from energon_data.packing import collate

    spec = UNetConfig(context_size=TEXT_WIDTH).batch_spec()
    source = MockSource(MockData(height=side, width=side), spec, seed=0, split="train", stream=0, num_streams=1)
    batch = collate([source.sample(number) for number in range(count)], spec)
    texts = torch.randn(count * TEXT_TOKENS, TEXT_WIDTH)
    context = Entry("text", texts, SequenceLayout.from_lengths([TEXT_TOKENS] * count))
    batch = replace(batch, conditions=batch.conditions | {"context": context}).to(local_device())
    return Pictures(batch, torch.rand(count).to(local_device()), torch.randn_like(batch.latents_TC))


def clock() -> float:
    """Return process seconds on CPU, or wall-clock seconds after synchronising the GPU."""
    from dit.backends.device import synchronize, use_cuda

    synchronize()
    return time.perf_counter() if use_cuda() else time.process_time()


def measure(arms: Sequence[Arm], pictures: Pictures, rounds: int) -> list[Row]:
    """Time every arm in every round, sequentially, after two warm-up steps."""
    from torch.utils.flop_counter import FlopCounterMode

    count, flops = len(pictures.batch.grids), {}
    for arm in arms:
        arm.step(pictures)
    for arm in arms:
        with FlopCounterMode(display=False) as counter:
            arm.step(pictures)
        flops[arm.name] = counter.get_total_flops() / count
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            arm.network.zero_grad(set_to_none=True)
            began = clock()
            arm.step(pictures)
            seconds[arm.name].append(clock() - began)
    rows = []
    for arm in arms:
        step_s = median(seconds[arm.name])
        ratio = median(a / b for a, b in zip(seconds[arm.name], seconds[arm.compared_with], strict=True))
        parameters = sum(p.numel() for p in arm.network.parameters())
        rows.append(Row(arm.name, parameters, flops[arm.name] / 1e9, step_s, count / step_s, ratio))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    heads = ["network", "parameters", "GFLOP per picture", "ms per step", "pictures per s", "GFLOP per s"]
    cells = [
        [
            *(row.name, f"{row.parameters:,}", f"{row.gflop:.2f}", f"{1e3 * row.seconds:,.0f}"),
            *(f"{row.images_per_s:,.2f}", f"{row.gflop * row.images_per_s:,.0f}", f"{row.ratio:.2f}"),
        ]
        for row in rows
    ]
    return markdown([*heads, "times as long"], cells, len(heads))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unets", description=__doc__)
    parser.add_argument("--side", type=int, default=64, help="pixels (%(default)s)")
    parser.add_argument("--batch", type=at_least_one, default=4, help="pictures of a step (%(default)s)")
    parser.add_argument("--rounds", type=at_least_one, default=7, help="timed steps of each network (%(default)s)")
    parser.add_argument("--out", type=Path, help="append a line of JSON to this file")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Time the networks and print the table."""
    args = build_parser().parse_args(argv)
    smallest = 2 ** (LEVELS - 1)
    if args.side < smallest or args.side % smallest:
        raise ConfigError(f"--side={args.side} must be a multiple of {smallest}")
    environment.prepare()
    import torch

    from dit.backends import process_groups
    from dit.backends.device import describe
    from dit.parallel.dims import ParallelConfig

    groups = process_groups.initialize(ParallelConfig())
    rows = measure([*imagen_arms(groups), *latent_arms(groups)], random_pictures(args.side, args.batch), args.rounds)
    process_groups.destroy()
    echo(table(rows))
    where = {"device": describe(), "revision": revision(), "torch": torch.__version__}
    append(args.out, where | {"side": args.side, "batch": args.batch, "rows": [asdict(row) for row in rows]})
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
