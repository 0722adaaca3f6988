"""The teacher's noised class token matches the formulas of the REG paper, computed sample by sample in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.condition_table import TEACHER, TEACHER_TOKEN
from dit.conditions import Entry
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.objective_checks import check_alignment, check_outputs
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.alignment import Alignment
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.training.validate import held_out_loss
from tests.conftest import BuildModel
from tests.parity import weights
from tests.parity.test_alignment import RTOL, SEED, STEP, assert_gradients, cosine, network, step_of, with_projection
from tests.parity.test_alignment import SAMPLES as RAGGED
from tests.parity.test_dit import JIT, assert_last_stage_equals, config, rows_of, two_stages
from tests.support.batches import Sample, pack

WIDTH, WEIGHT = 7, 0.2
DENSE = [Sample((1, 3, 4), label=i) for i in (2, 0, 6)]
MODEL = config(num_layers=4, class_dropout=0.0, teacher_token_size=WIDTH)
OBJECTIVE = FlowMatching(teacher_token_weight=WEIGHT, time_distribution="logit_normal")
ALIGNED = replace(OBJECTIVE, alignment=Alignment(weight=0.7, layer=2, features=WIDTH, hidden_size=20))


def pack_with_tokens(model: DiTConfig = MODEL, samples: list[Sample] = RAGGED, multiple: int = 4) -> PackedBatch:
    """Pack samples of several weights, with tokens and features of a teacher."""
    batch = pack(samples, model, multiple_of=multiple, tail=3 * (multiple - 1))
    generator = torch.Generator().manual_seed(1)
    batch.latents_TC = torch.randn(batch.latents_TC.shape, generator=generator)
    token_SF = torch.randn(len(samples), WIDTH, generator=generator)
    features_TF = torch.randn(len(batch.latents_TC), WIDTH, generator=generator)
    batch.conditions |= {TEACHER_TOKEN.name: Entry("sample", token_SF), TEACHER.name: Entry("token", features_TF)}
    return replace(batch, loss_weight_S=torch.tensor([0.5, 1.0, 2.0, 1.0])[: len(samples)])


CASES = {
    "dense": (MODEL, OBJECTIVE, DENSE, 1),
    "packed": (MODEL, OBJECTIVE, RAGGED, 4),
    "aligned": (MODEL, ALIGNED, RAGGED, 4),
    "x0 after class tokens": (
        config(**{**JIT, "num_layers": 4, "class_dropout": 0.0, "teacher_token_size": WIDTH}),
        replace(OBJECTIVE, prediction="x0"),
        RAGGED,
        4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_a_loop_over_samples(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The token is noised at the time of its sample; each of the sample's tokens adds its error times the weight.

    The clean token is aligned like those of the patches; a sample has its number of patches times the mean.
    """
    model, objective, samples, multiple = CASES[case]
    model.validate()
    backbone, batch = network(build_model, objective, model), pack_with_tokens(model, samples, multiple)
    actual = step_of(backbone, objective, batch, model=model)
    reference: Any = weights.reference_of(model)
    hidden = with_projection(reference, monkeypatch, WIDTH) if objective.alignment is not None else None
    weights.copy_weights(backbone, reference, model.num_attention_heads)
    noise = AddressedNoise(SEED, STEP, batch.sample_ids_S, batch.layout)
    prepared = objective.prepare(batch, noise)
    eps_SF = noise.normal_SC("teacher_token", WIDTH, repeated=False).double()
    error, token_error, alignment = torch.zeros(3, dtype=torch.float64)
    for i, (sample, rows) in enumerate(zip(samples, rows_of(batch.layout))):
        t, weight = prepared.time_S[i].double(), float(batch.loss_weight_S[i])  # type: ignore[index]
        clean, eps = batch.conditions["teacher_token"].values[i].double(), eps_SF[i]
        noised = (1 - t) * clean + t * eps
        x_TC = prepared.inputs_TC[rows].double()
        out = reference(x_TC[None], t[None], sample.grid, [sample.label], token_BF=noised[None])[0]
        patches, token = out[:, : model.token_channels], out[0, model.token_channels :]
        if objective.prediction == "x0":
            residual, token_residual = patches - batch.latents_TC[rows].double(), token - clean
            weight = weight / max(float(t), 0.05) ** 2
        else:
            residual, token_residual = patches - prepared.target_TC[rows].double(), token - (eps - clean)
        error = error + weight * residual.square().mean(1).sum()
        token_error = token_error + weight * WEIGHT * len(patches) * token_residual.square().mean()
        if hidden is not None:
            teacher = [*batch.conditions[TEACHER.name].values[rows].double(), clean]
            cosines = [cosine(reference, x, y) for x, y in zip(hidden[-1][0], teacher, strict=True)]
            alignment = alignment - weight * 0.7 * len(patches) * sum(cosines) / len(cosines)
    terms = [error, token_error] if hidden is None else [error, alignment, token_error]
    torch.stack(terms).sum().backward()
    assert actual["sums"][: len(terms)].tolist() == pytest.approx([term.item() for term in terms], rel=RTOL)
    assert actual["total"].item() == pytest.approx(sum(term.item() for term in terms), rel=RTOL)
    assert int(actual["count"]) == batch.layout.valid_tokens
    assert_gradients(actual["gradients"], backbone, reference, model)


def test_tokens_of_a_pack_have_their_own_standard_normal_noise() -> None:
    """The noise does not depend on the other samples, and is neither that of other tokens nor repeated per position."""
    model = replace(MODEL, patch_spatial=1, in_channels=3)
    full, single = (pack_with_tokens(model, samples) for samples in (RAGGED, RAGGED[1:2]))
    single.sample_ids_S = full.sample_ids_S[1:2]
    full.sample_ids_S = torch.arange(1, 5)
    single.sample_ids_S = torch.tensor([2])
    eps = []
    for batch in (full, single):
        noise = AddressedNoise(SEED, STEP, batch.sample_ids_S, batch.layout, latent_channels=3)
        eps.append(noise.normal_SC("teacher_token", 768, repeated=False))
    assert torch.equal(eps[0][1:2], eps[1])
    assert eps[0].unique().numel() > 0.99 * eps[0].numel()
    assert eps[0].std().item() == pytest.approx(1, abs=0.05)


def test_features_of_another_width_than_the_token_are_refused() -> None:
    objective = FlowMatching(alignment=Alignment(features=9, layer=1))
    with pytest.raises(ConfigError, match=r"teacher_token_size=7 and objective.alignment.features=9 must be equal"):
        check_alignment(objective, MODEL)


def test_the_held_out_loss_includes_the_token(build_model: BuildModel, one_rank_world: ProcessGroups) -> None:
    backbone = network(build_model, OBJECTIVE, MODEL)
    found = held_out_loss(backbone, iter([pack_with_tokens()]), OBJECTIVE, MODEL, torch.device("cpu"), one_rank_world)
    assert found["loss"] == pytest.approx(found["loss_error"] + found["loss_teacher_token"])
    assert found["loss_teacher_token"] > 0.05


@pytest.mark.parametrize("cut", [1, 2])
def test_the_token_crosses_pipeline_stages(build_model: BuildModel, cut: int) -> None:
    """Class tokens begin at layer 1, in the first or the second of two stages; the teacher's token at layer 0."""
    model_config = config(**{**JIT, "teacher_token_size": WIDTH})
    model = build_model(model_config, perturb=0.1)
    stages = two_stages(model_config, model, cut)
    assert [stage.teacher_token is not None for stage in stages] == [True, False]
    batch, time = pack_with_tokens(model_config), torch.tensor([0.3, 0.8, 0.5, 0.1])
    sent = stages[0](batch.latents_TC, time, batch)
    assert len(sent) == len(batch.latents_TC) + 4 * 4
    assert_last_stage_equals(model, stages, sent, batch.latents_TC, time, batch)


@pytest.mark.parametrize(
    ("objective", "model"), [(FlowMatching(), MODEL), (OBJECTIVE, config()), (DDPM(), MODEL)], ids=["0", "1", "2"]
)
def test_a_token_without_its_loss_or_model_is_refused(objective: Objective, model: DiTConfig) -> None:
    with pytest.raises(ConfigError, match=r"teacher_token_weight=.* and model.teacher_token_size=.* set both"):
        check_outputs(objective, model)


@pytest.mark.parametrize(
    "changes", [{"num_experts": 4}, {"wide_head": [1, 48, 4]}], ids=lambda changes: next(iter(changes))
)
def test_settings_that_exclude_the_token_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigError, match=r"model\.teacher_token_size=7"):
        replace(MODEL, **changes).validate()
