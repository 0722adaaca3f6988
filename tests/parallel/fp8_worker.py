"""Functions that test cases run on each rank of a world with quantised products."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.parallel_training import micro_batch, tiny_model
from dit.backends import process_groups
from dit.backends.fp8_linear import fp8_linear
from dit.backends.init import ONES
from dit.backends.process_groups import ProcessGroups
from dit.backends.provider import LayerProvider
from dit.batch import PackedBatch
from dit.kernels.fp8 import BLOCKS, Fp8Products, Quantized, emulated
from dit.models.base import Backbone
from dit.parallel.build import megatron_config
from dit.parallel.dims import ParallelConfig
from dit.settings import Fp8
from dit.verify import trial
from dit.verify.trial import TRAINING, Trial

INPUTS, OUTPUTS = 256, 512
GRIDS = ((1, 8, 8), (2, 4, 8), (1, 4, 8), (3, 4, 4))


def multiple_of(fp8: Fp8) -> int:
    """Return a padding multiple that all layouts accept, also CP 2 (load-balanced except with large blocks)."""
    return (2 if fp8 == "blockwise" else 4) * BLOCKS[fp8]


def packs(fp8: Fp8, dp_rank: int, dp_size: int, token_multiple: int) -> Iterator[PackedBatch]:
    """Yield packs with the same padding under every layout, because padding affects the largest magnitude."""
    multiple = multiple_of(fp8)
    assert multiple % token_multiple == 0
    for i in itertools.count(dp_rank, dp_size):
        grids = tuple(GRIDS[(2 * i + j) % len(GRIDS)] for j in range(2))
        total = 2 * max(64, multiple) + multiple
        yield micro_batch(i, packed=True, multiple_of=multiple, grids=grids, total_tokens=total)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train one step."""
    depth = {} if case.get("model", {}).get("backbone") == "flux" else {"num_layers": 2}
    model = tiny_model(**{"hidden_size": 2 * max(32, BLOCKS[case["fp8"]]), **depth, **case.get("model", {})})
    training = replace(
        TRAINING,
        fp8=case["fp8"] if case.get("quantised", True) else None,
        precision=case.get("precision", "fp32"),
        recompute=case.get("recompute", "none"),
    )
    alter, stream = case.get("break"), partial(packs, case["fp8"])
    parallel = ParallelConfig(**case["parallel"])
    return trial.train(Trial(model=model, parallel=parallel, stream=stream, training=training, alter=alter, steps=1))


def forget_other_ranks(chunks: list[Backbone]) -> None:
    """Let each rank scale its shard of a matrix by the largest magnitude of the shard."""
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "fp8", None) is not None:
                module.fp8 = replace(module.fp8, group=None)


class Recorded:
    """Multiplies, and records the operands."""

    def __init__(self) -> None:
        self.operands: list[Tensor] = []

    def __call__(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
        self.operands += [a.dequantized(), b.dequantized()]
        return emulated(a, b, dtype)


def shards(case: dict[str, Any]) -> list[list[str]]:
    """Return for each rank the quantised operands of two linears that differ from slices of the unsharded ones."""
    parallel = ParallelConfig(**case["parallel"])
    groups = process_groups.initialize(parallel)
    config = megatron_config(tiny_model(), parallel, "fp32")
    provider = LayerProvider(config, groups.collection, fp8=case["fp8"])
    wrong = [
        f"{layer}: {operand}"
        for layer, build in (("column", _column), ("row", _row))
        for operand in build(provider, groups, parallel, case)
    ]
    found = process_groups.gather_objects(wrong)
    process_groups.release()
    return found


def _matrices(fp8: Fp8, outputs: int, inputs: int) -> list[Tensor]:
    """Return x, the weight and the gradient of the output; the magnitudes of their shards differ."""
    generator = torch.Generator().manual_seed(3)
    tokens = 3 * multiple_of(fp8)
    shapes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    return [
        torch.randn(shape, generator=generator)
        * torch.linspace(0.1, 3, shape[0])[:, None]
        * torch.linspace(2, 0.2, shape[1])
        for shape in shapes
    ]


def _part(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return x.chunk(size, dim)[rank].contiguous()


def _column(provider: LayerProvider, groups: ProcessGroups, parallel: ParallelConfig, case: dict) -> list[str]:
    return _compare(provider.column_linear(INPUTS, OUTPUTS, bias=False, init=ONES), groups, parallel, case, dim=0)


def _row(provider: LayerProvider, groups: ProcessGroups, parallel: ParallelConfig, case: dict) -> list[str]:
    return _compare(provider.row_linear(OUTPUTS, INPUTS, bias=False, init=ONES), groups, parallel, case, dim=1)


def _compare(layer: Any, groups: ProcessGroups, parallel: ParallelConfig, case: dict, dim: int) -> list[str]:
    """Compare the operands of the three products with slices of the unsharded ones; `dim` of the weight is split."""
    outputs, inputs = (OUTPUTS, INPUTS) if dim == 0 else (INPUTS, OUTPUTS)
    x, weight, grad = _matrices(case["fp8"], outputs, inputs)
    one = Recorded()
    plain = x.clone().requires_grad_(), weight.clone().requires_grad_()
    fp8_linear(Fp8Products(case["fp8"], one), *plain, None).backward(grad)

    cp, tp = (groups.cp.rank(), groups.cp.size()), (groups.tp.rank(), groups.tp.size())
    local_x, local_grad = _part(x, 0, *cp), _part(grad, 0, *cp)
    split_x, split_grad = (dim == 1), (dim == 0)  # by features; by tokens under sequence parallelism
    if split_x or parallel.sequence_parallel:
        local_x = _part(local_x, int(split_x), *tp)
    if split_grad or parallel.sequence_parallel:
        local_grad = _part(local_grad, int(split_grad), *tp)
    many = Recorded()
    group = None if case.get("apart") else layer.fp8.group
    layer.fp8 = replace(layer.fp8, multiply=many, group=group)
    with torch.no_grad():
        layer.weight.copy_(_part(weight, dim, *tp))
    layer(local_x.requires_grad_()).backward(local_grad)

    def slices(operand: Tensor, tokens: int | None, features: int | None) -> Tensor:
        operand = operand if tokens is None else _part(operand, tokens, *cp)
        return operand if features is None else _part(operand, features, *tp)

    # Dimensions of tokens and of split features of each operand: x, w^T, dy, w, dy^T, x.
    places = {
        0: ((0, None), (None, 1), (0, 1), (None, 0), (1, 0), (0, None)),
        1: ((0, 1), (None, 0), (0, None), (None, 1), (1, None), (0, 1)),
    }[dim]
    names = ("x", "w^T", "dy", "w", "dy^T", "x of dw")
    assert len(many.operands) == len(one.operands) == len(names)
    return [
        name
        for name, mine, full, place in zip(names, many.operands, one.operands, places)
        if not torch.equal(mine, slices(full, *place))
    ]
