"""Tasks for the ranks of a test world: memory and file size of checkpoints, and state in two precisions."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parallel_checkpoints import load, save, save_state
from benchmarks.parallel_training import build
from dit.backends import process_groups
from dit.checkpoint.verify_together import on_first_rank
from dit.parallel.build import count_parameters
from dit.parallel.dims import ParallelConfig
from dit.verify.trial import named_parameters
from tests.support.reference import LiveBytes


def cost(case: dict) -> dict:
    """Save and load the training state and count the bytes allocated and written by each rank."""
    from dit.checkpoint.sharded_state import load_state
    from dit.optimizer.ema import EMA

    it = build(case)
    ema = EMA(it.shards, 0.5)
    for shard in it.shards:
        shard.ensure_state()
    folder = Path(case["folder"])
    if it.groups.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with LiveBytes() as saving:
        records = save_state(folder, it, ema)
    with LiveBytes() as loading:
        load_state(folder, it.shards, ema, it.optimizer, it.wrapped, it.groups)
    mine = {
        "saving": saving.peak,
        "loading": loading.peak,
        "written": sum(record.size_bytes for record in records.values()),
        "owned": sum(4 * 4 * shard.main.numel() for shard in it.shards),
        "largest": max(4 * parameter.numel() for _, parameter in named_parameters(it.chunks)),
    }
    found = process_groups.gather_objects(mine)
    process_groups.release()
    return {"parameters": count_parameters(it.model), **{name: [rank[name] for rank in found] for name in mine}}


def fail_on_the_first_rank(case: dict) -> dict:
    """Let a read of rank 0 fail; return the class and message of the error that each rank raises."""
    groups = process_groups.initialize(ParallelConfig())

    def read() -> None:
        raise case["error"]

    try:
        on_first_rank(read, groups)
    except Exception as error:
        errors = process_groups.gather_objects([type(error).__name__, str(error)])
    process_groups.release()
    return {"errors": errors}


def norms_in_fp32(chunks: list) -> None:
    """Convert the norms to fp32, as in a model whose other weights are in bf16."""
    for name, parameter in named_parameters(chunks):
        if "layernorm" in name:
            parameter.data = parameter.data.float()


def save_two_precisions(case: dict) -> dict:
    """Save the state of a bf16 model with norms in fp32."""
    return save({**case, "precision": "bf16", "break": norms_in_fp32})


def load_two_precisions(case: dict) -> dict:
    """Load that state into a new model of the same kind."""
    result = load({**case, "precision": "bf16", "break": norms_in_fp32})
    dtypes = {tensor.dtype for tensor in result.values() if isinstance(tensor, torch.Tensor)}
    # Rank 0 has the tensors of all ranks.
    assert dtypes == ({torch.float32, torch.bfloat16} if os.environ["RANK"] == "0" else set())
    return result
