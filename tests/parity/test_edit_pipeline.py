"""`launch.sample --reference` with Qwen-Image-Edit draws the pictures of the exported pipelines of diffusers."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from dit.encoders.prompts import PROMPTS
from dit.encoders.vae import VAE
from dit.inference.decoding import Decoder
from dit.inference.drawing import draw
from dit.inference.generator import Generator
from dit.models.streams.families import QwenImageConfig
from examples.flux2.compare import start_noise
from launch.export import main as export
from launch.initial_picture import add_pictures, read_reference
from launch.sample import build_parser, sampling_settings
from launch.sample_requests import what_to_draw
from tests.conftest import BuildModel
from tests.parity import pipeline_cases
from tests.parity.convert_cases import random_weights, relative_error
from tests.parity.pipeline_cases import CASES, QWEN, a_run
from tests.parity.test_pipelines import generator_of, page_call
from tests.support.encoders import Processor

RTOL = 1e-5  # float32: scheduler coefficients of diffusers
SIDE = 64
"""Pixels of pictures and references."""
CASE = replace(
    CASES["qwen image"],
    model=QwenImageConfig(**QWEN, clean_reference_time=True),
    vae="QwenImagePipeline",
    prompts=("make the circle red", "remove it"),
    guidance=2.5,
    clean_parts=("reference",),
)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dit.inference.generator.local_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(transformers.Qwen2VLProcessor, "from_pretrained", Processor.from_pretrained)
    monkeypatch.setattr(pipeline_cases, "random_weights", strong_weights)
    # The code of the README changes it.
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 1024 * 1024)
    # `QwenImageEditPipeline` scales every picture to 1024 x 1024 pixels.
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (SIDE, SIDE, None))
    monkeypatch.setitem(PROMPTS, "qwen_image_edit", replace(PROMPTS["qwen_image_edit"], picture_area=SIDE * SIDE))


def strong_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return random weights whose attention depends clearly on texts and references."""
    weights = random_weights(shapes)
    return {name: x * (10 if "norm" in name else 1) for name, x in weights.items()}


def pictures(folder: Path, count: int) -> list[list[Path]]:
    """Write `count` pictures for each prompt."""
    generator, paths = torch.Generator().manual_seed(1), []
    for i in range(len(CASE.prompts) * count):
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    return [paths[i : i + count] for i in range(0, len(paths), count)]


def drawn_by_us(generator: Generator, vae: Path, paths: list[list[Path]]) -> tuple[Tensor, Tensor]:
    """Return the latents that the command draws, and those of the references."""
    references = [word for several in paths for word in ("--reference", *map(str, several))]
    args = build_parser().parse_args(["--checkpoint", "run", "--prompt", *CASE.prompts, *references])
    requests = what_to_draw(args, generator, references=args.reference)
    decoder = Decoder(str(vae), torch.device("cpu"))
    read = partial(read_reference, largest=(8, 8), channels=16, patch=2, decoder=decoder)
    requests = add_pictures(requests, "--reference", paths, 1, read)
    ((_, latents),) = draw(generator, requests, batch_size=2, **sampling_settings(args))
    return latents, torch.stack([x for request in requests for x in request.references])


def drawn_by_diffusers(folder: Path, noise: Tensor, paths: list[list[Path]]) -> tuple[str, Tensor]:
    """Return the class of an exported pipeline, and the latents that it draws by the code of its README."""
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code.partition("image = ")[0].replace("THIS_FOLDER", str(folder)), names)
    pipeline, call, drawn = names["pipeline"], page_call(code), []
    pipeline.set_progress_bar_config(disable=True)
    for i, several in enumerate(paths):
        words = {"image": [Image.open(path) for path in several], "prompt": CASE.prompts[i]}
        words["latents"] = pipeline._pack_latents(noise[i : i + 1], 1, 16, 8, 8)
        (latents,) = pipeline(**{**call, **words}, output_type="latent", return_dict=False)
        drawn.append(pipeline._unpack_latents(latents, SIDE, SIDE, 8)[0])
    return type(pipeline).__name__, torch.stack(drawn)


@pytest.mark.parametrize(
    ("prompt", "name", "count"),
    [
        ("qwen_image_edit", "QwenImageEditPipeline", 1),
        ("qwen_image_edit_plus", "QwenImageEditPlusPipeline", 2),
    ],
)
def test_edits_equal_those_of_the_exported_pipeline(
    build_model: BuildModel, tmp_path: Path, capsys: pytest.CaptureFixture, prompt: str, name: str, count: int
) -> None:
    """Equal noise, texts read with the picture (also the unconditional one), references and guidance."""
    Processor(None).pictures.save_pretrained(tmp_path / "qwen2_5_vl")
    run, folder = a_run(tmp_path, replace(CASE, encoders=f"{{qwen2_5_vl}}:prompt={prompt}")), tmp_path / "pipeline"
    words = ["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out"]
    assert export([*words, str(tmp_path / "first")]) == 0
    assert export([*words, str(folder), "--text-encoder", str(tmp_path / "first")]) == 0
    area = "this area with sides that are multiples of 32" if name.endswith("PlusPipeline") else "1,048,576"
    note = f"as prepare --enlarge does; {name} scales references to {area} pixels, without a crop"
    assert note in capsys.readouterr().err
    generator, paths = generator_of(run, build_model), pictures(tmp_path, count)
    actual, references = drawn_by_us(generator, tmp_path / "vae", paths)
    pixels = torch.stack([VAE(str(tmp_path / "vae")).decode(x[None])[0] for x in references])
    assert pixels.shape[-2:] == (SIDE, SIDE)
    noise = start_noise(generator, {"context": [torch.zeros(1, QWEN["context_size"])] * 2})
    kind, exact = drawn_by_diffusers(folder, noise, paths)
    assert kind == name
    # Swap the pictures of a sample, or of the samples.
    other_paths = paths[::-1] if count == 1 else [several[::-1] for several in paths]
    swapped, _ = drawn_by_us(generator, tmp_path / "vae", other_paths)
    assert relative_error(actual, exact) <= RTOL
    assert relative_error(swapped, exact) > 30 * RTOL
