"""The schedule and the other parts of a Stable Diffusion pipeline around its network."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler

from dit.convert.diffusers_format import TrainedModel
from dit.convert.diffusers_sampling import scheduler_config
from dit.convert.pipeline_import import Completed, complete, network_folder, read_schedule
from dit.errors import ConfigError
from dit.models.flux.config import FluxConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching

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
    theirs = DDIMScheduler.from_config(scheduler_config(objective)).alphas_cumprod.sqrt()
    ours = found.noise_schedule.angles(torch.device("cpu")).cos().float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # their float32
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
    """Wherever the network's folder is named; a scheduler that spaces its steps in another way is noted."""
    root = pipeline(tmp_path / "xl", **index)
    assert network_folder(root) == network_folder(root / "unet") == root / "unet"
    imported = TrainedModel(XL, PUBLISHED, (1, 8, 8), {})
    found = complete(imported, root / "unet")
    assert found.trained.model == replace(XL, null_text=null)
    assert found.trained.text_encoder == (
        f"text={root}/text_encoder:layer=penultimate:padded,"
        f"text+pooled={root}/text_encoder_2:layer=penultimate:padded:joined"
    )
    assert (found.autoencoder, found.has_schedule, found.notes) == (str(root / "vae"), False, [])
    (root / "scheduler").mkdir()
    settings = scheduler_config(OBJECTIVES[1]) | {"timestep_spacing": "leading"}
    (root / "scheduler/scheduler_config.json").write_text(json.dumps(settings))
    found = complete(imported, root / "unet")
    assert (found.trained.objective, found.has_schedule) == (OBJECTIVES[1], True)
    assert "differ from those of DDIMScheduler" in found.notes[0]


def test_a_network_without_pipeline_and_other_pipelines_add_nothing(tmp_path):
    imported = TrainedModel(XL, PUBLISHED, (1, 8, 8), {})
    (tmp_path / "unet").mkdir()
    assert complete(imported, tmp_path / "unet").trained == imported
    root = pipeline(tmp_path / "other", _class_name="KandinskyPipeline")
    found = complete(imported, root / "unet")
    assert found.trained == imported
    assert "the text encoders of 'KandinskyPipeline' in" in found.notes[0]


def test_encoders_are_read_around_a_network_without_a_schedule(tmp_path):
    root = pipeline(tmp_path / "flux", _class_name="FluxPipeline")
    (root / "transformer").mkdir()
    imported = TrainedModel(FluxConfig(), FlowMatching(), (1, 8, 8), {})
    found = complete(imported, root / "transformer")
    line = f"text={root}/text_encoder_2:padded,pooled={root}/text_encoder"
    assert found == Completed(replace(imported, text_encoder=line), str(root / "vae"))
