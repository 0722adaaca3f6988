"""What this project uses of Megatron-Core's objects; Megatron-Core itself says no types."""

from collections.abc import MutableMapping
from typing import Any, Protocol, TypeAlias

from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.optim import Optimizer

from dit.backends.gradients import GradientFactor

MegatronConfig: TypeAlias = TransformerConfig
MegatronModelType: TypeAlias = ModelType


class MegatronOptimizer(Protocol):
    """An optimizer of Megatron-Core: a chain of them, or one over all parameters of a kind.

    Attributes:
        optimizer: torch's, over the master weights; a chain has none.
        param_groups: the settings of each group of parameters, as torch has them.
        gradient_factor: what the gradients are to be multiplied by; set by this project.
    """

    optimizer: Optimizer
    param_groups: list[MutableMapping[str, Any]]
    gradient_factor: GradientFactor

    def prepare_grads(self) -> bool:
        """Copy the gradients to the master weights; return whether one is not finite."""

    def get_grad_norm(self) -> float:
        """Return the global norm of the gradients."""

    def get_grad_stats_parallel_group(self) -> Any:
        """Return the ranks whose gradients are parts of one norm; not of a chain."""

    def get_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def step_with_ready_grads(self) -> bool:
        """Update the weights."""
