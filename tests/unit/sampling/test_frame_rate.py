"""The requested frame rate of samples is passed to the network; the default is the rate of the training data."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from dit.batch import PackedBatch
from dit.condition_table import DEFAULT_FPS
from dit.conditions import Conditions, Entry
from dit.data_api import BatchSpec, NoData
from dit.inference.generator import Generator
from dit.inference.preview import PictureWriter
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.stdit.config import STDiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from dit.settings import SamplingConfig
from dit.step.device_batches import DeviceBatches
from tests.conftest import BuildModel
from tests.support.batches import pack_of

SMALL: dict[str, Any] = {
    "in_channels": 2,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "context_size": 6,
    "num_classes": 3,
}
LATENT_SIZE = (2, 4, 4)
SAMPLING = SamplingConfig(num_steps=2, guidance_scale=2.0)
CONDITIONED = {
    "rate": DiTCrossConfig(**SMALL),
    "duration": DiTCrossConfig(**SMALL, fps_conditioning=False, size_conditioning=True),
    "stdit": STDiTConfig(**SMALL),
}


def generator_of(network: Any, model: ModelConfig, **metadata: Any) -> Generator:
    config = RunConfig(model=model, data=NoData(), objective=FlowMatching(), sampling=SAMPLING)
    return Generator(config, {"class_names": None, "latent_size": list(LATENT_SIZE), **metadata}, network, 0)


@pytest.mark.parametrize("name", CONDITIONED)
def test_samples_equal_those_of_the_network_at_the_frame_rate(build_model: BuildModel, name: str) -> None:
    model = CONDITIONED[name]
    network = build_model(model, perturb=0.1)

    def at_24(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        rate = {"fps": Entry("sample", torch.full_like(time_S, 24.0))}
        return network(inputs_TC, time_S, replace(batch, conditions=batch.conditions | rate))

    by_hand = generator_of(at_24, model).generate([0, 2])
    generator = generator_of(network, model, fps=24.0)
    assert torch.equal(generator.generate([0, 2], fps=24.0), by_hand)
    assert torch.equal(generator.generate([0, 2]), by_hand)  # the rate of the training data
    assert (generator.generate([0, 2], fps=8.0) - by_hand).abs().max() > 1e-3


def test_a_run_without_a_frame_rate_is_sampled_at_thirty(build_model: BuildModel) -> None:
    network = build_model(CONDITIONED["rate"], perturb=0.1)
    generator = generator_of(network, CONDITIONED["rate"])
    assert generator.fps == DEFAULT_FPS == 30.0
    assert torch.equal(generator.generate([1]), generator.generate([1], fps=30.0))


def test_the_grid_while_training_is_drawn_and_played_at_the_rate(build_model: BuildModel, tmp_path) -> None:
    model = CONDITIONED["rate"]
    network = build_model(model, perturb=0.1)
    generator, rates = generator_of(network, model), []

    def listening(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        rates.extend(batch.conditions["fps"].values.tolist())
        return network(inputs_TC, time_S, batch)

    pictures = PictureWriter(model, FlowMatching(), generator.spec, SAMPLING, None)
    for rate, duration in ((10.0, 100), (120.0, 20)):  # 20 ms: the highest rate of a GIF
        (path,) = pictures.write(listening, LATENT_SIZE, rate, tmp_path).values()
        assert set(rates) == {rate}
        rates.clear()
        with Image.open(path) as film:
            assert film.info["duration"] == duration


def clips(*samples: tuple[tuple[int, int, int], float]) -> PackedBatch:
    """Return a pack of empty samples with these grids and frame rates."""
    grids = tuple(grid for grid, _ in samples)
    layout = SequenceLayout.from_lengths([t * h * w for t, h, w in grids])
    conditions = Conditions(fps=Entry("sample", torch.tensor([fps for _, fps in samples])))
    return pack_of(layout, torch.zeros(layout.total_tokens, 8), grids, conditions=conditions)


def test_the_rate_of_the_data_is_that_of_the_sample_with_most_tokens() -> None:
    """So a run on images and clips draws samples with the frame rate of its largest samples, in any order of them."""
    packs = [
        clips(((1, 2, 2), 30.0)),
        clips(((1, 4, 4), 30.0), ((4, 4, 4), 8.0), ((1, 2, 2), 30.0)),
        clips(((4, 4, 4), 24.0), ((4, 4, 4), 16.0), ((2, 4, 8), 60.0)),
        replace(clips(((8, 8, 8), 1.0)), conditions=Conditions()),
    ]
    spec = BatchSpec(patch_temporal=1, patch_spatial=2, latent_channels=2, micro_batch_size=1)
    batches: Any = DeviceBatches(iter(packs), torch.device("cpu"), spec, lambda batch: 0)  # type: ignore[arg-type]
    seen = []
    for _ in packs:
        next(batches)
        seen.append(batches.largest[1:3])
    assert seen == [((1, 2, 2), 30.0), ((4, 4, 4), 8.0), ((4, 4, 4), 24.0), ((8, 8, 8), DEFAULT_FPS)]


def test_a_preview_has_the_size_of_the_largest_samples_that_are_not_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long clip among 60 samples does not determine it; nine among 121 samples of all ranks do."""
    spec = BatchSpec(patch_temporal=2, patch_spatial=2, latent_channels=1, micro_batch_size=1)
    short = clips(*[((4, 4, 4), 8.0)] * 30, *[((1, 8, 4), 30.0)] * 30)

    def rank(*long: tuple[tuple[int, int, int], float]) -> DeviceBatches:
        packs: Any = iter([short, clips(*long)])
        batches = DeviceBatches(packs, torch.device("cpu"), spec, lambda batch: 0)
        next(batches), next(batches)
        return batches

    def preview_of(batches: DeviceBatches, *others: DeviceBatches) -> tuple[tuple[int, int, int], float]:
        def gather(value: object) -> list[object]:
            return [value, *(other.sizes if isinstance(value, Counter) else other.largest for other in others)]

        with monkeypatch.context() as ranks:
            ranks.setattr("dit.step.device_batches.gather_objects", gather)
            return batches.share_typical()

    one, nine = rank(((32, 4, 4), 24.0)), rank(*[((16, 4, 4), 24.0)] * 9)
    assert preview_of(one) == ((8, 8, 8), 8.0)
    assert preview_of(one, nine) == preview_of(nine, one) == preview_of(nine) == ((32, 8, 8), 24.0)
    resumed = DeviceBatches(iter([]), torch.device("cpu"), spec, lambda batch: 0)
    resumed.restore_largest({"latent_size": [8, 8, 8], "fps": 8.0})
    assert preview_of(resumed) == ((8, 8, 8), 8.0), "a preview that was due when the previous attempt ended"
