"""Schedulers and pipelines of diffusers, used as an export describes, draw the samples of our sampler."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    DiTTransformer2DModel,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionXLPipeline,
)
from torch import Tensor

from dit.backends.process_groups import ProcessGroups
from dit.checkpoint.full_weights import read_full_weights
from dit.checkpoint.reading import candidates, read_settings
from dit.convert.diffusers_format import TrainedModel
from dit.convert.diffusers_sampling import scheduler_config
from dit.convert.run_record import objective_of
from dit.inference.drawing import draw
from dit.inference.gallery import Gallery
from dit.inference.generator import Generator
from dit.models.dit.config import DiTConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.base import Objective
from dit.objectives.ddpm import DDPM
from dit.objectives.edm import EDM
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from dit.patchify import unpatchify
from dit.sampling.generate import empty_pack
from dit.sampling.solvers import solve
from dit.settings import SamplingConfig
from launch.export_weights import write_diffusers_folder
from launch.import_weights import main as import_weights
from launch.sample import build_parser, sampling_settings
from launch.sample import main as sample
from launch.sample_requests import what_to_draw
from tests.conftest import BuildModel
from tests.parity.convert_cases import load, random_weights, relative_error, start_noise
from tests.support.batches import generate
from tests.support.encoders import save_stable_diffusion

RTOL = 2e-5  # float32 coefficients in diffusers, float64 in our sampler
SEED, LABELS = 5, [2, 0]
OBJECTIVES = [
    ("euler", 5, FlowMatching()),
    ("euler", 5, FlowMatching(prediction="x0", time_shift=3.0)),
    ("ddim", 5, DDPM(discrete_steps=1000)),
    ("ddim", 10, DDPM(discrete_steps=1000, schedule="scaled_linear", prediction="v")),
    ("ddim", 5, DDPM(discrete_steps=100, schedule="cosine", prediction="x0")),
    ("ddim", 10, DDPM(discrete_steps=1000, schedule="scaled_linear", prediction="v", zero_terminal_snr=True)),
    ("ddim", 5, DDPM(discrete_steps=500, betas=[2e-4, 0.013])),
    ("euler", 5, EDM(sigma_max=20.0, sigma_data=0.8)),
]


def tiny(num_classes: int = 7, out_channels: int | None = None) -> DiTConfig:
    return DiTConfig(
        hidden_size=48,
        num_layers=2,
        num_attention_heads=4,
        in_channels=4,
        out_channels=out_channels,
        num_classes=num_classes,
        time_frequency_shift=1,
    )


def exported(folder: Path, model: DiTConfig, objective: Objective) -> tuple[TrainedModel, dict]:
    """Export random weights; return their metadata, and the weights under our names."""
    names = [f"class {i}" for i in range(model.num_classes or 0)]
    trained = TrainedModel(model, objective, (1, 8, 8), {}, class_names=names)
    weights = random_weights(parameter_shapes(model))
    write_diffusers_folder(trained, lambda: weights, folder)
    return trained, weights


def draw_samples(
    build_model: BuildModel, trained: TrainedModel, weights: dict, solver: str, steps: int, scale: float
) -> tuple:
    """Return the initial noise (standard deviation 1; for DDPM that of the noisiest step) and our samples."""
    model, objective = trained.model, trained.objective
    spec = model.batch_spec()
    batch = empty_pack(spec, trained.latent_size, len(LABELS), torch.device("cpu"), {"label": LABELS})
    network = load(build_model(model), weights)
    settings = {"solver": solver, "num_steps": steps, "guidance_scale": scale, "seed": SEED}
    latents = generate(network, objective, batch, spec, SamplingConfig(**settings))[:, :, 0]
    noise_TC = AddressedNoise(SEED, 0, batch.sample_ids_S, batch.layout).normal_TC("start", 16)
    noise = torch.stack([unpatchify(part, (1, 4, 4), 1, 2)[:, 0] for part in noise_TC.split(16)])
    _, sigma = objective.path.alpha_sigma(objective.sampling_grid(steps)[0])
    return noise * float(sigma) if isinstance(objective, DDPM) else noise, latents


@pytest.mark.parametrize(
    ("solver", "steps", "objective", "out_channels"),
    [*((*case, None) for case in OBJECTIVES), (*OBJECTIVES[2], 8)],
    ids=lambda value: str(value)[:48],
)
def test_the_loop_on_the_page_draws_the_samples_of_the_sampler(
    build_model: BuildModel, tmp_path: Path, solver: str, steps: int, objective: Objective, out_channels: int | None
):
    """With guidance and the same noise; the code is from the README, the coefficients from diffusers' scheduler."""
    folder = tmp_path / "out"
    trained, weights = exported(folder, tiny(out_channels=out_channels), objective)
    noise, expected = draw_samples(build_model, trained, weights, solver, steps, 2.5)
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    found = namespace["sample"](str(folder), str(folder), LABELS, steps, 2.5, noise)
    assert relative_error(found, expected) <= RTOL
    assert relative_error(found, noise) > 0.1


@pytest.mark.parametrize(
    ("num_steps", "objective", "note"),
    [
        (25, DDPM(discrete_steps=1000), "if their number divides 1000, as 25 does"),
        (30, DDPM(discrete_steps=1000), "divides 1000; the nearest to 30 that do are 25 and 40"),
        (28, DDPM(discrete_steps=500, prediction="v"), "divides 500; the nearest to 28 that do are 25 and 50"),
        (10, DDPM(discrete_steps=1000, betas=[1e-4, 0.025]), "starts at step 999, launch.sample at step 914"),
    ],
    ids=str,
)
def test_the_page_names_the_numbers_of_steps_in_which_a_scheduler_draws_the_samples_of_the_sampler(
    tmp_path: Path, num_steps: int, objective: DDPM, note: str
):
    """DDIMScheduler subtracts 1000 // n from a step, which is the next one only if n divides 1000."""
    trained = TrainedModel(tiny(), objective, (1, 8, 8), {"num_steps": num_steps})
    [found] = [
        x
        for x in write_diffusers_folder(trained, lambda: random_weights(parameter_shapes(tiny())), tmp_path / "o")
        if note in x
    ]
    assert found in (tmp_path / "o" / "README.md").read_text()

    def clean(x: Tensor, alpha2: Tensor) -> Tensor:
        return torch.tanh(alpha2.sqrt() * x / (1 - alpha2))  # the mean of x0 if it is 1 or -1

    scheduler = DDIMScheduler.from_config(scheduler_config(objective))
    scheduler.set_timesteps(num_steps)
    start = x = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    for t in scheduler.timesteps:
        alpha2 = scheduler.alphas_cumprod[t].double()
        x0, (alpha, sigma) = clean(x, alpha2), (alpha2.sqrt(), (1 - alpha2).sqrt())
        eps = (x - alpha * x0) / sigma
        x = scheduler.step(eps if objective.prediction == "noise" else alpha * eps - sigma * x0, t, x).prev_sample
    expected = solve(
        "ddim", lambda x, u: clean(x, u.cos() ** 2), objective.path, start, objective.sampling_grid(num_steps)
    )
    assert (relative_error(x, expected) <= RTOL) == ("as 25 does" in found)


def test_diffusers_takes_the_folder_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Our record in config.json is no argument of the class; diffusers ignores it, and keeps it when saving."""
    from diffusers.utils import logging

    exported(tmp_path / "out", tiny(), FlowMatching(time_shift=2.0))
    logging.enable_propagation()
    transformer = DiTTransformer2DModel.from_pretrained(tmp_path / "out")
    assert not [record for record in caplog.records if "not expected" in record.message]
    transformer.save_pretrained(tmp_path / "again")
    record = json.loads((tmp_path / "again" / "config.json").read_text())["_megatron_dit"]
    assert objective_of(record["objective"]) == FlowMatching(time_shift=2.0)


@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "empty text"])
def test_imported_sdxl_draws_the_pictures_of_its_pipeline(
    build_model: BuildModel, tmp_path: Path, monkeypatch: Any, zeros: bool
):
    """The import reads only the pipeline's folder: encoders, pooled text, sizes, crop, and null text of its config."""
    run = tmp_path / "run"
    objective = DDPM(schedule="scaled_linear", discrete_steps=1000, prediction="v", zero_terminal_snr=True)
    scheduler = DDIMScheduler.from_config(scheduler_config(objective))
    root = save_stable_diffusion(tmp_path / "sdxl", scheduler, xl=True, force_zeros_for_empty_prompt=zeros)
    assert import_weights(["--from", str(root), "--format", "diffusers", "--out", str(run)]) == 0

    [folder] = candidates(run)
    config, metadata = read_settings(folder)
    assert config.objective == objective
    assert metadata["autoencoder"] == str(root / "vae")
    generator = Generator(config, metadata, load(build_model(config.model), read_full_weights(folder, "weight")), 0)
    monkeypatch.setattr("dit.inference.generator.local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("dit.backends.device.local_device", lambda: torch.device("cpu"))
    prompts = ["a red circle", "blue"]

    def drawn(*words: str) -> Tensor:
        """Return the latents that the command line draws with these options."""
        flags = ["--checkpoint", str(run), "--steps", "4", "--seed", str(SEED)]
        args = build_parser().parse_args([*flags, "--prompt", *prompts, *words])
        requests, settings = what_to_draw(args, generator), sampling_settings(args)
        return torch.cat([latents for _, latents in draw(generator, requests, batch_size=2, **settings)])[:, :, 0]

    pipe = StableDiffusionXLPipeline.from_pretrained(root, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 4, "guidance_scale": 5.0, "output_type": "latent", "latents": start_noise(SEED)}
    plain = drawn()
    assert relative_error(plain, pipe(prompts, **options).images) <= RTOL / 2
    expected = pipe(prompts, negative_prompt=["blue square"] * 2, **options).images
    assert relative_error(drawn("--negative-prompt", "blue square"), expected) <= RTOL / 2
    expected = pipe(prompts, guidance_rescale=0.7, **options).images
    assert relative_error(drawn("--guidance-rescale", "0.7"), expected) <= RTOL / 2
    assert relative_error(expected, plain) > 0.001
    options |= {"original_size": (96, 80), "crops_coords_top_left": (5, 7), "target_size": (64, 48)}
    cropped = drawn("--original-size", "96x80", "--crop", "5,7", "--target-size", "64x48")
    assert relative_error(cropped, pipe(prompts, **options).images) <= RTOL / 2
    assert relative_error(cropped, plain) > 0.001


@pytest.mark.parametrize("xl", [False, True], ids=["v1", "xl"])
def test_commands_without_options_draw_the_pictures_of_the_pipeline(
    one_rank_world: ProcessGroups, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture, xl: bool
):
    """Decoded pictures are equal if the published scheduler is replaced according to the note of the import."""
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    published = EulerDiscreteScheduler(**betas) if xl else PNDMScheduler(**betas, skip_prk_steps=True)
    root, run = save_stable_diffusion(tmp_path / "published", published, xl=xl), tmp_path / "run"
    assert import_weights(["--from", str(root), "--format", "diffusers", "--out", str(run)]) == 0
    [code] = re.findall(r"pipeline\.scheduler = .*\)", capsys.readouterr().err)
    pictures: list[Tensor] = []
    add = Gallery.add
    monkeypatch.setattr(Gallery, "add", lambda *args: (pictures.append(args[-1]), add(*args)))
    monkeypatch.setattr("dit.inference.generator.groups_to_sample", lambda *paths: one_rank_world)
    prompts = ["a red circle", "blue"]
    assert sample(["--checkpoint", str(run), "--prompt", *prompts]) == 0

    pipeline = DiffusionPipeline.from_pretrained(root, **({"add_watermarker": False} if xl else {}))
    exec(code, {"pipeline": pipeline, "DDIMScheduler": DDIMScheduler})
    pipeline.set_progress_bar_config(disable=True)
    noise = (1 - pipeline.scheduler.alphas_cumprod[-1]).sqrt() * start_noise(SamplingConfig().seed)
    expected = pipeline(prompts, latents=noise, output_type="pt").images
    drawn = torch.cat(pictures)[:, :, 0] / 2 + 0.5
    assert drawn.shape == expected.shape == (2, 3, 64, 64)
    assert expected.std() > 0.01
    assert relative_error(drawn, expected) <= 1e-5
