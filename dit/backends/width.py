"""mu-parametrisation: the best learning rate of a small model stays the best one when the width grows.

Each linear layer is compared with the same layer at the base width. A dimension grows if it is m times as large. The
factors are relative to the base width:

    weight [out, in]                  std of the initial weights   rate of AdamW   rate of Muon
    hidden: both grow                 1 / sqrt(m)                  1 / m           1 / sqrt(m)
    input: out grows                  1                            1               1, or sqrt(m) if in > out
    output: in grows, in > out        1 / m                        1 / m           1 / m
    biases, norms, embedding tables   1                            1               1

The product of rate and `weight_decay` does not depend on the width. The paper divides the scores of attention by the
head size instead of its square root. Here only the number of heads grows, so the two differ by a constant factor.

AdamW: Yang et al. 2022 (Tensor Programs V), arXiv:2203.03466. Table 8 multiplies the output by 1 / m. The factors here
are those of table 3, which is equivalent: it scales the initial weights and the rate, and not the forward pass.

Muon: the update of a weight must have a spectral norm proportional to sqrt(out / in) (Yang, Simon and Bernstein 2023,
arXiv:2310.17813, condition 1), so that the change of each output does not depend on the width. An orthogonal matrix has
the norm 1, and `dit.kernels.muon` multiplies it by 0.2 sqrt(max(out, in)). Muon's factor is therefore
sqrt(out / in) / sqrt(max(out, in)), divided by its value at the base width.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import init_of, with_init
from dit.backends.provider import LINEAR_CLASSES
from dit.backends.sharding import Matrices, sharding_of


@dataclass(frozen=True)
class WidthFactors:
    """Factors of the initial values and of the learning rates of one parameter, relative to the base width."""

    init: float = 1.0
    adamw: float = 1.0
    muon: float = 1.0


UNCHANGED = WidthFactors()


def linear_factors(shape: torch.Size, base: torch.Size, matrices: Optional[Matrices]) -> WidthFactors:
    """Return the factors of the unsharded weight of a linear layer, `[out, in]`.

    Args:
        shape, base: its shape, and its shape at the base width.
        matrices: the matrices that it stores; None if AdamW updates it.
    """
    outputs, inputs = (Fraction(size, base_size) for size, base_size in zip(shape, base))
    adamw = float(1 / inputs)
    muon = adamw if matrices is None else math.sqrt(_squared_rate(shape, matrices) / _squared_rate(base, matrices))
    return WidthFactors(adamw if outputs == 1 else math.sqrt(1 / inputs), adamw, muon)


def _squared_rate(shape: torch.Size, matrices: Matrices) -> Fraction:
    """Return the square of the rate for an update with a norm proportional to sqrt(out / in), up to a factor."""
    size = matrices.views(torch.empty(shape, device="meta"))[0].flatten(0, 1).shape
    outputs, inputs = size if matrices.dim == 0 else size[::-1]
    return Fraction(outputs, inputs * max(outputs, inputs))


def set_width(model: nn.Module, base: nn.Module, tp_size: int) -> None:
    """Set the initialisation and the `WidthFactors` of every parameter of a chunk of a model.

    Args:
        base: the full model at the base width, without parallelism.
    """
    linears = {f"{name}.weight" for name, module in base.named_modules() if isinstance(module, LINEAR_CLASSES)}
    base_parameters = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        sharding, base_parameter = sharding_of(parameter, name), base_parameters[name]
        factors = UNCHANGED
        if name in linears:
            shape = torch.Size(sharding.global_shape(parameter.shape, tp_size))
            factors = linear_factors(shape, base_parameter.shape, sharding.matrices)
        init = init_of(base_parameter, name)
        with_init(parameter, replace(init, scale=init.scale * factors.init))
        parameter.width_factors = factors  # type: ignore[attr-defined]


def rate_factor(parameter: Tensor, *, muon: bool) -> float:
    """Return the factor of the learning rate of a parameter.

    Args:
        parameter: a parameter of the model, or its shard under Megatron-FSDP.
        muon: whether Muon updates the weights of blocks.
    """
    parameter = getattr(parameter, "orig_param", parameter)
    factors: WidthFactors = getattr(parameter, "width_factors", UNCHANGED)
    return factors.muon if muon else factors.adamw
