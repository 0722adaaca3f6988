"""Generate latents with a trained network: a dense pack of samples, guidance, a solver.

With the class token of a teacher (`model.teacher_token_size`), the solver's state has the token as more columns, with
equal numbers in all rows of a sample, so that solvers denoise it together with the latent:

    state    [ latent of the row | class token of its sample ]    one row for each token of the latent
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import LOW_RESOLUTION, TEACHER_TOKEN
from dit.conditions import Entry, Value, check_given, pack_conditions
from dit.data_api import BatchSpec, sample_id
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import ConditionalNetwork, Network, Objective
from dit.patchify import grid_positions, split_outputs
from dit.sampling.guidance import combine, guided_columns, guided_prediction, threshold, within
from dit.sampling.solvers import Churn, solve
from dit.settings import SamplingConfig


@dataclass(frozen=True)
class LowNoise:
    """The second of two networks that share the noise levels (Wan 2.2 A14B).

    Attributes:
        network: predicts at positions of the path below the boundary; the first network predicts at the others.
        boundary: position on the objective's path, such as a time of flow matching.
        guidance_scale: of this network; None for that of the first.
    """

    network: ConditionalNetwork
    boundary: float
    guidance_scale: Optional[float] = None


def empty_pack(
    spec: BatchSpec,
    latent_size: tuple[int, int, int],
    count: int,
    device: torch.device,
    values: Optional[Mapping[str, Sequence[Value]]] = None,
    numbers: Optional[Sequence[int]] = None,
) -> PackedBatch:
    """Return a dense pack of `count` samples to generate: positions and conditions, zero latents.

    Args:
        values: conditions by name, a value for each sample: a class, text embeddings `[k, width]`, a picture
            `[C, T, H, W]`. Absent conditions get their default, or the null.
        numbers: of the samples, which select their noise; 0, 1, ... if None. With a low-resolution
            picture, the noise also depends on `latent_size`, so stages of different sizes have different noise.
    """
    values = {} if values is None else values
    numbers = range(count) if numbers is None else numbers
    check_given(spec.conditions, values, count, latent_size)
    frames, height, width = latent_size
    grid = (frames // spec.patch_temporal, height // spec.patch_spatial, width // spec.patch_spatial)
    layout = SequenceLayout.from_lengths([math.prod(grid)] * count, multiple_of=spec.multiple_of, device=device)
    conditions = pack_conditions(spec.conditions, values, layout, spec.patch)
    _check_empty_texts(spec, values)
    for condition in spec.conditions:
        if condition.name not in values and (entry := condition.absent(layout, spec.patch)) is not None:
            conditions |= {condition.name: entry}
    stage = "" if spec.condition(LOW_RESOLUTION.name) is None else f" at {height}x{width}"
    keys = tuple(f"generated {i}{stage}" for i in numbers)
    return PackedBatch(
        latents_TC=torch.zeros(layout.total_tokens, spec.latent_channels * spec.patch_volume),
        positions_T3=layout.insert_padding(grid_positions(grid).repeat(count, 1).to(device)),
        layout=layout,
        sample_ids_S=torch.tensor([sample_id(key) for key in keys]),
        grids=(grid,) * count,
        keys=keys,
        conditions=conditions,
    ).to(device)


def join(cond: PackedBatch, uncond: PackedBatch) -> PackedBatch:
    """Concatenate the conditional and the unconditional pack of the same samples."""
    return replace(
        cond,
        latents_TC=torch.cat([cond.latents_TC, uncond.latents_TC]),
        positions_T3=torch.cat([cond.positions_T3, uncond.positions_T3]),
        layout=cond.layout.followed_by(uncond.layout),
        sample_ids_S=torch.cat([cond.sample_ids_S, uncond.sample_ids_S]),
        grids=cond.grids + uncond.grids,
        reference_grids=cond.reference_grids + uncond.reference_grids,
        keys=cond.keys + uncond.keys,
        conditions=cond.conditions.followed_by(uncond.conditions),
    )


def without_conditions(
    batch: PackedBatch, spec: BatchSpec, negative: Optional[Mapping[str, Sequence[Value]]] = None
) -> PackedBatch:
    """Return the unconditional pack of the same samples: conditions that training drops become null or negative."""
    t, h, w = batch.grids[0]
    latent_size = (t * spec.patch_temporal, h * spec.patch_spatial, w * spec.patch_spatial)
    values = {} if negative is None else negative
    check_given(spec.conditions, values, batch.layout.num_samples, latent_size)
    if absent := sorted(set(values) - set(batch.conditions)):
        raise ConfigError(
            f"negatives of {absent} are given, but the samples have no such condition; give both, or neither"
        )
    _check_empty_texts(spec, values)
    negatives = pack_conditions(spec.conditions, values, batch.layout, spec.patch).to(batch.layout.device)
    return replace(batch, conditions=batch.conditions.unconditional(spec.conditions, batch.layout) | negatives)


def _check_empty_texts(spec: BatchSpec, present: Collection[str]) -> None:
    if absent := [c.name for c in spec.conditions if c.null == "empty text" and c.name not in present]:
        raise ConfigError(
            f"the null of {', '.join(absent)} is the embedding of the empty text, which needs a text encoder; "
            "pass it as the condition of samples without text and of the unconditional branch"
        )


def keep_clean(x_TC: Tensor, batch: PackedBatch) -> Tensor:
    """Return latents with those of the pack in their clean tokens."""
    levels = batch.layout.levels
    if levels is None:
        return x_TC
    return torch.where(levels.layout.per_token(levels.clean_L), batch.latents_TC.to(x_TC), x_TC)


def of_pack(objective: Objective, batch: PackedBatch) -> Objective:
    """Return the objective of the samples of a pack, which a solver integrates along one grid of noise levels."""
    tokens = sorted({math.prod(grid) for grid in batch.grids})
    sized = [objective.at_size(n, batch.latents_TC.shape[1]) for n in tokens]
    if any(other != sized[0] for other in sized):
        raise ConfigError(
            f"samples of {tokens} tokens have different noise levels with {objective}, and a solver steps through one "
            "grid of levels; generate samples of one size per call"
        )
    return sized[0]


def steps_of(strength: float, num_steps: int) -> int:
    """Return the number of solver steps that follow a picture."""
    return max(1, round(strength * num_steps))


@torch.no_grad()
def generate_each(
    network: ConditionalNetwork,
    objective: Objective,
    batch: PackedBatch,
    spec: BatchSpec,
    sampling: SamplingConfig,
    *,
    seeds_S: Optional[Tensor] = None,
    guide: Optional[ConditionalNetwork] = None,
    low_noise: Optional[LowNoise] = None,
    negative: Optional[Mapping[str, Sequence[Value]]] = None,
    strength: Optional[float] = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[Tensor]:
    """Generate a latent `[C, T, H, W]`, float32, for every sample of a pack, usually of `empty_pack`.

    The noise is counter-based on (seed, sample, solver step), so a sample does not depend on the other samples. Clean
    tokens (`dit.levels`) keep the latents of the pack in every step.

    Args:
        seeds_S: int64, one per sample; None for that of `sampling`.
        guide: a weaker network of the same objective and conditions in the place of the unconditional branch; None for
            the network without its conditions. Karras et al. 2024, arXiv:2406.02507, Eq. 4.
        low_noise: the network of low noise levels, of two that share the levels; None for one network.
        negative: conditions of the unconditional branch, by name, a value for each sample; absent ones are null.
        strength: share of the steps to run, in (0, 1], at least one step; the samples start from the pack's latents
            with the noise level of the first of these steps. None runs all steps and starts from noise.
    """
    layout, channels, num_steps = batch.layout, batch.latents_TC.shape[1], sampling.num_steps
    features = token_features(spec)
    objective = of_pack(objective, batch)
    seed: int | Tensor = sampling.seed if seeds_S is None else seeds_S
    learned = sampling.solver == "ancestral" and sampling.variance == "learned"
    num_outputs = 2 if learned else 1  # a variance that the network also predicts is cut off

    def bind(network: ConditionalNetwork, pack: PackedBatch) -> Network:
        def predict(inputs_TC: Tensor, time_S: Tensor) -> Tensor:
            latents_TC, conditioned = network_inputs(inputs_TC, channels, pack)
            prediction_TC = network(latents_TC, time_S, conditioned).float()
            predicted = 1 if features else prediction_TC.shape[1] // channels
            outputs_TC = split_outputs(prediction_TC, channels, spec.latent_channels, predicted)
            return outputs_TC[:, : num_outputs * channels + features]

        return predict

    batch = objective.augment(batch, spec.conditions, AddressedNoise(seed, 0, batch.sample_ids_S, layout), draw=False)

    def branches(network: ConditionalNetwork, scale: float) -> tuple[Network, Network]:
        """Return the network with guidance of a scale, and without guidance."""
        plain = bind(network, batch)
        if scale == 1:
            return plain, plain
        columns = guided_columns(spec.latent_channels, spec.patch_volume, num_outputs, sampling.guidance_channels)
        if guide is None:
            second = bind(network, join(batch, without_conditions(batch, spec, negative)))
        else:
            second = bind(guide, batch)
        width, options = num_outputs * channels, (sampling.guidance_rescale, layout, sampling.guidance_norm)

        def guided(inputs_TC: Tensor, time_S: Tensor) -> Tensor:
            if guide is None:  # one call over the doubled pack, with the same inputs for both branches
                cond_TC, uncond_TC = second(torch.cat([inputs_TC] * 2), torch.cat([time_S] * 2)).chunk(2)
            else:
                cond_TC, uncond_TC = plain(inputs_TC, time_S), second(inputs_TC, time_S)
            guided_TC = guided_prediction(cond_TC[:, :width], uncond_TC[:, :width], scale, columns, *options)
            if not features:
                return guided_TC
            return torch.cat([guided_TC, combine(cond_TC[:, width:], uncond_TC[:, width:], scale)], 1)

        return guided, plain

    scale, boundary = sampling.guidance_scale, 0.0
    high = low = branches(network, scale)
    if low_noise is not None:
        low_scale, boundary = low_noise.guidance_scale, low_noise.boundary
        low = branches(low_noise.network, scale if low_scale is None else low_scale)

    def noise_at(step: int, purpose: str = "solver") -> Tensor:
        noise = AddressedNoise(seed, step + 1, batch.sample_ids_S, layout)
        return state_noise(noise, purpose, channels, features)

    grid = objective.sampling_grid(num_steps)
    if strength is not None:
        if features:
            raise ConfigError(
                f"strength={strength} starts from a picture, whose class token of {features} features is unknown; draw "
                "from noise, without strength"
            )
        grid = grid[-1 - steps_of(strength, num_steps) :]
    alpha, sigma = objective.path.alpha_sigma(grid[0])
    if sampling.thresholding != "none":
        objective.check_thresholding(sampling.solver, num_steps)
    clip_latents = threshold(sampling.thresholding, layout)

    def clip(x0_TC: Tensor) -> Tensor:
        latents_TC = clip_latents(x0_TC[:, :channels])
        return torch.cat([latents_TC, x0_TC[:, channels:]], 1) if features else latents_TC

    def denoiser(x_TC: Tensor, u: Tensor) -> Any:
        step = int((grid > u).sum())
        on_step(step)
        guided, plain = high if u >= boundary else low
        predict = guided if within(sampling.guidance_interval, *objective.path.alpha_sigma(u)) else plain
        x_TC = keep_clean(x_TC, batch)
        fraction: Optional[Tensor] = None
        if learned:
            x0_TC, fraction = objective.denoise_with_variance(predict, x_TC, u, layout)
        elif sampling.solver == "euler":
            x0_TC = objective.denoise_over(predict, x_TC, u, grid[step + 1], layout)
        else:
            x0_TC = objective.denoise(predict, x_TC, u, layout)
        x0_TC = keep_clean(clip(keep_clean(x0_TC, batch)), batch)
        return x0_TC if fraction is None else (x0_TC, fraction)

    start_TC = float(sigma) * noise_at(-1, "start")  # the start has the noise of step 0
    if strength is not None:
        start_TC = float(alpha) * batch.latents_TC + start_TC
    x0_TC = solve(
        sampling.solver,
        denoiser,
        objective.path,
        start_TC,
        grid,
        noise_at=noise_at,
        variance=sampling.variance,
        churn=Churn.of(sampling),
    )
    return batch.unpatchified(keep_clean(x0_TC, batch)[:, :channels], *spec.patch)


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
    conditions = pack.conditions | {TEACHER_TOKEN.name: Entry("sample", token_SF)}
    return state_TC[:, :channels], replace(pack, conditions=conditions)
