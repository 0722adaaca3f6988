"""A cascade used as one model equals its models in sequence."""

import pytest
import torch

from dit.batch import PackedBatch
from dit.condition_table import AUGMENTATION, LABEL, LOW_RESOLUTION
from dit.errors import ConfigError
from dit.inference.cascade import Cascade
from dit.inference.generator import Generator
from dit.models.base import ModelConfig
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.unet.config import UNetConfig
from dit.objectives.edm import EDM
from dit.resize import enlarged
from dit.run_config import RunConfig
from dit.settings import SamplingConfig, TrainingConfig
from energon_data.mock import MockData
from tests.conftest import BuildModel

SMALL = {
    "in_channels": 1,
    "num_classes": 3,
    "context_size": None,
    "attention_type": "self",
    "hidden_size": 8,
    "channel_multipliers": [1, 2],
    "num_res_blocks": [1, 1],
    "attention_levels": [1],
    "head_size": 8,
    "norm_num_groups": 4,
}
BASE = UNetConfig(**SMALL)
LARGER = EfficientUNetConfig(**SMALL, low_resolution_factor=2, noise_augmentation=True)
LABELS, LOW, HIGH = [0, 2, 1], {"num_steps": 2}, {"num_steps": 3, "guidance_scale": 2.0}


def generator_of(
    model: ModelConfig, build_model: BuildModel, side: int, *, text_encoder: str | None = None
) -> Generator:
    sampling = SamplingConfig(num_steps=2, guidance_scale=1.5, solver="heun")
    config = RunConfig(
        model=model, data=MockData(), objective=EDM(), sampling=sampling, training=TrainingConfig(micro_batch_size=4)
    )
    metadata = {"class_names": None, "latent_size": [1, side, side], "text_encoder": text_encoder}
    return Generator(config, metadata, build_model(model, perturb=0.1), 0)


@pytest.fixture
def stages(build_model: BuildModel) -> tuple[Generator, Generator]:
    return generator_of(BASE, build_model, 8), generator_of(LARGER, build_model, 16)


@pytest.mark.parametrize("level", [None, 0.5])
def test_a_cascade_equals_its_models_in_sequence(stages: tuple[Generator, Generator], level: float | None) -> None:
    """Equal to the bit, with different settings, the same seed and numbers, and pictures enlarged by 2, then by 4.

    The third model enlarges to a size on which it was not trained.
    """
    base, larger = stages
    numbers = [4, 0, 9]
    pictures = base.generate(LABELS, seed=5, numbers=numbers, **LOW)
    for side, cascade in (
        (16, Cascade(larger, base, LOW, level=level)),
        (32, Cascade(larger, Cascade(larger, base, LOW, level=level), HIGH, level=level)),
    ):
        given = {LOW_RESOLUTION.name: [enlarged(picture, 2) for picture in pictures]}
        given |= {} if level is None else {AUGMENTATION.name: [level] * 3}
        size = {"frames": 1, "size": (side, side)}
        pictures = larger.generate(LABELS, conditions=given, seed=5, numbers=numbers, **HIGH, **size)
        assert pictures.shape == (3, 1, 1, side, side)
        drawn = cascade.generate(seed=5, numbers=numbers, conditions={LABEL.name: LABELS}, **HIGH)
        assert torch.equal(drawn, pictures)


def test_no_two_stages_share_noise(stages: tuple[Generator, Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples of 8, 16 and 32 pixels: a shared address would repeat the tokens of a stage at the start of the next.

    The ids are also in the address of the noise of low-resolution pictures and of solver steps.
    """
    base, larger = stages
    starts: list[torch.Tensor] = []
    ids: list[int] = []

    def network(inputs_TC: torch.Tensor, time_S: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        starts.extend(part[:64, 0] for part in inputs_TC.chunk(2))
        ids.extend(batch.sample_ids_S.tolist())
        raise InterruptedError

    for generator, side in ((base, 8), (larger, 16), (larger, 32)):
        pictures = {LOW_RESOLUTION.name: [torch.zeros(1, 1, side, side)] * 2} if generator is larger else {}
        monkeypatch.setattr(generator, "network", network)
        with pytest.raises(InterruptedError):
            generator.generate([0, 1], seed=5, guidance_scale=1, size=(side, side), conditions=pictures)
    correlations = torch.corrcoef(torch.stack(starts))
    assert (correlations - torch.eye(6)).abs().max() < 0.5  # 1 for shared noise
    assert len(set(ids)) == 6


def test_models_that_do_not_follow_each_other_are_refused(
    stages: tuple[Generator, Generator], build_model: BuildModel
) -> None:
    base, larger = stages
    with pytest.raises(ConfigError, match=r"takes no low-resolution picture \(model.low_resolution_factor is None\)"):
        Cascade(base, larger, {})
    other = generator_of(LARGER, build_model, 16, text_encoder="t5")
    with pytest.raises(ConfigError, match="uses text encoder t5, the model before it None"):
        Cascade(other, base, {})
