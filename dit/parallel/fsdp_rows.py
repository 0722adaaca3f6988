"""Megatron-FSDP must not cut a row of a matrix: a repair of how it lays parameters out in a bucket.

Shards of a bucket end at multiples of its chunk size, and parameters are laid out so that whole rows lie between these
marks. Parameters smaller than a chunk fill gaps; those for which there is no gap are laid at the end one behind the
other (megatron-core 0.16.1), and a mark may then fall inside a row, which ends in "shape '[-1, n]' is invalid".
"""

from collections.abc import Callable
from functools import wraps

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

Layout = tuple[
    dict[int, param_and_grad_buffer.TensorItemIndex],
    param_and_grad_buffer.BucketIndex,
    param_and_grad_buffer.ShardBucketIndex,
]
"""Where each parameter lies in a bucket, the bucket, and this rank's shard of it."""
_NAME = "build_data_parallel_buffer_index"


def keep_rows_whole() -> None:
    """Install the repair in this process; a second call does nothing."""
    original = getattr(param_and_grad_buffer, _NAME)
    if not hasattr(original, "__wrapped__"):
        setattr(param_and_grad_buffer, _NAME, _with_whole_rows(original))


def _with_whole_rows(layout: Callable[..., Layout]) -> Callable[..., Layout]:
    @wraps(layout)
    def repaired(
        elements: list[torch.Size],
        rank: int,
        world_size: int,
        is_distributed: bool,
        config: DistributedDataParallelConfig,
        bucket_id: int = 0,
        chunk_size_factor: int = 1,
    ) -> Layout:
        items, bucket, shard = layout(
            elements, rank, world_size, is_distributed, config, bucket_id, chunk_size_factor=chunk_size_factor
        )

        def up(index: int, step: int) -> int:
            return -(-index // step) * step

        def is_cut(start: int, size: int) -> bool:
            return start // chunk_size_factor != (start + size - 1) // chunk_size_factor

        small = (i for i, item in items.items() if item.size < chunk_size_factor and item.shape[1:].numel() > 1)
        moved = [i for i in small if is_cut(items[i].global_data_index, items[i].size)]
        if not moved:
            return items, bucket, shard
        end = max((x.global_data_index + x.size for i, x in items.items() if i not in moved), default=0)
        for i in moved:
            size = items[i].size
            start = up(end, chunk_size_factor) if is_cut(end, size) else end
            items[i] = items[i]._replace(global_data_index=start)
            end = start + size
        bucket = bucket._replace(size=up(end, world_size * chunk_size_factor), items=list(items.values()))
        shard = param_and_grad_buffer._get_dp_buffer_shard_bucket_index(bucket, is_distributed, world_size, rank)
        return items, bucket, shard

    return repaired
