"""Count the bytes that ranks send to each other, by kind of call."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from benchmarks.parallel_training import build, micro_batch
from dit.backends import process_groups
from dit.objectives.flow_matching import FlowMatching
from dit.step.forward_step import training_forward_step
from dit.step.schedule import forward_backward
from dit.verify.trial import SEED

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
# Megatron-Core imports two of them under other names.
ALIASES = {"dist_all_gather_func": "all_gather_into_tensor", "dist_reduce_scatter_func": "reduce_scatter_tensor"}
BINDING = (layers, mappings, param_and_grad_buffer)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


@contextmanager
def bytes_sent(groups: Sequence[Any], *, reductions: bool = False) -> Iterator[Counter[str]]:
    """Count the bytes that this rank sends in these groups, by kind of call (`shapes`: sends of tensor shapes).

    Args:
        groups: other groups with the same ranks count as well.
        reductions: also count all-reduces, as ring all-reduces.
    """
    sent: Counter[str] = Counter()
    watched = {_ranks(group) for group in groups}
    exchange, all_reduce = dist.batch_isend_irecv, dist.all_reduce

    def exchanging(ops: list[Any]) -> Any:
        for op in ops:
            if op.op is dist.isend and _ranks(op.group) in watched:
                sent["p2p" if op.tensor.is_floating_point() else "shapes"] += op.tensor.nbytes
        return exchange(ops)

    def reducing(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        ranks = _ranks(group)
        if ranks in watched:
            sent["all_reduce"] += 2 * tensor.nbytes * (len(ranks) - 1) // len(ranks)
        return all_reduce(tensor, *args, group=group, **kwargs)

    def watching(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            ranks = _ranks(group)
            if ranks in watched:
                given = args[1] if args else next(kwargs[key] for key in ("input_tensor", "input") if key in kwargs)
                others = len(ranks) - 1
                if len(args) == 4:  # an all-to-all with uneven shares: all except the rank's own share
                    sent[name] += given[:1].nbytes * (sum(args[3]) - args[3][group.rank()])
                else:
                    # A gather sends its input to each other rank; the other two send one part of it to each.
                    sent[name] += given.nbytes * others // (1 if name == "all_gather_into_tensor" else len(ranks))
            return original(*args, group=group, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "batch_isend_irecv", exchanging))
        if reductions:
            stack.enter_context(patch.object(dist, "all_reduce", reducing))
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, watching(name, getattr(dist, name))))
        for module in BINDING:
            for alias, name in ALIASES.items():
                stack.enter_context(patch.object(module, alias, watching(name, getattr(module, alias))))
        yield sent


def of_a_step(case: dict) -> list[dict[str, int]]:
    """Make one training step and return the bytes that each rank sent in its tensor and pipeline groups."""
    it = build(case)
    groups = it.groups
    for chunk in it.wrapped:
        chunk.zero_grad_buffer()
    batches = (micro_batch(i, packed=True, multiple_of=4) for i in range(it.dims.micro_batches))
    step = training_forward_step(FlowMatching(), it.model, SEED, 0)
    with bytes_sent([groups.tp]) as tensor, bytes_sent([groups.pp]) as pipeline:
        forward_backward(step, batches, it.wrapped, it.dims.micro_batches, groups)
    mine = {**{f"tp {kind}": count for kind, count in tensor.items()}, "pp p2p": pipeline["p2p"]}
    found = process_groups.gather_objects(mine)
    process_groups.release()
    return found
