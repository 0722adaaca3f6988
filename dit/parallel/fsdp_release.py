"""A patch of Megatron-FSDP that frees the weights of a unit without changing the order in which gradients are summed.

Megatron-FSDP frees the gathered weights of a unit (a layer) after its backward pass. To detect its end, it inserts an
autograd node between the unit and all of its inputs (megatron-core 0.16.1). The unit's contributions to the gradient of
an input are then summed in this node first. In bf16 this changes the result if a unit uses an input several times and
other modules use it too, such as the skips of a UNet or the conditioning vector of all layers:

    x -+-> skip -------------------->          without the node    (skip + shortcut) + branch
       '-> [node] -+-> shortcut ----> unit     with the node       skip + (shortcut + branch)
                   '-> branch ------>

Both orders are equally accurate, but a run on one rank has no such node. The patch uses a hook on the first input of
the unit instead of a node. Autograd runs nodes in the reverse order of their creation, and AccumulateGrad immediately.
When it reaches the node that produced the input, all nodes of the unit have run.
"""

from collections.abc import Callable

from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
from torch import Tensor


def release_by_hook() -> None:
    """Install the patch in this process; a second call does nothing."""
    megatron_fsdp.RegisterFSDPBackwardFunction = _ReleaseAfterBackward


class _ReleaseAfterBackward:
    """Replaces the autograd function that Megatron-FSDP applies to the inputs of a unit."""

    @staticmethod
    def apply(release: Callable[[], None], first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Register `release` to run after the backward pass of the unit; return the unit's inputs.

        Args:
            release: frees the unit's weights.
            first, others: the inputs that require a gradient.
        """
        if first.is_leaf:
            first = first.view_as(first)  # AccumulateGrad of a leaf would run before other nodes of the unit

        def after_backward(grad: Tensor) -> None:
            release()

        first.register_hook(after_backward)
        # The unit that produced the input also has a hook on it, which gathers weights and must run after this one.
        hooks = first._backward_hooks
        assert hooks is not None  # register_hook creates it
        for key in list(hooks)[:-1]:
            hooks[key] = hooks.pop(key)
        return first, *others
