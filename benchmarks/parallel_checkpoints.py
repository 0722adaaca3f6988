"""Further tasks for the ranks of `benchmarks.parallel_training`: write and read checkpoints."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel_training import build
from dit.backends import process_groups
from dit.checkpoint.manifest import FileRecord
from dit.optimizer.ema import EMA
from dit.verify.trial import Built, global_values, global_weights, named_parameters


def state_of(it: Built, ema: EMA) -> dict[str, Any]:
    """Return every global tensor of the training state by name, and the shapes of the parameters."""
    from dit.checkpoint.sharded_state import global_shapes, parameters_of
    from dit.optimizer.master_weights import SLOTS, get_step_count

    named = []
    for shard, average in zip(it.shards, ema.values):
        slots = {"weight": shard.main, "ema": average, **{slot: shard.slot(slot) for slot in SLOTS}}
        named += [(f"{slot}.{shard.name}", shard, values) for slot, values in slots.items()]
    tensors, drifted = global_values(named, it.groups)
    shapes = global_shapes(parameters_of(it.shards), it.groups)
    return {**tensors, "drifted": drifted, "shapes": shapes, "step": get_step_count(it.optimizer)}


def save_state(folder: Path, it: Any, ema: EMA) -> dict[str, FileRecord]:
    """Write the state of a model; return the sizes and hashes of the files of this rank."""
    from dit.checkpoint.sharded_state import files_of, index_of, local_state
    from dit.checkpoint.state_files import write_files

    local = local_state(it.shards, ema, it.groups)
    records = write_files(folder, files_of(local, index_of(local, it.groups), it.optimizer, it.groups))
    torch.distributed.barrier()
    return records


def save(case: dict[str, Any]) -> dict[str, Any]:
    """Write the state of an untrained model; all slots differ and are computed from the weights, element by element."""
    from dit.optimizer.master_weights import set_step_count

    it = build(case)
    ema = EMA([*it.shards], 0.9)
    for shard, average in zip(it.shards, ema.values):
        shard.ensure_state()
        shard.slot("exp_avg").copy_(3 * shard.main.detach())
        shard.slot("exp_avg_sq").copy_(shard.main.detach().square())
        average.copy_(shard.main.detach() - 1)
    set_step_count(it.optimizer, 7)
    if it.groups.rank == 0:
        Path(case["folder"]).mkdir(parents=True)
    torch.distributed.barrier()
    save_state(Path(case["folder"]), it, ema)
    state = state_of(it, ema)
    process_groups.release()
    return state


def load(case: dict[str, Any]) -> dict[str, Any]:
    """Read a state into a model of zeros; return also the model's weights, and those after reading the average."""
    from dit.checkpoint.sharded_state import load_state, load_weights
    from dit.checkpoint.state_files import SlotWeights

    it = build(case)
    for shard in it.shards:
        shard.main.detach().zero_()
    ema = EMA([*it.shards], 0.9)
    load_state(Path(case["folder"]), it.shards, ema, it.optimizer, it.wrapped, it.groups)
    state = state_of(it, ema)
    weights, drifted = global_weights(named_parameters(it.chunks), it.groups)
    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    load_weights(SlotWeights(Path(case["folder"]), "ema"), it.chunks, it.groups)
    averaged, apart = global_weights(named_parameters(it.chunks), it.groups)
    tensors |= {f"averaged.{name}": weight for name, weight in averaged.items()}
    state = {**state, **tensors, "drifted": state["drifted"] + drifted + apart}
    process_groups.release()
    return state
