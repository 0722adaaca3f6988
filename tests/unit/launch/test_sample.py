"""Sampling from the command line, with a generator so small that every pixel is known."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dit.condition_table import CONTEXT
from dit.data_api import BatchSpec
from dit.models.dit.config import DiTConfig
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from dit.sampling import grid
from dit.settings import SamplingConfig
from launch import evaluate, sample, sample_requests
from launch.measurement import Measurement

NAMES = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
WITH_COMMAS = ["tench", "tench, Tinca tinca", "goldfish, Carassius auratus"]


@dataclass
class FakeGenerator:
    """Draws label `k` as a picture whose pixel `k` is ink; classes in `confused` are drawn as class 0."""

    class_names: Optional[list[str]] = field(default_factory=lambda: list(NAMES))
    num_classes: Optional[int] = 26
    context_size: Optional[int] = None
    class_dropout: float = 0.1
    confused: tuple[int, ...] = ()
    text_encoder: Optional[str] = None
    frames: int = 1
    fps: float = 20.0
    channels: int = 1
    autoencoder: Optional[str] = None
    attributions: list[str] = field(default_factory=list)
    reference_aspect: Optional[str] = None
    longest_text: Optional[int] = None
    spec: BatchSpec = field(
        default_factory=lambda: replace(DiTConfig(patch_spatial=2).batch_spec(), conditions=(CONTEXT,))
    )
    latent_size: tuple[int, int, int] = (1, 6, 6)
    calls: list[dict] = field(default_factory=list)
    data: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(path="somewhere"))

    @property
    def config(self):
        model = DiTConfig(
            num_classes=self.num_classes,
            context_size=self.context_size,
            in_channels=self.channels,
            class_dropout=self.class_dropout,
        )
        sampling = SamplingConfig(seed=7, num_steps=3)
        return RunConfig(model=model, data=self.data, objective=FlowMatching(), sampling=sampling)

    def batch_size(self, frames, size, references):
        return 1000

    def is_guided(self, scale):
        return scale != 1

    def size_of(self, frames, size):
        return (frames or self.frames, *(size or self.latent_size[1:]))

    def generate(self, labels=None, *, count=None, conditions=None, on_step=None, **settings):
        given = {} if labels is None else {"label": labels}
        given |= conditions or {}
        self.calls.append({"count": count, **given, **settings})
        shown = given.get("label") or [0] * count
        out = torch.full((len(shown), self.channels, self.frames, 6, 6), -1.0)
        for i, label in enumerate(shown):
            out[i].flatten(2)[..., 0 if label in self.confused else label] = 1.0
        return out


@pytest.fixture
def generator(monkeypatch):
    fake = FakeGenerator()
    monkeypatch.setattr(sample, "open_generator", lambda args: fake)
    return fake


def draw(tmp_path, *arguments):
    return sample.main(["--checkpoint", "run", "--out", str(tmp_path / "x.png"), *arguments])


def test_every_class_is_drawn_by_default(generator, tmp_path):
    assert draw(tmp_path) == 0
    assert generator.calls[0]["label"] == list(range(26))
    # Settings that are not passed are left to the run.
    given = ("solver", "num_steps", "variance", "guidance_scale", "guidance_channels", "thresholding", "seed", "fps")
    assert {generator.calls[0][k] for k in given} == {None}


def test_the_picture_shows_the_generated_samples(generator, tmp_path):
    assert draw(tmp_path, "--labels", "C,A", "--columns", "1") == 0
    image = torch.from_numpy(np.array(Image.open(tmp_path / "x.png")))
    scale = grid.enlargement(6, 6)
    for index, label in enumerate((2, 0)):
        left, top = grid.tile_origin(index, 1, 6 * scale, 6 * scale, captions=True)
        tile = image[top : top + 6 * scale : scale, left : left + 6 * scale : scale, 0]
        assert tile.flatten().argmax() == label


def test_settings_reach_the_generator(generator, tmp_path):
    flags = (
        "--solver heun --steps 5 --guidance-scale 0 --seed 0 --labels 3 --count 2 --fps 12 --variance large "
        "--guidance-channels 3 --thresholding static --tile 24 --tile-overlap 8 --guidance-rescale 0.7 --guidance-norm "
        "--guidance-interval 0.2 5 --churn 4 0.1 50 1.003"
    )
    assert draw(tmp_path, *flags.split()) == 0
    assert generator.calls[0] == {
        "label": [3, 3],
        "count": 2,
        "negative": None,
        "seeds": None,
        "numbers": [0, 1],
        "references": None,
        "solver": "heun",
        "num_steps": 5,
        "variance": "large",
        "guidance_scale": 0.0,
        "guidance_channels": 3,
        "guidance_rescale": 0.7,
        "guidance_norm": True,
        "guidance_interval": [0.2, 5.0],
        "churn": [4.0, 0.1, 50.0, 1.003],
        "thresholding": "static",
        "seed": 0,
        "tile": 24,
        "tile_overlap": 8,
        "fps": 12.0,
    }


def test_guidance_by_an_untrained_prediction_is_noted(generator, tmp_path, capsys):
    """A negative prompt or another model replaces it."""
    note = "note: --guidance-scale 2 uses the prediction without conditions, which model.class_dropout=0 never trains;"
    for dropout, flags in ((0.1, []), (0.0, ["--guidance-scale", "1"]), (0.0, ["--guide", "other"]), (0.0, [])):
        assert "note: " not in capsys.readouterr().err
        generator.class_dropout = dropout
        assert draw(tmp_path, "--labels", "A", *flags) == 0
    assert capsys.readouterr().err.startswith(note)


@pytest.mark.parametrize("name", evaluate.METRICS)
def test_metrics_of_samples_note_guidance_by_an_untrained_prediction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(evaluate, "open_generator", lambda args: FakeGenerator(class_dropout=0.0))
    metric = replace(evaluate.METRICS[name], measure=lambda args, generator: Measurement([], {}))
    monkeypatch.setitem(evaluate.METRICS, name, metric)
    assert evaluate.main(["--checkpoint", "run", "--metric", name, "--guidance-scale", "2"]) == 0
    assert ("note: --guidance-scale 2 uses the prediction" in capsys.readouterr().err) == (name != "loss")


def test_a_picture_is_generated_only_inside_the_mask(generator, tmp_path, capsys):
    """Only patches that the mask touches are generated; pixels outside the mask are the picture's."""
    pixels, mask = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8), np.zeros((6, 6, 3), np.uint8)
    mask[1:3, 4] = 255
    generator.channels = 3
    for name, array in {"picture": pixels, "mask": mask}.items():
        Image.fromarray(array).save(tmp_path / f"{name}.png")
    flags = ["--labels", "A,B", "--inpaint", str(tmp_path / "picture.png"), str(tmp_path / "mask.png")]
    assert draw(tmp_path, *flags, "--files", str(tmp_path / "files")) == 0
    [call] = generator.calls
    assert call["mask"].tolist() == [[False, False, True], [False, False, True], [False, False, False]]
    known = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[:, None]
    torch.testing.assert_close(call["known"], known)
    files = sorted((tmp_path / "files").glob("*.png"))
    assert len(files) == 2
    for path in files:
        drawn = np.array(Image.open(path))
        assert (drawn[mask[..., 0] == 0] == pixels[mask[..., 0] == 0]).all()
        assert (drawn[mask[..., 0] > 0] == 0).all()
    assert json.loads((tmp_path / "files" / "samples.jsonl").read_text().splitlines()[0])["inpaint"] == flags[3:]
    with pytest.raises(SystemExit, match="2"):
        draw(tmp_path, *flags, "--init", str(tmp_path / "picture.png"))
    assert "argument --init: not allowed with argument --inpaint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "names", "labels"),
    [
        ("a,B", NAMES, [0, 1]),
        ("25, 0", NAMES, [25, 0]),
        ("1,b,B", ["2", "b", "B", "1"], [3, 1, 2]),
        ("tench, Tinca tinca", WITH_COMMAS, [1]),
        ("tench,goldfish, carassius auratus, 0", WITH_COMMAS, [0, 2, 0]),
        ("Tench, tinca tinca,tench", WITH_COMMAS, [1, 0]),
    ],
)
def test_labels_are_names_or_numbers(text, names, labels):
    """Names precede numbers and names in another case, and may have commas."""
    assert sample_requests.read_labels(text, names) == labels


def test_every_prompt_edits_its_picture(generator, tmp_path, capsys):
    """The option is given for all prompts or for each one; a prompt may compose several pictures.

    A picture of 12 x 6 gets the size of at most 6 * 6 pixels with its aspect ratio, for samples of any size.
    """
    generator.channels = 3
    files = []
    for name, shade in (("dark", 0), ("bright", 255)):
        files.append(str(tmp_path / f"{name}.png"))
        Image.new("RGB", (12, 6), (shade,) * 3).save(files[-1])
    flags = ["--labels", "A,B", "--count", "2", "--files", str(tmp_path / "files")]
    assert draw(tmp_path, *flags, "--reference", files[0], "--reference", *reversed(files)) == 0
    assert draw(tmp_path, *flags, "--reference", files[1], "--size", "6x2") == 0
    for call, shades in zip(generator.calls, ([[-1], [-1], [1, -1], [1, -1]], [[1]] * 4), strict=True):
        assert {x.shape for several in call["references"] for x in several} == {(3, 1, 4, 8)}
        assert [[x.unique().item() for x in several] for several in call["references"]] == shades
    records = [json.loads(line) for line in (tmp_path / "files" / "samples.jsonl").read_text().splitlines()]
    assert [record["reference"] for record in records] == [[files[1]]] * 4
    for recorded, flag, shape in (
        ("square", [], (3, 1, 6, 6)),
        ("square", ["--reference-aspect", "keep"], (3, 1, 4, 8)),
    ):
        generator.reference_aspect = recorded
        assert draw(tmp_path, *flags, *flag, "--reference", files[0]) == 0
        assert {x.shape for several in generator.calls[-1]["references"] for x in several} == {shape}
    assert draw(tmp_path, "--labels", "A,B,C", "--reference", files[0], "--reference", files[1]) == 2
    said = (
        "--reference has pictures of 2 samples, and there are 3; repeat the option for each, or give pictures for all"
    )
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "setting", "message"),
    [
        (["--reference"], {"references": False}, "without references (data.references=False), so it cannot edit"),
        (["--first-frame"], {"clean_first_frame": 0.0}, "without clean first frames (data.clean_first_frame=0.0)"),
        (["--inpaint", "picture.png"], {"inpaint": 0.0}, "without clean regions (data.inpaint=0.0)"),
    ],
)
def test_a_run_that_never_trained_with_such_pictures_is_refused(generator, tmp_path, capsys, flags, setting, message):
    generator.data = SimpleNamespace(path="somewhere", **setting)
    assert draw(tmp_path, *flags, str(tmp_path / "picture.png")) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_class_exits_with_code_2_and_lists_the_classes(generator, tmp_path, capsys):
    for label in ("26", "ß", "-1", "goldfish"):
        assert draw(tmp_path, f"--labels={label}") == 2
        err = capsys.readouterr().err
        assert repr(label) in err
        assert "26 classes" in err
        assert "A, B, C" in err


def test_a_grid_of_many_classes_shows_evenly_spaced_classes():
    shown = sample_requests.spread(1000, 36)
    assert (len(set(shown)), shown[0]) == (36, 0)
    assert shown[-1] >= 1000 - 2 * 1000 // 36
    assert sample_requests.spread(26, 36) == list(range(26))


def test_text_embeddings_are_passed_to_the_model(generator, tmp_path, capsys):
    generator.context_size = 8
    for name in ("one", "two"):
        np.save(tmp_path / f"{name}.npy", np.ones((5, 8), dtype=np.float16))
    files = [str(tmp_path / f"{name}.npy") for name in ("one", "two")]
    assert draw(tmp_path, "--condition", "context", *files, "--count", "2") == 0
    assert [c.shape for c in generator.calls[-1]["context"]] == [(5, 8)] * 4
    one, two = (["--condition", "context", file] for file in files)
    for words, says in ((["--prompt", "Q", *one], "only one of the two"), ([*one, *two], "context is given twice")):
        assert draw(tmp_path, *words) == 2
        assert says in capsys.readouterr().err


def test_other_conditions_are_passed_on_for_all_or_for_each(generator, tmp_path, capsys):
    for name, shape in (("text", (5, 8)), ("pooled", (4,))):
        np.save(tmp_path / f"{name}.npy", np.ones(shape, dtype=np.float16))
    text, pooled = (str(tmp_path / f"{name}.npy") for name in ("text", "pooled"))
    generator.context_size = 8
    asked = [
        "--condition",
        "context",
        text,
        text,
        "--count",
        "2",
        "--condition",
        "pooled",
        pooled,
        "--condition",
        "level",
    ]
    assert draw(tmp_path, *asked, "0.25", "1") == 0
    call = generator.calls[-1]
    assert [p.tolist() for p in call["pooled"]] == [[1.0] * 4] * 4
    assert call["level"] == [0.25, 0.25, 1.0, 1.0]
    assert draw(tmp_path, *asked, "0.25", "1", "2") == 2
    assert "--condition level has 3 values for 2 samples" in capsys.readouterr().err
    assert draw(tmp_path, *asked, "nothing.npy") == 2
    assert "level (a number or a .npy file) nothing.npy cannot be read" in capsys.readouterr().err


class LengthEncoder:
    """Embeds a text as one row per word, filled with the word's length, or minus it for a negative prompt."""

    def encode(self, texts, pictures=None, *, negative=False):
        sign = -1.0 if negative else 1.0
        rows = [torch.tensor([[sign * len(word)] * 8 for word in text.split()]) for text in texts]
        return {"text": rows, "pooled": [x.sum(0) for x in rows]}


def test_prompts_are_encoded_as_the_training_texts_were(generator, tmp_path, monkeypatch, capsys):
    asked = []
    load = lambda name, device: asked.append(name) or LengthEncoder()  # noqa: E731
    monkeypatch.setattr("launch.sample_requests.load_text_encoders", load)
    assert draw(tmp_path, "--prompt", "a bold Q") == 2
    assert "takes no text" in capsys.readouterr().err
    generator.context_size = 8
    assert draw(tmp_path, "--prompt", "a bold Q") == 2
    assert "--condition context" in capsys.readouterr().err
    generator.text_encoder = "some encoder"
    assert draw(tmp_path, "--prompt", "a bold Q", "an R", "--count", "2", "--negative-prompt", "ugly") == 0
    assert set(asked) == {"some encoder"}
    call = generator.calls[-1]
    assert [c[:, 0].tolist() for c in call["context"]] == [[1, 4, 1], [1, 4, 1], [2, 1], [2, 1]]
    assert [c[:, 0].tolist() for c in call["negative"]["context"]] == [[-4]] * 4
    assert "pooled" not in call  # the model does not take it
    assert draw(tmp_path, "--negative-prompt", "ugly") == 2
    assert "needs --prompt" in capsys.readouterr().err


def test_negative_prompts_without_guidance_are_noted(generator, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("launch.sample_requests.load_text_encoders", lambda name, device: LengthEncoder())
    generator.context_size, generator.text_encoder = 8, "some encoder"
    (tmp_path / "x.jsonl").write_text('{"prompt": "a bold Q"}\n{"prompt": "an R", "negative": "ugly"}')
    prompts = ["--prompts", str(tmp_path / "x.jsonl")]
    negative = ["--prompt", "an R", "--negative-prompt", "ugly"]
    for words in (prompts, negative, ["--prompt", "an R", "--guidance-scale", "1"]):
        assert draw(tmp_path, *words) == 0
        assert capsys.readouterr().err == ""
    for words in (prompts, negative):
        assert draw(tmp_path, *words, "--guidance-scale", "1") == 0
        assert "note: without guidance, negative prompts have no effect" in capsys.readouterr().err


def test_a_file_of_prompts_may_have_negatives_and_seeds(generator, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.sample_requests.load_text_encoders", lambda name, device: LengthEncoder())
    generator.context_size, generator.text_encoder = 8, "some encoder"
    lines = ['{"prompt": "a bold Q", "seed": 5}', '{"prompt": "an R", "negative": "ugly thing"}', '{"prompt": "S"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    given = ["--prompts", str(tmp_path / "x.jsonl"), "--count", "2", "--files", str(tmp_path / "files")]
    assert draw(tmp_path, *given) == 0
    first, second, third = generator.calls
    assert [c[:, 0].tolist() for call in generator.calls for c in call["context"]] == [
        *[[1.0, 4.0, 1.0]] * 2,
        *[[2.0, 1.0]] * 2,
        *[[1.0]] * 2,
    ]
    assert [call["negative"] is None for call in generator.calls] == [True, False, True]
    assert [c[:, 0].tolist() for c in second["negative"]["context"]] == [[-4.0, -5.0]] * 2
    assert (first["seeds"], first["numbers"]) == ([5, 5], [0, 1])
    assert (third["seeds"], third["numbers"]) == (None, [4, 5])
    records = [json.loads(line) for line in (tmp_path / "files" / "samples.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["seed"], r["number"]) for r in records[1:3]] == [("a bold Q", 5, 1), ("an R", 7, 2)]
    assert draw(tmp_path, *given, "--negative-prompt", "bad") == 0
    led_away = [c[:, 0].tolist() for c in generator.calls[-1]["negative"]["context"]]
    assert led_away == [[-3.0]] * 2 + [[-4.0, -5.0]] * 2 + [[-3.0]] * 2


def test_sizes_are_those_of_the_model_or_refused(generator, tmp_path, capsys):
    assert draw(tmp_path, "--size", "8x12", "--labels", "A") == 0
    assert (generator.calls[-1]["frames"], generator.calls[-1]["size"]) == (1, (8, 12))
    assert draw(tmp_path, "--size", "7", "--labels", "A") == 2
    assert "the height of 7 is not a multiple of 2 (a patch of 2); use 6 or 8" in capsys.readouterr().err
    with pytest.raises(SystemExit) as leave:
        draw(tmp_path, "--size", "8x")
    assert leave.value.code == 2


def test_latents_without_an_autoencoder_are_shown_and_reported_as_false_colours(generator, tmp_path, capsys):
    generator.channels = 4
    assert draw(tmp_path, "--labels", "A", "--save-latents", str(tmp_path / "x.safetensors")) == 0
    assert "latents of 4 channels are drawn as false colours" in capsys.readouterr().err
    assert load_file(tmp_path / "x.safetensors")["latents"].shape == (1, 4, 1, 6, 6)
    assert draw(tmp_path, "--labels", "A", "--vae", str(tmp_path)) == 2
    assert "no autoencoder at" in capsys.readouterr().err
    assert draw(tmp_path, "--labels", "A", "--save-latents", "x.npy") == 2
    assert "--save-latents x.npy must end in .safetensors" in capsys.readouterr().err


def test_shortened_captions_keep_the_words_that_distinguish_prompts():
    prompts = ["the letter Q in a bold font", "the letter R in an italic font"]
    assert sample_requests.telling_words(prompts) == ["Q bold", "R italic"]
    assert sample_requests.telling_words(["the letter Q"]) == ["the letter Q"]


def test_attributions_are_printed_without_control_characters(generator, tmp_path, capsys):
    """Attributions come from the data set and may contain escape codes."""
    generator.attributions = ["Fonts by \x1b]0;title\x07\x1b[2J somebody"]
    assert draw(tmp_path, "--labels", "A") == 0
    said = capsys.readouterr().out
    assert said.endswith("trained on Fonts by ?]0;title??[2J somebody\n")
    assert all(line.isprintable() for line in said.splitlines())


def test_a_text_model_refuses_labels(generator, tmp_path, capsys):
    """Class names in the data do not make a model class-conditional."""
    generator.num_classes = None
    assert draw(tmp_path, "--labels", "A") == 2
    assert "takes no class" in capsys.readouterr().err


def test_the_file_extension_selects_a_film(generator, tmp_path):
    pytest.importorskip("av")
    generator.frames = 3
    out = tmp_path / "x.mp4"
    assert sample.main(["--checkpoint", "run", "--labels", "A,B", "--fps", "10", "--out", str(out)]) == 0
    assert out.stat().st_size > 100


@pytest.mark.parametrize(("flags", "ms_per_frame"), [(["--fps", "10"], 100), ([], 50)], ids=["asked", "training data"])
def test_a_film_plays_at_the_frame_rate_of_the_condition(generator, tmp_path, flags, ms_per_frame):
    generator.frames = 3
    assert sample.main(["--checkpoint", "run", "--labels", "A", *flags, "--out", str(tmp_path / "x.gif")]) == 0
    with Image.open(tmp_path / "x.gif") as clip:  # three equal frames, which a GIF stores as one
        assert (clip.n_frames, clip.info["duration"]) == (1, 3 * ms_per_frame)


def test_a_clip_as_a_picture_has_a_row_of_frames(generator, tmp_path):
    generator.frames = 3
    assert draw(tmp_path, "--labels", "A,B") == 0
    with Image.open(tmp_path / "x.png") as image:
        side, caption = 6 * grid.enlargement(6, 6), grid.CAPTION_HEIGHT
        assert image.size == (3 * side + 4 * grid.GAP, 2 * (side + caption) + 3 * grid.GAP)


def test_an_array_that_could_execute_code_is_refused(generator, tmp_path, capsys):
    generator.context_size = 8
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert draw(tmp_path, "--condition", "context", str(tmp_path / "evil.npy")) == 2
    assert "evil.npy" in capsys.readouterr().err


def test_an_unconditional_model_draws_the_requested_number(generator, tmp_path):
    generator.num_classes, generator.class_names = None, None
    assert draw(tmp_path, "--count", "3") == 0
    assert generator.calls[0]["count"] == 3


@pytest.mark.parametrize(("command", "words"), [(sample.main, []), (evaluate.main, ["--metric", "loss"])])
def test_a_missing_checkpoint_exits_with_code_5(command, words, tmp_path, capsys):
    assert command(["--checkpoint", str(tmp_path / "nowhere"), *words]) == 5
    assert "nowhere does not exist" in capsys.readouterr().err


def test_wrong_flags_exit_with_code_2(tmp_path, capsys):
    for flags in (
        ["--solver", "eulr"],
        ["--steps", "0"],
        ["--count", "x"],
        ["--labels", "1", "--prompt", "2"],
        ["--fps", "0"],
        ["--seed", "-1"],
        ["--guidance-scale", "nan"],
    ):
        with pytest.raises(SystemExit) as leave:
            draw(tmp_path, *flags)
        assert leave.value.code == 2
    assert "eulr" in capsys.readouterr().err
    assert sample.main(["--checkpoint", "x", "--out", "x.jpg"]) == 2


@pytest.mark.parametrize("option", ["--out", "--files", "--save-latents"])
def test_a_file_that_cannot_be_written_is_refused_before_samples_are_drawn(option, generator, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    name = "x.safetensors" if option == "--save-latents" else "x.png"
    assert draw(tmp_path, "--labels", "A", option, str(tmp_path / "file" / name)) == 2
    assert f"{option} {tmp_path}/file/{name}: nothing can be written to {tmp_path}/file" in capsys.readouterr().err
    assert draw(tmp_path, "--labels", "A", "--files", str(tmp_path / "file")) == 2
    assert generator.calls == []


def test_a_volume_of_a_container_takes_files(generator, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    (tmp_path / "files").mkdir()
    assert draw(tmp_path / "files", "--labels", "A", "--files", str(tmp_path / "files")) == 0
