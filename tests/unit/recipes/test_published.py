"""Settings of recipes equal those of the published code that each test names."""

import pytest

from launch.config_file import built
from launch.train import call_recipe
from recipes import registry


def test_pixels_of_imagenet_are_mirrored() -> None:
    """Source: LTH14/JiT, `RandomHorizontalFlip` in main_jit.py; latents cannot be mirrored."""
    names = [entry.name for entry in registry.recipes() if entry.name.endswith("_imagenet")]
    flipped = [name for name in names if built(call_recipe(name)).data.flip]
    assert flipped == ["jit_b16_imagenet"]
    assert built(call_recipe("jit_b16_imagenet")).data.flip == 0.5


def test_checkpoints_to_retain_are_saved() -> None:
    """A checkpoint is retained if its step is a multiple of `keep_every`, and saved if it is one of `interval`."""
    checkpoints = {entry.name: call_recipe(entry.name).checkpoint for entry in registry.recipes()}
    steps = {name: (c.interval, c.keep_every) for name, c in checkpoints.items() if c.keep_every}
    assert {name for name, (interval, keep_every) in steps.items() if keep_every % interval} == set()
    assert "edm2_s_imagenet" in steps


@pytest.mark.parametrize("name", ["pretrain_stdit_xl", "pretrain_stdit_xl_full"])
def test_times_of_open_sora_are_shifted_by_the_size_of_a_clip(name: str) -> None:
    """Source: hpcaitech/Open-Sora v1.2.0, `timestep_transform` in opensora/schedulers/rf/rectified_flow.py.

    There, the factor is the root of height * width / 512^2 in pixels, times that of the latent's frames.
    """
    objective = built(call_recipe(name)).objective
    for frames, height, width in ((1, 64, 64), (1, 32, 64), (9, 64, 64), (24, 128, 32)):
        expected = (height * 8 * width * 8 / 512**2) ** 0.5 * frames**0.5
        tokens = frames * height * width // 4
        assert objective.at_size(tokens, 16).time_shift == pytest.approx(expected)
