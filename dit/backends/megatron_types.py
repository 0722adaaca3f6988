"""Types of the Megatron-Core objects that this project uses; Megatron-Core has no annotations for them."""

from collections.abc import MutableMapping
from typing import Any, Protocol, TypeAlias

from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from dit.backends.gradients import GradientFactor

MegatronConfig: TypeAlias = TransformerConfig
MegatronModelType: TypeAlias = ModelType


class MegatronOptimizer(Protocol):
    """An optimizer of Megatron-Core, either for one kind of parameters or a chain of such optimizers.

    Attributes:
        optimizer: the torch optimizer of the master weights; missing in a chain.
        param_groups: parameter groups with their settings, as in torch.
        gradient_factor: factor of the gradients; set by this project.
        gradient_copies: ranks that add the same gradients to the norm, which is summed over all ranks: the number of
            instances of hybrid sharding, else 1; set by this project.
        parts_in_norm: optimizers of the chain whose gradients this rank adds to the norm; set by this project.
    """

    optimizer: Optimizer
    param_groups: list[MutableMapping[str, Any]]
    gradient_factor: GradientFactor
    gradient_copies: int
    parts_in_norm: "list[MegatronOptimizer]"

    def prepare_grads(self) -> bool:
        """Copy the gradients to the master weights; return whether any of them is not finite."""

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Return the gradients that this rank adds to the norm; not available for a chain."""

    def get_grad_stats_parallel_group(self) -> Any:
        """Return the group over which the gradient norm is summed; not available for a chain."""

    def get_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
