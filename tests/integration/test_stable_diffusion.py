"""Stable Diffusion end to end: a tiny XL UNet is trained and sampled, and a published v1 gets adapters."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import actions
from tests.integration.runs import training
from tests.parity.convert_cases import page_blocks, relative_error, start_noise
from tests.support.encoders import CLIP_WIDTH, PROJECTION, prepare_sdxl, save_stable_diffusion
from tests.support.ranks import Job, call, run_jobs

pytestmark = pytest.mark.slow


def test_prepared_pictures_train_a_model_conditioned_on_sizes_and_crops(tmp_path: Path):
    """The run uses offset noise and v-prediction with zero terminal SNR; the requested crop changes the picture."""
    folder, run = prepare_sdxl(tmp_path), tmp_path / "run"
    settings = {"data": "energon", "data__path": folder / "joined", "data__num_streams": 1, "data__background": False}
    settings |= {"data__bucket_by_shape": True, "model__context_size": 2 * CLIP_WIDTH, "model__pooled_size": PROJECTION}
    settings |= {"objective__prediction": "v", "objective__zero_terminal_snr": True, "objective__noise_offset": 0.05}
    settings |= {"training__num_steps": 3, "training__global_batch_size": 4, "training__sample_interval": 3}
    settings |= {"optimizer__lr": 0.03, "schedule__warmup_steps": 0, "logging__tensorboard": False}
    settings |= {"sampling__prompts": '["a red circle"]', "sampling__num_steps": 2}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a red circle", "crop": [0, 8]}\n{"prompt": "a red circle"}\n')
    common = ["--checkpoint", run, "--raw-weights", "--seed", 1, "--out", tmp_path / "x.png", "--save-latents"]
    files = [tmp_path / f"{name}.safetensors" for name in ("plain", "cut", "asked")]
    asked = [["--prompt", "a red circle"], ["--prompt", "a red circle", "--crop", "0,8"], ["--prompts", prompts]]
    jobs = {"train": training("tiny_sdxl_unet", run, **settings)}
    jobs |= {f.stem: call(actions.draw, *common, f, *flags) for f, flags in zip(files, asked)}
    ended = run_jobs(tmp_path / "jobs", jobs)
    assert [end.code for end in ended.values()] == [0, 0, 0, 0], [end.err for end in ended.values()]
    assert list((run / "samples").glob("step_*/*.png"))
    plain, cut, both = (next(x for x in load_file(f).values() if x.dim() == 5) for f in files)
    assert (plain - cut).abs().max() > 1e-4
    torch.testing.assert_close(both[:1], cut, rtol=0, atol=1e-5)  # drawn in another batch


def test_adapters_trained_here_draw_the_same_in_diffusers(tmp_path: Path):
    """Commands import, run `finetune_lora`, sample and export; diffusers runs both examples of the exported README."""
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    steps = {"timestep_spacing": "trailing", "clip_sample": False}
    published = save_stable_diffusion(tmp_path / "published", DDIMScheduler(**betas, **steps))
    (tmp_path / "in").mkdir()
    for i in range(5):
        noise = np.random.default_rng(i).integers(0, 40, (64, 64, 3)) + np.array((200, 30, 30))
        Image.fromarray(noise.astype(np.uint8)).save(tmp_path / f"in/{i}.png")

    settings = {"data__path": tmp_path / "data", "data__bucket_by_shape": True, "data__background": False}
    settings |= {"training__num_steps": 6, "training__precision": "fp32", "optimizer__lr": 0.01}
    settings |= {"model__lora__alpha": 32.0}  # scales the adapters by 2
    settings |= {"logging__tensorboard": False}
    read = ["--in", tmp_path / "in", "--out", tmp_path / "data", "--caption", "a red circle", "--multiple-of", 16]
    read += ["--vae", published / "vae", "--text-encoder", f"{published}/text_encoder:padded"]
    drawing = ["--prompt", "a red circle", "blue", "--steps", 4, "--seed", 5, "--out", tmp_path / "x.png"]
    export = ["--checkpoint", tmp_path / "run", "--format", "diffusers-lora", "--out", tmp_path / "lora"]

    def draw(run: str) -> Job:
        latents = ["--save-latents", tmp_path / f"{run}.safetensors"]
        return call(actions.draw, "--checkpoint", tmp_path / run, *drawing, *latents)

    jobs = {
        "import": call(
            actions.import_weights, *("--from", published, "--format", "diffusers", "--out", tmp_path / "base")
        ),
        "prepare": call(actions.prepare, "images", *read, "--validation", 0, "--processes", 1),
        "train": training(f"finetune_lora(base='{tmp_path}/base')", tmp_path / "run", **settings),
        "export": call(actions.export, *export),
        "base": draw("base"),
        "run": draw("run"),
    }
    ended = run_jobs(tmp_path / "jobs", jobs)
    assert {name: end.err for name, end in ended.items() if end.code} == {}
    base, expected = (load_file(tmp_path / f"{run}.safetensors")["latents"][:, :, 0] for run in ("base", "run"))
    with_pipeline, with_peft = page_blocks(tmp_path / "lora", published)
    assert relative_error(expected, base) > 0.01

    def drawn(pipeline: StableDiffusionPipeline) -> Tensor:
        pipeline.set_progress_bar_config(disable=True)
        noise = (1 - pipeline.scheduler.alphas_cumprod[-1]).sqrt() * start_noise(5)
        return pipeline(["a red circle", "blue"], num_inference_steps=4, latents=noise, output_type="latent").images

    assert relative_error(drawn(with_pipeline["pipeline"]), expected) <= 2e-5
    merged = StableDiffusionPipeline.from_pretrained(published, unet=with_peft["unet"])
    assert relative_error(drawn(merged), expected) <= 2e-5
