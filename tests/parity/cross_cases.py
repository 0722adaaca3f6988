"""Comparison of a backbone with cross-attention with the formulas of its paper."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.parity.reference_cross import CrossReference, Leaves
from tests.support.batches import Sample, draw, pack, pooled_size
from tests.support.reference import RTOL, relative_error


def check_against_reference(
    model: nn.Module,
    config: Any,
    samples: list[Sample],
    kind: Callable[[Any, Leaves], Any] = CrossReference,
    **padding: int,
) -> None:
    """Run the pack once through ours, each sample alone through the reference; compare outputs and all gradients."""
    batch, leaves = pack(samples, config, **padding), Leaves(model)
    reference = kind(config, leaves)
    inputs, time = draw(batch)
    out = model(inputs, time, batch)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    loss = torch.zeros((), dtype=torch.float64)
    for i, (sample, start, length) in enumerate(zip(samples, batch.layout.starts, batch.layout.lengths)):
        rows = slice(start, start + length)
        given: dict[str, Any] = {"fps": sample.fps, "label": sample.label}
        if (size := pooled_size(config)) is not None:
            given["pooled"] = sample.pooled(size)
        text = sample.text(config.context_size)
        exact = reference.run(inputs[rows], time[i : i + 1], sample.grid, text, **given)
        assert relative_error(out[rows], exact) <= RTOL, f"sample {i}"
        loss = loss + (exact * cotangent[rows].double()).sum()
    loss.backward()
    valid = batch.layout.valid_T
    (out[valid] * cotangent[valid]).sum().backward()
    errors = {}
    for name, parameter in model.named_parameters():
        exact = leaves[name].grad
        assert exact is not None, f"the reference does not use {name}"
        assert exact.norm() > 0, f"{name} has no gradient, so the comparison shows nothing"
        errors[name] = relative_error(parameter.grad, exact)
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    assert not wrong, wrong
