"""Recipes of fine-tuning select where the state of a training is stored; MLPerf's FLUX.1 has its published numbers."""

import re

import pytest

from dit.errors import ConfigError
from dit.parallel.build import count_parameters
from launch import dry_run
from launch.config_file import built
from launch.train import call_recipe
from recipes.finetune import (
    ON_ONE_GPU,
    WAYS,
    Way,
    finetune,
    finetune_chroma,
    finetune_hunyuan_video,
    finetune_lora,
    finetune_lumina2,
    finetune_prx,
    finetune_z_image,
    finetune_z_image_lora,
)

GIB = 2**30


def state_of(text: str) -> float:
    """Return the bytes of weights, gradients, optimizer and average in a dry run."""
    names = "weights and gradients", "optimizer", "average"
    return GIB * sum(float(re.search(rf"^  {name} +([\d.]+) GiB", text, re.MULTILINE)[1]) for name in names)


@pytest.mark.parametrize(("way", "gpus"), [*((way, 1) for way in ON_ONE_GPU), (WAYS[0], 2), (WAYS[1], 2)])
def test_the_bytes_of_a_way_are_those_of_the_planner(way: Way, gpus: int) -> None:
    recipe = finetune(gpus=gpus)
    recipe.checkpoint.start_from = None
    recipe.training.ema_offload, recipe.optimizer.offload = way.average, way.moments
    text = dry_run.report(recipe, world_size=gpus)
    parameters = int(re.search(r"parameters +([\d,]+)", text)[1].replace(",", ""))
    expected = way.bytes_per_gpu(parameters, gpus, adapters=False)
    assert state_of(text) == pytest.approx(expected, rel=0.02)  # a line has three digits


@pytest.mark.parametrize(
    ("gpus", "share", "expected"),
    [
        *((1, 80.0, ON_ONE_GPU[0]), (1, 1.0, ON_ONE_GPU[1]), (1, 0.8, ON_ONE_GPU[2])),
        *((8, 0.45, WAYS[0]), (8, 0.4, WAYS[1]), (8, 0.3, WAYS[2]), (8, 0.1, WAYS[3])),
    ],
)
def test_the_fastest_way_that_fits_is_selected(
    monkeypatch: pytest.MonkeyPatch, gpus: int, share: float, expected: Way
) -> None:
    """The model of 51 M needs 1.1 GB on one GPU; on eight its replicated weights and gradients need 0.3 GB."""
    monkeypatch.setattr("recipes.finetune.SHARE", share)
    config = built(finetune(gpus=gpus, gpu_memory=1))
    assert (config.training.ema_offload, config.optimizer.offload) == (expected.average, expected.moments)
    assert config.parallel.data_parallel == ("fsdp" if expected.fsdp else "distributed_optimizer")
    assert (config.training.recompute, config.training.global_batch_size) == ("full", max(4, gpus))


def test_ways_are_ordered_by_their_bytes() -> None:
    """Sharded weights come after replicated ones, and host memory last, for both kinds of training."""
    for ways, gpus in ((WAYS, 8), (ON_ONE_GPU, 1)):
        sizes = [way.bytes_per_gpu(10**9, gpus, adapters=False) for way in ways]
        assert sizes == sorted(sizes, reverse=True)
    assert WAYS[2].bytes_per_gpu(8 * 10**9, 8, adapters=True) == 2e9
    assert WAYS[0].bytes_per_gpu(8 * 10**9, 8, adapters=True) == 16e9


def test_a_model_that_fits_in_no_way_is_refused_with_the_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.finetune.SHARE", 0.1)
    with pytest.raises(ConfigError, match=r"0\.1 B parameters need 1 GB in 1 x 1 GB; use gpus=\d+, or train adapters"):
        finetune(gpus=1, gpu_memory=1)
    monkeypatch.setattr("recipes.finetune.SHARE", 0.08)
    with pytest.raises(ConfigError, match=r"in 1 x 1 GB; use gpus=2$"):
        finetune_lora(gpus=1, gpu_memory=1)
    with pytest.raises(ConfigError, match="gpus=0 and gpu_memory=80 must be at least 1"):
        finetune(gpus=0)


def test_without_a_number_of_gpus_nothing_changes() -> None:
    config = built(finetune())
    assert (config.training.recompute, config.training.ema_offload, config.optimizer.offload) == ("none", False, False)


def test_mlperf_measures_at_its_samples_with_its_optimizer() -> None:
    """Source: mlcommons/training, text_to_image; mlcommons/logging, rcps_flux1.json, row of batch 512."""
    config = built(call_recipe("flux_mlperf"))
    training, optimizer = config.training, config.optimizer
    assert training.validation_interval * training.global_batch_size == 262_144
    assert config.checkpoint.interval == training.validation_interval
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps) == (2e-4, 0.9, 0.95, 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_grad, config.schedule.warmup_steps) == (0.1, 1.0, 1600)
    assert config.schedule.rate(20_000, training.num_steps, 2e-4) == 2e-4
    assert (config.data.validation_samples, config.data.max_text_tokens) == (29_696, 256)


@pytest.mark.parametrize(
    ("factory", "folder", "parameters", "rank"),
    [
        (finetune_z_image, "models/z-image", 6_154_908_736, None),
        (finetune_z_image_lora, "models/z-image", 6_154_908_736, 16),
        (finetune_lumina2, "models/lumina2", 2_609_769_152, None),
        (finetune_prx, "models/prx", 1_170_691_648, None),
        (finetune_chroma, "models/chroma", 8_899_983_424, None),
        (finetune_hunyuan_video, "models/hunyuan-video", 8_326_608_160, None),
    ],
)
def test_recipes_of_published_models_have_their_sizes(factory, folder, parameters, rank) -> None:
    config = built(factory(gpus=8))
    assert config.checkpoint.start_from == folder
    assert count_parameters(config.model.without_adapters()) == parameters
    assert (None if config.model.adapters is None else config.model.adapters.rank) == rank
    assert config.training.recompute == "full"
