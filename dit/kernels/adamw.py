"""AdamW, the weight average and the copy for the model as one operation on the elements of many parameters.

    gradient --(clip)--> moments --> master weight --+--> average
                                                     '--> the model's own weight, rounded

The function here is the reference. A training runs Megatron-Core's optimizer and torch's AdamW instead, or the fused
form (`dit.kernels.fused.adamw`), which reads and writes every tensor once.

Source: Loshchilov and Hutter 2017, arXiv:1711.05101, Algorithm 2; with torch's order of operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from torch import Tensor


@dataclass(frozen=True)
class Elements:
    """The tensors of one parameter, of as many elements in the same order; float32 but for `model`.

    Attributes:
        gradient: read alone.
        main, exp_avg, exp_avg_sq: master weights and Adam's moments.
        average: of the weights; None for none.
        model: gets a rounded copy of the master weights; None where the master weights are the model's.
    """

    gradient: Tensor
    main: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    average: Optional[Tensor] = None
    model: Optional[Tensor] = None


@dataclass(frozen=True)
class Rates:
    """The numbers of one update of a group of parameters.

    Attributes:
        step: number of the update, from 1.
        clip: factor of the gradient, of clipping and of all that was left to the update.
        average: weight of the new weights in the average: 1 - decay, or 1 for a copy.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    clip: float = 1.0
    average: float = 1.0

    @property
    def step_size(self) -> float:
        """The learning rate over the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """The factor of the root of the second moment that corrects its bias."""
        return float((1 - self.beta2**self.step) ** -0.5)


AdamW = Callable[[Sequence[Elements], Rates], None]
"""Updates some parameters in place; all have an average or none, and all have a copy for the model or none."""


def adamw(parameters: Sequence[Elements], rates: Rates) -> None:
    """Update parameters in place, each element by itself; in the precision of the master weights."""
    for p in parameters:
        gradient = p.gradient * rates.clip
        p.main.sub_(p.main * (rates.lr * rates.weight_decay))
        p.exp_avg.lerp_(gradient, 1 - rates.beta1)
        p.exp_avg_sq.lerp_(gradient * gradient, 1 - rates.beta2)
        p.main.addcdiv_(p.exp_avg, p.exp_avg_sq.sqrt() * rates.root + rates.eps, value=-rates.step_size)
        if p.average is not None:
            p.average.lerp_(p.main, rates.average)
        if p.model is not None:
            p.model.copy_(p.main)
