"""Data settings for clips with a clean first frame, or with a noise level for each frame."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import CLEAN
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.models.wan.config import WanConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.mean_flow import MeanFlow
from dit.run_config import RunConfig
from dit.settings import TrainingConfig
from energon_data.mock import MockData

MODEL = WanConfig(
    hidden_size=16, num_attention_heads=2, num_layers=1, ffn_hidden_size=16, in_channels=4, context_size=6
)
SPEC = MODEL.batch_spec()
SHAPES = ["1x4x4", "4x4x4", "3x2x4"]
PACKED: dict[str, Any] = {"shapes": SHAPES, "max_tokens_per_pack": 96, "pack_multiple_of": 1}


def packs(count: int, dp_size: int = 1, dp_rank: int = 0, **settings: Any) -> list[PackedBatch]:
    data = MockData(**{**PACKED, "num_streams": 2, **settings})
    stream = data.build_train(SPEC, dp_rank=dp_rank, dp_size=dp_size, seed=3, log_dir=None, micro_batches_per_step=2)
    return list(islice(stream, count))


def levels_by_draw(batches: list[PackedBatch]) -> dict[int, tuple[tuple[int, int, int], list[tuple[int, int]]]]:
    """Return the grid and the segments (tokens, number) of each draw of a sample."""
    found = {}
    for batch in batches:
        assert batch.draws_S is not None
        levels = batch.layout.levels
        for i, draw in enumerate(batch.draws_S.tolist()):
            if levels is None:
                found[draw] = (batch.grids[i], [(batch.layout.lengths[i], 0)])
                continue
            first, count = sum(levels.counts[:i]), levels.counts[i]
            rows = range(first, first + count)
            found[draw] = (batch.grids[i], [(levels.layout.lengths[row], levels.numbers[row]) for row in rows])
    return found


def test_every_clip_has_a_clean_first_frame_and_no_picture_has_one() -> None:
    found = levels_by_draw(packs(8, clean_first_frame=1.0))
    assert {grid[0] for grid, _ in found.values()} == {1, 3, 4}
    for (t, h, w), segments in found.values():
        clip = [(h * w, CLEAN), ((t - 1) * h * w, 0)]
        assert segments == ([(h * w, 0)] if t == 1 else clip)


def test_every_frame_has_its_level() -> None:
    found = levels_by_draw(packs(8, frame_levels=1.0, clean_first_frame=0.5))
    clips = [(grid, segments) for grid, segments in found.values() if grid[0] > 1]
    for (t, h, w), segments in clips:
        assert [tokens for tokens, _ in segments] == [h * w] * t
        assert [number for _, number in segments[1:]] == list(range(1, t))
    assert {segments[0][1] for _, segments in clips} == {0, CLEAN}


def test_the_share_is_that_of_the_clips_on_any_number_of_ranks() -> None:
    """A draw depends only on the sample and the draw's number."""
    settings = {"clean_first_frame": 0.25, "inpaint": 0.5}
    one = levels_by_draw(packs(160, **settings))
    two = [levels_by_draw(packs(80, dp_size=2, dp_rank=rank, **settings)) for rank in range(2)]
    assert two[0] | two[1] == one
    clips = [(grid, segments) for grid, segments in one.values() if grid[0] > 1]
    share = sum(segments[0] == (h * w, CLEAN) and len(segments) == 2 for (_, h, w), segments in clips) / len(clips)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(clips)) ** 0.5


def test_a_region_of_pictures_and_clips_is_generated_next_to_clean_tokens() -> None:
    """Inside a box or outside it, the same in every frame; only its tokens count in the loss."""
    batches = packs(120, max_tokens_per_pack=200, inpaint=1.0, shapes=["1x10x12", "3x10x12"])
    masks, objective = [], FlowMatching()
    for batch in batches:
        noise = AddressedNoise(1, 0, batch.sample_ids_S, batch.layout)
        prepared = objective.prepare(batch, noise)
        noised_T = batch.layout.noised_T
        clean_T = batch.layout.valid_T & ~noised_T
        assert torch.equal(prepared.inputs_TC[clean_T], batch.latents_TC[clean_T])
        _, count, _ = objective.loss(torch.zeros_like(prepared.target_TC), prepared, batch.layout)
        assert int(count) == int(noised_T.sum())
        places = zip(batch.layout.starts, batch.grids)
        masks += [noised_T[start : start + t * h * w].view(t, h, w) for start, (t, h, w) in places]
    boxes = 0
    for mask_THW in masks:
        mask_HW = mask_THW[0]
        assert torch.equal(mask_THW, mask_HW.expand_as(mask_THW))
        rows, columns = mask_HW.any(1), mask_HW.any(0)
        boxes += torch.equal(mask_HW, rows[:, None] & columns)
        inverse = ~mask_HW
        box = inverse.any(1)[:, None] & inverse.any(0)
        assert torch.equal(mask_HW, rows[:, None] & columns) or torch.equal(inverse, box)
    assert 0.4 * len(masks) < boxes < 0.8 * len(masks)
    assert any(not mask_THW.all() for mask_THW in masks)
    assert {int(mask_THW[0].any(1).sum()) for mask_THW in masks} == {1, 2, 3, 4, 5}


def test_copies_of_a_sample_are_drawn_again() -> None:
    data = levels_by_draw(packs(60, clean_first_frame=0.5, dataset_size=2, shapes=["4x4x4"]))
    assert len({tuple(segments) for _, segments in data.values()}) == 2
    data = levels_by_draw(packs(60, inpaint=0.5, dataset_size=2, shapes=["1x4x4"]))
    assert len({tuple(segments) for _, segments in data.values()}) > 10


def test_held_out_clips_have_the_same_levels_in_every_pass() -> None:
    data = MockData(**PACKED, clean_first_frame=0.5, validation_samples=24)
    passes = [[batch.layout.levels for batch in data.build_validation(SPEC, dp_rank=0, dp_size=1)] for _ in range(2)]
    assert passes[0] == passes[1]
    numbers = [number for levels in passes[0] if levels is not None for number in levels.numbers]
    assert {CLEAN, 0} == set(numbers)


def test_packs_do_not_change_without_the_settings() -> None:
    assert all(batch.layout.levels is None for batch in packs(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": MockData(clean_first_frame=1.5)}, "data.clean_first_frame=1.5"),
        ({"data": MockData(inpaint=1.5)}, "data.inpaint=1.5"),
        (
            {
                **{"objective": MeanFlow(), "training": TrainingConfig(precision="fp32")},
                "model": DiTConfig(position_embedding="sincos_3d", interval_conditioning=True),
            },
            "data.clean_first_frame=0.5 needs several noise levels .* use objective=flow_matching, edm or ddpm",
        ),
        (
            {"model": DDPMUNetConfig()},
            "DDPMUNetConfig does not support several noise levels in a sample, which data.clean_first_frame=0.5",
        ),
    ],
    ids=["range", "range of masks", "objective", "model"],
)
def test_unsupported_models_and_objectives_are_refused(changes: dict[str, Any], message: str) -> None:
    run = RunConfig(model=MODEL, data=MockData(clean_first_frame=0.5), objective=FlowMatching())
    run.check()
    with pytest.raises(ConfigError, match=message):
        replace(run, **changes).check()
