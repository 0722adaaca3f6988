"""Sampling methods other than plain guidance and solvers, against diffusers or a loop written from the paper."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import rescale_noise_cfg
from diffusers.schedulers.deprecated import scheduling_karras_ve

from dit.condition_table import LABEL
from dit.data_api import BatchSpec, NoData
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.layout import SequenceLayout
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig, check_sampling
from dit.sampling.generate import LowNoise, empty_pack, without_conditions
from dit.sampling.guidance import guided_prediction, rescaled
from dit.settings import SamplingConfig
from tests.support.batches import generate

CLASSES, CHANNELS, SIDE = 3, 4, 4
CHURN = [40.0, 0.05, 50.0, 1.003]
SPEC = BatchSpec(
    patch_temporal=1,
    patch_spatial=1,
    latent_channels=CHANNELS,
    conditions=(replace(LABEL, num_classes=CLASSES, dropout=0.1),),
    micro_batch_size=2,
)
LABELS = [2, 0]
OBJECTIVES = [EDM(), FlowMatching(), DDPM(prediction="v"), DDPM(discrete_steps=1000)]
RTOL = 2e-5


class Network:
    """A smooth function of input, time and class; records the number of samples of each call."""

    def __init__(self, strength: float = 1.0) -> None:
        self.strength, self.samples = strength, list[int]()

    def __call__(self, inputs_TC, time_S, batch):
        self.samples.append(len(time_S))
        label_T1 = batch.layout.per_token(batch.conditions["label"].values.float())
        mixed_TC = inputs_TC @ torch.linspace(-1, 1, CHANNELS**2).view(CHANNELS, CHANNELS)
        return self.strength * torch.sin(mixed_TC + 0.7 * label_T1 + batch.layout.per_token(time_S))


def pack():
    return empty_pack(SPEC, (1, SIDE, SIDE), len(LABELS), torch.device("cpu"), {"label": LABELS})


def as_tokens(latents):
    return latents[:, :, 0].flatten(2).transpose(1, 2).reshape(-1, CHANNELS)


def drawn(objective, sampling, network=None, **options):
    return as_tokens(generate(network or Network(), objective, pack(), SPEC, sampling, **options))


def with_class(network):
    """Bind a network to the pack."""
    batch = pack()
    return lambda inputs_TC, time_S: network(inputs_TC, time_S, batch)


def null_class(network):
    """Bind a network to the pack with null classes."""
    batch = pack()
    null = batch.conditions["label"]
    batch.conditions = batch.conditions | {"label": replace(null, values=torch.full_like(null.values, CLASSES))}
    return lambda inputs_TC, time_S: network(inputs_TC, time_S, batch)


def start_of(objective, sampling):
    batch = pack()
    noise_TC = AddressedNoise(sampling.seed, 0, batch.sample_ids_S, batch.layout).normal_TC("start", CHANNELS)
    grid = objective.sampling_grid(sampling.num_steps)
    return float(objective.path.alpha_sigma(grid[0])[1]) * noise_TC, grid


@pytest.mark.parametrize(
    "churn",
    [
        [2.0, 0.0, 1e9, 1.0],
        [40.0, 0.0, 1e9, 1.01],
        [3.0, 0.1, 20.0, 1.1],
    ],
    ids=["little", "most", "some levels"],
)
def test_churn_is_algorithm_2_of_edm(churn: list[float], monkeypatch):
    """Compared with the parts of diffusers' KarrasVeScheduler, on our grid and with our noise."""
    objective, steps = EDM(sigma_max=40.0), 6
    sampling = SamplingConfig(solver="heun", num_steps=steps, guidance_scale=1.0, seed=4, churn=churn)
    names = ("s_churn", "s_min", "s_max", "s_noise")
    theirs = scheduling_karras_ve.KarrasVeScheduler(**dict(zip(names, churn, strict=True)))
    theirs.num_inference_steps = steps
    x_TC, grid = start_of(objective, sampling)
    batch, network, levels = pack(), with_class(Network()), []

    def slope(x_TC, sigma):
        x0_TC = objective.denoise(network, x_TC, sigma, batch.layout)
        return (x0_TC - x_TC) / sigma

    for i, (sigma, sigma_next) in enumerate(itertools.pairwise(grid)):
        noise_TC = AddressedNoise(4, i + 1, batch.sample_ids_S, batch.layout).normal_TC("solver", CHANNELS)
        monkeypatch.setattr(scheduling_karras_ve, "randn_tensor", lambda shape, generator, noise=noise_TC: noise)
        x_TC, raised = theirs.add_noise_to_input(x_TC, sigma)
        levels.append(float(raised / sigma))
        step = theirs.step(slope(x_TC, raised), raised, sigma_next, x_TC)
        if sigma_next > 0:
            corrected = (
                slope(step.prev_sample, sigma_next),
                raised,
                sigma_next,
                x_TC,
                step.prev_sample,
                step.derivative,
            )
            step = theirs.step_correct(*corrected)
        x_TC = step.prev_sample
    found = drawn(objective, sampling)
    torch.testing.assert_close(found, x_TC.float(), rtol=RTOL, atol=RTOL)
    plain = drawn(objective, SamplingConfig(solver="heun", num_steps=steps, guidance_scale=1.0, seed=4))
    assert (plain - found).abs().max() > 0.01
    assert max(levels) > 1
    assert min(levels) > 1 or churn[1] > 0


@pytest.mark.parametrize("objective", [FlowMatching(), DDPM()], ids=repr)
def test_churn_of_another_path_is_refused(objective):
    sampling = SamplingConfig(solver="heun", num_steps=3, churn=CHURN)
    with pytest.raises(ConfigError, match="churn raises"):
        drawn(objective, sampling)
    with pytest.raises(ConfigError, match=r"churn=\[40.*raises"):
        check_sampling(sampling, objective, DiTConfig())


def test_a_rescaled_prediction_equals_that_of_diffusers():
    """Each sample is rescaled separately, whatever the padding contains."""
    layout = SequenceLayout.from_lengths([6, 6], multiple_of=8)
    cond_TC, guided_TC = (
        scale * torch.randn(16, 5, generator=torch.Generator().manual_seed(n)) for n, scale in ((1, 1), (2, 3))
    )
    for padding in (slice(6, 8), slice(14, 16)):
        cond_TC[padding] = 1e3
    found = layout.without_padding(rescaled(guided_TC, cond_TC, 0.7, layout)).view(2, 6, 5)
    real = [layout.without_padding(x).view(2, 6, 5) for x in (guided_TC, cond_TC)]
    torch.testing.assert_close(found, rescale_noise_cfg(*real, guidance_rescale=0.7))


def test_guided_tokens_keep_the_norm_of_the_conditional_ones():
    """Only guided columns count, whatever guidance does to the norm of each token."""
    cond_TC, uncond_TC = (torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    columns = torch.tensor([True, True, False, True])
    found = guided_prediction(cond_TC, uncond_TC, 3.0, columns, keep_norm=True)
    plain = guided_prediction(cond_TC, uncond_TC, 3.0, columns)
    assert torch.equal(found[:, 2], cond_TC[:, 2])
    torch.testing.assert_close(found[:, columns].norm(dim=1), cond_TC[:, columns].norm(dim=1))
    assert torch.nn.functional.cosine_similarity(found[:, columns], plain[:, columns]).min() > 1 - 1e-6


def test_only_guided_columns_are_rescaled():
    layout = SequenceLayout.from_lengths([8])
    cond_TC, uncond_TC = (torch.randn(8, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    columns = torch.tensor([True, True, False, True])
    found = guided_prediction(cond_TC, uncond_TC, 3.0, columns, 1.0, layout)
    assert torch.equal(found[:, 2], cond_TC[:, 2])
    assert found[:, columns].std() == pytest.approx(cond_TC[:, columns].std())


def euler_step(path, x_TC, x0_TC, u, u_next):
    """Return the state after an Euler step with a clean estimate; the last step returns the estimate."""
    (alpha, sigma), (d_alpha, d_sigma) = (map(float, f(u)) for f in (path.alpha_sigma, path.derivatives))
    slope_TC = d_alpha * x0_TC + d_sigma / sigma * (x_TC - alpha * x0_TC)
    return x0_TC if u_next == 0 else x_TC + float(u_next - u) * slope_TC


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_samples_are_guided_inside_the_interval_only(objective):
    """Compared with a loop of Euler steps; outside the interval, the network gets each sample once."""
    low, high, steps = 0.3, 4.0, 8
    sampling = SamplingConfig(
        solver="euler", num_steps=steps, guidance_scale=3.0, guidance_interval=[low, high], seed=4
    )
    x_TC, grid = start_of(objective, sampling)
    network, layout = Network(), pack().layout
    inside = []
    for u, u_next in itertools.pairwise(grid):
        alpha, sigma = map(float, objective.path.alpha_sigma(u))
        cond_TC = objective.denoise(with_class(network), x_TC, u, layout)
        uncond_TC = objective.denoise(null_class(network), x_TC, u, layout)
        inside.append(alpha > 0 and low <= sigma / alpha <= high)
        x0_TC = uncond_TC + 3.0 * (cond_TC - uncond_TC) if inside[-1] else cond_TC
        x_TC = euler_step(objective.path, x_TC, x0_TC, u, u_next)
    assert 0 < sum(inside) < steps
    counting = Network()
    torch.testing.assert_close(drawn(objective, sampling, counting), x_TC.float(), rtol=1e-4, atol=1e-4)
    assert counting.samples == [4 if guided else 2 for guided in inside]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_a_guide_replaces_the_unconditional_network(objective):
    """D = D_guide + w (D_network - D_guide), Eq. 4 of the paper, in a loop of Euler steps on clean estimates."""
    network, guide, layout = Network(), Network(0.4), pack().layout
    sampling = SamplingConfig(solver="euler", num_steps=5, guidance_scale=1.7, seed=4)
    x_TC, grid = start_of(objective, sampling)
    for u, u_next in itertools.pairwise(grid):
        strong_TC, weak_TC = (objective.denoise(with_class(n), x_TC, u, layout) for n in (network, guide))
        x0_TC = weak_TC + 1.7 * (strong_TC - weak_TC)
        x_TC = euler_step(objective.path, x_TC, x0_TC, u, u_next)
    found = drawn(objective, sampling, network, guide=guide)
    torch.testing.assert_close(found, x_TC.float(), rtol=1e-4, atol=1e-4)
    assert (found - drawn(objective, sampling, network)).abs().max() > 0.01


def generator_of(model: DiTConfig, network: Any = None, objective: Any = None, **sampling: Any) -> Generator:
    settings = SamplingConfig(num_steps=2, **sampling)
    config = RunConfig(model=model, data=NoData(), objective=objective or EDM(), sampling=settings)
    metadata = {"class_names": None, "latent_size": [1, SIDE, SIDE]}
    return Generator(config, metadata, network or Network(), 0)


MODEL = DiTConfig(in_channels=CHANNELS, patch_spatial=1, num_classes=CLASSES)


def test_one_call_over_the_doubled_pack_equals_two_calls():
    """The guide is the same network, which gets the pack without conditions in a second call."""
    network, settings = Network(), SamplingConfig(num_steps=3, guidance_scale=2.5)
    spec = replace(SPEC, multiple_of=5)  # 4 of 20 tokens are padding
    batch = empty_pack(spec, (1, SIDE, SIDE), len(LABELS), torch.device("cpu"), {"label": LABELS})

    def guide(inputs_TC, time_S, batch):
        return network(inputs_TC, time_S, without_conditions(batch, spec))

    one = generate(network, EDM(), batch, spec, settings)
    two = generate(network, EDM(), batch, spec, settings, guide=guide)
    torch.testing.assert_close(one, two)


def test_a_generator_is_guided_by_another():
    """A generator that guides itself draws the samples without guidance."""
    same, weak = generator_of(MODEL), generator_of(replace(MODEL, hidden_size=48, num_attention_heads=4), Network(0.4))
    plain = same.generate(LABELS, guidance_scale=1.0)
    same.guide_by(generator_of(MODEL))
    torch.testing.assert_close(same.generate(LABELS, guidance_scale=3.0), plain, rtol=1e-5, atol=1e-5)
    same.guide_by(weak)
    assert (same.generate(LABELS, guidance_scale=3.0) - plain).abs().max() > 0.01
    with pytest.raises(ConfigError, match="guidance_scale=1; leave out one"):
        same.generate(LABELS, guidance_scale=1.0)
    with pytest.raises(ConfigError, match="negative conditions; leave out one"):
        same.generate(LABELS, negative={"label": [1, 1]})


@pytest.mark.parametrize(
    ("model", "objective", "fault"),
    [
        (MODEL, FlowMatching(), "was trained with FlowMatching"),
        (replace(MODEL, in_channels=8), EDM(), "latent_channels=8 .this model: 4"),
        (replace(MODEL, num_classes=7), EDM(), "'label' in another form"),
        (replace(MODEL, context_size=6), EDM(), "'context' in another form"),
    ],
)
def test_a_guide_of_another_kind_is_refused(model, objective, fault):
    with pytest.raises(ConfigError, match=fault):
        generator_of(MODEL).guide_by(generator_of(model, objective=objective))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"guidance_rescale": 0.7, "guidance_scale": 1.0},
            r"guidance_rescale=0\.7 has no effect with .*guidance_scale=1",
        ),
        ({"guidance_interval": [0.1, 2.0], "guidance_scale": 1.0}, "guidance_interval=.* has no effect"),
        ({"guidance_interval": [2.0, 0.1]}, "two noise levels, low and high"),
        ({"guidance_interval": [2.0]}, "two noise levels"),
        ({"churn": CHURN}, r"churn=\[40.* has no effect with sampling.solver=euler"),
        ({"churn": [4.0], "solver": "heun"}, "must be four numbers"),
        ({"churn": [0.0, *CHURN[1:]], "solver": "heun"}, "the first above 0"),
        ({"churn": [-1.0, *CHURN[1:]], "solver": "heun"}, "churn"),
    ],
)
def test_settings_without_effect_are_refused(settings, fault):
    with pytest.raises(ConfigError, match=fault):
        SamplingConfig(**settings).validate()


def test_options_of_a_command_reset_settings_that_they_leave_without_effect():
    """This only applies to settings of the run; settings of the command that have no effect are refused."""
    run = generator_of(MODEL, solver="heun", churn=CHURN, guidance_rescale=0.5)
    assert run.sampling().churn == CHURN
    euler = run.sampling(solver="euler", guidance_scale=1.0)
    assert (euler.churn, euler.guidance_rescale) == (None, 0.0)
    with pytest.raises(ConfigError, match=r"churn=.* has no effect"):
        run.sampling(solver="euler", churn=CHURN)


def test_guidance_of_the_model_of_low_noise_keeps_its_settings():
    run = generator_of(MODEL, guidance_rescale=0.5)
    interval = {"guidance_scale": 1.0, "guidance_interval": [0.1, 9.0]}
    for scale in (None, 1.0):
        run.low_noise = LowNoise(Network(), 0.5, scale)
        assert run.sampling(guidance_scale=1.0).guidance_rescale == 0.0
        with pytest.raises(ConfigError, match=r"guidance_interval=.* has no effect"):
            run.sampling(**interval)
    run.low_noise = LowNoise(Network(), 0.5, 3.0)
    both = run.sampling(**interval)
    assert (both.guidance_rescale, both.guidance_interval) == (0.5, [0.1, 9.0])
