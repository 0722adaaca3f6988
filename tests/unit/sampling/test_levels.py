"""Sampling with clean tokens, and with two networks for different noise levels."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.layout import CLEAN
from dit.levels import with_levels
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.hunyuan_video.config import HunyuanVideoConfig, first_frame_and_mask
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.mean_flow import MeanFlow
from dit.patchify import patchify
from dit.run_config import RunConfig
from dit.sampling.generate import LowNoise, empty_pack, generate_each
from dit.sampling.guidance import rescaled
from dit.sampling.tiles import TiledNetwork
from dit.settings import SamplingConfig
from energon_data.mock import MockData
from tests.conftest import BuildModel
from tests.support.batches import generate

MODEL = DiTConfig(
    **{"patch_spatial": 1, "num_classes": 3, "hidden_size": 32, "num_layers": 1, "num_attention_heads": 4},
    position_embedding="sincos_3d",
)
SPEC = MODEL.batch_spec()
FRAMES, SIDE, FRAME = 3, 2, 4
OBJECTIVE = FlowMatching(time_shift=2.0)


def pack() -> PackedBatch:
    """Return two clips of three frames with known latents: a clean first frame, and clean tokens in the middle."""
    batch = empty_pack(SPEC, (FRAMES, SIDE, SIDE), 2, torch.device("cpu"), {"label": [1, 0]})
    latents_TC = torch.randn(batch.latents_TC.shape, generator=torch.Generator().manual_seed(4))
    segments = [[(FRAME, CLEAN), (2 * FRAME, 0)], [(5, 0), (3, CLEAN), (4, 0)]]
    return replace(batch, latents_TC=latents_TC, layout=with_levels(batch.layout, segments))


CLEAN_TOKENS = [*range(FRAME), *range(12 + 5, 12 + 8)]
NOISED_TOKENS = [token for token in range(24) if token not in CLEAN_TOKENS]


class Kind(NamedTuple):
    """An objective, the factor and the time of its clean tokens, and the times of noised ones at path positions."""

    objective: Objective
    factor: float
    clean_time: float
    times: Callable[[Tensor], Tensor]


TABLE = DDPM(discrete_steps=1000, prediction="v")
LEARNED = DDPM(discrete_steps=20, schedule="cosine", variance=LearnedVariance())
KINDS = {
    "flow": Kind(OBJECTIVE, 1.0, 0.0, lambda u: u),
    "edm": Kind(EDM(), 2.0, math.log(0.002) / 4, lambda sigma: sigma.log() / 4),
    "ddpm": Kind(DDPM(network_time="log_snr"), 1.0, 20.0, lambda angle: -2 * angle.tan().log()),
    "table": Kind(TABLE, 1.0, 0.0, TABLE.noise_schedule.time),
    "learned": Kind(LEARNED, 1.0, 0.0, LEARNED.noise_schedule.time),
}


@pytest.mark.parametrize(
    ("kind", "solver", "settings"),
    [
        ("flow", "euler", {}),
        ("flow", "heun", {}),
        ("flow", "dpmpp_2m", {}),
        ("flow", "ddim", {}),
        ("flow", "ancestral", {}),
        ("flow", "euler", {"guidance_scale": 3.0, "guidance_rescale": 0.5}),
        ("flow", "euler", {"thresholding": "static"}),
        ("flow", "euler", {"thresholding": "dynamic"}),
        ("edm", "heun", {"churn": [2.0, 0.1, 50.0, 1.003]}),
        ("edm", "dpmpp_2m", {"guidance_scale": 3.0}),
        ("ddpm", "heun", {}),
        ("table", "ddim", {"thresholding": "dynamic"}),
        ("learned", "ancestral", {"variance": "learned", "thresholding": "static"}),
    ],
)
def test_clean_tokens_equal_those_of_the_pack_in_every_step(kind: str, solver: str, settings: dict[str, Any]) -> None:
    """The network gets them without noise, and noised tokens with the time of the step."""
    objective, factor, clean_time, times_of = KINDS[kind]
    batch, times = pack(), []

    def network(inputs_TC: Tensor, time_S: Tensor, seen: PackedBatch) -> Tensor:
        levels = seen.layout.levels
        assert levels is not None
        copies = len(inputs_TC) // len(batch.latents_TC)
        assert levels.numbers == (CLEAN, 0, 0, CLEAN, 0) * copies
        for half in inputs_TC.chunk(copies):
            assert torch.equal(half[CLEAN_TOKENS], factor * batch.latents_TC[CLEAN_TOKENS])
        assert time_S[levels.clean_L].tolist() == pytest.approx([clean_time] * (2 * copies))
        noised = time_S[~levels.clean_L]
        assert len(set(noised.tolist())) == 1
        times.append(float(noised[0]))
        return torch.full_like(inputs_TC, 100.0).repeat(1, objective.num_outputs)  # must not reach clean tokens

    sampling = SamplingConfig(solver=solver, num_steps=3, **{"guidance_scale": 1.0, **settings})  # type: ignore[arg-type]
    drawn = generate_each(network, objective, batch, SPEC, sampling)
    tokens = torch.cat([x.permute(1, 2, 3, 0).flatten(0, 2) for x in drawn])
    assert torch.equal(tokens[CLEAN_TOKENS], batch.latents_TC[CLEAN_TOKENS])
    assert not torch.equal(tokens[NOISED_TOKENS], batch.latents_TC[NOISED_TOKENS])
    if sampling.churn is None:
        assert sorted(set(times)) == pytest.approx(sorted(times_of(objective.sampling_grid(3)[:-1]).tolist()))


@pytest.mark.parametrize("kind", ["flow", "edm", "ddpm", "table"])
def test_noised_tokens_do_not_depend_on_clean_tokens(kind: str) -> None:
    """Using a network that computes each token separately."""
    batch = pack()

    def network(inputs_TC: Tensor, time_S: Tensor, seen: PackedBatch) -> Tensor:
        return 0.3 * inputs_TC + seen.layout.level_layout.per_token(time_S)

    plain = replace(batch, layout=replace(batch.layout, levels=None))
    sampling = SamplingConfig(solver="heun", num_steps=4, guidance_scale=1.0)
    mixed, without = (generate(network, KINDS[kind].objective, x, SPEC, sampling) for x in (batch, plain))
    rows = [x.permute(0, 2, 3, 4, 1).flatten(0, 3) for x in (mixed, without)]
    torch.testing.assert_close(rows[0][NOISED_TOKENS], rows[1][NOISED_TOKENS])


def test_guidance_keeps_the_contrast_of_noised_tokens() -> None:
    """Clean tokens do not count in the standard deviations."""
    layout, generator = pack().layout, torch.Generator().manual_seed(2)
    guided, cond = (torch.randn(24, 4, generator=generator) for _ in range(2))
    expected = rescaled(guided, cond, 1.0, layout)
    guided[CLEAN_TOKENS], cond[CLEAN_TOKENS] = 1e3, -1e4
    again = rescaled(guided, cond, 1.0, layout)
    torch.testing.assert_close(again[NOISED_TOKENS], expected[NOISED_TOKENS])
    first = [token for token in NOISED_TOKENS if token < 12]
    torch.testing.assert_close(again[first].std(correction=0), cond[first].std(correction=0))


def test_tiles_refuse_clean_tokens() -> None:
    tiled = TiledNetwork(lambda inputs_TC, time_S, batch: inputs_TC, (1, 1), (0, 0), 100)
    with pytest.raises(ConfigError, match="draw without tiles"):
        tiled(pack().latents_TC, torch.zeros(5), pack())


@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_second_network_predicts_below_the_boundary(scale: float | None) -> None:
    """With a separate guidance scale; the first network predicts at the boundary and above."""
    calls: dict[str, list[tuple[float, int]]] = {"high": [], "low": []}

    def network(name: str) -> Any:
        def predict(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
            calls[name].append((float(time_S[0]), batch.layout.num_samples))
            return torch.zeros_like(inputs_TC)

        return predict

    batch = empty_pack(SPEC, (1, 2, 2), 2, torch.device("cpu"), {"label": [1, 0]})
    times = [float(t) for t in OBJECTIVE.sampling_grid(6)[:-1].float()]
    boundary = float(OBJECTIVE.sampling_grid(6)[2])
    sampling = SamplingConfig(solver="euler", num_steps=6, guidance_scale=1.0)
    low = LowNoise(network("low"), boundary, scale)
    generate(network("high"), OBJECTIVE, batch, SPEC, sampling, low_noise=low)
    assert [t for t, _ in calls["high"]] == times[:3]
    assert [t for t, _ in calls["low"]] == times[3:]
    assert {samples for _, samples in calls["high"]} == {2}
    assert {samples for _, samples in calls["low"]} == {2 if scale is None else 4}


def generator_of(build_model: BuildModel, objective: Any, model: ModelConfig = MODEL, seed: int = 3) -> Generator:
    config = RunConfig(model=model, data=MockData(), objective=objective, sampling=SamplingConfig(num_steps=4))
    metadata = {"class_names": None, "latent_size": [FRAMES, 4, 4]}
    return Generator(config, metadata, build_model(model, perturb=0.3, seed=seed), 0)


@pytest.mark.parametrize("kind", ["flow", "edm", "table"])
def test_a_generator_starts_clips_with_a_picture(build_model: BuildModel, kind: str) -> None:
    generator = generator_of(build_model, KINDS[kind].objective)
    picture = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    clips = generator.generate(labels=[0, 2], first_frame=picture)
    assert torch.equal(clips[:, :, :1], picture.expand(2, 4, 1, 4, 4))
    other = generator.generate(labels=[0, 2], first_frame=picture + 1)
    assert (clips[:, :, 1:] - other[:, :, 1:]).abs().max() > 1e-3
    with pytest.raises(ConfigError, match="clips of at least 2 latent frames, and these have 1; raise frames"):
        generator.generate(labels=[0], frames=1, first_frame=picture)
    with pytest.raises(ConfigError, match="a first frame needs several noise levels"):
        generator_of(build_model, MeanFlow()).generate(labels=[0], first_frame=picture)


def test_a_model_with_a_condition_of_first_frames_gets_the_picture_there(build_model: BuildModel) -> None:
    """All frames are generated; without a first frame nothing is drawn."""
    sizes = {"hidden_size": 32, "num_joint_layers": 1, "num_attention_heads": 4, "rope_axes": [2, 2, 4]}
    widths = {"context_size": 8, "glyph_size": 8, "glyph_hidden_size": 8, "image_context_size": 8}
    model = HunyuanVideoConfig(in_channels=4, image_to_video=True, num_refiner_layers=1, **sizes, **widths)  # type: ignore[arg-type]
    generator, seen = generator_of(build_model, OBJECTIVE, model), list[PackedBatch]()
    network = generator.network

    def spy(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        seen.append(batch)
        return network(inputs_TC, time_S, batch)  # type: ignore[no-any-return]

    generator.network = spy  # type: ignore[assignment]
    picture, texts = torch.randn(4, 1, 4, 4), {"context": [torch.ones(2, 8)] * 2}
    generator.generate(conditions=texts, first_frame=picture, guidance_scale=2.0)
    clip = torch.cat([picture, torch.randn(4, FRAMES - 1, 4, 4)], 1)
    expected_TC, _ = patchify(first_frame_and_mask(clip), 1, 1)
    assert torch.equal(seen[0].conditions["first_frames"].values, expected_TC.repeat(4, 1))  # guidance keeps it
    assert seen[0].layout.levels is None
    with pytest.raises(ConfigError, match=r"give one as first_frame \(--first-frame PICTURE\)"):
        generator.generate(conditions=texts)


def test_a_generator_draws_the_masked_patches_of_a_picture(build_model: BuildModel) -> None:
    """Other patches are returned unchanged; the drawn patches depend on them."""
    generator = generator_of(build_model, OBJECTIVE)
    known = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
    drawn = generator.generate(labels=[0, 2], frames=1, known=known, mask=mask)
    assert torch.equal(drawn[:, :, 0, ~mask], known.expand(2, 4, 1, 4, 4)[:, :, 0, ~mask])
    assert (drawn - known)[:, :, 0, mask].abs().min() > 0
    other = generator.generate(labels=[0, 2], frames=1, known=torch.where(mask, known, -known), mask=mask)
    assert (drawn - other)[:, :, 0, mask].abs().max() > 1e-3
    everything = torch.ones(4, 4, dtype=torch.bool)
    plain = generator.generate(labels=[0, 2], frames=1)
    assert torch.equal(generator.generate(labels=[0, 2], frames=1, known=known, mask=everything), plain)
    with pytest.raises(ConfigError, match=r"samples of \(1, 4, 4\) patches .* got \(1, 4, 4\) and \[3, 4\] with 4"):
        generator.generate(labels=[0], frames=1, known=known, mask=mask[1:])
    with pytest.raises(ConfigError, match="a mask needs several noise levels"):
        generator_of(build_model, MeanFlow()).generate(labels=[0], frames=1, known=known, mask=mask)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["strength"], "initial and strength, .* has no effect without the other"),
        (["initial"], "initial and strength, .* has no effect without the other"),
        (["known"], "known and mask, .* has no effect without the other"),
        (["mask"], "known and mask, .* has no effect without the other"),
        (["known", "mask", "first_frame"], "known keeps a part of a picture, initial and first_frame begin with one"),
    ],
)
def test_pictures_without_effect_are_refused(build_model: BuildModel, settings: list[str], message: str) -> None:
    pictures = dict.fromkeys(["initial", "known", "first_frame"], torch.zeros(4, 1, 4, 4))
    values = {**pictures, "strength": 0.5, "mask": torch.ones(4, 4, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=message):
        generator_of(build_model, OBJECTIVE).generate(labels=[0], **{name: values[name] for name in settings})  # type: ignore[arg-type]


def test_a_backbone_without_several_levels_refuses_a_first_frame() -> None:
    config = RunConfig(model=replace(MODEL, class_tokens=[2, 0]), data=MockData(), objective=OBJECTIVE)
    metadata = {"class_names": None, "latent_size": [FRAMES, 4, 4]}
    generator = Generator(config, metadata, torch.nn.Identity(), 0)
    with pytest.raises(ConfigError, match="DiTConfig does not support several noise levels"):
        generator.generate(labels=[0], first_frame=torch.zeros(4, 1, 4, 4))


def test_a_pair_of_generators_uses_each_network_at_its_times(build_model: BuildModel) -> None:
    """Compared with one network that selects the model by the time."""
    high, low = FlowMatching(min_time=0.6), FlowMatching(max_time=0.6)
    pair = generator_of(build_model, high)
    pair.switch_to(generator_of(build_model, low, seed=9))
    assert pair.low_noise is not None
    first, second = pair.network, pair.low_noise.network

    def either(inputs_TC: Tensor, time_S: Tensor, batch: PackedBatch) -> Tensor:
        chosen: Tensor = (first if float(time_S[0]) >= 0.6 else second)(inputs_TC, time_S, batch)
        return chosen

    together = pair.generate(labels=[0, 2])
    one = generator_of(build_model, FlowMatching())
    one.network = either  # type: ignore[assignment]
    torch.testing.assert_close(together, one.generate(labels=[0, 2]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("high", "low", "boundary", "message"),
    [
        (FlowMatching(), FlowMatching(), None, "the boundary is 0.0"),
        (FlowMatching(min_time=0.8), FlowMatching(max_time=0.5), None, "use a pair that covers all times"),
        (FlowMatching(min_time=0.8), FlowMatching(max_time=0.8), 0.7, "the boundary is 0.7"),
        (FlowMatching(min_time=0.8), FlowMatching(max_time=0.8, time_shift=2.0), None, "use a pair"),
        (FlowMatching(min_time=0.5, max_time=0.9), FlowMatching(max_time=0.8), None, "use a pair that covers all"),
        (FlowMatching(), EDM(), 0.5, "two models share the times of flow matching"),
    ],
)
def test_models_that_do_not_match_as_a_pair_are_refused(
    build_model: BuildModel, high: Any, low: Any, boundary: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        generator_of(build_model, high).switch_to(generator_of(build_model, low), boundary=boundary)


@pytest.mark.parametrize("times", [{"min_time": 0.6}, {"max_time": 0.6}])
def test_one_model_of_a_pair_draws_no_samples_from_noise(build_model: BuildModel, times: dict[str, float]) -> None:
    """The model of low noise can change a picture."""
    generator, initial = generator_of(build_model, FlowMatching(**times)), torch.zeros(4, FRAMES, 4, 4)
    message = "draws no samples by itself; use a pair of models, with --low-noise"
    with pytest.raises(ConfigError, match=message):
        generator.generate(labels=[0])
    with nullcontext() if "max_time" in times else pytest.raises(ConfigError, match=message):
        generator.generate(labels=[0], initial=initial, strength=0.5)


def test_a_model_of_low_noise_starts_at_a_time_that_it_was_trained_at(build_model: BuildModel) -> None:
    """Of four steps with a shift of 3, times 1, 0.9, 0.75, 0.5 and 0, the last two start at 0.75 or less."""
    generator, initial = generator_of(build_model, FlowMatching(max_time=0.8, time_shift=3.0)), torch.zeros(4, 1, 4, 4)
    settings: dict[str, Any] = {"labels": [0], "initial": initial, "num_steps": 4}
    with pytest.raises(ConfigError, match=r"strength=0\.75 of 4 steps starts at time 0\.9, .* up to 0\.8 .* use str"):
        generator.generate(**settings, strength=0.75)
    generator.generate(**settings, strength=0.5)
    with pytest.raises(ConfigError, match="use more steps"):
        generator.generate(**settings | {"num_steps": 1}, strength=0.5)


def test_the_solver_uses_the_shift_of_the_sample_size() -> None:
    """Reference tokens do not count in the size; two sizes in a pack are refused."""
    times: list[float] = []

    def network(inputs_TC: Tensor, time_S: Tensor, seen: PackedBatch) -> Tensor:
        times.append(float(time_S.max()))
        return inputs_TC

    sampling = SamplingConfig(solver="euler", num_steps=4, guidance_scale=1.0)
    by_size, batch = FlowMatching(time_shift=2.0, shift_dimension=MODEL.in_channels * 3), pack()
    generate_each(network, by_size, batch, SPEC, sampling)
    assert times == pytest.approx(FlowMatching(time_shift=4.0).sampling_grid(4)[:-1].tolist())
    mixed = replace(batch, grids=((3, 2, 2), (1, 2, 2)))
    with pytest.raises(ConfigError, match=r"samples of \[4, 12\] tokens .* generate samples of one size per call"):
        generate_each(network, by_size, mixed, SPEC, sampling)
    generate_each(network, FlowMatching(time_shift=2.0), mixed, SPEC, sampling)


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
def test_times_in_a_range_have_the_distribution_of_all_times_there(distribution: Any) -> None:
    """Compared with the times of the full distribution that are in the range."""
    full = FlowMatching(time_distribution=distribution, logit_mean=0.3, logit_std=1.4, time_shift=3.0)
    q = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    times = full.level(q)
    for low, high in ((0.875, 1.0), (0.0, 0.875), (0.2, 0.5)):
        part = replace(full, min_time=low, max_time=high)
        inside = times[(times >= low) & (times < high)].sort().values
        at = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
        torch.testing.assert_close(part.level(at), inside.quantile(at), rtol=0, atol=2e-4)
    assert torch.equal(replace(full, min_time=0.0, max_time=1.0).level(q), times)


@pytest.mark.parametrize("ends", [(0.5, 0.5), (-0.1, 1.0), (0.2, 1.5), (float("nan"), 1.0)])
def test_a_range_of_times_lies_between_0_and_1(ends: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="must be times between 0 and 1"):
        FlowMatching(min_time=ends[0], max_time=ends[1])
