"""Samples with several noise levels: packs equal single samples, and layouts equal one rank."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.layout import CLEAN
from dit.models.base import Backbone, ModelConfig
from dit.models.streams.config import StreamsConfig
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.dims import ParallelConfig
from dit.step.forward_step import training_forward_step
from dit.verify.trial import disturb_constants
from energon_data.mock import with_references
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import MockPacks, Pair, tiny_pair
from tests.conftest import BuildModel
from tests.laws.backbones import BACKBONES, NAMES, config_of, run_of
from tests.support.levels import LeveledPacks, LeveledStream, leveled
from tests.support.ranks import compared, one_step, rows, selected

LEVELED = [name for name in NAMES if config_of(name).supports.levels]
EDITED = [name for name in LEVELED if config_of(name).takes_references and isinstance(config_of(name), StreamsConfig)]
"""Backbones that can modulate a reference with the time of its sample."""
CLEAN_TIME = {name: {"clean_reference_time": True} for name in ("qwen_image", "flux")}
"""Settings of those that modulate it with the time 0 in these tests, as in Qwen-Image-Edit-2511."""


class Kind(NamedTuple):
    """The objective of a case, and the change that gives the samples of a pack several levels."""

    objective: Objective
    change: Callable[[PackedBatch], PackedBatch]


KINDS = {
    "levels": Kind(FlowMatching(), leveled),
    "edits": Kind(FlowMatching(), with_references),
    "edm": Kind(EDM(), leveled),
    "ddpm": Kind(DDPM(prediction="v"), leveled),
}
SAMPLES = (0, 1, 2, 3, 4)
RTOL = 1e-6
"""Relative error of the loss and all gradients together, in fp32."""


def leveled_config(name: str) -> ModelConfig:
    """Return the tiny form of a backbone for samples with several levels."""
    return replace(config_of(name), **CLEAN_TIME.get(name, {}))


def step_of(
    model: Backbone, name: str, objective: Objective, packs: Any, numbers: tuple[int, ...], **padding: int
) -> dict[str, Tensor]:
    """Return loss sum, number of noised tokens, and every gradient of one training step."""
    step = training_forward_step(objective, leveled_config(name), 7, 0)
    model.zero_grad(set_to_none=True)
    prediction_TC, loss_of = step(iter([packs(numbers, **padding)]), model)
    total, count, _ = loss_of(prediction_TC)
    total.backward()
    gradients = {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach().double(), "tokens": count.double(), **gradients}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "levels") for name in LEVELED),
        *((name, "edits") for name in EDITED),
        *(("dit", "edm"), ("flux", "edm"), ("wan", "ddpm")),
    ],
)
def test_a_pack_equals_its_samples(
    build_model: BuildModel, one_rank_world: ProcessGroups, name: str, kind: str
) -> None:
    """Loss, token count and gradients of a padded pack equal the sums over single samples."""
    model = build_model(leveled_config(name))
    disturb_constants([model], one_rank_world)
    trained, change = KINDS[kind]
    packs = LeveledPacks(MockPacks(leveled_config(name)), change)
    together = step_of(model, name, trained, packs, SAMPLES, multiple_of=10, tail=16)
    single = [step_of(model, name, trained, packs, (number,)) for number in SAMPLES]
    summed = {key: sum(x[key] for x in single if key in x) for key in together}
    noised = [int(packs((number,)).layout.noised_T.sum()) for number in SAMPLES]
    assert int(together["tokens"]) == sum(noised) < packs(SAMPLES).layout.valid_tokens
    difference = torch.stack([(together[key] - summed[key]).norm() for key in together]).norm()
    assert difference <= RTOL * torch.stack([x.norm() for x in summed.values()]).norm()
    one_level = step_of(model, name, trained, MockPacks(leveled_config(name)), SAMPLES)
    assert abs(one_level["loss"] - together["loss"]) > 1e-2 * together["loss"]


TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2_sp": (2, TP2SP),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp2_balanced": (2, {"context_parallel_size": 2, "context_split": "load_balanced"}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "fsdp2": (2, {"data_parallel": "fsdp"}),
    "tp2_sp_cp2": (4, {**TP2SP, "context_parallel_size": 2}),
}
ROW = ("name", "layout", "kind")
# Wan, FLUX and edits of Qwen-Image on every layout; others on layouts that split tokens, heads and layers.
QUICK = {("wan", layout, "levels") for layout in ("tp2_sp", "cp2_balanced", "pp2", "fsdp2")}
QUICK |= {("z_image", "pp2", "levels"), ("qwen_image", "cp2", "edits"), ("dit", "pp2", "ddpm")}
PIPELINES = ("wan", "flux", "qwen_image", "z_image", "dit")
"""Backbones of different stages; the pipelines of the others are `long`."""
EVERYWHERE = {("wan", "levels"), ("flux", "levels"), ("qwen_image", "edits")}
CASES = [
    (name, layout, kind)
    for kind, names in {"levels": LEVELED, "edits": EDITED}.items()
    for name in names
    for layout in LAYOUTS
    if (name, kind) in EVERYWHERE or layout in ("tp2_sp_cp2", "pp2") or (name, layout, kind) in QUICK
]
CASES += [
    ("dit", layout, kind) for layout in ("tp2_sp", "cp2", "pp2", "fsdp2", "tp2_sp_cp2") for kind in ("edm", "ddpm")
]


def pair_of(name: str, layout: str, kind: str) -> Pair:
    """Return the tiny form of a recipe with several levels in a sample."""
    ranks, parallel = LAYOUTS[layout]
    run = run_of(name)
    model = replace(run.model, **CLEAN_TIME.get(name, {}))
    pair = one_step(replace(run, model=model, parallel=ParallelConfig(**parallel)), ranks)
    trained, change = KINDS[kind]
    stream = LeveledStream(replace(pair.one.stream, references=False), change)
    return replace(
        pair,
        one=replace(pair.one, stream=stream, objective=trained),
        many=replace(pair.many, stream=stream, objective=trained),
    )


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, Any]:
    """Verdict of each selected case; each world size starts once."""
    pairs = {row: pair_of(*row) for row in sorted(selected(request, ROW))}
    return compared(pairs, tmp_path_factory.mktemp("levels"))


@pytest.mark.parametrize(
    ROW, rows(CASES, lambda *row: row in QUICK, lambda name, layout, kind: layout == "pp2" and name not in PIPELINES)
)
def test_layouts_equal_one_rank(verdicts: dict[tuple, Any], name: str, layout: str, kind: str) -> None:
    """Gradients, losses, weights and their copies on other ranks are equal."""
    verdict = verdicts[name, layout, kind]
    assert verdict.is_equal, verdict.text()
    assert [p for p in verdict.idle if not re.fullmatch(BACKBONES[name].idle, p)] == []


def test_a_recipe_with_several_levels_is_verified_with_several() -> None:
    packs = tiny_pair(built(call_recipe("tiny_wan_image_to_video")), 1).one.stream(0, 1, 1)
    levels = [batch.layout.levels for batch in islice(packs, 24)]
    assert {CLEAN, 0, 1} <= {number for pack in levels if pack is not None for number in pack.numbers}


@pytest.mark.parametrize("recipe", ["tiny_flux", "finetune_qwen_image_edit", "tiny_dit"])
def test_models_of_references_are_verified_with_references(recipe: str) -> None:
    """A third of the micro-batches have samples with none, one and two, dense ones too; others have no references."""
    run = built(call_recipe(recipe))
    batches = list(islice(tiny_pair(run, 1).one.stream(0, 1, 1), 24))
    counts = [{len(references) for references in batch.reference_grids} for batch in batches]
    assert set.union(*counts) == {0, 1, 2}
    assert counts[::3] == counts[2::3] == [set()] * 8
    grids = [(grid, several) for batch in batches for grid, several in zip(batch.grids, batch.reference_grids)]
    assert any(len(several) == len({grid, *several}) - 1 == 2 for grid, several in grids)


def test_only_token_backbones_take_several_levels() -> None:
    refusing = {name for name in NAMES if not config_of(name).supports.levels}
    assert {name for name in NAMES if "unet" in name or "autoencoder" in name or name == "imagen"} <= refusing
    assert {"wan", "dit", "dit_cross", "moviegen", "experts", "stdit", "sd3", "z_image", *EDITED} <= set(LEVELED)
    assert set(EDITED) == {"chroma", "flux", "flux2", "qwen_image"}
