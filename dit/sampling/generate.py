"""Generate latents with a trained network: a dense pack of samples, guidance, a solver."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from dit.batch import DEFAULT_FPS, PackedBatch
from dit.data_api import BatchSpec, sample_id
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.patchify import grid_positions, outputs_apart, unpatchify
from dit.sampling.guidance import doubled_layout, guided_pair, needs_unconditional
from dit.sampling.solvers import solve

ConditionalNetwork = Callable[[Tensor, Tensor, PackedBatch], Tensor]
"""Maps (inputs_TC, time_S, batch) to a prediction; a backbone."""


def empty_pack(
    spec: BatchSpec,
    latent_size: tuple[int, int, int],
    count: int,
    device: torch.device,
    *,
    labels: Optional[Sequence[int]] = None,
    contexts: Optional[Sequence[Tensor]] = None,
    pooled: Optional[Sequence[Tensor]] = None,
    fps: float = DEFAULT_FPS,
) -> PackedBatch:
    """Return a dense pack of `count` samples to be generated: positions and conditions, zero latents.

    Args:
        latent_size: (T, H, W) of each latent.
        labels: class of each sample; None for no class.
        contexts: text embeddings `[k, context_size]` of each sample; None for no text.
        pooled: pooled text embedding `[pooled_size]` of each sample; None for no text.
        fps: frames per second of every sample.

    Raises:
        ConfigError: a label is not one of the model's classes, or texts lack the pooled embeddings the model takes.
    """
    frames, height, width = latent_size
    grid = (frames // spec.patch_temporal, height // spec.patch_spatial, width // spec.patch_spatial)
    tokens = grid[0] * grid[1] * grid[2]
    layout = SequenceLayout.from_lengths([tokens] * count, multiple_of=spec.multiple_of, device=device)
    positions = torch.zeros(layout.total_tokens, 3, dtype=torch.int64)
    for start in layout.starts:
        positions[start : start + tokens] = grid_positions(grid)
    labels_S = None
    if spec.num_classes is not None:
        wrong = [label for label in labels or () if not 0 <= label < spec.num_classes]
        if wrong:
            raise ConfigError(f"labels {wrong} are out of range; the model knows classes 0..{spec.num_classes - 1}")
        labels_S = torch.tensor(labels if labels is not None else [spec.num_classes] * count, device=device)
    context_KD, context_layout = None, None
    if contexts is not None:
        if spec.pooled_size is not None and pooled is None:
            raise ConfigError(
                f"{len(contexts)} texts come without pooled embeddings, which the model takes beside those of the "
                f"tokens; give one of {spec.pooled_size} features for each"
            )
        context_KD = torch.cat(list(contexts)).to(device)
        context_layout = SequenceLayout.from_lengths([len(c) for c in contexts], device=device)
    return PackedBatch(
        latents_TC=torch.zeros(layout.total_tokens, spec.latent_channels * spec.patch_temporal * spec.patch_spatial**2),
        positions_T3=positions,
        layout=layout,
        sample_ids_S=torch.tensor([sample_id(f"generated {i}") for i in range(count)]),
        grids=(grid,) * count,
        keys=tuple(f"generated {i}" for i in range(count)),
        labels_S=labels_S,
        context_KD=context_KD,
        context_layout=context_layout,
        pooled_SD=None if pooled is None else torch.stack(list(pooled)),
        fps_S=torch.full((count,), fps, dtype=torch.float32),
    ).to(device)


def join(cond: PackedBatch, uncond: PackedBatch) -> PackedBatch:
    """Lay the conditional and the unconditional pack of the same samples behind each other."""

    def both(name: str) -> Optional[Tensor]:
        a, b = getattr(cond, name), getattr(uncond, name)
        return None if a is None or b is None else torch.cat([a, b])

    context_layout = None
    if cond.context_layout is not None and uncond.context_layout is not None:
        lengths = cond.context_layout.lengths + uncond.context_layout.lengths
        context_layout = SequenceLayout.from_lengths(lengths, device=cond.layout.device)
    return replace(
        cond,
        latents_TC=torch.cat([cond.latents_TC, uncond.latents_TC]),
        positions_T3=torch.cat([cond.positions_T3, uncond.positions_T3]),
        layout=doubled_layout(cond.layout),
        sample_ids_S=torch.cat([cond.sample_ids_S, uncond.sample_ids_S]),
        grids=cond.grids + uncond.grids,
        keys=cond.keys + uncond.keys,
        labels_S=both("labels_S"),
        context_KD=both("context_KD"),
        context_layout=context_layout,
        context_dropped_S=both("context_dropped_S"),
        pooled_SD=both("pooled_SD"),
        fps_S=both("fps_S"),
    )


def without_conditions(
    batch: PackedBatch,
    spec: BatchSpec,
    negative: Optional[Sequence[Tensor]] = None,
    negative_pooled: Optional[Sequence[Tensor]] = None,
) -> PackedBatch:
    """Return the unconditional twin of a pack: no class, and no text or the negative texts instead.

    Raises:
        ConfigError: the model wants a pooled embedding of each text, and the negative ones have none.
    """
    changes: dict = {}
    if spec.num_classes is not None:
        changes["labels_S"] = torch.full_like(batch.labels_S, spec.num_classes)  # type: ignore[arg-type]
    if batch.context_KD is not None:
        device, count = batch.layout.device, batch.layout.num_samples
        changes["context_dropped_S"] = torch.full((count,), negative is None, device=device)
        if negative is not None:
            changes["context_KD"] = torch.cat(list(negative)).to(device)
            changes["context_layout"] = SequenceLayout.from_lengths([len(c) for c in negative], device=device)
            if batch.pooled_SD is not None:
                if negative_pooled is None:
                    raise ConfigError("negative texts of this model need pooled embeddings, too; give negative_pooled")
                changes["pooled_SD"] = torch.stack(list(negative_pooled)).to(device)
    return replace(batch, **changes)


@torch.no_grad()
def generate(
    network: ConditionalNetwork,
    objective: Objective,
    batch: PackedBatch,
    spec: BatchSpec,
    *,
    solver: str,
    num_steps: int,
    guidance_scale: float,
    seed: int,
    negative: Optional[Sequence[Tensor]] = None,
    negative_pooled: Optional[Sequence[Tensor]] = None,
) -> Tensor:
    """Generate every sample of a pack made by `empty_pack`.

    The noise is addressed by (seed, sample, solver step): a sample does not depend on what is generated beside it.

    Args:
        negative: text embeddings that guidance leads away from, one per sample; None leads away from no text.
        negative_pooled: their pooled embeddings, where the model takes any.

    Returns:
        Latents `[N, C, T, H, W]`, float32.
    """
    layout, channels = batch.layout, batch.latents_TC.shape[1]
    if batch.context_KD is not None and batch.context_dropped_S is None:
        none_dropped = torch.zeros(layout.num_samples, dtype=torch.bool, device=layout.device)
        batch = replace(batch, context_dropped_S=none_dropped)

    def predict(inputs_TC: Tensor, time_S: Tensor, of: PackedBatch) -> Tensor:
        # The mean; solvers choose the variance themselves.
        prediction_TC = outputs_apart(network(inputs_TC, time_S, of).float(), channels, spec.latent_channels)
        return prediction_TC[:, :channels]

    if needs_unconditional(guidance_scale):
        pair = join(batch, without_conditions(batch, spec, negative, negative_pooled))
        bound = guided_pair(lambda inputs_TC, time_S: predict(inputs_TC, time_S, pair), guidance_scale)
    else:

        def bound(inputs_TC: Tensor, time_S: Tensor) -> Tensor:
            return predict(inputs_TC, time_S, batch)

    def noise_at(step: int) -> Tensor:
        return AddressedNoise(seed, step + 1, batch.sample_ids_S, layout).normal_TC("solver", channels)

    grid = objective.sampling_grid(num_steps)
    _, sigma = objective.path.alpha_sigma(grid[0])
    start_TC = float(sigma) * AddressedNoise(seed, 0, batch.sample_ids_S, layout).normal_TC("start", channels)
    x0_TC = solve(
        solver,
        lambda x_TC, u: objective.denoise(bound, x_TC, u, layout),
        objective.path,
        start_TC,
        grid,
        noise_at=noise_at,
    )
    latents = [
        unpatchify(x0_TC[start : start + length], sample_grid, spec.patch_temporal, spec.patch_spatial)
        for start, length, sample_grid in zip(layout.starts, layout.lengths, batch.grids)
    ]
    return torch.stack(latents)
