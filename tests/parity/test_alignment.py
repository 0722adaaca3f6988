"""Alignment matches the formulas of the REPA paper, computed in a loop over samples in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.condition_table import TEACHER
from dit.conditions import Conditions, Entry
from dit.errors import ConfigError
from dit.models.base import Backbone, ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.flux.config import FluxConfig
from dit.models.routing_config import RoutingConfig
from dit.objective_checks import check_alignment
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.alignment import Alignment
from dit.objectives.flow_matching import FlowMatching
from dit.step.forward_step import training_forward_step
from dit.training.validate import held_out_loss
from tests.conftest import BuildModel
from tests.parity import weights
from tests.parity.test_dit import config, rows_of
from tests.support.batches import Sample, pack
from tests.support.reference import join_layers, relative_error

RTOL = 1e-5  # float32 against float64, as without alignment
SEED, STEP = 3, 11
SAMPLES = [Sample((1, 3, 4), label=2), Sample((2, 2, 3)), Sample((1, 1, 1), label=5), Sample((1, 5, 2), label=0)]
MODEL = config(num_layers=4, class_dropout=0.0)
PART = Alignment(weight=0.5, layer=2, features=10, hidden_size=20)
OBJECTIVE = FlowMatching(alignment=PART, prediction="x0", time_distribution="logit_normal")


def aligned_pack(model: DiTConfig = MODEL) -> PackedBatch:
    """Pack samples of several sizes and weights; padding has teacher features, so that reading them would show."""
    batch, generator = pack(SAMPLES, model, multiple_of=4, tail=3), torch.Generator().manual_seed(1)
    batch.latents_TC = torch.randn(batch.latents_TC.shape, generator=generator)
    features_TF = torch.randn(len(batch.latents_TC), PART.features, generator=generator)
    batch.conditions |= {TEACHER.name: Entry("token", features_TF.half())}
    return replace(batch, loss_weight_S=torch.tensor([0.5, 1.0, 2.0, 1.0]))


def network(build_model: BuildModel, objective: FlowMatching = OBJECTIVE, model: DiTConfig = MODEL) -> Backbone:
    backbone = build_model(model, perturb=0.1)
    backbone.add_networks(objective.auxiliary, backbone.provider)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name.startswith("alignment."):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return backbone


def step_of(
    backbone: nn.Module, objective: FlowMatching, batch: PackedBatch, step: int = STEP, model: DiTConfig = MODEL
) -> dict[str, Any]:
    prediction_TC, loss_of = training_forward_step(objective, model, SEED, step)(iter([batch]), backbone)
    total, count, logs = loss_of(prediction_TC)
    backbone.zero_grad(set_to_none=True)
    total.backward()
    gradients = {name: p.grad for name, p in backbone.named_parameters() if p.grad is not None}
    return {"total": total.detach(), "count": count, "sums": logs["sums"], "gradients": gradients}


def with_projection(reference: Any, monkeypatch: pytest.MonkeyPatch, features: int = PART.features) -> list[Tensor]:
    """Add the projection to a reference; return a list that gets the tokens after the second block."""
    for i, inputs, outputs in ((1, 48, 20), (2, 20, 20), (3, 20, features)):
        setattr(reference, f"align_{i}", nn.Linear(inputs, outputs).double())
    names = {f"alignment.fc{i}": f"align_{i}" for i in (1, 2, 3)}
    monkeypatch.setattr(weights, "_DIRECT", {**weights._DIRECT, **names})
    hidden: list[Tensor] = []
    reference.blocks[1].register_forward_hook(lambda _, args, out: hidden.append(out))
    return hidden


def cosine(reference: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine between the projection of a token and a feature of the teacher."""
    h = reference.align_2(nn.functional.silu(reference.align_1(x)))
    h = reference.align_3(nn.functional.silu(h))
    return (h @ y) / (h.norm() * y.norm())


def assert_gradients(actual: dict[str, Tensor], backbone: Backbone, reference: Any, model: DiTConfig) -> None:
    exact = weights.reference_gradients(backbone, reference, model.num_attention_heads)
    assert set(exact) == set(actual)
    for name, gradient in actual.items():
        assert relative_error(gradient, exact[name]) <= RTOL, name


def test_loss_and_gradients_equal_a_loop_over_samples(build_model: BuildModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token adds -1/2 cos(y, h(x)) times the weight of its sample, without the factor 1 / t^2."""
    backbone, batch = network(build_model), aligned_pack()
    actual = step_of(backbone, OBJECTIVE, batch)
    reference: Any = weights.reference_of(MODEL)
    hidden = with_projection(reference, monkeypatch)
    weights.copy_weights(backbone, reference, MODEL.num_attention_heads)
    prepared = OBJECTIVE.prepare(batch, AddressedNoise(SEED, STEP, batch.sample_ids_S, batch.layout))
    error, alignment = torch.zeros(2, dtype=torch.float64)
    for i, (sample, rows) in enumerate(zip(SAMPLES, rows_of(batch.layout))):
        t, weight = prepared.time_S[i], float(batch.loss_weight_S[i])  # type: ignore[index]
        x0 = reference(prepared.inputs_TC[None, rows].double(), t[None], sample.grid, [sample.label])[0]
        residual = (x0 - batch.latents_TC[rows].double()) / max(float(t), 0.05)
        error = error + weight * residual.square().mean(1).sum()
        for x, y in zip(hidden[-1][0], batch.conditions["teacher"].values[rows].double()):
            alignment = alignment - weight * 0.5 * cosine(reference, x, y)
    (error + alignment).backward()
    assert actual["sums"][:2].tolist() == pytest.approx([error.item(), alignment.item()], rel=RTOL)
    assert actual["total"].item() == pytest.approx((error + alignment).item(), rel=RTOL)
    assert int(actual["count"]) == batch.layout.valid_tokens
    assert_gradients(actual["gradients"], backbone, reference, MODEL)


def test_joined_layers_have_the_same_alignment(build_model: BuildModel) -> None:
    """The tokens after the aligned layer include its last residual."""
    networks = network(build_model), join_layers(network(build_model))
    apart, joined = (step_of(each, OBJECTIVE, aligned_pack()) for each in networks)
    assert torch.equal(apart["sums"], joined["sums"])
    for name, gradient in apart["gradients"].items():
        assert relative_error(joined["gradients"][name], gradient) <= RTOL, name


def test_the_term_ends_at_its_step(build_model: BuildModel) -> None:
    """From `until_step` on, loss and gradients equal those of flow matching."""
    ending = replace(OBJECTIVE, alignment=replace(PART, until_step=STEP))
    backbone, batch = network(build_model), aligned_pack()
    without = step_of(build_model(MODEL, perturb=0.1), replace(OBJECTIVE, alignment=None), batch)
    before, after = (step_of(backbone, ending, batch, step) for step in (STEP - 1, STEP))
    assert torch.equal(after["total"], without["total"])
    for name, gradient in after["gradients"].items():
        assert torch.equal(gradient, without["gradients"].get(name, torch.zeros_like(gradient))), name
    assert before["sums"][1] < 0
    assert before["gradients"]["alignment.fc1.weight"].any()
    idle = [ending.auxiliary.idle(step) for step in (STEP - 1, STEP)]
    assert idle == [(), ("alignment.",)]


def test_the_held_out_loss_excludes_the_alignment_term(build_model: BuildModel, one_rank_world: ProcessGroups) -> None:
    losses = []
    for objective in (OBJECTIVE, replace(OBJECTIVE, alignment=None)):
        backbone = network(build_model, objective)
        found = held_out_loss(backbone, iter([aligned_pack()]), objective, MODEL, torch.device("cpu"), one_rank_world)
        losses.append({name: loss for name, loss in found.items() if name == "loss" or "level" in name})
    assert losses[0] == losses[1]
    assert len(losses[0]) > 1


def test_samples_need_no_features(build_model: BuildModel) -> None:
    batch = replace(aligned_pack(), conditions=Conditions(label=aligned_pack().conditions["label"]))
    prediction_TC = network(build_model)(batch.latents_TC, torch.rand(len(SAMPLES)), batch)
    assert prediction_TC.shape == batch.latents_TC.shape


TREAD = config(num_layers=6, routing=RoutingConfig(first_layers=2, last_layers=1))


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        (MODEL, 5, r"objective\.alignment\.layer=5 is above model\.num_layers=4"),
        (TREAD, 3, r"layer=3 sees only some .* skips layers 3 to 5; use a layer up to 2 or above 5"),
        (TREAD, 5, "layer=5 sees only some"),
        (FluxConfig(), 8, "FluxConfig does not support alignment of hidden states"),
        (DiTConfig(num_classes=2, class_tokens=[1, 0]), 8, "one stream and without model.class_tokens"),
    ],
)
def test_a_layer_without_all_tokens_is_refused(model: ModelConfig, layer: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_alignment(FlowMatching(alignment=Alignment(layer=layer)), model)


@pytest.mark.parametrize("layer", [2, 6])
def test_a_layer_outside_of_the_middle_sees_all_tokens(build_model: BuildModel, layer: int) -> None:
    objective = FlowMatching(alignment=replace(PART, layer=layer))
    check_alignment(objective, TREAD)
    backbone, batch = network(build_model, objective, TREAD), aligned_pack(TREAD)
    found = step_of(backbone, objective, replace(batch, draw_keys_S=torch.arange(len(SAMPLES))))
    assert found["gradients"]["alignment.fc3.weight"].any()
