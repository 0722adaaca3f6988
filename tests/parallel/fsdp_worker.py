"""Functions that test cases run on each rank of a Megatron-FSDP world."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.parallel_training import build, packs
from dit.backends import process_groups
from dit.backends.sharding import ParameterSharding, set_sharding
from dit.checkpoint.sharded_state import share_of_copy
from dit.models.base import Backbone, Stage
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.master_weights import SLOTS, copy_of, get_step_count, master_shards, part_of
from dit.optimizer.schedules import Constant
from dit.optimizer.step_numbers import StepNumbers
from dit.parallel.build import build_optimizer, megatron_config, wrap
from dit.parallel.dims import ParallelConfig
from dit.parallel.loss_scale import sub_optimizers
from dit.run_config import RunConfig
from dit.sampling.generate import empty_pack
from dit.settings import CheckpointConfig, LoggingConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.step.schedule import forward_backward
from dit.training.pretrain import Run
from dit.verify.trial import SEED, global_values
from energon_data.mock import MockData
from tests.parallel.traffic import bytes_sent
from tests.support.batches import generate


def config_of(case: dict) -> RunConfig:
    """Return the settings of a run on synthetic ragged packs, the same on every layout.

    `case` may change the fields of some parts, such as `{"model": {"num_experts": 4}}`.
    """

    def part(name: str, cls: type, **own: Any) -> Any:
        return cls(**{**own, **case.get(name, {})})

    run_dir, precision = str(case["run_dir"]), case.get("precision", "fp32")
    sizes = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "position_embedding": "sincos_3d"}
    return RunConfig(
        model=part("model", DiTConfig, **sizes, num_classes=3),
        data=part(
            "data", MockData, shapes=["1x8x8", "1x4x8"], num_streams=4, max_tokens_per_pack=40, pack_multiple_of=8
        ),
        objective=FlowMatching(),
        optimizer=part("optimizer", OptimizerConfig, lr=1e-2, weight_decay=0.1),
        schedule=case.get("schedule", Constant()),
        parallel=ParallelConfig(**case["parallel"]),
        training=part(
            "training", TrainingConfig, run_dir=run_dir, global_batch_size=4, precision=precision, ema_decay=0.5
        ),
        checkpoint=part("checkpoint", CheckpointConfig, interval=0),
        logging=LoggingConfig(tensorboard=False),
    )


def start(case: dict) -> Run:
    """Start or resume the run in `case["run_dir"]`."""
    config = config_of(case)
    dims, spec = config.check_here()
    return Run(config, dims, spec, process_groups.initialize(config.parallel), quiet=True)


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Return the unsharded state of a run on rank 0: masters, averages, Adam's moments and step count."""
    state, named = run.state, []
    for i, shard in enumerate(state.shards):
        parts = {"weight": shard.main, **{slot: shard.slot(slot) for slot in shard.slots}}
        parts |= {slot: values[i] for slot, values in state.ema.by_slot.items()}
        named += [(f"{slot}.{shard.name}", shard, values) for slot, values in parts.items()]
    tensors, drifted = global_values(named, run.groups)
    assert drifted == []
    return {**tensors, "step": torch.tensor(get_step_count(state.optimizer))}


def look(run: Run) -> dict:
    """Return the held-out loss and three samples, drawn with the averaged weights and with the current weights."""
    pack = empty_pack(run.spec, (1, 8, 8), 3, run.device, {"label": [0, 1, 2]})

    def draw() -> torch.Tensor:
        options = {"solver": "euler", "num_steps": 1, "guidance_scale": 2.0, "seed": 7}
        return generate(run.network, FlowMatching(), pack, run.spec, SamplingConfig(**options))

    run.validate()
    with run.state.ema.applied(run.state.optimizer, run.state.wrapped):
        averaged = draw()
    return {"held_out": run.state.held_out.loss, "averaged": averaged, "raw": draw()}


def samples_of(run: Run) -> list[str]:
    """Return the sorted names of all samples that any replica has trained on."""
    own = run.batches.consumed.keys if run.groups.is_data_reader else []
    return sorted(key for rank in process_groups.gather_objects(own) for key in rank)


def train(case: dict) -> dict:
    """Resume, train and save; `look` before and after if the case requests it. Return the state before and after."""
    run = start(case)
    loss_sums = torch.zeros(2)
    result = {"resumed_at": run.state.step, "before": state_of(run)}
    if case.get("look_before"):
        result["looks_before"] = look(run)
    result["grad_norms"] = [run.step(loss_sums) for _ in range(case["steps"])]
    result["after"], result["samples"] = state_of(run), samples_of(run)
    if case.get("look_after"):
        result["looks_after"] = look(run)
        result["after_looking"] = state_of(run)
    if case.get("save"):
        run.save()
    if "steps_after" in case:
        result["grad_norms"] += [run.step(loss_sums) for _ in range(case["steps_after"])]
        result["at_end"], result["samples_at_end"] = state_of(run), samples_of(run)
    run.close()
    process_groups.release()
    return result


def clipped(case: dict) -> list[dict[str, Any]]:
    """Clip gradients while the norm of instance 1 uses slightly larger ones; return norms and weights of each rank."""
    run = start(case)
    copies, (part,) = run.groups.shard_copies, sub_optimizers(run.state.optimizer)
    if copies.rank() == 1:  # by a few float32 ulps, the error of another summation order
        gradients = part.get_main_grads_for_grad_norm
        part.get_main_grads_for_grad_norm = lambda: [gradient * (1 + 2**-21) for gradient in gradients()]
    loss_sums = torch.zeros(2)
    mine = {"norms": [run.step(loss_sums) for _ in range(case["steps"])]}
    mine["weights"] = {s.name: s.main.detach().clone() for s in run.state.shards}
    found = process_groups.gather_objects(mine)
    run.close()
    process_groups.release()
    return found


class Unit(nn.Module):
    """A layer that FSDP gathers and frees as one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Awkward(Backbone):
    """A model with a parameter of its root module, `embed` registered last but run first, and an unused module."""

    fsdp_units = (Unit,)

    def __init__(self, config) -> None:
        super().__init__(Stage(range(2)))
        self.config = config
        self.scale = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 4)
        self.layers = nn.ModuleList(Unit() for _ in range(2))
        self.unused = nn.Linear(8, 8)
        self.embed = nn.Linear(4, 8)
        for parameter in self.parameters():
            set_sharding(parameter, ParameterSharding())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Frozen(Awkward):
    """A model whose parameters before the first layer are frozen, as in a model with adapters."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.scale.requires_grad = False
        self.embed.requires_grad_(False)


class ConditionedUnit(nn.Module):
    """A layer that reads both of its inputs twice, its condition first."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.linear = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        shift = self.condition(cond.tanh())
        return x * cond + self.linear(x).tanh() + shift


class Joined(Backbone):
    """A model in which several layers read the same tensors; the input of the first layer is a leaf.

    `gathered`: for each layer, the layers with gathered weights when the gradient of its input was computed.
    """

    fsdp_units = (ConditionedUnit,)

    def __init__(self, config) -> None:
        super().__init__(Stage(range(6)))
        self.config, self.gathered = config, {}
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(ConditionedUnit() for _ in self.stage.layers)
        for parameter in self.parameters():
            set_sharding(parameter, ParameterSharding())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cond = self.embed(x)
        x, skips = torch.cat([x, x], -1).requires_grad_(), []
        for i, layer in enumerate(self.layers):
            x.register_hook(partial(self._look, i))
            skips.append(x)
            x = layer(x, cond)
        for skip in reversed(skips):
            x = x + skip
        return self.head(x)

    def _look(self, i: int, grad: torch.Tensor) -> None:
        self.gathered[i] = unsharded(self.layers)


def unsharded(layers: nn.ModuleList) -> list[int]:
    """Return the numbers of the layers whose weights are gathered."""
    return [i for i, layer in enumerate(layers) if layer.linear.weight.untyped_storage().nbytes() > 0]


MICRO_BATCHES = 3
"""Micro-batches of a step on each of 4 ranks."""
BACKBONES = {"awkward": (Awkward, "fp32"), "frozen": (Frozen, "fp32"), "joined": (Joined, "bf16")}


def gradients(case: dict) -> dict:
    """Return the gradients of one of `BACKBONES` over four micro-batches, divided among the ranks."""
    kind, precision = BACKBONES[case["backbone"]]
    parallel = ParallelConfig(**case["parallel"])
    groups = process_groups.initialize(parallel)
    torch.manual_seed(0)
    backbone = kind(megatron_config(DiTConfig(hidden_size=8, num_attention_heads=1), parallel, precision))
    backbone.to(backbone.config.params_dtype)
    wrapped = wrap([backbone], parallel, groups)
    optimizer = build_optimizer(wrapped, OptimizerConfig(), parallel, TrainingConfig(precision=precision), groups)
    shards = master_shards(optimizer, [backbone])
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1)).to(backbone.config.params_dtype)
    x = x.chunk(groups.dp_size)[groups.dp_rank]
    config = backbone.config
    wrapped[0].zero_grad_buffer()
    with config.no_sync_func() if config.no_sync_func else nullcontext():  # as in Megatron-Core's schedules
        for part in x[:-1]:
            wrapped[0](part).square().sum().backward()
    wrapped[0](x[-1]).square().sum().backward()
    left = unsharded(backbone.layers)
    config.finalize_model_grads_func(wrapped, torch.tensor(len(x), dtype=torch.int32), groups.collection)
    numbers = StepNumbers(optimizer, groups, torch.tensor([0.0, len(x)]), 1)
    gradients, _ = global_values([(s.name, s, s.grad) for s in shards], groups)
    result = {"norm": numbers.host.grad_norm, "gradients": gradients}
    result |= {"gathered": getattr(backbone, "gathered", None), "left": left}
    process_groups.release()
    return result


def shards_and_traffic(case: dict) -> list[dict[str, Any]]:
    """Return ranges and bytes of each rank's shards, the elements that it saves and the bytes it sends per step."""
    it = build({**case, "micro_batches": MICRO_BATCHES * 4})
    groups = it.groups
    copies, instance = groups.shard_copies, it.shards[0].group
    batches = packs(case, groups.dp_rank, groups.dp_size, it.dims.token_multiple)
    for chunk in it.wrapped:
        chunk.zero_grad_buffer()
    step = training_forward_step(FlowMatching(), it.model, SEED, 0)
    with bytes_sent([instance]) as inside, bytes_sent([copies] if copies else [], reductions=True) as across:
        forward_backward(step, batches, it.wrapped, it.dims.micro_batches, groups)
    for shard in it.shards:
        shard.ensure_state()
    buffers = it.wrapped[0].param_and_grad_buffer.parameter_groups
    owned = [(s, part_of(s.parameter, groups, s.start, s.stop)) for s in it.shards]
    shares = [share_of_copy(part, s.name, *copy_of(s, groups)) for s, part in owned]
    mine = {
        "ranges": {s.name: (s.start, s.stop) for s in it.shards},
        "bytes": {
            "weights": sum(group.model_weight_buffer.data.nbytes for group in buffers),
            "gradients": sum(group.main_grad_buffer.data.nbytes for group in buffers),
            "moments": sum(s.slot(slot).nbytes for s in it.shards for slot in SLOTS),
        },
        "gradient_bytes": sum(group.main_grad_buffer.get_shard_from_local_buffer().nbytes for group in buffers),
        "written": sum(share.stop - share.start for share in shares),
        "inside": dict(inside),
        "across": dict(across),
    }
    found = process_groups.gather_objects(mine)
    process_groups.release()
    return found
