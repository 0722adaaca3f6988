"""Laws that every objective obeys, and the constants of each."""

import math
from dataclasses import replace

import pytest
import torch

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.layout import CLEAN, SequenceLayout
from dit.levels import with_levels
from dit.objectives.addressed_noise import AddressedNoise, skip_mixing
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM, MIN_ALPHA_FROM_NOISE, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import MIN_TIME, FlowMatching
from dit.objectives.losses import pointwise_error
from tests.unit.objectives.packs import noise_for, pack

DDPMS = [
    DDPM(schedule=schedule, prediction=prediction, discrete_steps=(None, 1000)[(i + j) % 2])
    for i, schedule in enumerate(("linear", "cosine", "scaled_linear"))
    for j, prediction in enumerate(("noise", "x0", "v"))
]
"""Every pair of a schedule, a prediction and continuous or discrete times."""
WEIGHTED = [
    *(DDPM(prediction=prediction, min_snr_gamma=5.0) for prediction in ("noise", "x0", "v")),
    FlowMatching(min_snr_gamma=2.0),
    FlowMatching(prediction="x0", min_snr_gamma=5.0, time_shift=3.0),
]
RESCALED = [
    DDPM(prediction=prediction, schedule="scaled_linear", discrete_steps=1000, zero_terminal_snr=True)
    for prediction in ("x0", "v")
]
LEARNED = [
    DDPM(prediction=prediction, schedule="cosine", discrete_steps=20, variance=LearnedVariance(vlb_weight=0.01))
    for prediction in ("noise", "x0", "v")
]
OBJECTIVES: list[Objective] = [
    EDM(),
    EDM(sigma_data=1.0, p_mean=0.0, p_std=1.0),
    FlowMatching(),
    FlowMatching(time_distribution="logit_normal", logit_mean=0.2, logit_std=0.9, time_shift=3.0),
    FlowMatching(prediction="x0", time_shift=3.0),
    *DDPMS,
    *WEIGHTED,
    *RESCALED,
]
PREDICTIONS = ("noise", "x0", "v")
WEIGHT_RTOL = 1e-4  # float32 against float64
WEIGHT_ATOL = 1e-3  # for errors about 1; at low noise, x0 is a difference of large numbers
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)


def guess(objective: Objective, inputs_TC: torch.Tensor) -> torch.Tensor:
    """Return some prediction of all outputs that the objective trains."""
    return torch.cat([torch.sin((i + 1) * inputs_TC) for i in range(objective.num_outputs)], -1)


@every_objective
def test_true_target_denoises_to_the_clean_latents(objective):
    """denoise inverts prepare: at x_u, a network that outputs the target gives x0, and gets the same input."""
    batch = pack(list(range(3, 19)))
    noise = noise_for(batch)
    prepared = objective.prepare(batch, noise)
    eps_TC = noise.normal_TC("eps", 4).double()
    u_S = objective.level(noise.level_S()).double()
    for i, (start, n) in enumerate(zip(batch.layout.starts, batch.layout.lengths)):
        rows = slice(start, start + n)
        x0_TC = batch.latents_TC[rows].double()
        alpha, sigma = objective.path.alpha_sigma(u_S[i])

        def network(inputs_TC, time_S, rows=rows, i=i):
            # One float32 ulp of the level may separate prepare (float32) from the path (float64).
            torch.testing.assert_close(inputs_TC, prepared.inputs_TC[rows], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(time_S, prepared.time_S[i : i + 1], rtol=1e-5, atol=1e-6)
            return prepared.target_TC[rows]

        layout = SequenceLayout.from_lengths([n])
        denoised = objective.denoise(network, alpha * x0_TC + sigma * eps_TC[rows], u_S[i], layout)
        assert denoised.dtype == torch.float64
        torch.testing.assert_close(denoised, x0_TC, rtol=1e-5, atol=1e-5)


@every_objective
def test_a_middle_pipeline_stage_prepares_times_and_weights_without_noise_per_token(objective):
    """It uses neither inputs nor targets, but its blocks need the same times as the other stages."""

    class NoTokens(AddressedNoise):
        def normal_TC(self, purpose, channels):
            raise AssertionError("noise per token was drawn")

    batch = pack([3, 5])
    middle = NoTokens(1234, 0, batch.sample_ids_S, batch.layout, mixer=skip_mixing)
    prepared, full = (objective.prepare(batch, noise) for noise in (middle, noise_for(batch)))
    assert prepared.inputs_TC.shape == full.inputs_TC.shape
    assert torch.equal(prepared.time_S, full.time_S)
    assert torch.equal(prepared.weight_S, full.weight_S)


@every_objective
def test_samples_of_one_pack_have_their_own_levels_and_all_is_float32(objective):
    """Twelve samples have twelve times; each sample is prepared as in a pack of one."""
    batch = pack(list(range(3, 15)))
    batch.latents_TC = batch.latents_TC.bfloat16()
    prepared = objective.prepare(batch, noise_for(batch))
    assert len(prepared.time_S.unique()) == 12
    for value in (prepared.inputs_TC, prepared.time_S, prepared.target_TC, prepared.weight_S):
        assert value.dtype == torch.float32
    alone = pack([7])
    rows = slice(batch.layout.starts[4], batch.layout.starts[5])
    alone.latents_TC = batch.latents_TC[rows]
    single = objective.prepare(alone, noise_for(alone))
    assert torch.equal(single.inputs_TC, prepared.inputs_TC[rows])
    assert torch.equal(single.target_TC, prepared.target_TC[rows])
    assert torch.equal(single.time_S, prepared.time_S[4:5])


@every_objective
def test_level_grows_with_the_quantile(objective):
    """So validation by quantile compares equal noise for every objective."""
    u = objective.level(torch.linspace(1e-4, 1 - 1e-4, 400))
    assert (u.diff() > 0).all()
    _, sigma = objective.path.alpha_sigma(u)
    assert (sigma.diff() >= 0).all()


@every_objective
def test_path_derivatives_are_those_of_the_path(objective):
    """They agree with central differences; the path ends clean."""
    u = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    h = 1e-5
    up, down = objective.path.alpha_sigma(u + h), objective.path.alpha_sigma(u - h)
    for derivative, a, b in zip(objective.path.derivatives(u), up, down):
        torch.testing.assert_close(derivative, (a - b) / (2 * h), rtol=1e-8, atol=1e-8)
    alpha, sigma = objective.path.alpha_sigma(torch.zeros((), dtype=torch.float64))
    assert (alpha.item(), sigma.item()) == (1.0, 0.0)


@every_objective
def test_sampling_grid_falls_to_zero(objective):
    """num_steps + 1 positions in float64, strictly decreasing; the last one is clean."""
    for num_steps in (1, 2, 30):
        grid = objective.sampling_grid(num_steps)
        assert grid.dtype == torch.float64
        assert len(grid) == num_steps + 1
        assert grid[-1] == 0
        assert (grid.diff() < 0).all()


@every_objective
def test_sampling_uses_training_times(objective):
    """Every time on the grid occurs in training; with a table, it is one of its steps."""
    times = []

    def network(inputs_TC, time_S):
        times.append(time_S)
        return torch.zeros_like(inputs_TC)

    layout = SequenceLayout.from_lengths([1, 1])
    for u in objective.sampling_grid(10)[:-1]:
        objective.denoise(network, torch.zeros(2, 4), u, layout)
    times_TS = torch.stack(times)
    assert torch.equal(times_TS[:, 0], times_TS[:, 1])
    assert (times_TS[:, 0].diff() < 0).all()
    if isinstance(objective, EDM):
        assert times_TS[0, 0].item() == pytest.approx(math.log(80) / 4)
    else:
        assert 0 <= times_TS.min() <= times_TS.max() <= 1
    if isinstance(objective, DDPM) and objective.discrete_steps:
        steps = times_TS * objective.discrete_steps
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES + LEARNED, ids=repr)
@pytest.mark.parametrize("kind", ["l2", "l1", "huber"])
def test_the_packed_loss_equals_the_loss_of_its_samples(objective, kind):
    """Sum and count over a padded pack equal those of its samples: packing weighs every token equally."""
    lengths, objective = [5, 9, 3], replace(objective, loss_kind=kind)
    batch = pack(lengths, multiple_of=4)
    batch.loss_weight_S = torch.tensor([1.0, 0.5, 2.0])
    prepared = objective.prepare(batch, noise_for(batch))
    total, count, terms = objective.loss(guess(objective, prepared.inputs_TC), prepared, batch.layout)
    per_sample = objective.loss_terms(guess(objective, prepared.inputs_TC), prepared, batch.layout)
    parts = []
    for n, weight in zip(lengths, (1.0, 0.5, 2.0)):
        single = pack([n])
        single.latents_TC = batch.latents_TC[batch.layout.starts[lengths.index(n)] :][:n]
        own_S = objective.prepare(single, noise_for(single)).weight_S  # weight of its noise level
        single.loss_weight_S = torch.tensor([weight])
        ready = objective.prepare(single, noise_for(single))
        parts.append(objective.loss(guess(objective, ready.inputs_TC), ready, single.layout))
        by_hand = pointwise_error(torch.sin(ready.inputs_TC), ready.target_TC, kind).mean() * (weight * own_S[0]) * n
        torch.testing.assert_close(parts[-1][2][objective.terms[0]], by_hand)
    assert tuple(terms) == objective.terms
    for name, value in terms.items():
        own_S = per_sample[name].sum_per_level(batch.layout)  # the sums that validation uses
        torch.testing.assert_close(own_S, torch.stack([part[2][name] for part in parts]))
        torch.testing.assert_close(value, own_S.sum())
    torch.testing.assert_close(total, sum(terms.values()))
    torch.testing.assert_close(total, sum(p[0] for p in parts))
    assert count == sum(lengths) == sum(p[1] for p in parts)


@pytest.mark.parametrize("objective", [FlowMatching(), *LEARNED], ids=repr)
def test_padding_values_do_not_matter(objective):
    """NaN in padding rows reaches neither the loss nor its gradient."""
    batch = pack([5, 3], multiple_of=4)
    prepared = objective.prepare(batch, noise_for(batch))
    clean = guess(objective, prepared.inputs_TC)
    expected, _, _ = objective.loss(clean, prepared, batch.layout)
    prediction = clean.clone()
    prediction[~batch.layout.valid_T] = math.nan
    prepared.target_TC[~batch.layout.valid_T] = math.nan
    prepared.inputs_TC[~batch.layout.valid_T] = math.nan
    prediction.requires_grad_()
    loss, count, _ = objective.loss(prediction, prepared, batch.layout)
    loss.backward()
    assert loss == expected
    assert count == 8
    assert prediction.grad.isfinite().all()
    assert (prediction.grad[~batch.layout.valid_T] == 0).all()
    assert (prediction.grad[batch.layout.valid_T] != 0).any(-1).all()


@pytest.mark.parametrize("objective", OBJECTIVES + LEARNED, ids=repr)
def test_loss_over_slices_adds_up_to_the_loss_of_the_pack(objective):
    """Ranks with different rows of a pack compute parts of one loss."""
    batch = pack([6, 5, 3], multiple_of=4)
    prepared = objective.prepare(batch, noise_for(batch))
    full = objective.loss(guess(objective, prepared.inputs_TC), prepared, batch.layout)
    halves = []
    for rows in torch.arange(batch.layout.total_tokens).view(2, -1, 2).unbind(0):
        part = PackedBatch(**{**vars(batch), "latents_TC": batch.latents_TC[rows.flatten()]})
        part.layout = batch.layout.select(rows.flatten())
        ready = objective.prepare(part, noise_for(part))
        halves.append(objective.loss(guess(objective, ready.inputs_TC), ready, part.layout))
    torch.testing.assert_close(halves[0][0] + halves[1][0], full[0])
    assert halves[0][1] + halves[1][1] == full[1]


def published_error(objective: Objective, batch: PackedBatch, output_TC: torch.Tensor) -> torch.Tensor:
    """Return the terms whose squares the paper sums: the error times the root of its weight, in float64.

    * EDM: D(x) - x0 with D = c_skip x + c_out F, weighed by (sigma**2 + sigma_data**2) / (sigma sigma_data)**2.
    * Flow matching: the error of the velocity, v - (eps - x0); for x0 predictions, v = (x_t - x0) / t with t at least
      `MIN_TIME` in the division of the errors.
    * DDPM: the error of the noise, of x0, or of v = alpha eps - sigma x0, unweighted.
    * min-SNR-gamma, SNR = (alpha / sigma)**2: the error of x0 times min(SNR, gamma); noise predictions have weight
      min(SNR, gamma) / SNR, and v predictions min(SNR, gamma) / (SNR + 1). Hang et al. 2023, section 3.4.
    """
    noise = noise_for(batch)
    u_T1 = batch.layout.per_token(objective.level(noise.level_S())).double()
    x0_TC, eps_TC, output_TC = batch.latents_TC.double(), noise.normal_TC("eps", 4).double(), output_TC.double()
    if isinstance(objective, EDM):
        sigma_T1, data = u_T1, objective.sigma_data
        total = sigma_T1**2 + data**2
        x_TC = x0_TC + sigma_T1 * eps_TC
        denoised_TC = data**2 / total * x_TC + sigma_T1 * data / total.sqrt() * output_TC
        return (total / (sigma_T1 * data) ** 2).sqrt() * (denoised_TC - x0_TC)
    if isinstance(objective, FlowMatching):
        if objective.min_snr_gamma is not None:
            x_TC = (1 - u_T1) * x0_TC + u_T1 * eps_TC
            estimate_TC = output_TC if objective.prediction == "x0" else x_TC - u_T1 * output_TC
            return (estimate_TC - x0_TC) * (((1 - u_T1) / u_T1) ** 2).clamp(max=objective.min_snr_gamma).sqrt()
        if objective.prediction == "velocity":
            return output_TC - (eps_TC - x0_TC)
        velocity_TC = ((1 - u_T1) * x0_TC + u_T1 * eps_TC - output_TC) / u_T1
        return (velocity_TC - (eps_TC - x0_TC)) * (u_T1 / MIN_TIME).clamp(max=1)
    assert isinstance(objective, DDPM)
    targets_TC = {"noise": eps_TC, "x0": x0_TC, "v": u_T1.cos() * eps_TC - u_T1.sin() * x0_TC}
    error_TC = output_TC - targets_TC[objective.prediction]
    if objective.min_snr_gamma is None:
        return error_TC
    snr_T1 = u_T1.tan() ** -2
    of_x0_T1 = snr_T1.clamp(max=objective.min_snr_gamma)
    weights_T1 = {"noise": of_x0_T1 / snr_T1, "x0": of_x0_T1, "v": of_x0_T1 / (snr_T1 + 1)}
    return error_TC * weights_T1[objective.prediction].sqrt()


@every_objective
def test_every_noise_level_has_the_published_weight(objective):
    """For 60 noise levels in one pack, the loss and its gradient per token follow the paper's formula."""
    batch = pack(list(range(3, 63)))
    generator = torch.Generator().manual_seed(1)
    batch.loss_weight_S = torch.rand(60, generator=generator) + 0.5
    output_TC = torch.randn(batch.layout.total_tokens, 4, generator=generator).requires_grad_()
    prepared = objective.prepare(batch, noise_for(batch))
    total, _, _ = objective.loss(output_TC, prepared, batch.layout)
    weight_T1 = batch.layout.per_token(batch.loss_weight_S)
    expected = (published_error(objective, batch, output_TC).square() * weight_T1).mean(-1).sum()
    assert total.item() == pytest.approx(expected.item(), rel=WEIGHT_RTOL)
    given_TC, expected_TC = (torch.autograd.grad(loss, output_TC)[0] for loss in (total, expected))
    torch.testing.assert_close(given_TC, expected_TC, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL)


def test_edm_has_the_constants_of_the_paper():
    """Karras et al. 2022, Table 1: ends and spacing of the grid, and the training law."""
    edm = EDM()
    grid = edm.sampling_grid(18)
    assert [grid[0].item(), grid[17].item()] == pytest.approx([80, 0.002])
    steps = grid[:-1].pow(1 / 7).diff()
    torch.testing.assert_close(steps, steps[:1].expand(17))
    assert edm.level(torch.tensor(0.5)).item() == pytest.approx(math.exp(-1.2))


def test_flow_matching_trains_and_samples_on_the_same_shifted_times():
    """A uniform quantile and a uniform grid are shifted equally; the odds of t are multiplied by the shift."""
    flow = FlowMatching(time_shift=3.0)
    grid = flow.sampling_grid(4)
    assert grid.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])
    torch.testing.assert_close(flow.level(torch.tensor([0.25, 0.5, 0.75])), grid.flip(0)[1:4].float())
    logit = FlowMatching(time_distribution="logit_normal", logit_mean=0.4, logit_std=0.7)
    assert logit.level(torch.tensor(0.5)).logit().item() == pytest.approx(0.4, abs=1e-5)
    assert logit.level(torch.tensor(0.841344746)).logit().item() == pytest.approx(1.1, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"min_time": 0.3, "max_time": 0.8}, {"time_distribution": "logit_normal"}])
def test_the_shift_by_dimension_is_computed_per_sample(settings):
    """The shift is sqrt(m / n) times the shift for n numbers, in packs of one or several sizes, as if set directly."""
    flow = FlowMatching(time_shift=1.5, shift_dimension=12, **settings)
    for lengths in ([3, 12, 48], [12, 12]):
        batch = pack(lengths)
        noise = noise_for(batch)
        times_S = flow.prepare(batch, noise).time_S
        expected = [
            FlowMatching(time_shift=1.5 * math.sqrt(4 * n / 12), **settings).level(noise.level_S()[i : i + 1])
            for i, n in enumerate(lengths)
        ]
        torch.testing.assert_close(times_S, torch.cat(expected), rtol=1e-6, atol=0)
    assert flow.at_size(12, 4) == FlowMatching(time_shift=3.0, **settings)
    assert FlowMatching(time_shift=2.0).at_size(12, 4) == FlowMatching(time_shift=2.0)
    assert EDM().at_size(12, 4) == EDM()


def test_each_sample_of_a_pack_has_the_shift_of_its_own_tokens():
    """As in a pack of one sample with a fixed shift."""
    flow = FlowMatching(shift_by_tokens=[0.5, 1.5, 10, 30])
    lengths = [10, 16, 30]
    batch = pack(lengths)
    prepared = flow.prepare(batch, noise_for(batch))
    shifts = [math.exp(0.5 + (n - 10) / 20) for n in lengths]
    parts = zip(prepared.time_S, prepared.inputs_TC.split(lengths), batch.latents_TC.split(lengths))
    for n, shift, (time, inputs_TC, latents_TC) in zip(lengths, shifts, parts):
        single = replace(pack([n]), latents_TC=latents_TC)
        expected = FlowMatching(time_shift=shift).prepare(single, noise_for(single))
        torch.testing.assert_close(time, expected.time_S[0])
        torch.testing.assert_close(inputs_TC, expected.inputs_TC)
        assert flow.at_size(n, 4).time_shift == pytest.approx(shift)
    reference = replace(pack([16]), grids=((1, 1, 10),))  # six reference tokens follow the tokens of the grid
    reference = replace(reference, layout=with_levels(reference.layout, [[(10, 0), (6, CLEAN)]]))
    plain = FlowMatching(time_shift=shifts[0]).prepare(reference, noise_for(reference))
    torch.testing.assert_close(flow.prepare(reference, noise_for(reference)).time_S, plain.time_S)
    last = replace(flow, last_time=0.1).at_size(30, 4).sampling_grid(5)
    assert last[[0, -2, -1]].tolist() == pytest.approx([1.0, 0.1, 0.0])


def test_sampling_from_noise_predictions_keeps_away_from_zero_alpha():
    """cosine ends at alpha = 0: x0 and v start there, noise predictions where division by alpha is still accurate."""
    for steps in (None, 1000):
        ddpms = {p: DDPM(schedule="cosine", prediction=p, discrete_steps=steps) for p in PREDICTIONS}
        first = {p: ddpm.sampling_grid(20)[0] for p, ddpm in ddpms.items()}
        assert first["noise"].cos().item() == pytest.approx(MIN_ALPHA_FROM_NOISE, rel=0.5)
        assert first["noise"].cos() >= MIN_ALPHA_FROM_NOISE * (1 - 1e-9)
        assert first["x0"] == first["v"]
        assert first["v"].cos() < 1e-4
    layout = SequenceLayout.from_lengths([2])
    at_pure_noise = torch.tensor(math.pi / 2, dtype=torch.float64)
    for prediction in PREDICTIONS:
        ddpm = DDPM(schedule="cosine", prediction=prediction)
        x0 = ddpm.denoise(lambda x, t: 0.5 * x, torch.ones(2, 3), at_pure_noise, layout)
        assert x0.isfinite().all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EDM(sigma_min=90.0), "sigma_min=90.0 and sigma_max=80.0"),
        (lambda: EDM(loss_kind="mse"), "objective.loss_kind='mse' is unknown; use one of 'l2', 'l1', 'huber'"),
        (lambda: FlowMatching(shift_by_tokens=[0.5, 1.0, 30, 10]), r"shift_by_tokens=\[0.5, 1.0, 30, 10\] must be two"),
        (lambda: FlowMatching(shift_by_tokens=[0.5, 1.0, 1, 9], time_shift=2.0), "time_shift=2.0, .* do not go with"),
        (lambda: FlowMatching(last_time=1.0), "objective.last_time=1.0 must be .* below 1"),
        (lambda: DDPM(discrete_steps=10), "discrete_steps=10 is too short"),
        (lambda: DDPM(variance=LearnedVariance()), "discrete_steps is None; use 1000"),
        (lambda: DDPM(variance=LearnedVariance(), discrete_steps=1, schedule="cosine"), "is 1; use 1000"),
        (lambda: LearnedVariance(vlb_weight=-1.0), "objective.variance.vlb_weight=-1.0 must be"),
        (lambda: DDPM(discrete_steps=100).sampling_grid(101), "101 sampling steps .* at most 100"),
    ],
)
def test_impossible_settings_are_refused_with_a_cure(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
