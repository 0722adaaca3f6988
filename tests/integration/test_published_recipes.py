"""Small diffusers pipelines are planned, trained for three steps, exported, and draw the same pictures in diffusers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FluxControlPipeline
from PIL import Image
from safetensors.torch import load_file

from dit.checkpoint.base_model import read_run
from dit.checkpoint.reading import candidates, read_settings
from dit.encoders.vae import VAE
from dit.inference.generator import Generator
from launch.export import main as export
from tests.conftest import BuildModel
from tests.integration import actions
from tests.parity.convert_cases import load, relative_error
from tests.parity.pipeline_cases import CASES, PROMPTS, Case, a_run
from tests.parity.test_pipelines import draw_samples, drawn_by_pipeline, given_pictures
from tests.support.ranks import call, run_jobs
from tests.unit.energon_data.awkward_media import mp4

pytestmark = pytest.mark.slow

RECIPES = {
    "flux2_klein": "flux2 klein",
    "qwen_image": "qwen image",
    "wan22_ti2v": "wan 2.2",
    "sdxl": "stable diffusion xl",
    "sd35": "sd3",
    "z_image": "z image",
    "lumina2": "lumina2",
    "prx": "prx",
    "sana": "sana",
    "chroma": "chroma",
    "hunyuan_video": "hunyuan video",
}
"""Case of tests/parity/pipeline_cases.py for each recipe."""
IN_SHORT = ("wan22_ti2v",)
"""Recipe of this file, with clips; FLUX.1 below has pictures. tests/long/test_published_recipes.py has the others."""
RTOL = 1e-4  # float32; the encoders run with other batch sizes
SHORT = "training.num_steps=3 training.precision=fp32 optimizer.lr=0.001 logging.tensorboard=False sampling.num_steps=4"


def generator_of(run: Path, build_model: BuildModel, slot: str = "ema") -> Generator:
    """Return a generator with the newest checkpoint of a run and merged adapters."""
    folder = candidates(run)[0]
    config, metadata = read_settings(folder)
    weights, model = read_run(folder, config, slot), config.model.without_adapters()
    return Generator(replace(config, model=model), metadata, load(build_model(model), weights), 0)


def saved_by_diffusers(folder: Path, case: Case) -> tuple[Path, Path]:
    """Return a run with random weights, and its pipeline saved by diffusers, without our metadata."""
    run = a_run(folder / "made", case)
    exported = ["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder / "ours")]
    assert export(exported) == 0
    DiffusionPipeline.from_pretrained(folder / "ours").save_pretrained(folder / "base")
    shutil.copy(folder / "ours/model_index.json", folder / "base")  # diffusers does not load its own index of PRX
    for path in (folder / "base").glob("*/config.json"):
        settings = json.loads(path.read_text())
        settings.pop("_megatron_dit", None)
        path.write_text(json.dumps(settings))
    return run, folder / "base"


@pytest.mark.parametrize("recipe", IN_SHORT)
def test_a_small_pipeline_is_trained_and_drawn_in_diffusers(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Tests full fine-tuning and adapters."""
    case = CASES[RECIPES[recipe]]
    run, base = saved_by_diffusers(tmp_path, case)
    (tmp_path / "in").mkdir()
    geometry = VAE(str(base / "vae")).geometry
    space, frames = geometry.space, 1 + (case.frames - 1) * geometry.time
    height, width = (space * side for side in case.size)
    for i in range(8):
        picture = Image.new("RGB", (width, height), (200, 25 * i, 30))
        if case.frames > 1:
            (tmp_path / f"in/{i}.mp4").write_bytes(mp4(picture, count=frames))
        else:
            picture.save(tmp_path / f"in/{i}.png")
        (tmp_path / f"in/{i}.txt").write_text(case.prompts[i % 2])
    kind = ["videos", "--frames", frames] if case.frames > 1 else ["images"]
    prepared = [*kind, "--in", tmp_path / "in", "--out", tmp_path / "data", "--vae", base, "--text-encoder", base]
    prepared += ["--multiple-of", 2 * space, "--validation", 0, "--processes", 1]
    planned, jobs = {}, {"prepare": call(actions.prepare, *prepared)}
    for name, lora in {"all": False, "adapters": True}.items():
        factory = ["--factory", f"finetune_{recipe}(base='{base}', lora={lora}, gpus=1)"]
        words = [*factory, f"data.path={tmp_path}/data", f"training.run_dir={tmp_path / name}", *SHORT.split()]
        planned[f"plan {name}"] = call(actions.train, *words, "--dryrun", "--world-size", 1)
        jobs[f"train {name}"] = call(actions.train, "--yes", *words)
        pipeline = ["--checkpoint", tmp_path / name, "--format", "pipeline", "--out", tmp_path / f"{name}_pipeline"]
        jobs[f"export {name}"] = call(actions.export, *pipeline)
    # A plan forks, and must not do so after a training has started threads.
    ended = run_jobs(tmp_path / "jobs", planned | jobs)
    assert {name: end.err for name, end in ended.items() if end.code} == {}
    assert "total" in ended["plan all"].out
    assert "are trained (LoRA)" in ended["plan adapters"].out

    _, before = draw_samples(generator_of(run, build_model, "weight"), case)
    for name in ("all", "adapters"):
        noise, expected = draw_samples(generator_of(tmp_path / name, build_model), case)
        drawn = drawn_by_pipeline(tmp_path / f"{name}_pipeline", case, noise, monkeypatch)
        assert torch.isfinite(drawn).all()
        assert relative_error(drawn, expected.clamp(0, 1)) <= RTOL
        assert relative_error(expected, before) > 10 * RTOL  # the training changed the pictures


def test_flux_learns_to_read_given_pictures(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a FLUX.1 without control: full fine-tuning, and adapters that FluxControlPipeline loads onto that FLUX.1."""
    case = CASES["flux control"]
    plain = replace(case, pipeline="FluxPipeline", model=replace(case.model, control_channels=None))
    _, base = saved_by_diffusers(tmp_path, plain)
    pictures = ((given_pictures(case) + 1) * 127.5).round().byte().movedim(1, -1).numpy()
    for folder, of_sample in {"in": 1, "control": 0}.items():
        (tmp_path / folder).mkdir()
        for i in range(8):
            Image.fromarray(pictures[(i + of_sample) % 2]).save(tmp_path / folder / f"{i}.png")
            (tmp_path / folder / f"{i}.txt").write_text(PROMPTS[i % 2])
    prepared = ["images", "--in", tmp_path / "in", "--reference", tmp_path / "control", "--out", tmp_path / "data"]
    prepared += ["--vae", base, "--text-encoder", base, "--multiple-of", 8, "--validation", 0, "--processes", 1]
    jobs = {"prepare": call(actions.prepare, *prepared)}
    settings = [*SHORT.split(), "optimizer.lr=0.1", f"data.path={tmp_path}/data", "model.control_channels=4"]
    adapted = 'model.lora.targets=["layers.*.linear_*", "embed.linear"]'
    for name, words in {"finetune": [], "finetune_lora": [adapted], "refused": []}.items():
        recipe = "finetune_lora" if name == "refused" else name
        arguments = ["--yes", "--factory", f"{recipe}(base='{base}')", *settings, *words]
        jobs[name] = call(actions.train, *arguments, f"training.run_dir={tmp_path / name}")
    for name in ("finetune", "finetune_lora"):
        out = ["--format", "pipeline", "--out", tmp_path / f"{name}_pipeline"]
        jobs[f"export {name}"] = call(actions.export, "--checkpoint", tmp_path / name, *out)
        drawing = ["--checkpoint", tmp_path / name, "--prompt", *PROMPTS, "--out", tmp_path / "x.png"]
        drawing += ["--save-latents", tmp_path / f"{name}.safetensors", "--size", "32x48", "--steps", 4]
        drawing += ["--control", tmp_path / "control/0.png", tmp_path / "control/1.png"]
        jobs[f"draw {name}"] = call(actions.draw, *drawing)
    lora = ["--checkpoint", tmp_path / "finetune_lora", "--format", "diffusers-lora", "--out", tmp_path / "lora"]
    jobs["export adapters"] = call(actions.export, *lora)
    ended = run_jobs(tmp_path / "jobs", jobs)
    assert "add 'embed.linear' to model.lora.targets" in ended.pop("refused").err
    assert {name: end.err for name, end in ended.items() if end.code} == {}

    for name in ("finetune", "finetune_lora"):
        generator = generator_of(tmp_path / name, build_model)
        noise, expected = draw_samples(generator, case)
        vae = VAE(str(base / "vae"))
        latents = load_file(tmp_path / f"{name}.safetensors")["latents"]
        torch.testing.assert_close(vae.decode(latents) / 2 + 0.5, expected, rtol=0, atol=1e-4)
        drawn = drawn_by_pipeline(tmp_path / f"{name}_pipeline", case, noise, monkeypatch)
        assert relative_error(drawn, expected.clamp(0, 1)) <= RTOL
        monkeypatch.setattr("tests.parity.test_pipelines.given_pictures", lambda _: given_pictures(case).flip(0))
        _, exchanged = draw_samples(generator, case)
        monkeypatch.undo()
        assert relative_error(exchanged, expected) > 10 * RTOL
    pipeline = FluxControlPipeline.from_pretrained(base)
    pipeline.load_lora_weights(tmp_path / "lora", weight_name="pytorch_lora_weights.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    merged = FluxControlPipeline.from_pretrained(tmp_path / "finetune_lora_pipeline").transformer.state_dict()
    torch.testing.assert_close(pipeline.transformer.state_dict(), merged, rtol=0, atol=1e-6)
