"""A patch of Megatron-FSDP: freeing the weights of a unit must not change how gradients are summed.

Megatron-FSDP frees the gathered weights of a unit (a layer) behind its backward pass. To know when that is, it puts a
node of its own between the unit and all of its inputs (megatron-core 0.16.1). What the unit contributes to the gradient
of an input is then summed there first. In bf16 that is another number where a unit reads an input at several places,
and others read it too, such as the skips of a UNet or the conditioning vector of all layers:

    x -+-> skip -------------------->          without the node    (skip + shortcut) + branch
       '-> [node] -+-> shortcut ----> unit     with the node       skip + (shortcut + branch)
                   '-> branch ------>

Neither is more exact, but one rank has no such node. The patch adds no node, but a hook on the first input of the unit.
Autograd runs nodes in the reverse order of their creation, and AccumulateGrad at once. When the node that made the
input is due, no node of the unit is left.
"""

from collections.abc import Callable

from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
from torch import Tensor


def release_without_a_node() -> None:
    """Install the patch in this process; a second call does nothing."""
    megatron_fsdp.RegisterFSDPBackwardFunction = _ReleaseBehindBackward


class _ReleaseBehindBackward:
    """Stands for the autograd function that Megatron-FSDP applies to the inputs of a unit."""

    @staticmethod
    def apply(release: Callable[[], None], first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Call `release` behind the backward pass of the unit; return its inputs.

        Args:
            release: frees the unit's weights.
            first, others: the inputs that have a gradient.
        """
        if first.is_leaf:
            first = first.view_as(first)  # its AccumulateGrad would run before other nodes of the unit

        def behind_backward(grad: Tensor) -> None:
            release()

        first.register_hook(behind_backward)
        # The unit that made the input has a hook there, too, which gathers weights: it must run behind this one.
        hooks = first._backward_hooks
        assert hooks is not None  # one was registered just now
        for key in list(hooks)[:-1]:
            hooks[key] = hooks.pop(key)
        return first, *others
