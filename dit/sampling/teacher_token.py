"""The class token of a teacher (`model.teacher_token_size`) in sampling.

The solver's state has the token as more columns, with equal numbers in all rows of a sample, so that solvers denoise
it together with the latent:

    state    [ latent of the row | class token of its sample ]    one row for each token of the latent
"""

from dataclasses import replace

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import TEACHER_TOKEN
from dit.conditions import per_sample
from dit.data_api import BatchSpec
from dit.objectives.addressed_noise import AddressedNoise


def token_features(spec: BatchSpec) -> int:
    """Return the width of the class token; 0 if the model has none."""
    condition = spec.condition(TEACHER_TOKEN.name)
    return 0 if condition is None or condition.shape is None else condition.shape[0]


def state_noise(noise: AddressedNoise, purpose: str, channels: int, features: int) -> Tensor:
    """Draw standard normal noise for the `channels` of a latent and the `features` of a class token, float32."""
    noise_TC = noise.normal_TC(purpose, channels)
    if not features:
        return noise_TC
    token_SF = noise.normal_SC(f"{purpose} {TEACHER_TOKEN.name}", features, repeated=False)
    return torch.cat([noise_TC, noise.layout.per_token(token_SF)], 1)


def network_inputs(state_TC: Tensor, channels: int, pack: PackedBatch) -> tuple[Tensor, PackedBatch]:
    """Split a state into latents and a pack with the class token of each sample."""
    if state_TC.shape[1] == channels:
        return state_TC, pack
    token_SF = state_TC[pack.layout.tensor(pack.layout.starts), channels:]
    conditions = pack.conditions | {TEACHER_TOKEN.name: per_sample(token_SF)}
    return state_TC[:, :channels], replace(pack, conditions=conditions)
