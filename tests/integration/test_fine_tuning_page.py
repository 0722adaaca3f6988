"""Pages of fine-tuning and FLUX.2: all commands work as shown, in order; training and sampling take few steps."""

import json
from pathlib import Path

import pytest
from diffusers import DDIMScheduler
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from PIL import Image

from tests.parity.convert_cases import random_weights
from tests.support.encoders import T5_WIDTH, save_stable_diffusion, save_t5, save_vae
from tests.unit.launch import pages

pytestmark = pytest.mark.slow

TRAINING = "training.num_steps=2 training.precision=fp32 logging.tensorboard=False"
MADE = (
    *("runs/pixart", "data/mine", "runs/direct", "runs/finetune_lora", "runs/finetune", "lora.png", "lora.safetensors"),
    *("lora/pytorch_lora_weights.safetensors", "lora/adapter_config.json", "lora/adapter_model.safetensors"),
    *("lora/README.md", "merged/config.json", "data/subject", "class", "data/class"),
    *("runs/lora", "runs/more", "runs/dreambooth", "dog.png", "runs/sdxl_min_snr", "runs/control", "control.png"),
)


def models_and_pictures(folder: Path) -> None:
    """Write the files that the page assumes: published models with their encoders, and pictures."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 1, "cross_attention_dim": 48}
    model = PixArtTransformer2DModel(**sizes, out_channels=4, sample_size=8, caption_channels=T5_WIDTH)
    model.load_state_dict(random_weights({n: tuple(x.shape) for n, x in model.state_dict().items()}))
    model.save_pretrained(folder / "models" / "pixart" / "transformer")
    save_vae(folder / "models" / "pixart" / "vae")
    save_t5(folder / "models" / "pixart" / "text_encoder", folder / "models" / "pixart" / "tokenizer")
    (folder / "models/pixart/model_index.json").write_text('{"_class_name": "PixArtAlphaPipeline"}')
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    save_stable_diffusion(folder / "models/sdxl", scheduler, xl=True, force_zeros_for_empty_prompt=True)
    for name in ("pictures", "subject", "depth"):
        (folder / name).mkdir()
        for i in range(5):
            side = 64 if name == "subject" else 32
            Image.new("RGB", (side, side), (200, 40 * i, 30)).save(folder / name / f"{i}.png")
            if name == "pictures":
                (folder / name / f"{i}.txt").write_text("a red circle")


def test_every_command_of_fine_tuning_works(tmp_path: Path) -> None:
    """On a tiny PixArt and a tiny Stable Diffusion XL."""
    models_and_pictures(tmp_path)
    words = {"launch.train": TRAINING, "launch.sample": "--count 3 --steps 2"}
    words["energon_data.prepare"] = "--multiple-of 16 --processes 1"
    lines = pages.shortened("docs/fine-tuning.md", words)
    assert len(lines) == 18
    pages.follow(lines, tmp_path)
    of_control = "data.path=data/control data.bucket_by_shape=True model.control_channels=4"
    described = {
        "finetune(base='runs/pixart')": "data.path=data/mine",
        "finetune(base='models/sdxl')": f"{of_control} objective.min_snr_gamma=5 objective.noise_offset=0.05"
        " training.run_dir=runs/sdxl_min_snr",
    }
    train = "python -m launch.train --yes --factory"
    pages.follow({f'{train} "{recipe}" {settings}': TRAINING for recipe, settings in described.items()}, tmp_path)
    assert [name for name in MADE if not (tmp_path / name).exists()] == []
    subject, others = (
        json.loads((tmp_path / "data" / name / "dataset.json").read_text()) for name in ("subject", "class")
    )
    assert list(subject["shapes"]) == list(others["shapes"]), "a picture of DreamBooth weighs as much as it has tokens"


def test_every_command_of_flux2_works(tmp_path: Path) -> None:
    """The last command compares the pictures of both code bases."""
    words = {"launch.train": TRAINING, "launch.sample": "--steps 2", "energon_data.prepare": "--count 4"}
    ended = pages.follow(pages.shortened("examples/flux2/README.md", words), tmp_path)
    assert "examples.flux2.compare" in list(ended)[-1]
    assert (tmp_path / "both.png").exists()
