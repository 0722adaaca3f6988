"""Worker functions of the pipeline tests: sends, predictions and checkpoints."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.parallel_training import build, micro_batch, tiny_model, train
from dit.backends.process_groups import gather_objects
from dit.errors import ConfigError
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.losses import UncertaintyWeighting
from dit.parallel.dims import ParallelConfig
from dit.settings import SamplingConfig
from dit.verify.trial import Built, global_values, global_weights, named_parameters


def watch_sends(case: dict) -> dict:
    """Train, and list messages whose memory was freed or overwritten before `wait` of the send."""
    from megatron.core.pipeline_parallel import p2p_communication

    start, sent, touched = p2p_communication._p2p_ops, [], []

    def watched(send: Any, tensor: torch.Tensor, name: str) -> SimpleNamespace:
        memory, values = tensor.data_ptr(), tensor.detach().clone()
        sent.append(name)

        def wait() -> None:
            send.wait()
            if tensor.data_ptr() != memory or not torch.equal(tensor, values):
                touched.append(name)

        return SimpleNamespace(wait=wait)

    def start_watched(**options: Any) -> dict:
        handles = start(**options)
        sends = {name: handle for name, handle in handles.items() if name.startswith("send")}
        return handles | {name: watched(send, options[f"tensor_{name}"], name) for name, send in sends.items()}

    with mock.patch.object(p2p_communication, "_p2p_ops", start_watched):
        return {**train(case), "sent": sent, "touched": touched}


def predict(case: dict) -> dict:
    """Return held-out loss and samples with the averaged weights, and the weights after them."""
    from dit.backends import process_groups
    from dit.optimizer.ema import EMA
    from dit.parallel.full_network import FullNetwork
    from dit.sampling.generate import empty_pack, generate
    from dit.training.validate import held_out_loss

    it = build(case)
    groups, model = it.groups, it.model
    network = FullNetwork(it.chunks, groups)
    ema = EMA(it.shards, 0.5)
    for value in ema.values:
        value.mul_(1.25)
    before = [p.detach().clone() for chunk in it.chunks for p in chunk.parameters()]
    spec = model.batch_spec(multiple_of=it.dims.token_multiple)
    generator = torch.Generator().manual_seed(1)
    contexts = [torch.randn(length, 12, generator=generator) for length in (3, 4)]
    pack = empty_pack(spec, (1, 8, 8), 2, torch.device("cpu"), {"label": [1, 4], "context": contexts})
    with ema.applied(it.optimizer, it.wrapped):
        mine = range(groups.dp_rank, 4, groups.dp_size)
        batches = (micro_batch(i, packed=True, multiple_of=4) for i in mine)
        losses = held_out_loss(network, batches, FlowMatching(), tiny_model(), torch.device("cpu"), groups)
        options = {"solver": "heun", "num_steps": 2, "guidance_scale": 2.0, "seed": 3}
        samples = generate(network, FlowMatching(), pack, spec, SamplingConfig(**options))
        churn = SamplingConfig(**options, churn=[1.5, 0.0, 1e9, 1.0], guidance_rescale=0.5)
        churned = generate(network, EDM(), pack, spec, churn)
    after = [p for chunk in it.chunks for p in chunk.parameters()]
    stages = gather_objects([samples, torch.tensor(losses["loss"])], groups.pp)
    differ = [stage for stage, values in enumerate(stages) if not all(map(torch.equal, values, stages[0]))]
    process_groups.release()
    return {
        "losses": losses,
        "samples": samples,
        "churned": churned,
        "differ_between_stages": differ,
        "weights_back": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
    }


def _state(it: Built, ema) -> dict:
    """Return every unsharded tensor of a checkpoint, and the shapes in its fingerprint."""
    from dit.checkpoint.sharded_state import global_shapes, parameters_of
    from dit.optimizer.master_weights import SLOTS, get_step_count

    named = []
    for shard, average in zip(it.shards, ema.values, strict=True):
        shard.ensure_state()
        slots = {"weight": shard.main, "ema": average, **{slot: shard.state[slot] for slot in SLOTS}}
        named += [(f"{slot}.{shard.name}", shard, values) for slot, values in slots.items()]
    tensors, drifted = global_values(named, it.groups)
    weights, drifted_weights = global_weights(named_parameters(it.chunks), it.groups)
    tensors |= {f"model.{name}": weight for name, weight in weights.items()}
    drifted += drifted_weights
    shapes = global_shapes(parameters_of(it.shards), it.groups)
    return {"tensors": tensors, "drifted": drifted, "step": get_step_count(it.optimizer), "shapes": shapes}


def save(case: dict) -> dict:
    """Train, write a checkpoint into `folder` and return its expected content."""
    from dit.checkpoint.sharded_state import save_state
    from dit.optimizer.ema import EMA

    found: dict = {}

    def then(it: Built) -> None:
        ema = EMA(it.shards, 0.5)
        for value in ema.values:
            value.mul_(1.25)
        found.update(_state(it, ema))
        folder = Path(case["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder, it.shards, ema, it.optimizer, it.groups)

    train({**case, "then": then})
    return found


def load(case: dict) -> dict:
    """Load the checkpoint in `folder` on this case's layout, return its tensors and save them in `save_to`."""
    from dit.backends import process_groups
    from dit.checkpoint.sharded_state import load_state, load_weights, save_state
    from dit.checkpoint.state_files import SlotWeights
    from dit.optimizer.ema import EMA

    it = build(case)
    ema = EMA(it.shards, 0.5)
    load_state(Path(case["folder"]), it.shards, ema, it.optimizer, it.wrapped, it.groups)
    found = _state(it, ema)
    if "save_to" in case:
        Path(case["save_to"]).mkdir(parents=True, exist_ok=True)
        save_state(Path(case["save_to"]), it.shards, ema, it.optimizer, it.groups)
    load_weights(SlotWeights(Path(case["folder"]), "ema"), it.chunks, it.groups)
    found["ema_weights"], _ = global_weights(named_parameters(it.chunks), it.groups)
    process_groups.release()
    return found


def save_adapters(case: dict) -> dict:
    """Train adapters, write a checkpoint into `folder`, and return the scalars in it."""
    from dit.checkpoint.sharded_state import save_state
    from dit.checkpoint.state_files import StateReader

    scalars: dict = {}

    def then(it: Built) -> None:
        folder = Path(case["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder, it.shards, it.ema, it.optimizer, it.groups)
        torch.distributed.barrier()
        scalars.update(StateReader(folder).scalars)

    train({**case, "then": then})
    return scalars


def refuse(case: dict) -> list[str]:
    """Build a model that is refused, and return the error of each rank."""
    from dit.backends import process_groups

    with pytest.raises(ConfigError) as refusal:
        build(case)
    messages: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(messages, str(refusal.value))
    process_groups.release()
    return messages


def run_legs(case: dict) -> dict:
    """Run the training loop in parts, each of which resumes the previous one on another layout; return the logs."""
    from dit.backends import process_groups
    from dit.monitoring.guards import PreemptionFlag
    from dit.run_config import RunConfig
    from dit.settings import LoggingConfig, OptimizerConfig, TrainingConfig
    from dit.training.pretrain import Run, train
    from energon_data.mock import MockData

    for parallel, num_steps in case["legs"]:
        config = RunConfig(
            model=tiny_model(),
            data=MockData(
                shapes=["1x8x8", "1x4x8"], text_tokens=5, max_tokens_per_pack=40, pack_multiple_of=8, num_streams=1
            ),
            objective=EDM(weighting=UncertaintyWeighting()),
            optimizer=OptimizerConfig(lr=1e-3),
            parallel=ParallelConfig(**parallel),
            training=TrainingConfig(
                run_dir=case["folder"],
                num_steps=num_steps,
                global_batch_size=4,
                precision="fp32",
                ema_decay=0.9,
                log_interval=1,
                validation_interval=2,
                sample_interval=2,
            ),
            logging=LoggingConfig(tensorboard=False),
            sampling=SamplingConfig(num_steps=2),
        )
        dims, spec = config.check_here()
        run = Run(config, dims, spec, process_groups.initialize(config.parallel))
        train(run, SimpleNamespace(step=0), PreemptionFlag())
        run.close()
        process_groups.release()
    lines = (Path(case["folder"]) / "metrics.jsonl").read_text().splitlines() if Path(case["folder"]).exists() else []
    return {"metrics": [json.loads(line) for line in lines]}
