"""`launch.export --format pipeline`: diffusers opens the folder, and the pipeline draws the samples of our sampler."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline
from torch import Tensor

from dit.batch import pixel_values
from dit.checkpoint.diffusers_folder import read_network
from dit.checkpoint.full_weights import read_full_weights
from dit.checkpoint.reading import candidates, read_settings
from dit.convert.diffusers_format import TrainedModel
from dit.convert.diffusers_pipeline import PIPELINES
from dit.convert.diffusers_sampling import scheduler_config, spaced_scheduler
from dit.encoders.text import load_text_encoders
from dit.encoders.text_config import as_conditions, config_of
from dit.encoders.vae import VAE
from dit.errors import ConfigError
from dit.inference.generator import Generator
from dit.models.streams.families import Flux2Config
from dit.models.wan.config import WanConfig
from dit.objectives.ddpm import DDPM
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import check_sampling
from dit.sampling.grid import to_image
from examples.flux2.compare import start_noise
from launch.config_file import built
from launch.export import main as export
from launch.export_weights import sampling_notes
from recipes.finetune import finetune
from tests.conftest import BuildModel
from tests.parity.convert_cases import load, relative_error
from tests.parity.pipeline_cases import CASES, FLUX2, JOINED, RTOL, SEED, STEPS, STEPS_1000, WAN, Case, a_run
from tests.support.encoders import CLIP_WIDTH


def generator_of(run: Path, build_model: BuildModel) -> Generator:
    [folder] = candidates(run)
    config, metadata = read_settings(folder)
    return Generator(config, metadata, load(build_model(config.model), read_full_weights(folder, "weight")), 0)


FTFY = SimpleNamespace(fix_text=lambda text: text)
"""Package that some pipelines need, and that changes no prompt here."""


def draw_samples(generator: Generator, case: Case, **sampling: Any) -> tuple[Tensor, Tensor]:
    """Return the noise for a scheduler, `[N, C, t, h, w]`, and our pictures in [0, 1], `[N, 3, T, H, W]`."""
    if case.encoders is None:
        given: Mapping[str, Any] = {"label": [2, 0]}
    else:
        encoders = load_text_encoders(generator.text_encoder or "")
        given = as_conditions(encoders.encode(case.prompts), case.model.conditions())
    vae = VAE(generator.config.sampling.vae or generator.autoencoder or "")
    if case.model.condition("control") is not None:
        given = {**given, "control": list(vae.encode(given_pictures(case)[:, :, None]))}
    if "reference" in case.clean_parts:
        sampling["references"] = [[x] for x in vae.encode(given_pictures(case)[:, :, None])]
    latents = generator.generate(conditions=given, **sampling)
    tokens = prod(case.size) // generator.spec.patch_volume * case.frames
    objective = case.objective.at_size(tokens, case.model.token_channels)
    _, sigma = objective.path.alpha_sigma(objective.sampling_grid(STEPS)[0])
    return float(sigma) * start_noise(generator, given), vae.decode(latents) / 2 + 0.5


def given_pictures(case: Case) -> Tensor:
    """Return a control picture or a picture to edit for each prompt, `[2, 3, H, W]` in [-1, 1], with 8-bit values.

    A picture to edit has another aspect ratio than the sample.
    """
    height, width = (2 ** (case.blocks - 1) * side for side in case.size[:: -1 if case.clean_parts else 1])
    return pixel_values(torch.randint(256, (2, 3, height, width), generator=torch.Generator().manual_seed(6)))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dit.inference.generator.local_device", lambda: torch.device("cpu"))


def page_call(code: str) -> dict[str, Any]:
    """Return the keyword arguments of the pipeline call in the code of a README."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if ast.unparse(node.func) == "pipeline"]
    return {
        str(word.arg): eval(ast.unparse(word.value), {"load_image": Path, "range": range}) for word in call.keywords
    }


FURTHER = (
    *("pixart bert", "flux", "flux control", "flux2", "flux2 klein", "flux2 klein distilled", "qwen image", "chroma"),
    *("stable diffusion", "wan", "hunyuan video", "lumina2", "prx"),
)
"""Cases that only `make test-long` draws. `tests/laws` compares their networks with those of diffusers."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in FURTHER else n for n in CASES])
def test_the_pipeline_draws_the_samples_of_the_sampler(
    build_model: BuildModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """Run the code of the README in the folder, with the same noise, texts and guidance."""
    case, folder = CASES[name], tmp_path / "pipeline"
    run = a_run(tmp_path, case)
    capsys.readouterr()
    assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
    output = capsys.readouterr().err
    assert (f"{case.pipeline} takes references at their own size" in output) == ("reference" in case.clean_parts)
    assert "is called without" not in output
    generator = generator_of(run, build_model)
    noise, expected = draw_samples(generator, case)
    if case.guidance != 1:
        _, unguided = draw_samples(generator, case, guidance_scale=1.0)
        assert relative_error(unguided, expected) > 30 * RTOL  # otherwise wrong guidance would pass
    drawn = drawn_by_pipeline(folder, case, noise, monkeypatch)
    assert drawn.shape == expected.shape
    assert drawn.shape[-2:] == tuple(VAE(str(tmp_path / "vae")).geometry.space * side for side in case.size)
    assert expected.clamp(0, 1).std() > 0.01
    assert relative_error(drawn, expected.clamp(0, 1)) <= RTOL


def drawn_by_pipeline(folder: Path, case: Case, noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the pictures of an exported pipeline, called as in its README, `[N, 3, T, H, W]` in [0, 1]."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline).__name__ == case.pipeline
    if case.pipeline == "PRXPipeline":
        monkeypatch.setattr("diffusers.pipelines.prx.pipeline_prx.ftfy", FTFY, raising=False)
    if case.pipeline == "ChromaPipeline":  # attention adds its float mask to the scores, which masks nothing
        mask_of = pipeline._prepare_attention_mask
        pipeline._prepare_attention_mask = lambda **words: mask_of(**words).bool()
    pipeline.set_progress_bar_config(disable=True)
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    call = page_call(code)
    given = "prompt" if case.encoders else "class_labels"
    assert given in call
    call[given] = list(case.prompts) if case.encoders else [2, 0]  # a copy: ZImagePipeline writes into the list
    is_clip = case.frames > 1
    noise = noise if is_clip else noise[:, :, 0]
    if case.pipeline == "DiTPipeline":
        monkeypatch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda **_: noise)
        assert pipeline.get_label_ids(["class 2", "class 0"]) == [2, 0]
    else:
        call["latents"] = noise
        if case.pipeline.startswith(("FluxPip", "FluxC", "FluxK", "Chroma", "QwenImage")):
            call["latents"] = pipeline._pack_latents(noise, 2, case.model.in_channels, *case.size)
        elif case.pipeline.startswith("Flux2"):
            call["latents"] = pipeline._patchify_latents(noise)
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * 2
    if "control_image" in call:
        call["control_image"] = given_pictures(case)
    calls = [call]
    alone = case.pipeline in ("PRXPipeline", "HunyuanVideo15Pipeline")  # draw one prompt at a time
    if alone or "image" in call:
        calls = [{**call, "prompt": p, "latents": x[None]} for p, x in zip(call["prompt"], call["latents"])]
    if "image" in call:
        for words, picture in zip(calls, given_pictures(case)):
            words["image"] = to_image(picture)
    outputs = [pipeline(**words, output_type="np") for words in calls]
    drawn = [torch.from_numpy(output.frames if is_clip else output.images) for output in outputs]
    pictures = torch.cat(drawn).movedim(-1, 1)
    return pictures if is_clip else pictures[:, :, None]


def refused(folder: Path, case: Case, capsys: pytest.CaptureFixture, *words: str) -> str:
    """Export; expect no output folder and one line of error, and return the line."""
    run = a_run(folder, case)
    capsys.readouterr()
    arguments = ["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder / "out")]
    assert export([*arguments, *words]) == 2
    assert not (folder / "out").exists()
    [line] = capsys.readouterr().err.splitlines()
    return line


PIXART_T5, XL = CASES["pixart"], CASES["stable diffusion xl"]
OTHER_VAE = Case("", WanConfig(**WAN, in_channels=4, null_text="empty"), FlowMatching(), "{t5}:zero_padded")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (replace(PIXART_T5, objective=FlowMatching()), "runs DDPM of 1000 steps .* trained with FlowMatching"),
        (
            replace(CASES["dit"], objective=DDPM(discrete_steps=1000, network_time="log_snr")),
            "runs DDPM of 1000 steps .*network_time=time.* trained with .*network_time='log_snr'",
        ),
        *(
            (replace(CASES["sd3"], objective=FlowMatching(**times)), "runs flow matching of the velocity at all times")
            for times in ({"min_time": 0.875}, {"max_time": 0.875})
        ),
        (
            replace(PIXART_T5, model=replace(PIXART_T5.model, null_text="learned")),
            "uses the embedding of the empty text as unconditional.*null_text=empty",
        ),
        (replace(PIXART_T5, encoders=None), "needs 1 text encoder .t5 or umt5 or sentence., and the run names none"),
        (
            replace(PIXART_T5, encoders="{t5}:padded"),
            "kind t5 or umt5 or sentence, `NAME:prompt=lower_case:max_tokens=120`",
        ),
        (replace(PIXART_T5, model=replace(PIXART_T5.model, in_channels=3)), "AutoencoderKL of 3 channels"),
        (OTHER_VAE, "WanPipeline needs an AutoencoderKLWan of 4 channels .*, and .* is a AutoencoderKL of 4"),
        (replace(CASES["wan"], encoders="{t5}"), "of kind umt5 or t5, `NAME:prompt=wan:zero_padded`"),
        (
            replace(XL, model=replace(XL.model, null_text="learned")),
            "uses the embedding of the empty text or zeros as unconditional.*null_text=empty or zeros",
        ),
        (
            replace(XL, model=replace(XL.model, context_size=CLIP_WIDTH), encoders="text+pooled={clip}:padded"),
            "of kind clip, `text=NAME:layer=penultimate:padded`",
        ),
        (
            replace(XL, encoders=JOINED.replace("{projected}", "{clip}")),
            "of kind clip_projected, `text.pooled=NAME:layer=penultimate:padded:joined`",
        ),
        (
            replace(XL, model=replace(XL.model, control_channels=2)),
            "StableDiffusionXLPipeline has no control, which this model takes",
        ),
        (
            replace(CASES["stable diffusion"], encoders="{clip}"),
            "StableDiffusionPipeline needs a text encoder of kind clip, `NAME:padded`",
        ),
        (replace(CASES["flux"], encoders="text={t5}:padded"), "`pooled=NAME`"),
        (
            replace(CASES["flux2 klein"], model=Flux2Config(**{**FLUX2, "null_text": "learned"})),
            "Flux2KleinPipeline uses the embedding of the empty text as unconditional.*null_text=empty",
        ),
        (replace(CASES["z image"], encoders="{qwen3}:layer=-2"), "of kind qwen3, `NAME:prompt=chat_thinking:layer=-2`"),
        (
            replace(CASES["qwen image"], clean_parts=("reference",)),
            "QwenImageEditPlusPipeline needs a text encoder of kind qwen2_5_vl, `NAME:prompt=qwen_image_edit_plus`",
        ),
        (replace(CASES["wan"], clean_parts=("reference",)), "takes no picture to edit, .*data.references=True"),
        (replace(CASES["lumina2"], blocks=3), "that compresses 8 x 8 pixels, and .* compresses 4 x 4"),
    ],
    ids=[
        *(
            "objective",
            "log snr",
            "high noise",
            "low noise",
            "null",
            "no encoder",
            "padding",
            "channels",
            "vae of wan",
            "text of wan",
        ),
        *("null of xl", "one encoder", "no projection", "control", "unpadded", "no pooled text"),
        *("null of klein", "plain prompt", "edit without picture", "edits of wan", "compression"),
    ],
)
def test_a_run_whose_pipeline_would_draw_other_samples_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, case: Case, said: str
) -> None:
    assert re.search(said, refused(tmp_path, case, capsys))


@pytest.mark.parametrize(("part", "cure"), [("vae", "--vae PATH"), ("t5", "--text-encoder")])
def test_a_part_that_has_moved_is_named_with_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture, part: str, cure: str
) -> None:
    run = a_run(tmp_path, PIXART_T5)
    (tmp_path / part).rename(tmp_path / "elsewhere")
    config_of.cache_clear()  # as in a new process
    capsys.readouterr()
    arguments = ["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(tmp_path / "out")]
    assert export(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / part) in line
    assert line.endswith(f"has moved, give {cure}")


@pytest.mark.parametrize(("shift", "steps"), [(1.0, 1), (1.0, 2), (3.0, 1), (3.0, 4), (5.0, 50), (0.5, 10), (12.0, 30)])
def test_a_scheduler_without_noise_levels_gets_the_sampling_steps(shift: float, steps: int) -> None:
    """`WanPipeline` passes only the number of steps, and by default the last noise level would be 1/1000."""
    assert "sigmas" not in signature(WanPipeline.__call__).parameters
    objective = FlowMatching(time_shift=shift)
    for same in (objective, replace(objective, last_time=0.02)):
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(spaced_scheduler(same, steps))
        scheduler.set_timesteps(steps)
        torch.testing.assert_close(scheduler.sigmas.double(), same.sampling_grid(steps), rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="time_shift=60 is too large for the scheduler of diffusers in 50 steps"):
        spaced_scheduler(FlowMatching(time_shift=60.0), 50)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_scheduler_with_a_last_time_gets_the_sampling_steps(steps: int) -> None:
    """Stretching one step to a last time would divide by zero."""
    objective = FlowMatching(time_shift=3.0, last_time=0.02)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler_config(objective, steps))
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    torch.testing.assert_close(scheduler.sigmas.double(), objective.sampling_grid(steps), rtol=0, atol=1e-6)


def test_settings_of_sampling_that_a_pipeline_lacks_are_noted() -> None:
    sampling = {"guidance_channels": 3, "guidance_rescale": 0.7, "guidance_interval": [0.2, 5.0]}
    note = "DiTPipeline is called without sampling.guidance_channels=3, guidance_rescale=0.7"
    for scale, thresholding, said in (
        (2.0, "none", [f"{note}, guidance_interval=[0.2, 5.0]"]),
        (1.0, "none", []),
        (1.0, "static", ["DiTPipeline is called without sampling.thresholding=static"]),
    ):
        settings = {**sampling, "guidance_scale": scale, "thresholding": thresholding}
        trained = TrainedModel(CASES["dit"].model, STEPS_1000, (1, 8, 8), settings)
        pipeline = next(pipeline for pipeline in PIPELINES if pipeline.class_name == "DiTPipeline")
        assert sampling_notes(pipeline, trained) == said


def test_a_distilled_klein_is_imported_and_exported_as_one(tmp_path: Path) -> None:
    """Four steps without guidance. Source: model card of FLUX.2 klein; `is_distilled` of `Flux2KleinPipeline`."""
    from launch.import_weights import main as import_weights

    run, folder = a_run(tmp_path, CASES["flux2 klein"]), tmp_path / "pipeline"
    for distilled in (True, False):
        words = ["--raw-weights", "--format", "pipeline", "--out", str(folder)]
        assert export(["--checkpoint", str(run), *words]) == 0
        index = json.loads((folder / "model_index.json").read_text())
        assert index["is_distilled"] is (not distilled)
        (folder / "model_index.json").write_text(json.dumps({**index, "is_distilled": distilled}))
        network = json.loads((folder / "transformer/config.json").read_text())
        del network["_megatron_dit"]  # as in published folders
        (folder / "transformer/config.json").write_text(json.dumps(network))
        run = tmp_path / f"imported {distilled}"
        assert import_weights(["--from", str(folder), "--format", "diffusers", "--out", str(run)]) == 0
        config, _ = read_settings(candidates(run)[0])
        expected = (4, 1.0) if distilled else (50, 4.0)
        assert (config.sampling.num_steps, config.sampling.guidance_scale) == expected
        folder = tmp_path / f"pipeline of {distilled}"


def test_a_model_of_first_frames_continues_a_picture_in_the_pipeline(
    build_model: BuildModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan 2.2 TI2V: `WanImageToVideoPipeline` opens the folder, too, and reads `expand_timesteps`."""
    case = replace(CASES["wan 2.2"], clean_parts=("first_frame",), prompts=("a red circle",))
    run, folder = a_run(tmp_path, case), tmp_path / "pipeline"
    assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
    generator = generator_of(run, build_model)
    noise, expected = draw_samples(generator, case)
    assert relative_error(drawn_by_pipeline(folder, case, noise, monkeypatch), expected.clamp(0, 1)) <= RTOL
    vae = VAE(str(tmp_path / "vae"))
    picture = pixel_values(expected[0, :, :1].clamp(0, 1).mul(255).byte())
    noise, continued = draw_samples(generator, case, first_frame=vae.encode(picture[None])[0])
    monkeypatch.setattr("diffusers.pipelines.wan.pipeline_wan_i2v.ftfy", FTFY, raising=False)
    pipeline = WanImageToVideoPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    words = {**page_call(code), "prompt": list(case.prompts), "latents": noise, "image": to_image(picture[:, 0])}
    drawn = torch.from_numpy(pipeline(**words, output_type="np").frames).movedim(-1, 1)
    assert relative_error(continued.clamp(0, 1), expected.clamp(0, 1)) > 30 * RTOL
    assert relative_error(drawn, continued.clamp(0, 1)) <= RTOL


def test_a_run_without_an_autoencoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """`--vae identity` has no autoencoder that the pipeline could load."""
    assert "AutoencoderKL" in refused(tmp_path, PIXART_T5, capsys, "--vae", "identity")


def test_a_pipeline_is_trained_further_after_the_autoencoder_of_its_run_has_moved(tmp_path: Path) -> None:
    """The pipeline has a copy; the run names the autoencoder as `sampling.vae`."""
    run, folder = a_run(tmp_path, PIXART_T5), tmp_path / "pipeline"
    assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
    (tmp_path / "vae").rename(tmp_path / "elsewhere")
    config = built(finetune(base=str(folder)))
    check_sampling(config.sampling, config.objective, config.model)
    assert (config.sampling.num_steps, config.sampling.seed) == (STEPS, SEED)
    assert read_network(folder).trained.autoencoder == str(folder / "vae")


def test_the_parts_can_be_imported_again(tmp_path: Path) -> None:
    """The folder of the transformer has the record of the export; the padded class table keeps the class names."""
    from launch.import_weights import main as import_weights

    run, folder = a_run(tmp_path, CASES["dit"]), tmp_path / "pipeline"
    assert export(["--checkpoint", str(run), "--raw-weights", "--format", "pipeline", "--out", str(folder)]) == 0
    words = ["--from", str(folder / "transformer"), "--format", "diffusers", "--out", str(tmp_path / "back")]
    assert import_weights(words) == 0
    [checkpoint] = candidates(tmp_path / "back")
    config, metadata = read_settings(checkpoint)
    assert (config.model.num_classes, metadata["class_names"]) == (1000, ["class 0", "class 1", "class 2"])
    index = json.loads((folder / "model_index.json").read_text())
    assert index["id2label"] == {"0": "class 0", "1": "class 1", "2": "class 2"}
