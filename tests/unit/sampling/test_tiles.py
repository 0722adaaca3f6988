"""Drawing in overlapping tiles: one tile equals the full picture, and a pixelwise network gives the same in tiles."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from dit.batch import PackedBatch
from dit.condition_table import LOW_RESOLUTION
from dit.errors import ConfigError
from dit.inference.cascade import Cascade, enlarging
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.sampling.generate import empty_pack
from dit.sampling.tiles import TiledNetwork, tile_starts, tile_weights
from dit.settings import SamplingConfig
from tests.conftest import BuildModel
from tests.support.batches import generate
from tests.unit.inference.test_cascade import BASE, LARGER, generator_of

SPEC = DiTConfig(in_channels=3, patch_spatial=1, num_classes=3, context_size=2).batch_spec()
LABELS, TEXTS = [2, 0], [torch.full((length, 2), 1.0 + length) for length in (1, 3)]
HEIGHT, WIDTH, TILE, OVERLAP = 10, 13, (6, 8), (2, 3)


def pack(height: int = HEIGHT, width: int = WIDTH, frames: int = 1) -> PackedBatch:
    given = {"label": LABELS, "context": TEXTS}
    return empty_pack(SPEC, (frames, height, width), 2, torch.device("cpu"), given)


def pixelwise(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
    """Depend on the pixel, the time, the class and the text, and on no other pixel."""
    text = batch.conditions["context"]
    texts_S = text.layout.sum_per_sample(text.values).mean(-1)
    if text.dropped_S is not None:
        texts_S = torch.where(text.dropped_S, -1.0, texts_S)
    of_S = batch.conditions["label"].values + texts_S + 3 * time_S
    return (inputs_TC + 0.1 * batch.layout.per_token(of_S)).sin()


def blurred(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
    """Depend on neighbours in the picture that the network gets, and on the position of its edges."""
    pictures = batch.dense(inputs_TC)[:, 0].permute(0, 3, 1, 2)
    out = avg_pool2d(pictures, 3, stride=1, padding=1) + time_S[:, None, None, None]
    return out.permute(0, 2, 3, 1).flatten(0, 2)


def tiled(network, tokens_at_once: int = 1, tile: tuple[int, int] = TILE) -> TiledNetwork:
    return TiledNetwork(network, tile, OVERLAP, tokens_at_once)


@pytest.mark.parametrize(
    ("side", "tile", "overlap", "starts"),
    [
        (8, 8, 2, [0]),
        (5, 8, 2, [0]),
        (9, 8, 2, [0, 1]),
        (14, 8, 2, [0, 6]),
        (15, 8, 2, [0, 4, 7]),
        (24, 8, 0, [0, 8, 16]),
        (1024, 256, 64, [0, 192, 384, 576, 768]),
    ],
)
def test_tiles_cover_a_side_with_their_overlap(side: int, tile: int, overlap: int, starts: Sequence[int]) -> None:
    assert tile_starts(side, tile, overlap) == list(starts)


def test_the_number_of_tiles_is_minimal() -> None:
    """For every side: tiles begin and end with it and overlap enough; one tile fewer would not be enough."""
    for side in range(6, 60):
        starts = tile_starts(side, 7, 3)
        assert starts[0] == 0
        assert starts[-1] + 7 == side or side < 7
        assert all(0 < b - a <= 4 for a, b in itertools.pairwise(starts))
        assert side <= 7 or (len(starts) - 1) * 4 + 3 < side


@pytest.mark.parametrize("overlap", [-1, 8, 9])
def test_an_overlap_that_does_not_fit_is_refused(overlap: int) -> None:
    with pytest.raises(ConfigError, match=rf"tiles of 8 cannot overlap by {overlap}; use 0 to 7"):
        tile_starts(20, 8, overlap)


def test_one_tile_equals_the_full_picture() -> None:
    """Equal to the bit if the tile is as large as the picture or larger, for a network that depends on the edges."""
    batch, time_S = pack(), torch.tensor([0.2, 0.7])
    inputs_TC = torch.randn(batch.latents_TC.shape, generator=torch.Generator().manual_seed(0))
    for tile in ((HEIGHT, WIDTH), (HEIGHT + 3, WIDTH + 1)):
        assert torch.equal(tiled(blurred, tile=tile)(inputs_TC, time_S, batch), blurred(inputs_TC, time_S, batch))


@pytest.mark.parametrize("tokens_at_once", [1, 200, 10_000])
def test_the_prediction_is_the_weighted_average_of_the_tiles(tokens_at_once: int) -> None:
    """By the paper's equation, tile by tile and picture by picture, however many are computed together."""
    batch, time_S = pack(), torch.tensor([0.2, 0.7])
    inputs_TC = torch.randn(batch.latents_TC.shape, generator=torch.Generator().manual_seed(0))
    found_TC = tiled(blurred, tokens_at_once)(inputs_TC, time_S, batch)
    pictures = inputs_TC.view(2, HEIGHT, WIDTH, 3)
    total, weight = torch.zeros_like(pictures), torch.zeros(2, HEIGHT, WIDTH, 1)
    rows = torch.tensor([min(i + 1, TILE[0] - i) for i in range(TILE[0])])
    columns = torch.tensor([min(i + 1, TILE[1] - i) for i in range(TILE[1])])
    for i in range(2):
        for top in (0, 4):
            for left in (0, 5):
                here = (i, slice(top, top + TILE[0]), slice(left, left + TILE[1]))
                picture = pictures[here].permute(2, 0, 1)[None]
                out = avg_pool2d(picture, 3, stride=1, padding=1)[0].permute(1, 2, 0) + time_S[i]
                total[here] += (rows[:, None] * columns)[..., None] * out
                weight[here] += (rows[:, None] * columns)[..., None]
    torch.testing.assert_close(found_TC, (total / weight).flatten(0, 2), rtol=1e-5, atol=1e-6)
    assert torch.equal(tile_weights(*TILE), (rows[:, None] * columns).float())


@pytest.mark.parametrize("solver", ["euler", "heun", "ancestral", "dpmpp_2m"])
@pytest.mark.parametrize("frames", [1, 2])
def test_a_network_of_pixels_draws_the_same_picture_in_tiles(solver: str, frames: int) -> None:
    """Equal to rounding, with guidance and fresh noise in every step, because noise belongs to pixels, not to tiles."""
    settings = {"solver": solver, "num_steps": 4, "guidance_scale": 2.5, "seed": 3}
    batch = pack(frames=frames)
    full = generate(pixelwise, FlowMatching(), batch, SPEC, SamplingConfig(**settings))
    parts = generate(tiled(pixelwise, 500), FlowMatching(), batch, SPEC, SamplingConfig(**settings))
    torch.testing.assert_close(parts, full, rtol=1e-4, atol=1e-5)
    assert full.std() > 0.1


class Seen:
    """Records the sizes of the pictures that a network gets, and their low-resolution pictures."""

    def __init__(self, network) -> None:
        self.network, self.grids, self.small = network, [], []

    def __call__(self, inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        batch.validate()
        self.grids += batch.grids
        self.small.append(batch.conditions[LOW_RESOLUTION.name].values)
        return self.network(inputs_TC, time_S, batch)


def test_a_generator_draws_a_larger_picture_in_tiles_of_the_training_size(build_model: BuildModel) -> None:
    """The network only gets pictures of the training size, each with its part of the small picture."""
    generator = generator_of(LARGER, build_model, 16)
    small = [torch.randn(1, 1, 24, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    given = {"conditions": {LOW_RESOLUTION.name: small}, "frames": 1, "size": (24, 32), "labels": [0, 2]}
    seen = Seen(generator.network)
    generator.network = seen
    full, whole_seen = generator.generate(**given), set(seen.grids)
    seen.grids.clear()
    parts = generator.generate(**given, tile=16, tile_overlap=8)
    assert whole_seen == {(1, 24, 32)}
    assert set(seen.grids) == {(1, 16, 16)}
    assert parts.shape == full.shape
    assert not torch.equal(parts, full)
    quarter, same = (generator.generate(**given, tile=16, tile_overlap=o) for o in (None, 4))
    assert torch.equal(quarter, same)
    assert torch.equal(generator.generate(**given, tile=32), full)


def test_a_tile_gets_its_part_of_the_small_picture(build_model: BuildModel) -> None:
    """A network that reads it pixel by pixel gives the same result in tiles, two of which are computed together."""
    generator = generator_of(LARGER, build_model, 16)

    def pixels(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        small_TC = batch.conditions[LOW_RESOLUTION.name].values
        return (inputs_TC + small_TC).sin() + batch.layout.per_token(time_S)

    generator.network = pixels
    small = [torch.randn(1, 1, 24, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    given = {"conditions": {LOW_RESOLUTION.name: small}, "frames": 1, "size": (24, 32), "labels": [0, 2]}
    full, parts = generator.generate(**given), generator.generate(**given, tile=16, tile_overlap=8)
    torch.testing.assert_close(parts, full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tile_overlap": 4}, "tile_overlap=4 has no effect without tiles"),
        ({"tile": 16, "tile_overlap": 16}, "tile_overlap=16 must be a multiple of 1 from 0 to 15"),
        ({"tile": 16, "tile_overlap": -1}, "tile_overlap=-1 must be"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(build_model: BuildModel, given: dict, says: str) -> None:
    generator = generator_of(LARGER, build_model, 16)
    with pytest.raises(ConfigError, match=says):
        generator.generate([0], **given)


def test_a_cascade_enlarges_in_tiles(build_model: BuildModel) -> None:
    """The result equals that of its last model on the pictures of the previous model."""
    base, larger = generator_of(BASE, build_model, 16), generator_of(LARGER, build_model, 16)
    tiles = {"tile": 16, "tile_overlap": 8}
    drawn = Cascade(larger, base, {}).generate([0, 1], seed=4, **tiles)
    conditions, size = enlarging(larger.spec, list(base.generate([0, 1], seed=4)), None)
    assert torch.equal(drawn, larger.generate([0, 1], conditions=conditions, seed=4, **size, **tiles))
    assert not torch.equal(drawn, Cascade(larger, base, {}).generate([0, 1], seed=4))
