"""The forward step of one micro-batch: drop conditions, add noise, predict, compute the loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Optional

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.kernels.choice import choose
from dit.kernels.resolve import NOISE
from dit.models.base import ModelConfig
from dit.objectives.addressed_noise import AddressedNoise, NoiseMixer, skip_mixing
from dit.objectives.base import Objective, Prepared
from dit.parallel.implementations import target_of
from dit.patchify import split_outputs
from dit.settings import TrainingConfig

Logged = dict[str, Tensor]
LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, Logged]]
ForwardStep = Callable[[Iterator[PackedBatch], nn.Module], tuple[Tensor, LossFunction]]


def noise_kernel(model: ModelConfig, training: TrainingConfig, device: Optional[torch.device] = None) -> NoiseMixer:
    """Return the implementation of `AddressedNoise.mix` that `training.kernels` selects.

    Args:
        device: None for that of this process.
    """
    return choose(NOISE, target_of(model, training.precision, device), training.kernels).load()


def drop_conditions(batch: PackedBatch, noise: AddressedNoise, model: ModelConfig) -> PackedBatch:
    """Drop conditions of some samples, for classifier-free guidance: see `Conditions.drop`."""
    return replace(batch, conditions=batch.conditions.drop(model.conditions(), noise.uniform_S, batch.layout))


@dataclass(frozen=True)
class TrainingForwardStep:
    """The forward step of optimizer step `step` for Megatron-Core's schedules.

    Its loss function returns (loss sum, noised tokens, logs: the sums of `logged`, then the tokens). The update divides
    the gradients by the noised tokens of the global batch (`dit.backends.gradients`).
    """

    objective: Objective
    model: ModelConfig
    seed: int
    step: int | Tensor
    mix: Optional[NoiseMixer] = None

    def __call__(self, batches: Iterator[PackedBatch], network: nn.Module) -> tuple[Tensor, LossFunction]:
        batch, model = next(batches), self.model
        stage = get_attr_wrapped_model(network, "stage")
        # Only the first stage (inputs) and the last one (targets) use noise per token.
        mixer = self.mix if stage.first or stage.last else skip_mixing
        address = self.seed, self.step, batch.sample_ids_S, batch.layout, batch.draws_S
        noise = AddressedNoise(*address, mixer, model.in_channels)
        batch = self.objective.augment(drop_conditions(batch, noise, model), model.conditions(), noise, draw=True)
        if model.draws_in_training:
            batch = replace(batch, draw_keys_S=noise.keys_S("dropout"))
        prepared = self.objective.prepare(batch, noise)
        batch = prepared.noised(batch)
        prepared = self.objective.complete(network, prepared, batch, model.conditions())
        prediction_TC = network(prepared.inputs_TC, prepared.time_S, batch)
        prepared = replace(prepared, sum_over_ranks=get_attr_wrapped_model(network, "sum_over_context_ranks"))
        return prediction_TC, partial(self._loss, prepared, batch)

    def _loss(self, prepared: Prepared, batch: PackedBatch, prediction_TC: Tensor) -> tuple[Tensor, Tensor, Logged]:
        model, objective = self.model, self.objective
        outputs_TC = split_outputs(prediction_TC, model.token_channels, model.in_channels, objective.num_outputs)
        total, count, terms = objective.loss(outputs_TC, prepared, batch.layout)
        return total, count.int(), {"sums": torch.stack([*terms.values(), count])}


def training_forward_step(
    objective: Objective, model: ModelConfig, seed: int, step: int, mix: Optional[NoiseMixer] = None
) -> TrainingForwardStep:
    """Return the forward step of a step from arguments by position, see `TrainingForwardStep`."""
    return TrainingForwardStep(objective, model, seed, step, mix)
