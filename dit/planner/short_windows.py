"""Peak memory of deep models under Megatron-FSDP from traces of three and four layers.

Megatron-FSDP keeps a window of layers unsharded: weights gathered ahead, and gradients that wait for their reduction.
A backward pass therefore has its peak at one of two points. A trace of few layers with a window of fewer layers has
the same two points (`a`: activations of a layer, `g`: its gradients, `w`: its weights):

```
                      start of the backward pass     window is full of gradients
    window of 5, 8         L a + 6 w + g                (L - 9) a + 6 w + 10 g
    window of 1, 0         L a + 2 w + g                (L - 1) a + 2 w +  2 g
```
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dit.patches import patches
from dit.tracing.counter import StepCounter

SHORT_WINDOWS = 3
"""Number of layers above which memory grows linearly with `ShortWindows`."""


class ShortWindows:
    """Shortens the windows of Megatron-FSDP by whole layers, and adds these layers to the peak of the passes.

    Args:
        wrapped: model of equal layers, wrapped by `dit.parallel.fsdp.wrap_fsdp`.
        units: its layers.
    """

    @patches(
        "megatron-core 0.16",
        "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: suggested_RS_queue_capacity, "
        "suggested_AG_prefetch_size, ParameterGroup",
        why="its setting for both windows cannot be less than their default",
    )
    def __init__(self, wrapped: Any, units: Sequence[nn.Module], counter: StepCounter) -> None:
        self.counter = counter
        fsdp = wrapped.module
        groups = [group for group in wrapped.param_and_grad_buffer.parameter_groups if group.fsdp_unit_id == 0]
        layer = sum(group.model_weight_buffer.bucket_index.size for group in groups)
        self._ahead = (fsdp.suggested_AG_prefetch_size - 1) // layer
        self._waiting = fsdp.suggested_RS_queue_capacity // layer
        fsdp.suggested_AG_prefetch_size -= self._ahead * layer
        fsdp.suggested_RS_queue_capacity -= self._waiting * layer
        self._weights, self._gradients = (
            sum(buffer.bucket_index.size * buffer.dtype.itemsize for buffer in buffers)
            for buffers in zip(*((group.model_weight_buffer, group.main_grad_buffer) for group in groups))
        )
        first, second, *_ = units
        first.register_forward_pre_hook(self._enter_first)
        second.register_forward_pre_hook(self._enter_second)
        units[-1].register_forward_pre_hook(self._enter_last)
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._peaks, self._is_full, self._activations = [0, 0], False, 0

    def peak(self, last: int) -> int:
        """Return the peak of the passes with the original windows.

        Args:
            last: peak since the last call of a hook.
        """
        self._record(last)
        start, full = self._peaks
        full += self._waiting * (self._gradients - self._activations)
        return max(start, full) + self._ahead * self._weights

    def _record(self, peak: int) -> None:
        self._peaks[self._is_full] = max(self._peaks[self._is_full], peak)

    def _set(self, is_full: bool) -> None:
        counter = self.counter
        self._record(counter.peak)
        counter.peak, self._is_full = counter.live, is_full

    def _enter_first(self, *_: object) -> None:
        self._set(False)
        self._activations = -self.counter.live

    def _enter_second(self, *_: object) -> None:
        self._activations += self.counter.live

    def _enter_last(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(lambda _: self._set(True))  # its gradient ends the backward pass of the layer
