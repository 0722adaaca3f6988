"""Properties of every backbone: packs, padding, dropped conditions, settings, layouts. A new backbone adds a row."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.fixed_packs import PackMaxima
from dit.models.base import Backbone, ModelConfig
from dit.models.lora_config import LoRAConfig
from dit.models.stdit.config import STDiTConfig
from dit.monitoring.flops import PackFlops, shape_of
from dit.objectives.base import Objective
from dit.parallel.build import build_model as build_on_one_rank
from dit.parallel.build import build_on_meta, count_parameters
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.verify.compare import BOUNDS, compare_training
from dit.verify.laws import Check
from dit.verify.ranks import run_world
from dit.verify.report import Verdict
from dit.verify.trial import Trial, disturb_constants
from launch.config_file import built
from launch.train import call_recipe
from launch.verify import Pair, check_case, tiny_pair
from tests.conftest import BuildModel
from tests.laws.backbones import BACKBONES, CONDITIONED, NAMES, OTHER, REQUIRES, config_of, pack, run_of
from tests.support.ranks import compared, one_step, rows, selected


@pytest.fixture
def build(build_model: BuildModel, one_rank_world: ProcessGroups) -> Any:
    """Build a model without zero parameters; the initial value of a parameter depends only on its name."""

    def built(config: ModelConfig) -> Backbone:
        config.validate()
        model = build_model(config)
        disturb_constants([model], one_rank_world)
        return model

    return built


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_registered_in_the_order_of_the_forward_pass(name: str) -> None:
    """Megatron's buckets of gradients, which follow this order, are complete early in the backward pass."""
    names = [child for child, _ in build_on_meta(config_of(name)).named_children()]
    order = [child for child in ("embed", "layers", "head") if child in names]
    assert [child for child in names if child in order] == order


CLASSES = [type(config_of(name)) for name in NAMES]
FIRST_OF_CLASS = [
    pytest.param(name, marks=() if CLASSES.index(kind) == i else pytest.mark.long)
    for i, (name, kind) in enumerate(zip(NAMES, CLASSES))
]
"""Rows; further rows with the same class of config are `long`."""
SAMPLES = [0, 1, 2, 3]


def times(batch: PackedBatch) -> Tensor:
    return torch.linspace(0.1, 0.9, len(SAMPLES))[: batch.layout.num_samples]


PIXART = STDiTConfig(
    **{"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "in_channels": 4, "context_size": 12},
    **{"layer_pattern": ["full"], "qk_layernorm": False, "fps_conditioning": False},
    position_span=4.0,
)
"""The settings of STDiT that diffusers implements."""


CHECKED = [name for name in NAMES if name not in ("reg", "rit", "sr_dit", "tread", "autoencoder", "vq_autoencoder")]
"""Backbones without those whose checks are in `test_alignment.py` and `tests/parallel/test_adversarial.py`."""


def scale_outputs(chunks: list) -> None:
    """Scale outputs by the same wrong factor on all layouts and packs."""
    forward = chunks[0].forward
    chunks[0].forward = lambda *arguments: 1.01 * forward(*arguments)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Check]]:
    """Checks of every backbone on one rank, in one process."""
    models = {name: one_step(replace(run_of(name), parallel=ParallelConfig()), 2).one for name in CHECKED}
    classes = one_step(built(call_recipe("dit_xl2_imagenet")), 2).one
    models["published dit"] = classes
    models["dit of classes"] = replace(classes, model=replace(classes.model, time_frequency_shift=1))
    models["pixart"] = replace(models["stdit"], model=PIXART)
    models["scaled"] = replace(models["pixart"], alter=scale_outputs)
    found = run_world(1, [check_case(trial) for trial in models.values()], tmp_path_factory.mktemp("checks"))
    return dict(zip(models, found, strict=True))


@pytest.mark.parametrize("name", CHECKED)
def test_padding_packs_their_order_and_accumulation_change_nothing(checks: Any, name: str) -> None:
    """Compare outputs, gradients and losses; shapes in a pack differ if the backbone supports that."""
    config = config_of(name)
    assert len(set(pack(config, SAMPLES).grids)) > 1 or not config.supports.mixed_shapes
    for check in ("padding", "packed", "order", "accumulated"):
        assert checks[name][check].wrong == [], checks[name][check].line(check)
        assert len(checks[name][check].errors) > 20


PUBLIC = {
    "dit of classes": "DiTTransformer2DModel",
    "pixart": "PixArtTransformer2DModel",
    "flux": "FluxTransformer2DModel",
    "flux of control pictures": "FluxTransformer2DModel",
    "chroma": "ChromaTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "lumina2": "Lumina2Transformer2DModel",
    "qwen_image": "QwenImageTransformer2DModel",
    "sd3": "SD3Transformer2DModel",
    "prx of diffusers": "PRXTransformer2DModel",
    "sana": "SanaTransformer2DModel",
    "wan": "WanTransformer3DModel",
    "ldm_unet": "UNet2DConditionModel",
    "sdxl_unet": "UNet2DConditionModel",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_class_has_the_same_output_and_gradients(checks: Any, name: str) -> None:
    check = checks[name]["diffusers"]
    assert (check.note, check.wrong) == (PUBLIC[name], []), check.line(name)
    assert len(check.errors) > 30


def test_comparison_with_the_public_class_detects_a_fault_of_every_layout_and_pack(checks: Any) -> None:
    found = checks["scaled"]
    assert {name for name, check in found.items() if check.wrong} == {"diffusers"}
    assert "output" in found["diffusers"].wrong


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("moviegen", "no class of diffusers: diffusers 0.38.0 has no model like MovieGenConfig"),
        ("published dit", "DiTTransformer2DModel computes a different function: .*time_frequency_shift=0"),
    ],
)
def test_a_model_without_a_public_class_states_the_reason(checks: Any, name: str, why: str) -> None:
    check = checks[name]["diffusers"]
    assert check.wrong == []
    assert re.search(f"not compared: {why}", check.line("diffusers"))


@pytest.mark.parametrize("name", CONDITIONED)
def test_a_dropped_condition_equals_a_missing_condition(build: Any, name: str) -> None:
    """The unconditional branch of guidance computes the prediction that training learned for dropped conditions."""
    config = config_of(name)
    batch, wanted = pack(config, SAMPLES, text_tokens=BACKBONES[name].text_tokens), config.conditions()
    droppable = [condition for condition in wanted if condition.dropout is not None]
    absent = {c.name: c.absent(batch.layout, config.batch_spec().patch) for c in droppable}
    without = batch.conditions.without(*absent) | {n: entry for n, entry in absent.items() if entry is not None}
    dropped = batch.conditions.unconditional(wanted, batch.layout)
    model = build(config)
    all_given, all_dropped, none_given = (
        model(batch.latents_TC, times(batch), replace(batch, conditions=conditions))
        for conditions in (batch.conditions, dropped, without)
    )
    torch.testing.assert_close(all_dropped, none_given, rtol=1e-5, atol=1e-6)
    assert (all_given - all_dropped).abs().max() > 1e-3


def observed(config: ModelConfig, model: Backbone, objective: Objective) -> Iterator[Tensor]:
    """Yield the prediction of a training step, then every gradient."""
    step = training_forward_step(objective, config, 7, 0)
    prediction_TC, loss_of = step(iter([pack(config, SAMPLES)]), model)
    yield prediction_TC
    loss_of(prediction_TC)[0].backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all()
            yield parameter.grad


CONVOLUTIONAL = [name for name in NAMES if not config_of(name).supports.mixed_shapes]
OTHER_TOKENS = ("tread", "sprint", "sr_dit", "hunyuan_video")
"""Backbones that drop tokens or refine only one of their texts; the FLOP counts assume neither."""


@pytest.mark.parametrize("name", NAMES)
def test_counted_parameters_and_operations_equal_those_of_the_model(build: Any, name: str) -> None:
    """Counts from the config equal those of the built model; every parameter has a gradient."""
    config = config_of(name)
    model, batch = build(config), pack(config, SAMPLES[:2])
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch.latents_TC, times(batch), batch)
    shape = batch.layout, batch.grids, batch.conditions.layout("context")
    counted = PackFlops(config).forward(*shape, convention="hardware")
    if name not in OTHER_TOKENS:
        assert counter.get_total_flops() == pytest.approx(counted, rel=1e-3 if name in CONVOLUTIONAL else 1e-12)
    assert list(observed(config, model, BACKBONES[name].objective))


def test_tokens_of_a_picture_and_of_a_second_text_are_counted_as_text(build: Any) -> None:
    """These are 15 of the 69 tokens in the joint layers of HunyuanVideo, which do most of the work."""
    config = replace(config_of("hunyuan_video"), num_joint_layers=24)
    model, batch = build(config), pack(config, SAMPLES)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch.latents_TC, times(batch), batch)
    counted = PackFlops(config).forward(*shape_of(batch), convention="hardware")
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)
    padded = PackMaxima(tokens=64, samples=6, text_tokens=32).pad(batch)  # with empty samples
    assert PackFlops(config).of_pack(padded) == PackFlops(config).of_pack(batch)


ELSEWHERE = {"base_width", "clean_reference_time"}
"""Initial weights and learning rates: `tests/unit/backends/test_width.py`. References: `tests/laws/test_levels.py`."""


@pytest.mark.parametrize("name", FIRST_OF_CLASS)
def test_every_setting_has_an_effect_or_a_stated_reason(build: Any, name: str) -> None:
    """Another value of a setting changes the prediction or a gradient of a step; every parameter has a gradient."""
    row, bases = BACKBONES[name], dict[str, list[Tensor]]()
    known = {**OTHER, **row.other}
    for setting in (field.name for field in fields(config_of(name)) if field.name not in ELSEWHERE):
        assert setting in known, f"add another value of {setting} to OTHER or to the row, and what it needs to act"
        base = replace(config_of(name), **{**REQUIRES, **row.requires}.get(setting, {}))
        value = known[setting](getattr(base, setting)) if callable(known[setting]) else known[setting]
        changed = replace(base, **{setting: value}, **row.also.get(setting, {}))
        if setting in row.refused:
            with pytest.raises(ConfigError, match=re.escape(f"{setting}={value}")):
                changed.validate()
            continue
        if repr(base) not in bases:
            bases[repr(base)] = list(observed(base, build(base), row.objective))
        pairs = zip(bases[repr(base)], observed(changed, build(changed), row.objective))
        acts = any(one.shape != two.shape or not torch.equal(one, two) for one, two in pairs)
        reason = row.without_effect.get(setting, "it changes nothing")
        assert acts == (setting not in row.without_effect), f"{setting}: {reason}"


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel": "ddp"},
    "distributed2": {"data_parallel": "distributed_optimizer"},
    "fsdp2": {"data_parallel": "fsdp"},
    "fsdp2_bf16": {"data_parallel": "fsdp"},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
LAYOUT_ROW = ("name", "layout")
ROWS = [(name, layout) for name in NAMES for layout in LAYOUTS if layout != "dp2" or layout in BACKBONES[name].quick]
"""`distributed2` has the same replicas as `dp2`, whose gradient sums do not depend on the model."""
LORA = "lora_"
FURTHER = ("fsdp2_bf16", "distributed2", LORA + "pp2")
"""Layouts with the mark `long`."""
ADAPTED = ["flux", "chroma", "flux2", "qwen_image", "sd3", "sana", "lumina2", "z_image", "hunyuan_video", "wan"]
ADAPTED += ["prx of diffusers"]
ROWS += [(name, LORA + layout) for name in ADAPTED for layout in ("tp2_sp", "pp2")]
"""The last rows have an adapter on every linear layer; `tests/parallel/test_layouts.py` has more of their layouts."""


def norms_in_fp32(chunks: list[Backbone]) -> None:
    """Keep the norms of a bf16 model in fp32."""
    for chunk in chunks:
        for norm in (module for module in chunk.modules() if "Norm" in type(module).__name__):
            norm.float()
        assert {parameter.dtype for parameter in chunk.parameters()} == {torch.float32, torch.bfloat16}


def pair_of(name: str, layout: str) -> Pair:
    """Return the tiny form of a recipe under a layout of two ranks, instead of the layout of the recipe."""
    run = replace(run_of(name), parallel=ParallelConfig(**LAYOUTS[layout.removeprefix(LORA)]))
    if layout.startswith(LORA):
        lora = LoRAConfig(rank=3, alpha=6.0, targets=["*"])
        based = replace(run.checkpoint, start_from="base")
        run = replace(run, model=replace(run.model, lora=lora), checkpoint=based)
    pair = one_step(run, 2)
    if layout != "fsdp2_bf16":
        return pair
    alter = norms_in_fp32 if name in CONVOLUTIONAL else None
    one, many = (replace(in_bf16(x), alter=alter) for x in (pair.one, pair.many))
    return replace(pair, one=one, many=many)


def in_bf16(trial: Trial) -> Trial:
    return replace(trial, training=replace(trial.training, precision="bf16"))


def supported(name: str, layout: str) -> bool:
    """Return whether the backbone declares support for the layout."""
    flags = {"fsdp2": "fsdp", "fsdp2_bf16": "fsdp", "tp2_sp": "tensor", "cp2": "context", "pp2": "pipeline"}
    flag = flags.get(layout.removeprefix(LORA))
    return flag is None or getattr(config_of(name).supports, flag)


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, Verdict]:
    """Verdict of each selected case; each world size starts once."""
    pairs = {row: pair_of(*row) for row in sorted(selected(request, LAYOUT_ROW)) if supported(*row)}
    return compared(pairs, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(
    LAYOUT_ROW,
    rows(
        ROWS,
        lambda name, layout: layout in BACKBONES[name].quick or not supported(name, layout),
        lambda name, layout: layout in FURTHER,
    ),
)
def test_layouts_equal_one_rank_or_are_refused(request: pytest.FixtureRequest, name: str, layout: str) -> None:
    """Gradients, losses, weights and their copies on other ranks are equal; an unsupported layout is refused."""
    if not supported(name, layout):
        with pytest.raises(ConfigError, match=f"{type(config_of(name)).__name__} does not support"):
            pair_of(name, layout)
        return
    verdict = request.getfixturevalue("verdicts")[name, layout]
    assert verdict.is_equal, verdict.text()
    assert all(re.fullmatch(BACKBONES[name].idle, parameter) for parameter in verdict.idle)
    assert verdict.text().endswith(f"equal: {verdict.compared} gradients, losses, weights and their copies")


BF16_ROW = ("bf16_name", "data_parallel")
BF16_NAMES = ("imagen", "efficient_unet")
DATA_PARALLEL = ("ddp", "distributed_optimizer")
HALVES = {"bf16": (torch.bfloat16, 0.05), "fp16": (torch.float16, 0.01)}
"""Type of the weights, and relative error of a prediction against fp32."""
BF16_RTOL = 2**-8  # after an update, which may round a weight to the next bf16 number


@pytest.fixture(scope="module")
def bf16_trials(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple, tuple[dict[str, Any], dict[str, Any]]]:
    """Reports of one and of two ranks for each selected case."""
    folder, wanted = tmp_path_factory.mktemp("bf16"), sorted(selected(request, BF16_ROW))
    names = sorted({name for name, _ in wanted})

    def pair(name: str, kind: Any) -> Pair:
        return tiny_pair(replace(run_of(name), parallel=ParallelConfig(data_parallel=kind)), 2)

    def trained(ranks: int, trials: Iterable[Trial]) -> list[dict[str, Any]]:
        cases = [{"task": "dit.verify.trial:run_case", "trial": in_bf16(trial)} for trial in trials]
        return run_world(ranks, cases, folder / str(ranks))

    alone = dict(zip(names, trained(1, (pair(name, "ddp").one for name in names))))
    return {row: (alone[row[0]], many) for row, many in zip(wanted, trained(2, (pair(*row).many for row in wanted)))}


@pytest.mark.slow
@pytest.mark.parametrize(BF16_ROW, [(name, kind) for name in BF16_NAMES for kind in DATA_PARALLEL])
def test_bf16_with_fp32_norms_equals_one_rank(bf16_trials: Any, bf16_name: str, data_parallel: str) -> None:
    """Gradients of bf16 weights and of fp32 norms in one model are both summed in fp32."""
    one, many = bf16_trials[bf16_name, data_parallel]
    errors = compare_training(one, many).errors
    for kind, bound in BOUNDS.items():
        for key, error in errors[kind].items():
            follows_update = kind == "parameters" or key == "step 1"
            assert error <= (BF16_RTOL if follows_update else bound), (kind, key)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", BF16_NAMES)
def test_norms_stay_in_fp32(one_rank_world: ProcessGroups, name: str, half: str) -> None:
    """In a half-precision model; its prediction equals that of the fp32 model within half precision."""
    config = config_of(name)
    outputs = []
    for precision in ("fp32", half):
        (model,) = build_on_one_rank(config, ParallelConfig(), TrainingConfig(precision=precision), one_rank_world)
        disturb_constants([model], one_rank_world)
        batch = pack(config, SAMPLES)
        outputs.append(model(batch.latents_TC, times(batch), batch).float())
    kinds = {n: p.dtype for n, p in model.named_parameters()}
    norms = [n for n in kinds if re.search(r"(?<!pooling\.)(?<!caption\.)norm(_\w+)?\.(weight|bias)$", n)]
    assert {kinds[n] for n in norms} == {torch.float32}
    assert {kind for n, kind in kinds.items() if n not in norms} == {HALVES[half][0]}
    assert (outputs[1] - outputs[0]).norm() < HALVES[half][1] * outputs[0].norm()


FP16_RTOL, LOSS_SCALE = 0.02, 8.0


@pytest.mark.parametrize("name", FIRST_OF_CLASS)
def test_fp16_has_the_gradients_of_fp32(one_rank_world: ProcessGroups, name: str) -> None:
    """Loss and unscaled gradients equal those of fp32, within the fp16 rounding of a deep network."""
    config, found = config_of(name), {}
    for precision, scale in (("fp32", 1.0), ("fp16", LOSS_SCALE)):
        (model,) = build_on_one_rank(config, ParallelConfig(), TrainingConfig(precision=precision), one_rank_world)
        disturb_constants([model], one_rank_world)
        step = training_forward_step(BACKBONES[name].objective, config, 7, 0)
        prediction_TC, loss_of = step(iter([pack(config, SAMPLES)]), model)
        loss = loss_of(prediction_TC)[0]
        assert loss.dtype == torch.float32
        (loss * scale).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        found[precision] = loss.detach(), torch.cat([p.grad.float().flatten() / scale for p in trained])
    assert torch.float16 in {p.dtype for p in model.parameters()}
    (loss32, exact), (loss16, rounded) = found.values()
    assert (loss16 - loss32).abs() < FP16_RTOL * loss32.abs()
    assert 0 < (rounded - exact).norm() < FP16_RTOL * exact.norm()
