"""PSNR and gradient energy of enlarged pictures, compared with their definitions, and cascades in `launch.evaluate`."""

import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dit.evaluation.features import Features
from dit.evaluation.frechet import Gaussian, frechet_distance
from dit.inference.cascade import Cascade
from dit.inference.generator import Generator
from energon_data.mock import MockData
from examples.cascades import sharpness
from examples.comparison import draw_samples
from launch import evaluate, picture_scores
from launch.measurement import Measurement, Metric
from tests.conftest import BuildModel
from tests.unit.inference.test_cascade import BASE, LARGER, generator_of


def arguments(*words: str) -> Namespace:
    return evaluate.build_parser().parse_args(["--checkpoint", "run", "--metric", "sharpness", *words])


def psnr(pictures: np.ndarray, real: np.ndarray) -> float:
    """Return the PSNR in dB, by its definition on values from 0 to 1."""
    squares = sum(((p - t) / 2) ** 2 for p, t in zip(np.clip(pictures, -1, 1).ravel(), real.ravel(), strict=True))
    return -10 * math.log10(squares / real.size)


def energy(pictures: np.ndarray) -> float:
    clipped = np.clip(pictures, -1, 1)
    return sum(float((np.diff(picture, axis=axis) ** 2).sum()) for picture in clipped for axis in (0, 1))


def test_the_numbers_are_those_of_their_definitions(build_model: BuildModel) -> None:
    generator = generator_of(LARGER, build_model, 16)
    data = MockData(shapes=["1x16x16"], validation_samples=8)
    generator.config.data = data
    parts: list[list[Tensor]] = [[], [], []]
    for batch in data.build_validation(LARGER.batch_spec(micro_batch_size=4), dp_rank=0, dp_size=1):
        real = torch.cat(batch.unpatchified(batch.latents_TC, 1, 1))
        small = interpolate(real, (8, 8), mode="bicubic", antialias=True)
        parts[0].append(real.clamp(-1, 1))
        parts[1].append(torch.cat(generator.generate_pack(batch, generator.config.sampling)))
        parts[2].append(interpolate(small, (16, 16), mode="bicubic", antialias=True))
    truth, drawn, bicubic = (torch.cat(part)[:, 0].double().numpy() for part in parts)
    record = sharpness.measure(arguments("--metric", "sharpness"), generator).record
    assert (record["pictures"], record["factor"]) == (len(truth), 2)
    assert record["psnr"] == pytest.approx(psnr(drawn, truth))
    assert record["bicubic_psnr"] == pytest.approx(psnr(bicubic, truth))
    assert record["gradient"] == pytest.approx(energy(drawn) / energy(truth))
    assert record["bicubic_gradient"] == pytest.approx(energy(bicubic) / energy(truth))


@pytest.mark.parametrize(
    ("psnr", "gradient", "missed"),
    [
        (23.0, 0.9, []),
        (23.0, 1.3, []),
        (22.9, 0.9, ["below the minimum of 3.00 dB"]),
        (23.0, 0.6, ["no sharper than bicubic interpolation"]),
        (23.0, 1.5, ["no sharper than bicubic interpolation"]),
    ],
)
def test_the_minimum_is_of_the_gain_and_asks_for_sharper_pictures(
    psnr: float, gradient: float, missed: list[str]
) -> None:
    record = {"psnr": psnr, "bicubic_psnr": 20.0, "gradient": gradient, "bicubic_gradient": 0.6}
    assert [line.partition(":")[0] for line in sharpness.shortfalls(record, 3.0)] == missed


def test_a_cascade_is_measured_after_each_of_its_stages(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each stage starts from samples of the previous stages, drawn with the settings of those stages, in batches."""
    generators = {"a": generator_of(BASE, build_model, 8), "b": generator_of(LARGER, build_model, 16)}
    monkeypatch.setattr(evaluate, "open_generator", lambda args, groups=None: generators[args.checkpoint])
    models: list[str] = []
    monkeypatch.setattr("dit.inference.generator.groups_to_sample", lambda *paths: models.extend(paths))
    monkeypatch.setattr(Generator, "batch_size", lambda self, *_: 2)
    labels, drawn = [0, 2, 1], {}

    def measure(args: Namespace, generator: Generator) -> Measurement:
        pictures = drawn[args.checkpoint] = draw_samples(args, generator, {"label": labels})
        return Measurement([], {"side": pictures.shape[-1]})

    monkeypatch.setitem(evaluate.METRICS, "side", Metric("", measure, by_condition=True))
    words = ["--cascade", "base=a", "larger=b", "--stage", "base", "steps=3", "--stage", "larger", "augmentation=0.5"]
    assert evaluate.main([*words, "guide=c", "--metric", "side", "--seed", "4", "--json"]) == 0
    assert models == ["a", "b", "c"]
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"stage": "base", "side": 8}, {"stage": "larger", "side": 16}]
    cascade = Cascade(generators["b"], generators["a"], {"num_steps": 3}, level=0.5)
    # Some processors add in another order for batches of two than of three; wrong settings differ by 0.1 or more.
    torch.testing.assert_close(drawn["a"], generators["a"].generate(labels, seed=4, num_steps=3), rtol=0, atol=1e-3)
    torch.testing.assert_close(drawn["b"], cascade.generate(labels, seed=4), rtol=0, atol=1e-2)


def test_each_stage_of_a_cascade_has_a_distance_from_a_reference(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The pictures of a stage are compared at their size; the features are the mean of each colour."""
    generators = {"a": generator_of(BASE, build_model, 8), "b": generator_of(LARGER, build_model, 16)}
    monkeypatch.setattr(evaluate, "open_generator", lambda args, groups=None: generators[args.checkpoint])
    models: list[str] = []
    monkeypatch.setattr("dit.inference.generator.groups_to_sample", lambda *paths: models.extend(paths))
    means = Features(lambda images: images.clamp(-1, 1).mean((2, 3)), "means")
    monkeypatch.setattr(picture_scores, "feature_network", lambda args, generator: means)
    real = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)).double()
    np.savez(tmp_path / "x.npz", mu=real.mean(0).numpy(), sigma=torch.cov(real.T).numpy())
    words = ["--cascade", "base=a", "larger=b", "--metric", "fid", "--count", "2", "--seed", "4", "--json"]
    assert evaluate.main([*words, "--reference", str(tmp_path / "x.npz")]) == 0
    assert models == ["a", "b"]
    found = {record["stage"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    labels = [label for label in range(BASE.num_classes or 0) for _ in range(2)]
    cascade = Cascade(generators["b"], generators["a"], {})
    for stage, generator in {"base": generators["a"], "larger": cascade}.items():
        drawn = means(generator.generate(labels, seed=4)[:, :, 0].expand(-1, 3, -1, -1)).double()
        assert len(drawn) == found[stage]["pictures"]
        sides = (Gaussian(side.mean(0), torch.cov(side.T)) for side in (real, drawn))
        assert found[stage]["fid"] == pytest.approx(frechet_distance(*sides), rel=1e-3)
    assert found["base"]["fid"] != pytest.approx(found["larger"]["fid"], rel=1e-2)


def test_a_metric_of_held_out_data_refuses_a_cascade(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--cascade", "a=b", "--metric", "loss"]) == 2
    assert (
        "--metric loss reads held-out data, and a cascade draws samples of classes or texts; use"
        in capsys.readouterr().err
    )
    assert evaluate.main(["--cascade", "a=b", "--metric", "fid"]) == 2
    assert "a cascade draws samples of classes or texts; give --reference" in capsys.readouterr().err
