"""The adversarial loss against its papers, which need two backward passes per sample; start steps; refused settings."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from dit.auxiliary import NO_NETWORKS, PatchGAN
from dit.backends.process_groups import ProcessGroups
from dit.batch import PackedBatch
from dit.config_record import from_record, to_record
from dit.errors import BatchError, ConfigError
from dit.kernels.choice import Target
from dit.layout import SequenceLayout
from dit.models.autoencoder.config import AutoencoderConfig
from dit.models.base import Backbone
from dit.monitoring.flops import PackFlops
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.adversarial import Adversarial
from dit.objectives.autoencoding import Autoencoding, Reconstruction
from dit.objectives.vq_autoencoding import VQAutoencoding
from dit.optimizer.master_weights import master_shards, set_rates
from dit.optimizer.step_numbers import StepNumbers
from dit.optimizer.update import Update
from dit.parallel.build import build_model, build_optimizer, wrap
from dit.parallel.dims import ParallelConfig
from dit.settings import OptimizerConfig, TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.step_checks.bad_steps import BadSteps
from dit.training.late import may_be_late
from dit.training.validate import held_out_loss
from energon_data.dataset import EnergonData
from launch.verify import MockPacks, tiny_pair
from tests.unit.objectives.packs import run_config

SIZES: dict[str, Any] = {
    **{"patch_spatial": 4, "latent_channels": 4, "block_out_channels": [8, 8, 16], "layers_per_block": 1},
    **{"norm_num_groups": 4, "mid_block_add_attention": False},
}
PART = Adversarial(weight=0.7, start_step=3, num_layers=2, hidden_size=6)
CASES: dict[str, tuple[AutoencoderConfig, Reconstruction]] = {
    "kl": (AutoencoderConfig(**SIZES), Autoencoding(kl_weight=0.1, adversarial=PART)),
    "vq": (AutoencoderConfig(**SIZES, codebook_size=16), VQAutoencoding(loss_kind="l2", adversarial=PART)),
}
SEED = 5
RTOL = 1e-5  # float32 against a float64 discriminator; measured: 1.5e-6 of the largest value of a gradient


def network_of(
    config: AutoencoderConfig, objective: Reconstruction, groups: ProcessGroups, precision: Any = "fp32"
) -> Backbone:
    """Return an autoencoder with the networks of the objective."""
    training = TrainingConfig(precision=precision)
    (network,) = build_model(config, ParallelConfig(), training, groups, auxiliary=objective.auxiliary)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        if objective.adversarial is not None:
            network.discriminator.last.weight.mul_(8)
    return network


def pack_of(config: AutoencoderConfig, numbers: tuple[int, ...] = (0, 1, 2)) -> PackedBatch:
    """Return pictures of 16 x 16 pixels with different weights and padding after each."""
    batch = MockPacks(config)(numbers, multiple_of=10, tail=4)
    return replace(batch, loss_weight_S=torch.tensor([0.5, 2.0, 1.0])[list(numbers)])


def gradients(network: nn.Module, objective: Reconstruction, batch: PackedBatch, step: int, config: Any) -> Any:
    """Return the logged sums and the gradients of a training step."""
    network.zero_grad(set_to_none=True)
    prediction_TC, loss_function = training_forward_step(objective, config, SEED, step)(iter([batch]), network)
    total, _, logs = loss_function(prediction_TC)
    total.backward()
    named = dict(zip((*objective.logged, "tokens"), logs["sums"]))
    return named | {"total": total.detach()}, {name: p.grad.clone() for name, p in network.named_parameters()}


class PaperDiscriminator(nn.Module):
    """The discriminator of pix2pix in torch modules, with group norms instead of batch norms."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.GroupNorm(math.gcd(2 * width, 32), 2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 1, 1, bias=False),
            nn.GroupNorm(math.gcd(4 * width, 32), 4 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4, 1, 1, bias=False),
        )

    def forward(self, picture_HWC: Tensor) -> Tensor:
        return self.layers(picture_HWC.permute(2, 0, 1)[None])


def picture(tokens_TC: Tensor, patch: int) -> Tensor:
    """Return the picture `[H, W, C]` of square patches."""
    side = math.isqrt(len(tokens_TC))
    return tokens_TC.view(side, side, patch, patch, -1).transpose(1, 2).reshape(side * patch, side * patch, -1)


def two_passes(
    network: Backbone, objective: Reconstruction, batch: PackedBatch, config: AutoencoderConfig
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Compute values and gradients of every sample by the papers, in one pass for each of the two networks."""
    paper = PaperDiscriminator(config.in_channels, PART.hidden_size).to(torch.float64)
    ours = {name: p for name, p in network.named_parameters() if name.startswith("discriminator.")}
    for (name, own), parameter in zip(ours.items(), paper.parameters(), strict=True):
        assert own.shape == parameter.shape, name
        parameter.data.copy_(own.data)

    plain = replace(objective, adversarial=None)
    noise = AddressedNoise(SEED, PART.start_step, batch.sample_ids_S, batch.layout, latent_channels=config.in_channels)
    prepared = plain.prepare(batch, noise)
    network.zero_grad(set_to_none=True)
    prediction_TC = network(prepared.inputs_TC, prepared.time_S, batch)[:, : config.output_features]
    total = plain.loss(prediction_TC, prepared, batch.layout)[0]
    values = dict.fromkeys(("generator", "discriminator", "adaptive_weight"), 0.0)
    discriminator_loss = torch.zeros((), dtype=torch.float64)
    beyond: list[float] = []
    power = {"l1": 1, "l2": 2}[objective.loss_kind]
    for i, (start, length) in enumerate(zip(batch.layout.starts, batch.layout.lengths)):
        x, y = (
            picture(tokens_TC[start : start + length, : config.token_channels].double(), config.patch_spatial)
            for tokens_TC in (batch.latents_TC, prediction_TC)
        )
        generator = -paper(y).mean()
        (of_error,) = torch.autograd.grad((x - y).abs().pow(power).mean(), y, retain_graph=True)
        (of_generator,) = torch.autograd.grad(generator, y, retain_graph=True)
        adaptive = (of_error.norm() / (of_generator.norm() + 1e-6)).clamp(0, 1e4).detach()
        beyond += [(paper(z).abs() > 1).double().mean().item() for z in (x, y)]
        hinge = 0.5 * (functional.relu(1 - paper(x)).mean() + functional.relu(1 + paper(y.detach())).mean())
        weight = length * batch.loss_weight_S[i]  # type: ignore[index]
        total = total + weight * PART.weight * adaptive * generator
        discriminator_loss = discriminator_loss + weight * hinge
        values["generator"] += (weight * PART.weight * adaptive * generator).item()
        values["discriminator"] += (weight * hinge).item()
        values["adaptive_weight"] += length * adaptive.item()
    assert 0.05 < sum(beyond) / len(beyond) < 0.95  # some scores are beyond the margins, others within
    names = [name for name, _ in network.named_parameters() if name not in ours]
    of_autoencoder = torch.autograd.grad(total, [network.get_parameter(name) for name in names])
    of_discriminator = torch.autograd.grad(discriminator_loss, list(paper.parameters()))
    values["total"] = (total.detach() + discriminator_loss.detach()).item()
    return values, dict(zip([*names, *ours], [*of_autoencoder, *of_discriminator]))


@pytest.mark.parametrize("name", CASES)
def test_one_backward_pass_gives_the_gradients_of_two(one_rank_world: ProcessGroups, name: str) -> None:
    """From the start step on; before it, gradients are those without the loss, and zero for the discriminator."""
    config, objective = CASES[name]
    network, batch = network_of(config, objective, one_rank_world), pack_of(config)
    values, exact = two_passes(network, objective, batch, config)
    logs, found = gradients(network, objective, batch, PART.start_step, config)
    assert {name: logs[name].item() for name in values} == pytest.approx(values, rel=RTOL)
    assert values["adaptive_weight"] > 0.1
    assert values["discriminator"] > 1.0
    assert found.keys() == exact.keys()
    for parameter, gradient in exact.items():
        scale = gradient.abs().max()
        assert scale > 0, parameter
        assert (found[parameter] - gradient).abs().max() < RTOL * scale, parameter

    logs, found = gradients(network, objective, batch, PART.start_step - 1, config)
    plain_objective = replace(objective, adversarial=None)
    plain_network = network_of(config, plain_objective, one_rank_world)
    plain_logs, plain = gradients(plain_network, plain_objective, batch, PART.start_step - 1, config)
    assert logs["generator"] == logs["discriminator"] == 0.0
    assert logs["total"] == plain_logs["total"]
    for parameter, gradient in found.items():
        if parameter.startswith("discriminator."):
            assert not gradient.any(), parameter
        else:
            assert torch.equal(gradient, plain[parameter]), parameter


@pytest.mark.parametrize(("precision", "rtol"), [("bf16", 0.1), ("fp16", 0.02)])
def test_half_precision_has_the_gradients_of_fp32(one_rank_world: ProcessGroups, precision: str, rtol: float) -> None:
    config, objective = CASES["kl"]
    batch = pack_of(config)
    logs, exact = gradients(network_of(config, objective, one_rank_world), objective, batch, 3, config)
    half = network_of(config, objective, one_rank_world, precision)
    half_logs, found = gradients(half, objective, batch, 3, config)
    for name in objective.logged:
        assert half_logs[name].item() == pytest.approx(logs[name].item(), rel=rtol, abs=rtol), name
    for part in ("discriminator.", "to_pixels."):
        ours, theirs = (
            torch.cat([x.float().flatten() for name, x in named.items() if name.startswith(part)])
            for named in (found, exact)
        )
        assert (ours - theirs).norm() < 2 * rtol * theirs.norm(), part


@pytest.mark.parametrize("start_step", [0, 1])
def test_the_held_out_loss_has_the_adversarial_terms_of_step_0(one_rank_world: ProcessGroups, start_step: int) -> None:
    """The adaptive weight needs a gradient although validation computes none for the weights."""
    config, objective = CASES["kl"]
    objective = replace(objective, adversarial=replace(PART, start_step=start_step))
    network, device = network_of(config, objective, one_rank_world), torch.device("cpu")
    losses = held_out_loss(network, iter([pack_of(config)]), objective, config, device, one_rank_world)
    assert losses["loss_adaptive_weight"] > 1e-3
    assert losses["loss"] == pytest.approx(sum(losses[f"loss_{name}"] for name in objective.terms), rel=1e-6)
    assert (losses["loss_discriminator"] > 0.1, losses["loss_generator"] != 0) == (start_step == 0,) * 2
    assert all(parameter.grad is None for parameter in network.parameters())


def test_frames_of_a_clip_are_pictures_of_one_sample(one_rank_world: ProcessGroups) -> None:
    """A clip of two equal frames has the scores of the picture; its gradient by each frame is half as large."""
    config, objective = CASES["kl"]
    network, picture = network_of(config, objective, one_rank_world), MockPacks(config)((0,))
    tokens_TC = picture.latents_TC.repeat(2, 1)
    clip = replace(
        picture,
        latents_TC=tokens_TC,
        positions_T3=picture.positions_T3.repeat(2, 1),
        layout=SequenceLayout.from_lengths([len(tokens_TC)]),
        grids=((2, *picture.grids[0][1:]),),
    )
    time_S = torch.zeros(1)
    one, two = (network(batch.latents_TC, time_S, batch)[0, -3:] for batch in (picture, clip))
    torch.testing.assert_close(two, one * torch.tensor([1.0, 1.0, 0.5**0.5]), rtol=1e-5, atol=1e-6)


def test_pictures_that_are_too_small_are_refused(one_rank_world: ProcessGroups) -> None:
    config, objective = CASES["kl"]
    objective = replace(objective, adversarial=replace(PART, num_layers=3))
    network = network_of(config, objective, one_rank_world)
    with pytest.raises(BatchError, match=r"16 x 16 pixels are too small .* at least 24; .*objective\.adversarial=none"):
        gradients(network, objective, pack_of(config), 0, config)


@pytest.mark.parametrize("recipe", ["pictogram_autoencoder", "pictogram_vq_autoencoder"])
def test_the_loss_is_set_on_the_command_line(recipe: str) -> None:
    config = run_config(recipe, "objective.adversarial=adversarial", "objective.adversarial.start_step=9")
    assert config.objective.adversarial == Adversarial(start_step=9)
    assert from_record(json.loads(json.dumps(to_record(config.objective)))) == config.objective
    assert config.objective.logged[-1] == "adaptive_weight"
    dims, _ = config.check()
    assert not [line for line in config.adaptations(dims) if "adversarial" in line]
    for start_step, count in ((2399, 0), (2400, 1), (50000, 1)):
        late = run_config(recipe, f"objective.adversarial=adversarial(start_step={start_step})")
        lines = [line for line in late.adaptations(dims) if "adversarial" in line]
        said = f"objective.adversarial.start_step={start_step} is not below training.num_steps=2400, so its terms never"
        assert [line.startswith(said) for line in lines] == [True] * count


@pytest.mark.parametrize(
    "setting",
    [
        {"weight": 0.0},
        {"weight": -1.0},
        {"start_step": -1},
        {"num_layers": 0},
        {"hidden_size": 0},
        {"weight": math.inf},
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"objective\.adversarial\.{next(iter(setting))}"):
        Adversarial(**setting)


CHANGE = 20
CHANGES = {
    "start": ("pictogram_autoencoder", f"objective.adversarial=adversarial(start_step={CHANGE})"),
    "end": (
        "tiny_dit",
        "objective=flow_matching",
        "objective.alignment=repa",
        "objective.alignment.layer=1",
        f"objective.alignment.until_step={CHANGE}",
    ),
    "data": ("tiny_dit",),
}
"""Runs with a term of the loss that starts or ends after step `CHANGE`, or with other data from then on."""


@pytest.mark.parametrize("case", CHANGES)
def test_the_first_step_of_another_loss_is_not_a_spike(one_rank_world: ProcessGroups, case: str) -> None:
    """Also after an fp16 overflow or a rewind; later steps are compared with the steps since the change."""
    state = SimpleNamespace(chunks=[], step=0, loss_scale=None, update=SimpleNamespace(can_be_omitted=True))
    config = run_config(*CHANGES[case], "training.spike_threshold=5.0", "training.log_interval=1000")
    if case == "data":
        config.data = EnergonData(blend=[{"path": "a", "weight": [1, 2]}], blend_steps=[CHANGE])
    bad_steps = BadSteps(config, cast(Any, state), one_rank_world)

    def is_bad(step: int, loss: float) -> bool:
        state.step = step - 1
        bad_steps.begin_step()
        return bad_steps.guard.judge(step, loss, 1.0) is not None

    assert not any(is_bad(step, 1.0) for step in range(1, CHANGE + 1))
    before = bad_steps.guard.state_dict()
    assert is_bad(CHANGE, 1.5)
    for _ in range(2):
        assert not any(is_bad(step, 1.5) for step in range(CHANGE + 1, CHANGE + 20))
        assert is_bad(CHANGE + 20, 3.0)
        bad_steps.guard.load_state_dict(before)
    state.step = CHANGE
    bad_steps.begin_step()  # the step overflows and is not judged
    assert not is_bad(CHANGE + 2, 1.5)
    # A step that is judged after the change would enter the new history.
    assert [may_be_late(config, cast(Any, state), step) for step in (CHANGE - 1, CHANGE)] == [True, False]


@pytest.mark.parametrize(("recipe", "layers"), [("pictogram_vq_autoencoder", 2), ("pictogram_autoencoder", 3)])
def test_the_tiny_form_trains_all_terms_on_its_small_pictures(recipe: str, layers: int) -> None:
    pair = tiny_pair(run_config(recipe, "objective.adversarial=adversarial"), 2)
    objective: Any = pair.one.objective
    assert pair.many.objective == objective
    assert objective.adversarial == Adversarial(start_step=0, num_layers=layers, hidden_size=8)
    assert tiny_pair(run_config(recipe), 2).one.objective == replace(objective, adversarial=None)


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize(
    "sizes", [PatchGAN(num_layers=2, hidden_size=6), PatchGAN(num_layers=3, hidden_size=5)], ids=str
)
def test_operations_of_the_discriminator_equal_those_of_torch(
    one_rank_world: ProcessGroups, sizes: PatchGAN, frames: int
) -> None:
    """Against torch's counter, which omits the gradient with respect to the real pictures because it is not needed."""
    objective = replace(
        CASES["kl"][1], adversarial=replace(PART, num_layers=sizes.num_layers, hidden_size=sizes.hidden_size)
    )
    (network,) = build_model(
        CASES["kl"][0], ParallelConfig(), TrainingConfig(), one_rank_world, auxiliary=objective.auxiliary
    )
    x, y = torch.rand(2, 2, frames, 8, 10, 48)
    with FlopCounterMode(display=False) as counter:
        network.discriminator(x, y.requires_grad_()).sum().backward()
    first = 2 * 16 * 3 * sizes.hidden_size * (32 // 2) * (40 // 2)
    grids = [(frames, 8, 10)] * 2
    layout = SequenceLayout.from_lengths([frames * 80] * 2)
    counted = [
        PackFlops(CASES["kl"][0], auxiliary).training(layout, grids) for auxiliary in (objective.auxiliary, NO_NETWORKS)
    ]
    assert counter.get_total_flops() == counted[0] - counted[1] - 2 * frames * first


@pytest.mark.parametrize("parallel", ["ddp", "distributed_optimizer"])
def test_the_discriminator_has_its_own_learning_rate(one_rank_world: ProcessGroups, parallel: Any) -> None:
    """The size of Adam's first update is the learning rate."""
    config, objective = CASES["kl"]
    objective = replace(objective, adversarial=replace(PART, lr_factor=0.25))
    layout, training = ParallelConfig(data_parallel=parallel), TrainingConfig(precision="fp32")
    chunks = build_model(config, layout, training, one_rank_world, auxiliary=objective.auxiliary)
    wrapped = wrap(chunks, layout, one_rank_world)
    settings = OptimizerConfig(weight_decay=0.0, clip_grad=0.0)
    optimizer = build_optimizer(wrapped, settings, layout, training, one_rank_world, auxiliary=objective.auxiliary)
    set_rates(optimizer, 1e-3, 0.9)
    before = {name: p.detach().clone() for name, p in chunks[0].named_parameters()}
    for parameter in chunks[0].parameters():
        parameter.main_grad.fill_(1.0)
    shards, target = master_shards(optimizer, chunks), Target(torch.device("cpu"), torch.float32)
    update = Update(optimizer, shards, None, settings, one_rank_world, target, "eager")
    update(StepNumbers(optimizer, one_rank_world, torch.ones(2), 1), 1)
    for name, parameter in chunks[0].named_parameters():
        rate = 0.25e-3 if name.startswith("discriminator.") else 1e-3
        torch.testing.assert_close(before[name] - parameter, torch.full_like(parameter, rate), rtol=1e-3, atol=1e-7)
