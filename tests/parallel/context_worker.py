"""What one rank of a context-parallel test world runs; cases name these functions."""

from collections import Counter
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dit.backends import process_groups
from dit.backends.context_rows import context_rows
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.parallel.parallelize import attention_path
from tests.unit.backends.attention_cases import AttentionCase, exact, run


@contextmanager
def counted(group: Any):
    """Count the bytes that this rank sends to others of `group`, by kind of call."""
    sent: Counter[str] = Counter()
    originals = {n: getattr(dist, n) for n in ("batch_isend_irecv", *COLLECTIVES)}

    def point_to_point(ops):
        for op in ops:
            if op.op is dist.isend and op.group is group:
                sent["isend"] += op.tensor.nbytes
        return originals["batch_isend_irecv"](ops)

    def collective(name):
        def call(output, given, *args, group=None, **kwargs):
            if group is watched:
                # A gather sends all of its input to each other rank; the other two send each part to one rank.
                copies = group.size() - 1 if name == "all_gather_into_tensor" else (group.size() - 1) / group.size()
                sent[name] += given.nbytes * copies
            return originals[name](output, given, *args, group=group, **kwargs)

        watched = counted_group
        return call

    counted_group = group
    dist.batch_isend_irecv = point_to_point
    for name in COLLECTIVES:
        setattr(dist, name, collective(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def attention(case: dict) -> dict:
    """Compare one scheme with the exact attention over whole packs, for every attention case.

    Returns:
        Per attention case, the worst relative error over all ranks of the output and of each gradient.
    """
    parallel = ParallelConfig(**case["parallel"])
    size, split = parallel.context_parallel_size, parallel.context_split
    check_parallel(parallel, world_size=dist_size(), num_attention_heads=4, micro_batch_size=1, global_batch_size=1)
    groups = process_groups.initialize(parallel)
    spread = attention_path(parallel, groups, torch.float32)
    errors = {}
    for given in case["cases"]:
        one: AttentionCase = given
        layout_q, layout_k = one.layouts()
        rows = context_rows(layout_q, size, split)
        mine = rows.of_rank(groups.cp.rank())
        keys = mine if layout_k is layout_q else slice(None)

        def sharded(q, k, v, _layout_q, _layout_k, mine=mine, keys=keys, layout_q=layout_q, layout_k=layout_k):
            held = layout_q.select(mine)
            out = spread(q[mine], k[keys], v[keys], held, held if layout_k is layout_q else layout_k)
            # Rows of other ranks come in as zeros: the cotangent reaches only what this rank computed.
            return torch.zeros_like(q).index_copy(0, mine, out)

        ours, theirs = run(sharded, one, one.qkv()), exact(one, one.qkv())
        found = {}
        for name, layout in (("out", layout_q), ("grad_q", layout_q), ("grad_k", layout_k), ("grad_v", layout_k)):
            got, want = getattr(ours, name), getattr(theirs, name)
            dist.all_reduce(got, group=groups.cp)
            found[name] = float((got - want).norm() / want.norm().clamp(min=1e-12))
            found[f"{name} padding"] = float(got[~layout.valid_T].abs().sum())
        errors[one.name] = found
    process_groups.release()
    return errors


def dist_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else process_groups.world_size_from_environment()
