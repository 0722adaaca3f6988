"""MeanFlow: flow matching where intervals are empty, one-step samples of an exact network, and its requirements."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.base_model import find_start, load_base
from dit.checkpoint.full_weights import write_imported
from dit.checkpoint.sharded_state import load_weights
from dit.convert.diffusers_format import TrainedModel
from dit.data_api import NoData
from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.models.lora_config import LoRAConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.mean_flow import MeanFlow
from dit.parallel.build import build_model, parameter_shapes
from dit.parallel.dims import ParallelConfig
from dit.run_config import RunConfig
from dit.sampling.generate import empty_pack
from dit.settings import CheckpointConfig, SamplingConfig, TrainingConfig
from tests.conftest import BuildModel
from tests.parity.convert_cases import random_weights
from tests.support.batches import generate
from tests.unit.objectives.packs import noise_for, pack, run_config

LOGIT_NORMAL = {"time_distribution": "logit_normal", "logit_mean": -0.4}
DATA_STD = 0.3


def std(t: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of z_t for Gaussian data."""
    return ((1 - t) ** 2 * DATA_STD**2 + t**2).sqrt()


def test_samples_with_empty_intervals_are_those_of_flow_matching():
    batch = pack(list(range(3, 43)))
    plain = FlowMatching(**LOGIT_NORMAL).prepare(batch, noise_for(batch))
    prepared = MeanFlow(**LOGIT_NORMAL, instant_share=0.75).prepare(batch, noise_for(batch))
    instant_S = prepared.time_S[:, 1] == 0
    assert 24 <= instant_S.sum() <= 36
    assert torch.equal(prepared.time_S[instant_S, 0], plain.time_S[instant_S])
    assert torch.equal(prepared.target_TC, plain.target_TC)
    instant_T = batch.layout.per_token(instant_S)[:, 0]
    assert torch.equal(prepared.inputs_TC[instant_T], plain.inputs_TC[instant_T])
    times_S2 = prepared.time_S[~instant_S]
    assert ((times_S2[:, 1] > 0) & (times_S2[:, 1] < times_S2[:, 0])).all()


def test_the_loss_without_intervals_and_weights_equals_flow_matching():
    batch = pack([3, 5, 8])
    objective, plain = MeanFlow(instant_share=1.0), FlowMatching()
    prepared, expected = (o.prepare(batch, noise_for(batch)) for o in (objective, plain))
    completed = objective.complete(lambda x_TC, time_S2, pack: 1 / 0, prepared, batch, ())
    output_TC = torch.cos(prepared.inputs_TC)
    losses = objective.loss(output_TC, completed, batch.layout), plain.loss(output_TC, expected, batch.layout)
    assert torch.equal(losses[0][0], losses[1][0])


def test_the_average_velocity_of_gaussian_data_solves_the_identity():
    """The exact u is its own target: v is replaced by the marginal velocity, which is u at r = t."""
    batch = pack(list(range(3, 19)))
    objective = MeanFlow(instant_share=0.2, difference=1e-3)
    prepared = objective.prepare(batch, noise_for(batch))

    def u(z_TC, time_S2):
        t_T1, d_T1 = (batch.layout.per_token(column).double() for column in time_S2.unbind(-1))
        slope_T1 = ((t_T1 - (1 - t_T1) * DATA_STD**2) / std(t_T1) ** 2).where(d_T1 == 0, 0)
        return torch.where(d_T1 == 0, slope_T1, (1 - std(t_T1 - d_T1) / std(t_T1)) / d_T1.where(d_T1 != 0, 1)) * z_TC

    t_S2 = prepared.time_S * torch.tensor([1.0, 0.0])
    prepared = type(prepared)(**{**vars(prepared), "target_TC": u(prepared.inputs_TC, t_S2).float()})
    completed = objective.complete(lambda x_TC, time_S2, pack: u(x_TC, time_S2), prepared, batch, ())
    exact_TC = u(prepared.inputs_TC.double(), prepared.time_S)
    assert (completed.target_TC - exact_TC).norm() <= 1e-3 * exact_TC.norm()
    assert (prepared.target_TC - exact_TC).norm() > 0.1 * exact_TC.norm()


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("solver", ["euler", "ddim"])
def test_any_number_of_euler_steps_is_exact_for_an_exact_network(num_steps, solver):
    """The deviation of Gaussian noise becomes that of the data. Other solvers use the velocity."""
    spec = DiTConfig(interval_conditioning=True).batch_spec()
    batch = empty_pack(spec, (1, 4, 4), 2, torch.device("cpu"))

    def network(x_TC, time_S2, pack):
        t, d = time_S2[0].double() if time_S2.dim() == 2 else (time_S2[0].double(), torch.zeros(()))
        slope = (t - (1 - t) * DATA_STD**2) / std(t) ** 2
        return x_TC * (slope if d == 0 else (1 - std(t - d) / std(t)) / d)

    sampling = SamplingConfig(num_steps=num_steps, guidance_scale=1.0, solver=solver)
    latents = generate(network, MeanFlow(time_shift=2.0), batch, spec, sampling)
    noise = AddressedNoise(sampling.seed, 0, batch.sample_ids_S, batch.layout).normal_TC("start", 16)
    exact = DATA_STD * torch.stack(batch.unpatchified(noise, *spec.patch))
    error = float((latents - exact).norm() / exact.norm())
    assert error < 1e-5 if solver == "euler" else error > 0.05
    if solver == "euler" and num_steps > 1:
        with pytest.raises(ConfigError, match="only the last one has such an estimate"):
            generate(network, MeanFlow(), batch, spec, replace(sampling, thresholding="dynamic"))


def test_the_embedding_of_intervals_starts_at_zero(build_model: BuildModel):
    """So that a trained model of flow matching continues with its own predictions."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_classes": None, "class_dropout": 0.0}
    model = build_model(DiTConfig(**sizes, interval_conditioning=True))
    embedding = model.conditioner.interval(torch.tensor([0.3, 0.9]))
    assert not embedding.any()
    assert model.conditioner.interval.linear_1.weight.any()


@pytest.mark.parametrize(
    "targets", [None, ["conditioner.interval.*"], ["layers.*"]], ids=["all", "adapters", "no output"]
)
def test_a_model_of_intervals_starts_with_the_predictions_of_weights_without_them(
    one_rank_world: ProcessGroups, tmp_path: Path, targets: list[str] | None
) -> None:
    """All weights are trained, or adapters, which must be able to change the output of the embedding from zero."""
    sizes = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 4, "num_classes": None, "class_dropout": 0.0}
    base, batch = DiTConfig(**sizes), empty_pack(DiTConfig(**sizes).batch_spec(), (1, 4, 4), 2, torch.device("cpu"))
    weights = random_weights(parameter_shapes(base))
    trained = TrainedModel(base, FlowMatching(), (1, 4, 4), {})
    folder = write_imported(tmp_path, weights, trained, SamplingConfig(), "a test")
    lora = None if targets is None else LoRAConfig(rank=2, targets=targets)
    model = replace(base, interval_conditioning=True, lora=lora)
    start = CheckpointConfig(start_from=str(tmp_path))
    config = RunConfig(model=model, data=NoData(), objective=MeanFlow(), checkpoint=start)
    network, of_base = (
        build_model(m, ParallelConfig(), TrainingConfig(precision="fp32"), one_rank_world) for m in (model, base)
    )
    torch.nn.init.ones_(network[0].conditioner.interval.linear_2.weight)
    load_weights(find_start(str(folder)).weights(base), of_base, one_rank_world)
    if targets == ["layers.*"]:
        with pytest.raises(
            ConfigError, match=r"zeros, which no adapter changes; add 'conditioner\.interval\.\*' to model"
        ):
            load_base(config, network, one_rank_world)
        return
    if lora is None:
        opened = find_start(str(folder)).weights(model, parameter_shapes(model))
        load_weights(opened, network, one_rank_world)
    else:
        load_base(config, network, one_rank_world)
    inputs_TC, times_S2 = noise_for(batch).normal_TC("x", 16), torch.tensor([[0.7, 0.4], [0.3, 0.0]])
    expected = of_base[0](inputs_TC, times_S2[:, 0], batch)
    assert expected.std() > 0.1
    assert torch.equal(network[0](inputs_TC, times_S2, batch), expected)
    interval = network[0].conditioner.interval
    assert torch.equal(interval.linear_1.weight, of_base[0].conditioner.time.linear_1.weight)
    assert not interval.linear_2.weight.any()
    assert not interval.linear_2.bias.any()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.interval_conditioning=False"], "mean_flow needs a DiT with True"),
        (["objective=flow_matching"], "objective=FlowMatching and model.interval_conditioning=True do not go together"),
        (["parallel.pipeline_model_parallel_size=2"], "in further passes; use parallel.pipeline_model_parallel_size=1"),
        (["training.precision=bf16"], "takes differences of predictions in further passes; use training.precision"),
        (["training.fp8=tensorwise"], "in further passes; use training.fp8=null"),
        (["model.num_experts=4"], "in further passes; use model.num_experts=null"),
        (["objective.prediction=x0"], "prediction=x0 is not supported with objective=mean_flow"),
        (["objective.difference=0.001"], r"use an objective.difference below 0\.001 \(1 / model.time_scale\)"),
        (
            ["objective.guidance_scale=3", "sampling.guidance_scale=3"],
            r"use sampling.guidance_scale=1 \(targets are guided\)",
        ),
        (
            [
                "objective.guidance_scale=3",
                "sampling.guidance_scale=1",
                "model.class_dropout=0",
                "model.context_dropout=0",
            ],
            "use a positive model.class_dropout or context_dropout",
        ),
        (["sampling.thresholding=static"], "of the 30 Euler steps of objective=mean_flow only the last one"),
    ],
)
def test_settings_that_it_does_not_support_are_refused(overrides, message):
    base = "tiny_dit", "objective=mean_flow", "model.interval_conditioning=True"
    for supported in ([], ["sampling.num_steps=1"], ["sampling.solver=heun"]):
        run_config(*base, *supported, *(["sampling.thresholding=static"] if supported else [])).check()
    with pytest.raises(ConfigError, match=message):
        run_config(*base, *overrides).check()
