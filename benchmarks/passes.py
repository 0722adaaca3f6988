"""Count the memory traffic of a layer outside of matrix products and attention: `python -m benchmarks.passes`.

A layer runs forward and backward on fake tensors, in bf16, and every operation is counted as it reaches the dispatcher.
The unit is one read or one write of all tokens (tokens x hidden size x 2 bytes). Nothing is timed and no GPU is needed:
these are counts of the program.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Optional

import torch
from torch import Tensor, nn

from benchmarks.layer_traffic import LayerTraffic, Passes, layer_traffic, traffic
from benchmarks.rows import markdown
from dit.backends import process_groups
from dit.backends.device import ACCELERATOR
from dit.backends.provider import LayerProvider
from dit.errors import EXIT_OK, one_line_errors
from dit.kernels.attention import Attention, varlen_attention
from dit.kernels.choice import Target
from dit.kernels.compiled import compile_layers
from dit.kernels.layer_kernels import EAGER, LayerKernels, PendingResidual, fused
from dit.kernels.recompute import recompute_activations
from dit.layers.positions import RotaryPositions
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.models.dit.layer import DiTLayer
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.dit_cross.model import DiTCrossLayer
from dit.optimizer.ema import EMA
from dit.optimizer.master_weights import master_shards
from dit.optimizer.step_numbers import StepNumbers
from dit.optimizer.update import Update
from dit.parallel.build import TracedBuild, build_model, build_optimizer, megatron_config, wrap
from dit.parallel.dims import ParallelConfig
from dit.parallel.implementations import DTYPES
from dit.settings import OptimizerConfig, TrainingConfig
from dit.terminal import echo
from dit.tracing.world import fake_world

HIDDEN, HEADS, CONTEXT = 3072, 24, 1024
Sizes = tuple[int, int, int]
SIZES = HIDDEN, HEADS, CONTEXT
"""Hidden size, heads, and width of the text."""

DENSE = SequenceLayout.from_lengths([1024] * 8)
ONE = SequenceLayout.from_lengths([8192])
PADDED = SequenceLayout.from_lengths([3000, 410, 1999, 2005], multiple_of=128, total_tokens=8192)


@dataclass(frozen=True)
class Case:
    """A layer and its pack.

    Attributes:
        name: as the table shows it.
        layout: of the tokens.
        cross: DiT with cross-attention (QK-norm, no biases) instead of DiT (biases, no QK-norm).
        rope: rotary positions.
    """

    name: str
    layout: SequenceLayout
    cross: bool = False
    rope: bool = False


CASES = (
    Case("DiT dense", DENSE),
    Case("DiT ragged + padding", PADDED),
    Case("DiT-cross one sample", ONE, cross=True),
    Case("DiT-cross ragged + padding", PADDED, cross=True),
    Case("DiT-cross ragged + padding + RoPE", PADDED, cross=True, rope=True),
)


class PlainBlock(nn.Module):
    """A DiT block of torch's own modules, on a dense batch, as it is usually written.

    Source: Peebles and Xie 2023, arXiv:2212.09748; with `cross`, a third sub-layer attends to the text, and queries and
    keys are normalised.
    """

    def __init__(self, sizes: Sizes = SIZES, *, cross: bool = False) -> None:
        super().__init__()
        hidden, self.heads, context = sizes
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6) for _ in range(2 + cross))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, (9 if cross else 6) * hidden))
        self.qk_norms = nn.ModuleList(nn.RMSNorm(hidden // self.heads) for _ in range(4)) if cross else None
        if cross:
            self.query, self.cross_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
            self.kv = nn.Linear(context, 2 * hidden)

    def forward(self, x_TD: Tensor, cond_SD: Tensor, context_SKC: Optional[Tensor] = None) -> Tensor:
        """Return the tokens after the block; all samples have one length."""
        x = x_TD.view(len(cond_SD), -1, x_TD.shape[-1])
        parts = iter(self.modulation(cond_SD)[:, None].chunk(3 * len(self.norms), -1))
        for number, (norm, *modulation) in enumerate(zip(self.norms, parts, parts, parts)):
            shift, scale, gate = modulation
            y = norm(x) * (1 + scale) + shift
            if number == 0:
                y = self.proj(self._attend(*self.qkv(y).chunk(3, -1), first_norm=0))
            elif number == 1 and context_SKC is not None:
                y = self.cross_proj(self._attend(self.query(y), *self.kv(context_SKC).chunk(2, -1), first_norm=2))
            else:
                y = self.fc2(nn.functional.gelu(self.fc1(y), approximate="tanh"))
            x = x + gate * y
        return x.flatten(0, 1)

    def _attend(self, *qkv: Tensor, first_norm: int) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in qkv)
        if self.qk_norms is not None:
            q, k = self.qk_norms[first_norm](q), self.qk_norms[first_norm + 1](k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def plain_block(sizes: Sizes = SIZES, *, cross: bool = False) -> PlainBlock:
    """Return a plain block in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return PlainBlock(sizes, cross=cross)
    finally:
        torch.set_default_dtype(torch.float32)


def trace(case: Case, kernels: LayerKernels, recompute: str = "none") -> LayerTraffic:
    """Trace one of our layers in a stack, as the only rank of a world: two layers minus one."""
    with fake_world(0, 1):
        groups = process_groups.initialize(ParallelConfig())
        try:
            stack = partial(layer, case, kernels, recompute, groups)
            one, two = (layer_traffic(partial(stack, count=n), case.layout.total_tokens, HIDDEN) for n in (1, 2))
            return two - one
        finally:
            process_groups.release()


def layer(
    case: Case,
    kernels: LayerKernels,
    recompute: Any,
    groups: Any,
    *,
    sizes: Sizes = SIZES,
    precision: Literal["bf16", "fp32"] = "bf16",
    attention: Attention = varlen_attention,
    std: Optional[float] = None,
    compiled: bool = False,
    text_tokens: int = 77,
    count: int = 1,
) -> Callable[[Tensor], Tensor]:
    """Build a stack of layers as a function of the tokens.

    Args:
        std: standard deviation of all parameters; None leaves them uninitialised, which is enough to trace them.
        compiled: compile the layer as `training.kernels=compile` does.
        text_tokens: tokens of each sample's text.
        count: number of layers.
    """
    hidden, heads, context = sizes
    settings: dict[str, Any] = {"hidden_size": hidden, "num_layers": 1, "num_attention_heads": heads}
    config = (
        DiTCrossConfig(**settings, context_size=context, qk_layernorm=True) if case.cross else DiTConfig(**settings)
    )
    provider = LayerProvider(megatron_config(config, ParallelConfig(), precision), groups.collection, kernels=kernels)
    kind: Any = DiTCrossLayer if case.cross else DiTLayer
    stack = nn.ModuleList(kind(config, provider, attention) for _ in range(count))
    for built in stack:
        recompute_activations(built, recompute)
    if compiled:
        compile_layers(stack)
    if std is not None:
        for parameter in stack.parameters():
            nn.init.normal_(parameter, std=std)
    device, dtype = case.layout.device, DTYPES[precision]
    texts = SequenceLayout.from_lengths([text_tokens] * case.layout.num_samples, device=device)
    cond_SD = torch.zeros(case.layout.num_samples, hidden, dtype=dtype, device=device, requires_grad=True)
    inputs: list[Any] = [cond_SD, case.layout]
    if case.cross:
        context_KD = torch.zeros(texts.total_tokens, context, dtype=dtype, device=device, requires_grad=True)
        inputs = [cond_SD, context_KD, case.layout, texts]
    positions = torch.zeros(case.layout.total_tokens, 3, device=device)
    inputs.append(RotaryPositions(hidden // heads)(positions) if case.rope else None)

    def call(x_TD: Any) -> Tensor:
        for built in stack:
            x_TD = built(x_TD, *inputs)
        return PendingResidual.added(x_TD)

    return call


def plain() -> LayerTraffic:
    """Trace the plain block."""

    def build() -> Callable[[Tensor], Tensor]:
        block = plain_block()
        cond_SD = torch.empty(DENSE.num_samples, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        return lambda x_TD: block(x_TD, cond_SD)

    return layer_traffic(build, DENSE.total_tokens, HIDDEN)


ROWS: tuple[tuple[str, LayerKernels, str], ...] = (
    ("eager", EAGER, "none"),
    ("fused", fused(), "none"),
    ("fused, selective recompute", fused(), "selective"),
)
"""Kernels and recompute of the rows of each case."""


def measure(kinds: Sequence[str]) -> dict[str, LayerTraffic]:
    """Trace every case with some kinds of `ROWS`, and the plain block; by the name of the row."""
    rows = {"plain PyTorch DiT block": plain()}
    for case in CASES:
        for kind, kernels, recompute in ROWS:
            if kind in kinds:
                rows[f"{case.name}, {kind}"] = trace(case, kernels, recompute)
    return rows


def table(rows: dict[str, LayerTraffic]) -> str:
    """Return the rows as a Markdown table."""
    heads = [
        "layer",
        "passes forward",
        "backward",
        "saved numbers per token / hidden",
        "memory-bound kernels",
        "products",
    ]
    lines = []
    for name, row in rows.items():
        forward, backward = row.forward, row.backward
        kernels, products = f"{forward.kernels} + {backward.kernels}", f"{forward.products + backward.products}"
        lines.append([name, f"{forward.passes:.1f}", f"{backward.passes:.1f}", f"{row.saved:.1f}", kernels, products])
    return markdown(heads, lines)


UPDATES = {f"optimizer's update, {name}": kernels for name, kernels in (("eager", "eager"), ("fused", "triton"))}
"""Settings of the rows of the update, in passes of 4 bytes per parameter."""


def update(kernels: str) -> Passes:
    """Trace the update of a layer's parameters in bf16: clip, AdamW, average, and the copy for the model."""
    with _fake_step(kernels, "bf16") as (_, numbers, call, unit):
        computed = numbers()
        call(computed, 1)  # makes Adam's state
        return traffic(lambda: call(computed, 2), unit)


def outside(kernels: str) -> Passes:
    """Trace the fp32 operations of a step of one micro-batch on a layer's parameters, outside of the layer.

    They start from the gradients of the backward pass: main gradients, norm, clipping, AdamW and average.
    """
    with _fake_step(kernels, "fp32") as (chunk, numbers, call, unit):

        def step() -> None:
            chunk.zero_grad_buffer()
            _Layer.apply(*(p for p in chunk.parameters() if p.requires_grad)).backward()
            chunk.finish_grad_sync()
            call(numbers(), 1)

        step()
        return traffic(step, unit)


class _Layer(torch.autograd.Function):
    """A layer that computes nothing, and returns a gradient for every parameter."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(p) for p in ctx.parameters)


@contextmanager
def _fake_step(
    kernels: str, precision: Literal["bf16", "fp32"]
) -> Iterator[tuple[Any, Callable[[], StepNumbers], Callable[[StepNumbers, int], None], int]]:
    """Yield a layer in its data-parallel wrapper, its numbers, its update, and 4 bytes times its parameters."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    settings, parallel, training = OptimizerConfig(clip_grad=0.5), ParallelConfig(), TrainingConfig(precision=precision)
    config = DiTConfig(hidden_size=HIDDEN, num_layers=1, num_attention_heads=HEADS)
    target = Target(ACCELERATOR, DTYPES[precision])
    with fake_world(0, 1), FakeTensorMode(allow_non_fake_inputs=True):
        groups = process_groups.initialize(parallel)
        try:
            chunks = build_model(config, parallel, training, groups, traced=TracedBuild(None, target.device))
            wrapped = wrap(chunks, parallel, groups)
            optimizer = build_optimizer(wrapped, settings, parallel, training, groups)
            shards = master_shards(optimizer, chunks)
            update = Update(optimizer, shards, EMA(shards, 0.99), settings, groups, target, kernels)

            def numbers() -> StepNumbers:
                optimizer.zero_grad()
                return StepNumbers(optimizer, groups, torch.zeros(2), 1)

            def call(computed: StepNumbers, step: int) -> None:
                update(computed, step)
                update.end(step, is_good=True)

            yield wrapped[0], numbers, call, 4 * sum(shard.main.numel() for shard in shards)
        finally:
            process_groups.release()


def plain_outside() -> Passes:
    """Trace the same of plain PyTorch: clipping, fused AdamW, and the average in one fused call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(shape)) for shape in ((4 * HIDDEN, HIDDEN), (HIDDEN,))]
        adamw = torch.optim.AdamW(parameters, fused=True)
        average = [p.detach().clone() for p in parameters]

        def step() -> None:
            adamw.zero_grad()
            _Layer.apply(*parameters).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            adamw.step()
            torch._foreach_lerp_(average, [p.detach() for p in parameters], 0.01)

        step()
        return traffic(step, 4 * sum(p.numel() for p in parameters))


OUTSIDE = {
    "a step outside the layers, eager": lambda: outside("eager"),
    "a step outside the layers, fused": lambda: outside("triton"),
    "a step outside the layers, plain PyTorch": plain_outside,
}
"""The rows of a whole step of one micro-batch in fp32, in passes of 4 bytes per parameter."""


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.passes", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=[kind for kind, _, _ in ROWS], help="rows of each case (all)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--by-operation", action="store_true", help="print what each operation moves, too")
    args = parser.parse_args(argv)
    os.environ["DIT_DEVICE"] = "cpu"  # nothing is computed
    rows = measure(args.kinds or [kind for kind, _, _ in ROWS])
    updates = {name: update(kernels) for name, kernels in UPDATES.items()}
    updates |= {name: count() for name, count in OUTSIDE.items()}
    if args.json:
        records = {name: asdict(row) for name, row in rows.items()}
        records |= {name: asdict(row) for name, row in updates.items()}
        echo(json.dumps(records))
        return EXIT_OK
    echo(table(rows))
    for name, passes in updates.items():
        echo(f"{name}: {passes.passes:.2f} passes of 4 bytes per parameter in {passes.kernels} kernels")
    if args.by_operation:
        for name, row in rows.items():
            for direction in ("forward", "backward"):
                parts = getattr(row, direction).largest
                echo(f"{name}, {direction}: " + ", ".join(f"{op} {n:.2f}" for op, n in parts if n >= 0.005))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
