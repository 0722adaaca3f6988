"""Peak memory of deep models under Megatron-FSDP from traces of fewer layers.

Megatron-FSDP keeps weights that it gathered ahead, and a window of gradients that wait for their reduction. A backward
pass has its peak either at its start or when the window is full. With a window of fewer layers, a trace of fewer
layers has both (`a`: activations of a layer, `g`: its gradients):

```
                         start         full
    window of 8 layers   L a + g       (L - 9) a + 10 g
    window of 0 layers   L a + g       (L - 1) a +  2 g
```
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dit.patches import patches
from dit.tracing.counter import StepCounter


class ShortWindow:
    """Shortens the window of gradients by whole layers, and adds these layers to the peak of the passes.

    Args:
        wrapped: model of equal layers, wrapped by `dit.parallel.fsdp.wrap_fsdp`.
        units: its layers.
    """

    @patches(
        "megatron-core 0.16",
        "core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: suggested_RS_queue_capacity, ParameterGroup",
        why="its setting also changes how many weights are gathered ahead",
    )
    def __init__(self, wrapped: Any, units: Sequence[nn.Module], counter: StepCounter) -> None:
        self.counter = counter
        fsdp = wrapped.module
        groups = [group for group in wrapped.param_and_grad_buffer.parameter_groups if group.fsdp_unit_id == 0]
        buffers = [group.main_grad_buffer for group in groups]
        layer = sum(buffer.bucket_index.size for buffer in buffers)
        self._gradients = sum(buffer.bucket_index.size * buffer.dtype.itemsize for buffer in buffers)
        self._removed = fsdp.suggested_RS_queue_capacity // layer
        fsdp.suggested_RS_queue_capacity -= self._removed * layer
        first, second, *_ = units
        first.register_forward_pre_hook(self._enter_first)
        second.register_forward_pre_hook(self._enter_second)
        units[-1].register_forward_pre_hook(self._enter_last)
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._peaks, self._is_full, self._activations = [0, 0], False, 0

    def peak(self, last: int) -> int:
        """Return the peak of the passes with the original window.

        Args:
            last: peak since the last call of a hook.
        """
        self._record(last)
        start, full = self._peaks
        return max(start, full + self._removed * (self._gradients - self._activations))

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
