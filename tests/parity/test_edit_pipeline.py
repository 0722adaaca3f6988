"""`launch.sample --reference` with Qwen-Image-Edit draws the pictures of diffusers' `QwenImageEditPlusPipeline`."""

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dit.convert.diffusers_sampling import scheduler_config
from dit.encoders.vae import VAE
from dit.inference.decoding import Decoder
from dit.inference.drawing import draw
from dit.inference.generator import Generator
from dit.models.qwen_image.config import QwenImageConfig
from examples.flux2.compare import start_noise
from launch.export import main as export
from launch.initial_picture import add_pictures, read_initial
from launch.sample import build_parser, sampling_settings
from launch.sample_requests import what_to_draw
from tests.conftest import BuildModel
from tests.parity import pipeline_cases
from tests.parity.convert_cases import random_weights, relative_error
from tests.parity.pipeline_cases import CASES, PROMPTS, QWEN, STEPS, a_run
from tests.parity.test_pipelines import generator_of
from tests.support.encoders import Processor, with_types

RTOL = 1e-5  # float32: scheduler coefficients of diffusers
SIDE = 64
"""Pixels of pictures and references."""
CASE = replace(
    CASES["qwen image"],
    model=QwenImageConfig(**QWEN, clean_reference_time=True),
    encoders="{qwen2_5_vl}:prompt=qwen_image_edit_plus",
    vae="QwenImagePipeline",
    prompts=("make the circle red", "remove it"),
    guidance=2.5,
)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dit.inference.generator.local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", SIDE * SIDE)


def pictures(folder: Path) -> list[Path]:
    generator, paths = torch.Generator().manual_seed(1), []
    for i in range(len(PROMPTS)):
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    return paths


def drawn_by_us(generator: Generator, vae: Path, paths: list[Path], *words: str) -> tuple[Tensor, Tensor]:
    """Return the latents that the command draws, and those of the references."""
    references = ["--reference", *map(str, paths)]
    args = build_parser().parse_args(["--checkpoint", "run", "--prompt", *CASE.prompts, *references, *words])
    requests = what_to_draw(args, generator, references=args.reference)
    decoder = Decoder(str(vae), torch.device("cpu"))
    requests = add_pictures(
        requests, "--reference", paths, 1, lambda path: read_initial(path, (1, 8, 8), 16, decoder, "--reference")
    )
    ((_, latents),) = draw(generator, requests, batch_size=2, **sampling_settings(args))
    return latents, torch.stack([request.reference for request in requests])


def drawn_by_diffusers(folder: Path, network: Path, noise: Tensor, paths: list[Path]) -> Tensor:
    text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "qwen2_5_vl").eval()
    text_encoder.register_forward_pre_hook(with_types, with_kwargs=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen2_5_vl")
    pipeline = diffusers.QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(scheduler_config(CASE.objective)),
        vae=AutoencoderKLQwenImage.from_pretrained(folder / "vae"),
        transformer=QwenImageTransformer2DModel.from_pretrained(network),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=Processor(tokenizer),
    )
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for i, path in enumerate(paths):
        tokens = pipeline._pack_latents(noise[i : i + 1], 1, 16, 8, 8)
        settings = {"num_inference_steps": STEPS, "true_cfg_scale": CASE.guidance, "height": SIDE, "width": SIDE}
        words = {"prompt": CASE.prompts[i], "negative_prompt": "", "latents": tokens, "output_type": "latent"}
        (latents,) = pipeline(image=[Image.open(path)], **words, **settings, return_dict=False)
        drawn.append(pipeline._unpack_latents(latents, SIDE, SIDE, 8)[0])
    return torch.stack(drawn)


def strong_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return random weights whose attention depends clearly on texts and references."""
    weights = random_weights(shapes)
    return {name: x * (10 if "norm" in name else 1) for name, x in weights.items()}


def test_edits_equal_those_of_the_pipeline(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal noise, texts read with the picture (also the unconditional one), references and guidance."""
    monkeypatch.setattr(pipeline_cases, "random_weights", strong_weights)
    run = a_run(tmp_path, CASE)
    Processor(None).pictures.save_pretrained(tmp_path / "qwen2_5_vl")
    words = ["--checkpoint", str(run), "--raw-weights", "--out"]
    assert export([*words, str(tmp_path / "network"), "--format", "diffusers"]) == 0
    assert export([*words, str(tmp_path / "refused"), "--format", "pipeline"]) == 2
    generator, paths = generator_of(run, build_model), pictures(tmp_path)
    actual, references = drawn_by_us(generator, tmp_path / "vae", paths)
    pixels = torch.stack([VAE(str(tmp_path / "vae")).decode(x[None])[0] for x in references])
    assert pixels.shape[-2:] == (SIDE, SIDE)
    noise = start_noise(generator, {"context": [torch.zeros(1, QWEN["context_size"])] * 2})
    exact = drawn_by_diffusers(tmp_path, tmp_path / "network", noise, paths)
    swapped, _ = drawn_by_us(generator, tmp_path / "vae", paths[::-1])
    assert relative_error(actual, exact) <= RTOL
    assert relative_error(swapped, exact) > 30 * RTOL
