"""Forward and backward passes of a step as one CUDA graph: the host makes one call instead of one per kernel.

    host    read packs | copy them and the step's number to the inputs of the graph | replay | reduce, count, update
    graph                                                    forward and backward of every micro-batch, main gradients

A graph replays kernels with fixed addresses, shapes and scalar arguments. Its inputs are the tensors of the packs with
which it was captured, and the index of the step, from which noise is computed. Everything else in a pack (lengths,
grids, noise levels) is constant in a graph, so packs that differ in it have separate graphs. Packs of fixed size
(`dit.fixed_packs`) share one graph: the tables that are computed from their lengths are inputs, too.

The graph contains tensor-parallel and context-parallel communication, but not the reduction of the gradients over
data-parallel ranks. Megatron-Core's `FullCudaGraphWrapper` copies the next inputs on another stream without waiting for
the previous replay, which is correct only if the host waits in every step; here, copies and replays share a stream.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dit.backends.graphs import Capture, Graphed, capture_on_gpu
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.errors import BatchError
from dit.fixed_packs import without_lengths
from dit.layout import TABLES, SequenceLayout
from dit.pack_copy import all_layouts, compute_tables, layouts_of
from dit.patches import replaced
from dit.settings import TrainingConfig
from dit.step.forward_step import TrainingForwardStep
from dit.step.schedule import Logs, Schedule, forward_backward

MOST_GRAPHS = 8
NAMES = ("keys",)
"""Fields of a pack that do not change its computation."""
FIXED_NAMES = ("keys", "grids")
"""The same for a pack of fixed size, whose grids may not be read."""

Compute = Callable[[], Logs]


@dataclass
class _Graph:
    """A graph, and the packs with which it was captured.

    Attributes:
        step: index of the step, int64 `[]`.
        packs: micro-batches of a step, whose tensors each step overwrites.
        inputs: tensors of `packs`, and their tables if the packs have a fixed size.
    """

    step: Tensor
    packs: list[PackedBatch]
    run: Graphed
    inputs: list[Tensor] = field(default_factory=list)


class GraphedSchedule:
    """Runs the passes of a step, as `forward_backward` does: first eagerly, then by graphs.

    Args:
        capture: records the passes.
    """

    def __init__(self, capture: Capture = capture_on_gpu) -> None:
        self._capture = capture
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(
        self,
        forward_step: TrainingForwardStep,
        batches: Iterator[PackedBatch],
        wrapped: Sequence[Any],
        num_micro_batches: int,
        groups: ProcessGroups,
    ) -> Logs:
        """Run one optimizer step's micro-batches forward and backward, and finish the gradients.

        Raises:
            BatchError: a new combination of shapes would need more than `MOST_GRAPHS` graphs.
        """
        packs = list(islice(batches, num_micro_batches))
        inputs = list[Tensor]()
        kind = constants(packs, inputs)
        if kind not in self._graphs:
            self._check_number(packs)
            step = torch.zeros((), dtype=torch.int64, device=inputs[0].device)
            self._graphs[kind] = _Graph(step, packs, Graphed(self._capture))
        graph = self._graphs[kind]
        graph.step.fill_(forward_step.step)
        captured = graph.packs
        if captured is not packs:
            if not graph.run.is_captured:
                graph.inputs = inputs_of(captured, captured)  # the first step computes the tables
            torch._foreach_copy_(graph.inputs, inputs_of(packs, captured))
            if captured[0].layout.is_fixed and not graph.run.is_captured:
                captured = without_lengths(captured)
        compute = partial(passes, replace(forward_step, step=graph.step), captured, wrapped, groups)
        logs = graph.run(compute)
        for chunk in wrapped:
            chunk.end_replay()
        wrapped[0].config.finalize_model_grads_func(wrapped, None, pg_collection=groups.collection)
        return logs

    def _check_number(self, packs: Sequence[PackedBatch]) -> None:
        if len(self._graphs) == MOST_GRAPHS:
            shapes = [(len(pack.layout.lengths), pack.layout.total_tokens, sorted(set(pack.grids))) for pack in packs]
            raise BatchError(
                f"training.cuda_graph=True captures a graph for each combination of shapes in a step, and these packs "
                f"(samples, tokens, grids) would need more than {MOST_GRAPHS}: {shapes}; use data of one shape with "
                "texts of one length, or training.cuda_graph=False"
            )


def schedule_of(training: TrainingConfig) -> Schedule:
    """Return the schedule that `training.cuda_graph` selects."""
    return GraphedSchedule() if training.cuda_graph else forward_backward


def passes(
    forward_step: TrainingForwardStep, packs: Sequence[PackedBatch], wrapped: Sequence[Any], groups: ProcessGroups
) -> Logs:
    """Run all passes of a step without the reduction of the gradients; clear main gradients that no pass wrote."""
    with replaced(wrapped[0].config, finalize_model_grads_func=None):
        logs = forward_backward(forward_step, iter(packs), wrapped, len(packs), groups)
    for chunk in wrapped:
        chunk.zero_stale()
    return logs


def inputs_of(packs: Sequence[PackedBatch], captured: Sequence[PackedBatch]) -> list[Tensor]:
    """Return the inputs of a graph: the tensors of packs, and if they have a fixed size, the tables of their layouts.

    Args:
        captured: packs with which the graph is captured. Tables that exist in them but not in `packs` are computed.
    """
    inputs = list[Tensor]()
    constants(packs, inputs)
    for pack, first in zip(packs, captured):
        if not first.layout.is_fixed:
            continue
        layouts, captured_layouts = layouts_of(pack), all_layouts(first)
        compute_tables(layouts, captured_layouts)
        for name, layout in captured_layouts.items():
            fields_of_layout = [getattr(layouts[name], part.name) for part in fields(layout)]
            inputs.extend(x for x in fields_of_layout if isinstance(x, Tensor))
            constants([vars(layouts[name])[table] for table in sorted(TABLES & vars(layout).keys())], inputs)
            constants([layouts[name].tables[key] for key in layout.tables], inputs)
    return inputs


def constants(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return the values that are constant in a graph (its key in a cache), and append all other tensors to a list.

    Tensors of a layout depend only on its lengths. Lengths are part of the key, except in packs of fixed size.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if isinstance(value, SequenceLayout) and value.is_fixed:
        return value.sizes
    if isinstance(value, SequenceLayout):
        related = value.parent, value.local, value.levels
        return value.sizes, tuple(constants(part, []) for part in related)
    if isinstance(value, Mapping):
        return tuple((name, constants(part, tensors)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(constants(part, tensors) for part in value)
    if is_dataclass(value):
        is_fixed = isinstance(value, PackedBatch) and value.layout.is_fixed
        names = [part.name for part in fields(value) if part.name not in (FIXED_NAMES if is_fixed else NAMES)]
        return tuple(constants(getattr(value, name), tensors) for name in names)
    return value
