"""Low-resolution pictures: made from the data, noised at their own size, with a separate noise level."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.conditions import Entry
from dit.errors import ConfigError
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.objective_checks import check_outputs
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.patchify import unpatchify
from dit.resize import Kernel, LowResolution, enlarged, reduced
from energon_data.mock import MockData, MockSource
from energon_data.packing import collate

MODEL = EfficientUNetConfig(context_size=8, noise_augmentation=True, low_resolution_factor=4)


def pack(model: EfficientUNetConfig = MODEL, numbers: tuple[int, ...] = (0, 1, 2), **options: Any) -> PackedBatch:
    spec = model.batch_spec(**options)
    source = MockSource(MockData(height=16, width=16), spec, seed=0, split="train", stream=0, num_streams=1)
    return collate([source.sample(number) for number in numbers], spec)


def noise_of(batch: PackedBatch, step: int = 0) -> AddressedNoise:
    return AddressedNoise(3, step, batch.sample_ids_S, batch.layout, batch.draws_S)


def low_resolutions(batch: PackedBatch) -> list[Tensor]:
    tokens_TC = batch.conditions["low_resolution"].values
    starts, lengths = batch.layout.starts, batch.layout.lengths
    return [
        unpatchify(tokens_TC[a : a + n], grid, 1, MODEL.patch_spatial)
        for a, n, grid in zip(starts, lengths, batch.grids)
    ]


@pytest.mark.parametrize(("kernel", "a"), [("pil", -0.5), ("opencv", -0.75)])
def test_the_kernel_has_its_coefficient(kernel: Kernel, a: float) -> None:
    """Enlarging a bright line gives the kernel of Keys 1981, equation 4, at distances from 1.75 to 0.25."""

    def keys(x: float) -> float:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4)

    line = torch.zeros(9, 9)
    line[:, 4] = 1.0
    for made in (enlarged(line, 2, kernel), LowResolution(2, kernel).enlarge(line)):
        assert made[9, 5:9].tolist() == pytest.approx([keys(x) for x in (1.75, 1.25, 0.75, 0.25)], abs=1e-6)


def test_a_low_resolution_picture_shows_no_more_than_the_small_one() -> None:
    """A constant picture stays; detail finer than the factor is lost; sides need not be multiples of the factor."""
    torch.testing.assert_close(LowResolution(4)(torch.full((3, 1, 10, 6), 0.7)), torch.full((3, 1, 10, 6), 0.7))
    checks = torch.ones(1, 1, 16, 16)
    checks[..., ::2] = -1
    assert LowResolution(4)(checks).abs().max() < 0.1
    smooth = enlarged(torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)), 4)
    assert (LowResolution(4)(smooth) - smooth).norm() < 0.4 * smooth.norm()


def test_a_low_resolution_picture_of_other_sides_is_not_stretched() -> None:
    """Each position of a ramp keeps its value: reducing and enlarging are at the same scale."""
    ramp = torch.arange(64.0).expand(1, 1, 64, 64)
    for picture in (ramp, ramp.mT):
        assert (LowResolution(3)(picture) - picture)[..., 15:-15, 15:-15].abs().max() < 1e-3
    assert LowResolution(4)(torch.zeros(1, 1, 2, 3)).shape == (1, 1, 2, 3)


def test_missing_low_resolution_pictures_are_computed() -> None:
    batch = pack()
    for made, latent in zip(low_resolutions(batch), batch.unpatchified(batch.latents_TC, 1, 1)):
        torch.testing.assert_close(made, enlarged(reduced(latent, 4), 4))


@pytest.mark.parametrize("padding", [{}, {"multiple_of": 10}])
def test_each_sample_has_its_own_noise_level(padding: dict[str, int]) -> None:
    """c_in(sigma') (x + sigma' eps), where eps is enlarged from the small size, so its variance there is about 1."""
    batch = pack(**padding)
    levels_S = torch.tensor([0.5, 4.0, 1e-4])
    given = replace(batch, conditions=batch.conditions | {"augmentation": Entry("sample", levels_S)})
    noised = EDM().augment(given, MODEL.conditions(), noise_of(batch), draw=False)
    eps = []
    for clean, scaled, level in zip(low_resolutions(batch), low_resolutions(noised), levels_S):
        c_in = (level**2 + 0.25).rsqrt()
        eps.append(reduced(scaled / c_in - clean, 4) / level)
    alone = EDM().augment(pack(numbers=(1,)), MODEL.conditions(), noise_of(pack(numbers=(1,))), draw=True)
    again = EDM().augment(batch, MODEL.conditions(), noise_of(batch), draw=True)
    torch.testing.assert_close(low_resolutions(again)[1], low_resolutions(alone)[0])
    assert torch.equal(again.conditions["augmentation"].values[1:2], alone.conditions["augmentation"].values)
    torch.testing.assert_close(eps[0].std(), torch.tensor(1.0), rtol=0.6, atol=0)
    torch.testing.assert_close(eps[1].std(), torch.tensor(1.0), rtol=0.6, atol=0)
    assert noised.conditions["augmentation"].values is levels_S


def test_augmentation_levels_have_the_distribution_of_sigma_and_are_independent() -> None:
    batch = pack(numbers=tuple(range(6)))
    edm = EDM(p_mean=2.0, p_std=0.1)
    sigma_S = edm.augment(batch, MODEL.conditions(), noise_of(batch), draw=True).conditions["augmentation"].values
    assert ((sigma_S.log() - 2).abs() < 0.5).all()
    assert not torch.isclose(sigma_S, edm.level(noise_of(batch).level_S())).any()
    weaker = replace(edm, augmentation_p_mean=-3.0)
    weaker_S = weaker.augment(batch, MODEL.conditions(), noise_of(batch), draw=True).conditions["augmentation"].values
    torch.testing.assert_close(weaker_S, sigma_S * math.exp(-5))
    assert torch.equal(weaker.level(noise_of(batch).level_S()), edm.level(noise_of(batch).level_S()))


def test_a_model_without_augmentation_gets_the_unchanged_picture() -> None:
    clean = replace(MODEL, noise_augmentation=False)
    batch = pack(clean)
    assert EDM().augment(batch, clean.conditions(), noise_of(batch), draw=True) is batch


def test_objectives_without_augmentation_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not add noise to low-resolution pictures"):
        check_outputs(DDPM(), MODEL)
    check_outputs(EDM(), MODEL)
    check_outputs(DDPM(), replace(MODEL, noise_augmentation=False))
