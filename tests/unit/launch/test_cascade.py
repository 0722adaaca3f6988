"""Several models on the command line: `--cascade`, `--stage`, `--guide`, and the pictures that a stage enlarges."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dit.errors import CheckpointError, ConfigError
from dit.inference.drawing import Request
from dit.models.base import ModelConfig
from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.unet.config import UNetConfig
from dit.resize import enlarged
from launch import evaluate, sample
from launch.cascade import read_pictures, read_stages, with_pictures
from launch.sample import build_parser, open_generator, run, sampling_settings

SUPER_RESOLUTION = EfficientUNetConfig(noise_augmentation=True)
REQUESTS = [Request(name, {"fps": 1.0}, {}, None, i) for i, name in enumerate("ab")]
PICTURES = list(torch.randn(2, 3, 1, 4, 6, generator=torch.Generator().manual_seed(0)))


def generator_of(model: ModelConfig) -> Any:
    return SimpleNamespace(spec=model.batch_spec())


def arguments(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def test_a_stage_has_its_own_settings_and_files() -> None:
    """A setting that a stage does not set is taken from the command, never from another stage."""
    args = arguments(
        *(
            "--cascade",
            "base=runs/a",
            "sr=runs/b",
            "--stage",
            "sr",
            "steps=20",
            "guidance_scale=8",
            "augmentation=0.1",
            "tile=64",
            "tile_overlap=8",
        ),
        *("--steps", "30", "--out", "out/x.png", "--files", "pictures", "--save-latents", "z.safetensors"),
    )
    base, large = (stage.arguments(args) for stage in read_stages(args.cascade, args.stage))
    assert (base.checkpoint, base.steps, base.guidance_scale, base.augmentation) == ("runs/a", 30, None, None)
    assert (large.checkpoint, large.steps, large.guidance_scale, large.augmentation) == ("runs/b", 20, 8.0, 0.1)
    assert (sampling_settings(large)["tile"], sampling_settings(large)["tile_overlap"]) == (64, 8)
    assert sampling_settings(base)["tile"] is None
    assert (base.out, base.files) == (Path("out/x_base.png"), Path("pictures/base"))
    assert (large.out, large.save_latents) == (Path("out/x_sr.png"), Path("z_sr.safetensors"))


@pytest.mark.parametrize(
    ("cascade", "settings", "says"),
    [
        (["runs/a"], [], "'runs/a' must be NAME=DIR"),
        (["a=x", "a=y"], [], "'a=y' must be NAME=DIR with a name of its own"),
        (["a=x"], [["b", "steps=1"]], "--stage b: there is no such stage; --cascade names a"),
        (["a=x"], [["a", "stepz=1"]], "--stage a stepz=1: must be SETTING=VALUE with one of steps"),
        (["a=x"], [["a", "steps=many"]], "--stage a steps=many: must be SETTING=VALUE"),
    ],
)
def test_a_cascade_in_another_notation_is_refused(cascade: list[str], settings: list[list[str]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_stages(cascade, settings)


def test_a_stage_enlarges_the_picture_of_each_sample() -> None:
    """The model sets the factor; the augmentation level is the requested one, or the model's default."""
    requests, size = with_pictures(generator_of(SUPER_RESOLUTION), REQUESTS, PICTURES, 0.1)
    assert size == {"frames": 1, "size": (16, 24)}
    for request, picture, asked in zip(requests, PICTURES, REQUESTS, strict=True):
        assert torch.equal(request.conditions["low_resolution"], enlarged(picture, 4))
        assert {**request.conditions, "low_resolution": 0} == {
            **asked.conditions,
            "low_resolution": 0,
            "augmentation": 0.1,
        }
    clean, _ = with_pictures(generator_of(SUPER_RESOLUTION), REQUESTS, PICTURES, None)
    assert "augmentation" not in clean[0].conditions
    assert with_pictures(generator_of(UNetConfig()), REQUESTS, None, None) == (REQUESTS, {})


def test_stages_that_do_not_follow_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes no low-resolution picture .* can only be the first stage"):
        with_pictures(generator_of(UNetConfig()), REQUESTS, PICTURES, None)
    with pytest.raises(ConfigError, match="enlarges a low-resolution picture; put a model that draws one before it"):
        with_pictures(generator_of(SUPER_RESOLUTION), REQUESTS, None, None)
    with pytest.raises(ConfigError, match="1 low-resolution pictures for 2 samples"):
        with_pictures(generator_of(SUPER_RESOLUTION), REQUESTS, PICTURES[:1], None)


def test_pictures_are_read_from_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", torch.stack(PICTURES)[:, :, 0].numpy())
    assert all(map(torch.equal, read_pictures(tmp_path / "x.npy"), PICTURES))
    np.save(tmp_path / "y.npy", np.zeros((3, 4)))
    with pytest.raises(ConfigError, match=r"y.npy has shape \[3, 4\], wanted \[N, channels, height, width\]"):
        read_pictures(tmp_path / "y.npy")
    np.save(tmp_path / "bytes.npy", np.full((1, 3, 4, 4), 200, np.uint8))
    with pytest.raises(ConfigError, match=r"bytes.npy holds uint8, wanted floating-point values in \[-1, 1\]"):
        read_pictures(tmp_path / "bytes.npy")
    with pytest.raises(ConfigError, match=r"z.npy cannot be read"):
        read_pictures(tmp_path / "z.npy")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--checkpoint", "a", "--stage", "sr", "steps=2"], "--stage sr: there is no such stage; --cascade names none"),
        (["--checkpoint", "a", "--augmentation", "0.1"], r"augmentation 0\.1 .* and the model gets none"),
        (
            ["--cascade", "base=a", "sr=b", "--stage", "base", "augmentation=0.1"],
            r"0\.1 .* and base gets none",
        ),
    ],
)
def test_options_of_stages_that_do_not_exist_or_enlarge_nothing_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(arguments(*words))


class Loaded:
    """Stand-in for the generator of a folder."""

    def __init__(self, *asked):
        self.asked, self.guide = asked, None
        self.config = SimpleNamespace(objective=SimpleNamespace())

    def guide_by(self, weaker):
        self.guide = weaker


def test_a_guide_is_loaded_with_the_model(tmp_path, monkeypatch):
    """The guide has the same ranks and the same kind of weights, raw or averaged; an error names a missing folder."""
    models: list[tuple[str, ...]] = []
    monkeypatch.setattr("dit.inference.generator.groups_to_sample", lambda *paths: models.append(paths) or "ranks")
    monkeypatch.setattr(
        "dit.inference.generator.load_generator",
        lambda path, *, weights, groups: Loaded(str(path), weights, groups),
    )
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
    large, small = str(tmp_path / "large"), str(tmp_path / "small")
    parse = build_parser().parse_args
    found = open_generator(parse(["--checkpoint", large, "--guide", small, "--raw-weights"]))
    assert found.asked == (large, "raw", "ranks")
    assert found.guide.asked == (small, "raw", "ranks")
    assert open_generator(parse(["--checkpoint", large])).guide is None
    with pytest.raises(CheckpointError, match=f"--guide {small}er does not exist"):
        open_generator(parse(["--checkpoint", large, "--guide", f"{small}er"]))
    (stage,) = read_stages([f"base={large}"], [["base", f"guide={small}"]])
    assert open_generator(stage.arguments(parse(["--cascade", f"base={large}"]))).guide.asked[0] == small
    assert models == [(large, small), (large,), (large, small)]


def test_a_cascade_refuses_a_second_model_for_all_stages(capsys):
    for words, message in (
        (["--guide", "b"], "--guide b applies to one model; set it for a stage, --stage NAME guide=DIR"),
        (["--low-noise", "b"], "--low-noise b applies to one model; use --checkpoint instead of --cascade"),
    ):
        for main, metric in ((sample.main, []), (evaluate.main, ["--metric", "clip"])):
            assert main(["--cascade", "base=a", *words, *metric]) == 2
            assert message in capsys.readouterr().err
