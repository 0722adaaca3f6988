"""Recipes for fine-tuning select where the training state is stored; MLPerf's FLUX.1 has its published numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dit.convert.diffusers_format import format_of_model
from dit.errors import ConfigError
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import count_parameters
from launch import dry_run
from launch.config_file import built
from launch.train import call_recipe
from recipes.finetune import (
    ON_ONE_GPU,
    PUBLISHED,
    WAYS,
    Way,
    _published,
    dreambooth,
    finetune,
    finetune_lora,
    finetune_sana,
)
from tests.support.fine_tuning_table import PAGE, ROWS, table_of
from tests.support.ranks import rows

GIB = 2**30


def state_of(text: str) -> float:
    """Return the bytes of weights, gradients, optimizer and average in a dry run."""
    names = "weights and gradients", "optimizer", "average"
    return GIB * sum(float(re.search(rf"^  {name} +([\d.]+) GiB", text, re.MULTILINE)[1]) for name in names)


@pytest.mark.usefixtures("one_tracer")
@pytest.mark.parametrize(("way", "gpus"), [*((way, 1) for way in ON_ONE_GPU), (WAYS[0], 2), (WAYS[1], 2)])
def test_the_bytes_of_each_method_equal_those_of_the_planner(way: Way, gpus: int) -> None:
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
def test_the_fastest_method_that_fits_is_selected(
    monkeypatch: pytest.MonkeyPatch, gpus: int, share: float, expected: Way
) -> None:
    """The model of 51 M needs 1.1 GB on one GPU; on eight, replicated weights and gradients need 0.3 GB."""
    monkeypatch.setattr("recipes.finetune.SHARE", share)
    config = built(finetune(gpus=gpus, gpu_memory=1))
    assert (config.training.ema_offload, config.optimizer.offload) == (expected.average, expected.moments)
    assert config.parallel.data_parallel == ("fsdp" if expected.fsdp else "distributed_optimizer")
    assert (config.training.recompute, config.training.global_batch_size) == ("full", max(4, gpus))


def test_the_batch_is_a_multiple_of_the_gpus() -> None:
    assert [finetune(gpus=gpus).training.global_batch_size for gpus in (1, 2, 3, 5, 8)] == [4, 4, 6, 5, 8]


def test_methods_are_sorted_by_their_bytes() -> None:
    """Sharded weights come after replicated ones, and host memory last, for both kinds of training."""
    for ways, gpus in ((WAYS, 8), (ON_ONE_GPU, 1)):
        sizes = [way.bytes_per_gpu(10**9, gpus, adapters=False) for way in ways]
        assert sizes == sorted(sizes, reverse=True)
    assert WAYS[2].bytes_per_gpu(8 * 10**9, 8, adapters=True) == 2e9
    assert WAYS[0].bytes_per_gpu(8 * 10**9, 8, adapters=True) == 16e9


def test_a_model_that_fits_with_no_method_is_refused_with_the_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.finetune.SHARE", 0.1)
    message = (
        r"0\.1 B parameters need 0\.5 GB, and activations leave 0\.1 GB in 1 x 1 GB; use gpus=\d+, or .* lora=True\)$"
    )
    with pytest.raises(ConfigError, match=message):
        finetune(gpus=1, gpu_memory=1)
    monkeypatch.setattr("recipes.finetune.SHARE", 0.08)
    with pytest.raises(ConfigError, match=r"in 1 x 1 GB; use gpus=2$"):
        finetune_lora(gpus=1, gpu_memory=1)
    with pytest.raises(ConfigError, match="gpus=0 and gpu_memory=80 must be at least 1"):
        finetune(gpus=0)


def test_a_missing_base_is_refused_with_every_kind_of_base() -> None:
    message = r"base='runs/none': .* give the training\.run_dir .*, or a folder or hf:// address of diffusers$"
    with pytest.raises(ConfigError, match=message):
        finetune(base="runs/none")


def test_a_missing_number_of_gpus_changes_no_setting() -> None:
    config = built(finetune())
    assert (config.training.recompute, config.training.ema_offload, config.optimizer.offload) == ("none", False, False)


SIZES = [
    ("finetune_z_image", "models/z-image", 6_154_908_736),
    ("finetune_lumina2", "models/lumina2", 2_609_769_152),
    ("finetune_prx", "models/prx", 1_170_691_648),
    ("finetune_sana", "models/sana", 1_604_462_752),
    ("finetune_chroma", "models/chroma", 8_899_983_424),
    ("finetune_hunyuan_video", "models/hunyuan-video", 8_326_608_160),
    ("finetune_flux2_klein", "models/flux2-klein", 3_875_544_576),
    ("finetune_flux2_klein(size='9b')", "models/flux2-klein-9b", 9_078_581_248),
    ("finetune_qwen_image", "models/qwen-image", 20_430_401_088),
    ("finetune_qwen_image_edit", "models/qwen-image-edit", 20_430_401_088),
    ("finetune_wan22_ti2v", "models/wan22-ti2v", 4_999_787_712),
    ("finetune_sdxl", "models/sdxl", 2_567_463_684),
    ("finetune_sd35", "models/sd35", 8_056_627_520),
    ("finetune_sd35(size='medium')", "models/sd35-medium", 2_243_171_520),
]
"""Recipe, folder and published number of parameters."""
NULLS = {"flux_12b": 4096 + 768, "wan_14b_mock": 4096}
"""Learned replacements of a dropped text, which the published weights do not have."""
PUBLISHED_COUNTS = {
    **{factory: parameters for factory, _, parameters in SIZES},
    **{"flux_12b": 11_891_178_560, "wan_14b_mock": 14_288_491_584},
}


def with_words(factory: str, words: str) -> str:
    """Return the call of a recipe with further arguments."""
    name, _, arguments = factory.partition("(")
    return f"{name}({words}, {arguments or ')'}"


FURTHER = ("flux_12b", "wan_14b_mock", "finetune_sdxl", "finetune_sd35", "finetune_flux2_klein(size='9b')")
FURTHER += ("finetune_sd35(size='medium')", "finetune_qwen_image_edit", "finetune_hunyuan_video")
"""Recipes whose dry run has the mark `long`."""


@pytest.mark.parametrize("factory", rows(zip(PUBLISHED_COUNTS), lambda name: False, lambda name: name in FURTHER))
def test_a_dry_run_prints_the_published_number_of_parameters(factory: str) -> None:
    task = call_recipe(factory if factory in NULLS else with_words(factory, "gpus=8, gpu_memory=80"))
    text = dry_run.report(task, None, [1, 4, 4])
    assert f"parameters  {PUBLISHED_COUNTS[factory] + NULLS.get(factory, 0):,}\n" in text


@pytest.mark.parametrize(("factory", "folder", "parameters"), SIZES)
def test_recipes_of_published_models_have_their_sizes(
    monkeypatch: pytest.MonkeyPatch, factory: str, folder: str, parameters: int
) -> None:
    # The recipes select a method by the shapes; building every model once is enough.
    monkeypatch.setattr("recipes.finetune.parameter_shapes", lambda model: {"weights": (parameters,)})
    models = []
    for lora in (False, True):
        config = built(call_recipe(with_words(factory, f"lora={lora}, gpus=8, gpu_memory=80")))
        assert config.checkpoint.start_from == folder
        models.append(config.model.without_adapters())
        assert (config.model.adapters is not None) is lora
        assert config.training.recompute == "full"
        assert config.training.run_dir.endswith("_lora") is lora
    assert models[0] == models[1]
    assert count_parameters(models[0]) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_folder_of_diffusers_changes_only_the_shift_of_a_published_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A network without a pipeline changes nothing; the scheduler of a pipeline has a shift; so has `finetune`."""
    expected = built(_published(name, None, False, None, 80))
    form = format_of_model(expected.model)
    settings, _ = form.write_settings(expected.model, (1, 128, 128))
    (tmp_path / form.part).mkdir()
    (tmp_path / form.part / "config.json").write_text(json.dumps(settings))
    config = built(_published(name, str(tmp_path / form.part), False, None, 80))
    assert (config.objective, config.sampling) == (expected.objective, expected.sampling)
    if name == "sdxl":
        return
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    (tmp_path / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 2.5}
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    config = built(_published(name, str(tmp_path), False, None, 80))
    shifted = FlowMatching(time_distribution="logit_normal", time_shift=2.5)
    assert (config.objective, config.sampling) == (shifted, expected.sampling)
    assert built(finetune(base=str(tmp_path))).objective == shifted
    monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], folder=str(tmp_path)))
    assert built(_published(name, None, False, None, 80)).objective == shifted  # the default folder


def test_a_base_with_adapters_is_refused_by_recipes_of_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(finetune_sana(lora=True)).model
    monkeypatch.setattr("recipes.finetune._settings", lambda base, published: {"model": model})
    for recipe in (finetune, dreambooth, finetune_sana):
        with pytest.raises(ConfigError, match=r"base='runs/lora' has adapters .*--checkpoint runs/lora --format diff"):
            recipe(base="runs/lora")
    for adapted in (finetune_lora(base="runs/lora"), finetune_sana(base="runs/lora", lora=True)):
        assert (built(adapted).model.lora, adapted.optimizer.lr) == (model.lora, 1e-4)


def test_the_page_has_a_row_for_every_published_model() -> None:
    assert [line.split(":")[0].removeprefix("| ") for line in table_of(PAGE.read_text(encoding="utf-8"))] == list(ROWS)
