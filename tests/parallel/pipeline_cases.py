"""Worker functions of the pipeline tests: sends, predictions and runs."""

import json
from dataclasses import replace
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
from dit.parallel.dims import ParallelConfig
from dit.settings import SamplingConfig
from dit.verify.trial import Built


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
    from dit.sampling.generate import empty_pack
    from dit.training.validate import held_out_loss
    from tests.support.batches import generate

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


def save_adapters(case: dict) -> dict:
    """Train adapters, write a checkpoint into `folder`, and return the scalars in it."""
    from benchmarks.parallel_checkpoints import save_state
    from dit.checkpoint.state_files import StateReader

    scalars: dict = {}

    def then(it: Built) -> None:
        folder = Path(case["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder, it, it.ema)
        torch.distributed.barrier()
        scalars.update(StateReader(folder).scalars)

    train({**case, "then": then})
    return scalars


def refuse(case: dict) -> list[str]:
    """Build a model that is refused, and return the error of each rank."""
    from dit.backends import process_groups

    with pytest.raises(ConfigError) as refusal:
        build(case)
    messages = process_groups.gather_objects(str(refusal.value))
    process_groups.release()
    return messages


def run_legs(case: dict) -> list[dict]:
    """Run the training loop in parts, each of which resumes the previous one on another layout; return the log."""
    from dit.backends import process_groups
    from dit.monitoring.guards import PreemptionFlag
    from dit.run_config import RunConfig
    from dit.settings import LoggingConfig, OptimizerConfig, TrainingConfig
    from dit.training.pretrain import Run, train

    training = TrainingConfig(run_dir=str(case["folder"]), precision="fp32", ema_decay=0.9, global_batch_size=4)
    changes = {"log_interval": 1, "validation_interval": 2, "sample_interval": 2, **case.get("training", {})}
    training = replace(training, **changes)
    for parallel, num_steps in case["legs"]:
        config = RunConfig(
            **case["parts"],
            optimizer=OptimizerConfig(lr=1e-3),
            parallel=ParallelConfig(**parallel),
            training=replace(training, num_steps=num_steps),
            logging=LoggingConfig(tensorboard=False),
            sampling=SamplingConfig(num_steps=2),
        )
        dims, spec = config.check_here()
        groups = process_groups.initialize(config.parallel)
        run = Run(config, dims, spec, groups)
        train(run, SimpleNamespace(step=0), PreemptionFlag())
        run.close()
        process_groups.release()
    lines = (case["folder"] / "metrics.jsonl").read_text().splitlines() if groups.rank == 0 else []
    return [json.loads(line) for line in lines]
