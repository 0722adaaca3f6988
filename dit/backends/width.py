"""mu-parametrisation: the best learning rate of a small model stays the best one when the width grows.

The shapes of a model and of the same model at the base width show which dimensions of a linear layer grow. If they grow
m times, these factors apply, relative to the model at the base width:

    weight [out, in]          std of the initial weights   rate of AdamW   rate of Muon
    hidden: both grow         1 / sqrt(m)                  1 / m           1 / sqrt(m)
    input: out grows          1                            1               1
    output: in grows          1 / m                        1 / m           1 / m
    biases, norms, tables     1                            1               1

The weight decay of a step, rate times `weight_decay`, keeps its value. Attention divides by the square root of the head
size: heads grow in number, not in size, so the scale 1 / (head size) of the paper would be a constant factor.

AdamW: Yang et al. 2022 (Tensor Programs V), arXiv:2203.03466. Output layers have no multiplier 1 / m as in table 8, but
the equal form of table 3: smaller initial weights and rate, so that a layer initialised to zero needs no other code.

Muon: the update of a weight must have a spectral norm proportional to sqrt(out / in) (Yang, Simon and Bernstein 2023,
arXiv:2310.17813, condition 1), so that the change of each output does not depend on the width. An orthogonal matrix has
the norm 1, and `dit.kernels.muon` multiplies it by 0.2 sqrt(max(out, in)). The factor is the quotient of the two,
relative to that of the base width. In the table, `out` and `in` of a weight are equal up to a constant if both grow.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Optional

import torch
from torch import Tensor, nn

from dit.backends.init import Init, init_of, with_init
from dit.backends.provider import LINEAR_CLASSES
from dit.backends.sharding import Matrices, sharding_of


@dataclass(frozen=True)
class WidthFactors:
    """Factors of one parameter, relative to the model at the base width: of its initial values and of its rate."""

    init: float = 1.0
    adamw: float = 1.0
    muon: float = 1.0


UNCHANGED = WidthFactors()


def linear_factors(shape: torch.Size, base: torch.Size, matrices: Optional[Matrices]) -> WidthFactors:
    """Return the factors of the unsharded weight of a linear layer, `[out, in]`.

    Args:
        base: its shape at the base width.
        matrices: the matrices that it stores, if Muon may update it.
    """
    outputs, inputs = (Fraction(size, base_size) for size, base_size in zip(shape, base))
    muon = 1.0 if matrices is None else math.sqrt(_squared_rate(shape, matrices) / _squared_rate(base, matrices))
    if inputs == 1:
        return WidthFactors(muon=muon)
    return WidthFactors(float(1 / inputs) if outputs == 1 else math.sqrt(1 / inputs), float(1 / inputs), muon)


def _squared_rate(shape: torch.Size, matrices: Matrices) -> Fraction:
    """Return the square of Muon's rate for a spectral norm proportional to sqrt(out / in), up to a constant."""
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
        scale = init.scale if init.kind == "constant" else init.scale * factors.init
        with_init(parameter, Init(init.kind, scale))
        parameter.width_factors = factors  # type: ignore[attr-defined]


def rate_factor(parameter: Tensor, *, muon: bool) -> float:
    """Return the factor of the learning rate of a parameter.

    Args:
        parameter: a parameter of the model, or its shard under Megatron-FSDP.
        muon: whether Muon updates the weights of blocks.
    """
    parameter = getattr(parameter, "orig_param", parameter)
    factors: WidthFactors = getattr(parameter, "width_factors", UNCHANGED)
    by_muon = factors != UNCHANGED and muon and sharding_of(parameter).matrices is not None
    return factors.muon if by_muon else factors.adamw
