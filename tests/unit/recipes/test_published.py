"""Settings of recipes equal those of the published code that each test names."""

import pytest

from dit.optimizer.schedules import Constant, Cosine
from dit.settings import OptimizerConfig
from launch.config_file import built
from launch.train import call_recipe
from recipes import registry


@pytest.mark.parametrize("name", ["sit_xl2_imagenet", "sit_xl2_repa"])
def test_sit_reads_the_time_itself(name: str) -> None:
    """Source: willisma/SiT, `model(xt, t)` in transport/transport.py; sihyun-yu/REPA, loss.py: no factor of 1000."""
    assert built(call_recipe(name)).model.time_scale == 1.0


@pytest.mark.parametrize("name", ["pretrain", "pretrain_xl_dfm", "pretrain_ditllama1b", "pretrain_ecditllama1b"])
def test_models_of_nemo_read_a_quarter_of_the_logarithm_itself(name: str) -> None:
    """Source: NeMo v2.1.0, `c_noise = 0.25 * sigma.log()` in sampler/edm/edm.py, `Timesteps(...)` in dit_model.py."""
    config = built(call_recipe(name))
    assert (type(config.objective).__name__, config.model.time_scale) == ("EDM", 1.0)


def test_times_of_flux_are_multiplied_by_1000() -> None:
    """Source: black-forest-labs/flux, `time_factor` in modules/layers.py."""
    assert built(call_recipe("flux_12b")).model.time_scale == 1000.0


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        *((f"dit_{size}2_imagenet", 0.0) for size in ("s", "b", "l", "xl")),
        *(("sit_xl2_imagenet", 0.0), ("lightningdit_xl_imagenet", 0.0), ("jit_b16_imagenet", 0.0)),
        *(("edm2_s_imagenet", 0.0), ("sit_xl2_repa", 1.0), ("sr_dit_b1_imagenet", 1.0), ("rit_xl_imagenet", 1.0)),
        ("dit_dh_xl_imagenet", 1.0),
    ],
)
def test_gradients_of_imagenet_are_clipped_as_published(name: str, clip: float) -> None:
    """Source: the training script of each repository; train.py of DiT and SiT clips nothing."""
    assert built(call_recipe(name)).optimizer.clip_grad == clip


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


def test_edm2_saves_after_every_8_mi_pictures() -> None:
    """Source: NVlabs/edm2, `snapshot_nimg=8<<20` and `checkpoint_nimg=128<<20` in training/training_loop.py."""
    config = built(call_recipe("edm2_s_imagenet"))
    assert config.checkpoint.interval * config.training.global_batch_size == 2**23
    assert config.checkpoint.keep_every * config.training.global_batch_size == 2**26


def test_sana_has_the_optimizer_of_the_published_adamw_run() -> None:
    """Source: NVlabs/Sana, configs/sana_config/1024ms/Sana_1600M_img1024_AdamW.yaml."""
    config = built(call_recipe("sana_1_6b_1024"))
    assert config.optimizer == OptimizerConfig(lr=1e-4, beta2=0.999, eps=1e-8, weight_decay=0.01, clip_grad=0.1)
    assert config.schedule == Constant(warmup_steps=2000)


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


def test_dfm_has_the_optimizer_of_megatron_bridge() -> None:
    """Source: NVIDIA-NeMo/Megatron-Bridge, `distributed_fused_adam_with_cosine_annealing`.

    Its schedule sets a weight decay of 0.033, which replaces the optimizer's 0.1.
    """
    config = built(call_recipe("pretrain_xl_dfm"))
    assert config.optimizer == OptimizerConfig(lr=0.9e-4, beta2=0.95, eps=1e-5, weight_decay=0.033, clip_grad=1.0)
    assert config.schedule == Cosine(warmup_steps=2000, min_lr=0.9e-5)
