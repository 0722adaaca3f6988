"""Importing the schedule and the other parts of a pipeline."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from dit.checkpoint.diffusers_folder import read_network
from dit.convert.diffusers_format import TrainedModel
from dit.convert.diffusers_sampling import scheduler_config
from dit.convert.pipeline_import import check_single, complete, network_folder, read_schedule, read_shift
from dit.errors import ConfigError
from dit.models.flux.config import FluxConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.sana.config import SanaConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.streams.families import Flux2Config, Lumina2Config, QwenImageConfig, SD3Config, ZImageConfig
from dit.models.wan.config import WanConfig
from dit.objectives.ddpm import DDPM, LearnedVariance
from dit.objectives.flow_matching import FlowMatching
from dit.parallel.build import parameter_shapes
from launch.export_weights import write_diffusers_folder
from tests.support.published import save_network

PUBLISHED = DDPM(schedule="scaled_linear", discrete_steps=1000, prediction="noise")
OBJECTIVES = [
    PUBLISHED,
    DDPM(discrete_steps=1000, prediction="v"),
    DDPM(schedule="cosine", discrete_steps=100, prediction="x0"),
    DDPM(schedule="scaled_linear", discrete_steps=1000, prediction="v", zero_terminal_snr=True),
    DDPM(discrete_steps=500, betas=[2e-4, 0.013]),
]
XL = LDMUNetConfig(context_size=24, pooled_size=10, null_text="zeros")


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_a_written_schedule_is_read_back_unchanged(objective):
    found = read_schedule(scheduler_config(objective), "here")
    external = DDIMScheduler.from_config(scheduler_config(objective)).alphas_cumprod.sqrt()
    actual = found.noise_schedule.angles(torch.device("cpu")).cos().float()
    torch.testing.assert_close(actual, external, rtol=0, atol=2e-5)  # theirs are float32
    if objective.betas is None:
        assert found == objective


@pytest.mark.parametrize(
    "odd",
    [
        {"beta_schedule": "sigmoid"},
        {"prediction_type": "flow"},
        {"trained_betas": [0.1, 0.2]},
        {"beta_start": "x"},
        {"num_train_timesteps": None},
        {"beta_schedule": []},
        {"_class_name": "EDMDPMSolverMultistepScheduler"},
        {"_class_name": "FlowMatchEulerDiscreteScheduler"},
        {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True},
    ],
    ids=str,
)
def test_a_schedule_without_a_counterpart_is_refused(odd):
    with pytest.raises(ConfigError, match="have no counterpart; copy the network to another folder"):
        read_schedule(scheduler_config(PUBLISHED) | odd, "here")


def pipeline(root: Path, **index) -> Path:
    """Write the settings of a pipeline, without weights."""
    for name in ("unet", "text_encoder", "text_encoder_2", "vae"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    (root / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline", **index}))
    return root


@pytest.mark.parametrize(("index", "null"), [({}, "zeros"), ({"force_zeros_for_empty_prompt": False}, "empty")])
def test_parts_are_read_from_the_folder_around_the_network(tmp_path, index, null):
    """Both the pipeline's folder and the network's folder may be named; another spacing of the steps gives a note."""
    root = pipeline(tmp_path / "xl", **index)
    assert network_folder(root) == network_folder(root / "unet") == root / "unet"
    imported = TrainedModel(XL, PUBLISHED, (1, 8, 8), {})
    found = complete(imported, root / "unet")
    assert found.model == replace(XL, null_text=null)
    assert found.text_encoder == (
        f"text={root}/text_encoder:layer=penultimate:padded,"
        f"text+pooled={root}/text_encoder_2:layer=penultimate:padded:joined"
    )
    assert (found.autoencoder, found.recorded, found.notes) == (str(root / "vae"), False, [])
    (root / "scheduler").mkdir()
    settings = scheduler_config(OBJECTIVES[1]) | {"timestep_spacing": "leading"}
    (root / "scheduler/scheduler_config.json").write_text(json.dumps(settings))
    found = complete(imported, root / "unet")
    assert (found.objective, found.recorded) == (OBJECTIVES[1], True)
    assert "differ from those of DDIMScheduler" in found.notes[0]


def test_the_schedule_of_a_transformer_is_read(tmp_path):
    """PixArt has a learned variance, which no scheduler describes."""
    root = pipeline(tmp_path / "pixart", _class_name="PixArtAlphaPipeline")
    (root / "transformer").mkdir()
    (root / "scheduler").mkdir()
    (root / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler_config(OBJECTIVES[3])))
    published = DDPM(discrete_steps=1000, variance=LearnedVariance())
    found = complete(TrainedModel(STDiTConfig(), published, (1, 8, 8), {}), root / "transformer")
    assert found.objective == replace(OBJECTIVES[3], variance=LearnedVariance())
    assert found.recorded


def test_a_network_without_pipeline_and_other_pipelines_add_nothing(tmp_path):
    imported = TrainedModel(XL, PUBLISHED, (1, 8, 8), {})
    (tmp_path / "unet").mkdir()
    assert complete(imported, tmp_path / "unet") == imported
    root = pipeline(tmp_path / "other", _class_name="KandinskyPipeline")
    found = complete(imported, root / "unet")
    assert found == replace(imported, autoencoder=str(tmp_path / "other/vae"), notes=found.notes)
    assert "the text encoders of 'KandinskyPipeline' in" in found.notes[0]


def test_encoders_are_read_around_a_network_without_a_schedule(tmp_path):
    root = pipeline(tmp_path / "flux", _class_name="FluxPipeline")
    (root / "transformer").mkdir()
    imported = TrainedModel(FluxConfig(), FlowMatching(), (1, 8, 8), {})
    found = complete(imported, root / "transformer")
    line = f"text={root}/text_encoder_2:padded,pooled={root}/text_encoder"
    assert found == replace(imported, text_encoder=line, autoencoder=str(root / "vae"))


def test_a_pipeline_of_clean_pictures_records_them(tmp_path):
    """A pipeline for edits has a class, one for a first frame an entry (Wan 2.2 TI2V)."""
    for number, (index, parts) in enumerate(
        [
            ({"_class_name": "FluxKontextPipeline"}, ["reference"]),
            ({"_class_name": "WanPipeline", "expand_timesteps": True}, ["first_frame"]),
            ({"_class_name": "WanPipeline", "expand_timesteps": False}, []),
        ]
    ):
        root = pipeline(tmp_path / str(number), **index)
        (root / "transformer").mkdir()
        found = complete(TrainedModel(WanConfig(), FlowMatching(), (1, 8, 8), {}), root / "transformer")
        assert found.clean_parts == parts


def test_one_of_two_networks_has_its_times(tmp_path):
    """Wan 2.2 A14B: the first one draws the times above the boundary. Source: diffusers, `pipeline_wan.py`."""
    two = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}
    root = pipeline(tmp_path / "wan", _class_name="WanPipeline", **two)
    (root / "scheduler").mkdir()
    (root / "scheduler/scheduler_config.json").write_text(json.dumps({"flow_shift": 3.0}))
    times = []
    for name in ("transformer", "transformer_2"):
        (root / name).mkdir()
        found = complete(TrainedModel(WanConfig(), FlowMatching(), (1, 8, 8), {}), root / name)
        assert found.objective.time_shift == 3.0
        times.append(found.objective.trained_times)
    assert times == [(0.875, 1.0), (0.0, 0.875)]
    with pytest.raises(ConfigError, match=r"has two networks, .* boundary_ratio=0.875; give .*/transformer or .*_2"):
        read_network(root)
    (root / "model_index.json").write_text(json.dumps({"transformer_2": [None, None], "boundary_ratio": None}))
    check_single(root)


DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "max_image_seq_len": 4096}
SHIFTS = {
    "flux": (FluxConfig(), {**DYNAMIC, "shift": 3.0}),
    "flux2": (Flux2Config(), {**DYNAMIC, "shift": 3.0}),
    "qwen image": (QwenImageConfig(), {**DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}),
    "z image": (ZImageConfig(), {"shift": 3.0}),
    "lumina 2": (Lumina2Config(), {"shift": 6.0}),
    "sd3": (SD3Config(), {"shift": 3.0}),
}
"""Model, and settings of the scheduler in its published pipeline."""


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
@pytest.mark.parametrize("name", SHIFTS)
def test_sampling_has_the_times_of_the_scheduler_in_the_pipeline(tmp_path, name, tokens):
    """In 50 steps, for several picture sizes; as a pipeline does, the test passes evenly spaced times and the shift."""
    model, settings = SHIFTS[name]
    root = pipeline(tmp_path / "model", _class_name="FluxPipeline")
    (root / "transformer").mkdir()
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    scheduler.save_pretrained(root / "scheduler")
    found = complete(TrainedModel(model, FlowMatching(time_shift=9.0), (1, 8, 8), {}), root / "transformer")
    config = scheduler.config
    points = config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    mu = compute_empirical_mu(tokens, 50) if name == "flux2" else calculate_shift(tokens, *points)
    scheduler.set_timesteps(50, sigmas=[1 - i / 50 for i in range(50)], mu=mu)
    grid = found.objective.at_size(tokens, 1).sampling_grid(50)
    torch.testing.assert_close(grid, scheduler.sigmas.double(), rtol=0, atol=1e-6)
    assert found.recorded
    assert not found.notes


def test_the_shift_of_another_solver_is_read(tmp_path):
    """SANA's scheduler is DPM-Solver, whose steps differ from ours; a note reports this."""
    root = pipeline(tmp_path / "model", _class_name="SanaPipeline")
    (root / "transformer").mkdir()
    (root / "scheduler").mkdir()
    settings = {"_class_name": "DPMSolverMultistepScheduler", "flow_shift": 4.0, "use_flow_sigmas": True}
    settings["use_karras_sigmas"] = True
    (root / "scheduler/scheduler_config.json").write_text(json.dumps(settings))
    found = complete(TrainedModel(SanaConfig(), FlowMatching(), (1, 8, 8), {}), root / "transformer")
    assert found.objective == FlowMatching(time_shift=4.0)
    assert "not of DPMSolverMultistepScheduler" in found.notes[0]
    assert "without use_karras_sigmas=True" in found.notes[1]


def test_a_pipeline_without_our_steps_is_named_at_import_and_export(tmp_path):
    """PRX's pipeline lets its scheduler space the steps; that of SD3 passes our steps."""
    for network, name in (("prx", "PRXPipeline"), ("sd3", "StableDiffusion3Pipeline")):
        root = pipeline(tmp_path / network, _class_name=name)
        save_network(network, root / "transformer")
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.save_pretrained(root / "scheduler")
        trained = read_network(root).trained
        shapes = parameter_shapes(trained.model)
        weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        exported = write_diffusers_folder(trained, lambda: weights, tmp_path / f"{network} exported")  # noqa: B023
        scheduler.set_timesteps(4)
        ours = trained.objective.sampling_grid(4).float()
        assert not torch.allclose(scheduler.sigmas, ours, atol=1e-3)  # the scheduler spaces them in both cases
        for notes in (read_network(root).trained.notes, exported):
            spaced = [note for note in notes if "lets its scheduler space the steps" in note]
            assert len(spaced) == (network == "prx")
        shutil.copytree(tmp_path / f"{network} exported", root / "transformer", dirs_exist_ok=True)
        assert not any(
            "space the steps" in note for note in read_network(root).trained.notes
        )  # the record has the steps


@pytest.mark.parametrize(
    "odd",
    [{"time_shift_type": "linear"}, {"max_shift": "x"}, {"shift_terminal": "x"}, {"num_train_timesteps": 500}],
    ids=str,
)
def test_a_shift_without_a_counterpart_is_refused(odd):
    with pytest.raises(ConfigError, match="have no counterpart; copy the network to another folder"):
        read_shift({**DYNAMIC, **odd}, TrainedModel(FluxConfig(), FlowMatching(), (1, 8, 8), {}), "here")


def test_a_shift_by_other_tokens_is_refused():
    """Lumina 2's pipeline in diffusers counts channels as tokens."""
    with pytest.raises(ConfigError, match="use_dynamic_shifting=True have no counterpart"):
        read_shift(DYNAMIC, TrainedModel(Lumina2Config(), FlowMatching(), (1, 8, 8), {}), "here")
