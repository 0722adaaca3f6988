"""AdamW, the weight average and the rounded model weights as one operation on the elements of many parameters.

    gradient --(clip)--> moments --> master weight --+--> average
                                                     '--> model weight, rounded

The function here calls torch's fused kernel, and writes average and model weights in further passes. The fused form
(`dit.kernels.fused.adamw`) reads and writes every tensor once. Numbers that change between updates are on the device,
so that a CUDA graph can repeat an update.

Source: Loshchilov and Hutter 2017, arXiv:1711.05101, Algorithm 2; with torch's order of operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import torch
from torch import Tensor

from dit.layout import to_device


@dataclass(frozen=True)
class Elements:
    """The tensors of one parameter, with corresponding elements; all are float32 except `model`.

    Attributes:
        main, exp_avg, exp_avg_sq: master weights and Adam's moments; `exp_avg_sq` has no elements for Muon.
        average: weight average, or None.
        model: model weights, a rounded copy of the master weights; None if the model uses the master weights.
    """

    gradient: Tensor
    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    average: Optional[Tensor] = None
    model: Optional[Tensor] = None


@dataclass(frozen=True)
class Rates:
    """Hyperparameters of one update of a group of parameters.

    Attributes:
        clip: factor of the gradient, which combines clipping with all other deferred factors, `[]`; NaN if nothing may
            change.
        average: weight of the new weights in the average: 1 - decay, or 1 for a copy.
        table: the result of `values` on the device, `[9]`, float32; None to copy it when it is needed.
        repeated: whether a CUDA graph repeats the update with other values in `table`.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    clip: Tensor
    average: float = 1.0
    table: Optional[Tensor] = None
    repeated: bool = False

    def values(self) -> list[float]:
        """Return the arguments of the fused kernel, then the learning rate and the step.

        The fourth is the learning rate divided by the bias correction of the first moment, the fifth the factor of the
        root of the second moment that corrects its bias.
        """
        step_size, root = self.lr / (1 - self.beta1**self.step), (1 - self.beta2**self.step) ** -0.5
        kernel = self.lr * self.weight_decay, 1 - self.beta1, 1 - self.beta2, step_size, root, self.eps, self.average
        return [*kernel, self.lr, self.step]

    @cached_property
    def on_device(self) -> Tensor:
        """The values, `[9]`, float32, on the device of the clipping factor."""
        return to_device(torch.tensor(self.values()), self.clip.device) if self.table is None else self.table

    @property
    def changes(self) -> Tensor:
        """1, or 0 if nothing may change, `[]`, float32."""
        return (~self.clip.isnan()).float()


AdamW = Callable[[Sequence[Elements], Rates], None]
"""Updates parameters in place; either all or none have an average, and either all or none have model weights."""


AddGradients = Callable[[list[Tensor], list[Tensor]], object]
"""Adds gradients to main gradients in place."""

DECAY, AVERAGE, RATE, STEP = 0, 6, 7, 8
"""Places of numbers in `Rates.values`: learning rate times weight decay, weight of the average, learning rate, step."""


def clipped(p: Elements, rates: Rates) -> Tensor:
    """Return the clipped gradient, 0 if nothing may change."""
    return torch.where(rates.clip.isnan(), 0.0, p.gradient * rates.clip)


def adamw(parameters: Sequence[Elements], rates: Rates) -> None:
    """Update parameters in place, and multiply their gradients by the clipping factor.

    A graph repeats `beta1` and `beta2` of its capture.
    """
    if not parameters:
        return
    values = rates.on_device
    torch._fused_adamw_(
        [p.main for p in parameters],
        [p.gradient for p in parameters],
        [p.exp_avg for p in parameters],
        [p.exp_avg_sq for p in parameters],
        [],
        [values[STEP]] * len(parameters),
        lr=values[RATE] if rates.repeated else rates.lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        weight_decay=rates.weight_decay,
        eps=rates.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=rates.clip.reciprocal().float(),
        found_inf=1 - rates.changes,
    )
    store(parameters, rates)


def store(parameters: Sequence[Elements], rates: Rates) -> None:
    """Update the averages and the model weights after the master weights."""
    averages = [p.average for p in parameters if p.average is not None]
    models = [p.model for p in parameters if p.model is not None]
    if averages:
        weight = rates.changes * rates.on_device[AVERAGE]
        torch._foreach_lerp_(averages, [p.main for p in parameters], [weight] * len(averages))
    if models:
        torch._foreach_copy_(models, [p.main.view(model.shape) for p, model in zip(parameters, models)])
