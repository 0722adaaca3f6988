"""Metrics of `launch.evaluate` on pictures, compared with values computed by hand from a tiny model's samples."""

import math
from argparse import Namespace
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dit import extensions
from dit.batch import PackedBatch
from dit.data_api import NoData
from dit.errors import ConfigError, DataError
from dit.evaluation.clip import ClipModel
from dit.evaluation.features import Features, load_features
from dit.evaluation.frechet import Gaussian, frechet_distance
from dit.evaluation.kernel_distance import kernel_distance
from dit.evaluation.precision_recall import precision_recall
from dit.inference.drawing import Request
from dit.inference.generator import Generator
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from dit.settings import SamplingConfig, TrainingConfig
from energon_data.dataset import EnergonData
from energon_data.mock import MockData
from energon_data.prepare.shards import ShardWriter, npy_bytes, write_energon_metadata
from launch import evaluate, picture_scores
from launch.held_out import data_of, held_out_batches
from launch.sample_requests import what_to_draw
from tests.conftest import BuildModel
from tests.unit.evaluation.test_clip import folder as clip_folder  # noqa: F401
from tests.unit.evaluation.test_inception import state as inception_weights
from tests.unit.evaluation.test_text_reader import picture_of

SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2}
SAMPLING = SamplingConfig(num_steps=2, guidance_scale=1.5)
CLASSES = DiTConfig(**SMALL, in_channels=1, num_classes=3)
TEXTS = DiTCrossConfig(**SMALL, in_channels=3, context_size=6)


def generator_of(model: Any, build_model: BuildModel, **objective: Any) -> Generator:
    data = MockData(shapes=["1x8x8", "1x16x8"], validation_samples=8)
    config = RunConfig(
        model=model,
        data=data,
        objective=FlowMatching(**objective),
        sampling=SAMPLING,
        training=TrainingConfig(micro_batch_size=4),
    )
    metadata = {"class_names": None, "latent_size": [1, 16, 16], "text_encoder": "words"}
    return Generator(config, metadata, build_model(model, perturb=0.1), 0)


def gaussian_of(features: Tensor) -> Gaussian:
    return Gaussian(features.mean(0), torch.cov(features.T))


def arguments(*words: str) -> Namespace:
    return evaluate.build_parser().parse_args(["--checkpoint", "run", *words])


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Register 128 random features of a grey picture of any size, under the name `pooled`."""
    torch.manual_seed(0)
    projection = torch.randn(16, 128)

    def of(images: Tensor) -> Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images[:, :1], 4).flatten(1).tanh() @ projection

    registered = {"pooled": lambda args, generator: Features(of, "pooled pixels")}
    monkeypatch.setattr(extensions, "load", lambda kind, product: product | (registered if kind == "features" else {}))
    return of


@pytest.mark.parametrize("shift", [None, 64])
def test_distances_are_between_held_out_samples_and_generated_ones_of_the_same_conditions(
    build_model: BuildModel, features: Callable[[Tensor], Tensor], shift: Any
) -> None:
    """Noise levels may depend on the size, of which a micro-batch has two."""
    generator = generator_of(CLASSES, build_model, shift_dimension=shift)

    def drawn_of(batch: PackedBatch) -> list[Tensor]:
        by_grid = {}
        for grid in batch.grids:
            sized, objective = copy(generator), generator.config.objective
            sized.config = replace(generator.config, objective=objective.at_size(math.prod(grid), 4))
            by_grid[grid] = sized.generate_pack(batch, SAMPLING)
        return [by_grid[grid][i] for i, grid in enumerate(batch.grids)]

    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    spec = CLASSES.batch_spec(micro_batch_size=4)
    for batch in generator.config.data.build_validation(spec, dp_rank=0, dp_size=1):
        for side, latents in zip(sides, (batch.unpatchified(batch.latents_TC, 1, 2), drawn_of(batch))):
            for latent in latents:
                side.append(features(latent[:, 0][None].clamp(-1, 1))[0].double())
    real, drawn = (torch.stack(side) for side in sides)
    assert len(real) == len(drawn) == 8
    moments = [gaussian_of(side) for side in (real, drawn)]
    fid = picture_scores.fid(arguments("--metric", "fid", "--features", "pooled"), generator)
    assert fid.record == {
        "fid": pytest.approx(frechet_distance(*moments), rel=1e-4),
        "pictures": 8,
        "features": 128,
        "network": "pooled pixels",
    }
    assert "biased upwards" in fid.lines[1]
    words = ("--metric", "kid", "--features", "pooled")
    kid = picture_scores.kid(arguments(*words), generator)
    assert kid.record["kid"] == pytest.approx(kernel_distance(real, drawn), rel=1e-4)
    fewer = picture_scores.kid(arguments(*words, "--samples", "4"), generator)
    assert fewer.record["pictures"] == 4


def test_the_network_of_a_distance_is_reported_with_it(build_model: BuildModel, tmp_path: Path) -> None:
    generator = generator_of(CLASSES, build_model)
    torch.save(inception_weights(), tmp_path / "fid.pth")
    words = ("--metric", "kid", "--samples", "2", "--features", str(tmp_path / "fid.pth"))
    of_fid = picture_scores.kid(arguments(*words), generator)
    assert of_fid.record.keys() == {"kid", "pictures", "features", "network"}
    assert (of_fid.record["network"], of_fid.record["features"]) == ("Inception of FID", 2048)
    assert "unbiased (2 held-out and as many generated pictures, 2048 features, Inception of FID)" in of_fid.lines[0]


class Colours(torch.nn.Module):
    """Features of a picture: the mean and the spread of each colour."""

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.float() / 255
        return torch.cat([pixels.mean((2, 3)), pixels.flatten(2).std(2)], 1)


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    torch.jit.script(Colours()).save(str(tmp_path / "colours.pt"))
    return tmp_path / "colours.pt"


def some_pictures(count: int) -> Tensor:
    """Return bytes `[N, H, W, 3]`."""
    return torch.randint(0, 256, (count, 9, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def colours_of(images: Tensor) -> Tensor:
    """Return the features of pictures in [-1, 1]."""
    return Colours()(((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)).double()


def save_folder(folder: Path, pictures: Tensor) -> Path:
    for i, pixels in enumerate(pictures):
        path = folder / f"class {i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(path)
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_a_folder_of_pictures_and_an_archive_of_them_are_references(
    build_model: BuildModel, colours: Path, tmp_path: Path
) -> None:
    """Samples have the requested classes, by default all classes; statistics in an archive give the same distances."""
    generator, pictures = generator_of(CLASSES, build_model), some_pictures(70)
    real = colours_of(pictures.movedim(3, 1).float() / 127.5 - 1)
    labels = [i // 3 for i in range(9)]
    drawn = colours_of(generator.generate(labels)[:, :, 0].expand(-1, 3, -1, -1))
    np.savez(tmp_path / "pictures.npz", arr_0=pictures.numpy())
    folder = save_folder(tmp_path / "pictures", pictures)
    network = load_features(colours, torch.device("cpu")).network
    recall = precision_recall(real, drawn)[1]
    expected = {
        "fid": frechet_distance(gaussian_of(real), gaussian_of(drawn)),
        "kid": kernel_distance(real, drawn),
        "precision": precision_recall(real, drawn)[0],
    }
    functions = {"fid": picture_scores.fid, "kid": picture_scores.kid, "precision": picture_scores.precision_and_recall}
    for name, measure in functions.items():
        words = ["--metric", name, "--features", str(colours), "--count", "3", "--reference"]
        out = tmp_path / f"{name}.npz"
        numbers = {"mu": real.mean(0), "sigma": torch.cov(real.T)} if name == "fid" else {"feats": real}
        np.savez(out, network=network, **{key: value.numpy() for key, value in numbers.items()})
        for reference in (folder, tmp_path / "pictures.npz", out):
            found = measure(arguments(*words, str(reference)), generator)
            unknown = name == "fid" and reference == out
            assert found.record == ({"recall": recall} if name == "precision" else {}) | {
                name: pytest.approx(expected[name], rel=1e-4),
                "pictures": 9,
                "features": 6,
                "network": network,
                "reference": str(reference),
                "reference_pictures": None if unknown else 70,
            }
            count = "" if unknown else ", 70 pictures"
            assert f"9 generated pictures, compared with {reference}{count}" in found.lines[0]


def test_the_minimum_of_precision_is_of_the_precision(
    build_model: BuildModel, features: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, words = generator_of(CLASSES, build_model), ("--metric", "precision", "--features", "pooled")
    monkeypatch.setattr("launch.picture_scores.precision_recall", lambda real, drawn: (0.75, 0.25))
    for minimum, missed in (("0.5", []), ("0.8", ["below the minimum of 0.8: precision, 0.750"])):
        assert picture_scores.precision_and_recall(arguments(*words, "--minimum", minimum), generator).missed == missed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--reference", "other.npz"),
            r"other.npz has 4 features and TorchScript of colours.pt \(.{12}\) makes 6",
        ),
        (("--reference", "nothing"), "nothing cannot be read: No such file"),
        (("--reference", "empty"), "empty holds no picture that ends in avif"),
        (("--reference", "damaged"), "damaged/x.png cannot be read: .*; remove it"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(
    build_model: BuildModel,
    colours: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    np.savez(tmp_path / "other.npz", mu=np.zeros(4), sigma=np.eye(4))
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "x.png").write_bytes(b"nonsense")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError if "damaged" not in said and "empty" not in said else DataError, match=said):
        picture_scores.fid(
            arguments("--metric", "fid", "--features", str(colours), *words), generator_of(CLASSES, build_model)
        )


def test_every_class_is_requested_unless_some_are_named(build_model: BuildModel) -> None:
    generator = generator_of(replace(CLASSES, num_classes=40), build_model)
    for words, every, count in (((), True, 40), ((), False, 36), (("--labels", "3,5"), True, 2)):
        requests = what_to_draw(arguments("--metric", "fid", *words), generator, every_class=every)
        assert len(requests) == count


def test_a_named_data_set_replaces_that_of_the_run(tmp_path: Path) -> None:
    asked = arguments("--metric", "loss", "--data", str(tmp_path), "--samples", "3")
    for data in (NoData(), MockData(), EnergonData(path="elsewhere", max_tokens_per_pack=64)):
        found = data_of(asked, data)
        assert isinstance(found, EnergonData)
        assert (found.path, found.validation_samples) == (str(tmp_path), 3)
    assert found.max_tokens_per_pack == 64
    with pytest.raises(ConfigError, match="imported weights have no held-out data"):
        data_of(arguments("--metric", "loss"), NoData())


def test_data_without_held_out_samples_have_the_cure_of_an_evaluation(tmp_path: Path, build_model: BuildModel) -> None:
    writer = ShardWriter(tmp_path, "train", 1)
    writer.add("sample", {}, {"latent.npy": npy_bytes(np.zeros(3))})
    writer.close()
    write_energon_metadata(tmp_path, [path.name for path in tmp_path.glob("*.tar")], ["train"])
    generator = generator_of(TEXTS, build_model)
    generator.config.data = EnergonData(path=str(tmp_path))
    with pytest.raises(DataError, match=r"no split 'val', .* --validation, or name a data set that .* \(--data DIR\)$"):
        next(held_out_batches(arguments("--metric", "loss"), generator))


def test_a_distance_needs_features(build_model: BuildModel, features: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"--metric fid compares features .* give --features PATH .*, or pooled$"):
        picture_scores.fid(arguments("--metric", "fid"), generator_of(TEXTS, build_model))


def test_pictures_are_compared_with_their_own_prompts(
    build_model: BuildModel,
    clip_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contexts = {text: torch.full((2, 6), float(len(text))) for text in ("a cat", "a bird")}
    requests = [
        Request(text, {"context": contexts[text]}, {}, None, number, {"prompt": text})
        for number, text in enumerate(text for text in contexts for _ in range(2))
    ]
    generator, words = generator_of(TEXTS, build_model), ("--metric", "clip", "--clip-model", str(clip_folder))
    with monkeypatch.context() as patch:
        patch.setattr(picture_scores, "what_to_draw", lambda args, generator: requests)
        found = picture_scores.clip(arguments(*words, "--minimum", "101"), generator)
    images = generator.generate(conditions={"context": [x for x in contexts.values() for _ in range(2)]})
    scores = ClipModel(clip_folder, torch.device("cpu")).scores(
        images[:, :, 0].clamp(-1, 1), [text for text in contexts for _ in range(2)]
    )
    assert found.record == {"clip_score": pytest.approx(float(scores.mean()), rel=1e-4), "pictures": 4, "prompts": 2}
    assert found.missed == [f"below the minimum of 101: CLIP score, {scores.mean():.3f}"]
    with pytest.raises(ConfigError, match="needs --clip-model"):
        picture_scores.clip(arguments("--metric", "clip"), generator)
    with pytest.raises(ConfigError, match=r"has no sampling\.prompts"):
        picture_scores.clip(arguments(*words), generator)


def test_the_quoted_texts_of_prompts_are_read_in_their_pictures(
    build_model: BuildModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pictures of the first prompt show its text; of the second, one text is missing and one misspelt."""
    prompts = ['a sign that says "Open daily"', 'a poster, "Fresh Paint" and "12:30", by a "bakery"']
    first = torch.stack([picture_of(["Open daily"])] * 2)
    drawn = [([0, 0], first), ([1], picture_of(["Fresh Point", "BAKERY"])[None])]
    generator = generator_of(TEXTS, build_model)
    requests = [Request(text, {}, {}, None, number, {"prompt": text}) for number, text in enumerate(prompts)]
    monkeypatch.setattr(picture_scores, "what_to_draw", lambda args, generator: requests)
    monkeypatch.setattr(picture_scores, "_drawn", lambda args, generator, requests: drawn)
    found = picture_scores.ocr(arguments("--metric", "ocr", "--minimum", "0.8"), generator)
    distance = pytest.approx((1 / 10 + 1) / 5)
    assert found.record == {"ocr": 3 / 5, "edit_distance": distance, "correct": 3, "texts": 5, "pictures": 3}
    assert found.lines == ["texts read exactly: 60.0 % (3 of 5; 3 pictures), mean edit distance 0.220"]
    assert found.missed == ["below the minimum of 0.8: texts read exactly, 0.600"]
    requests[1].record["prompt"] = "a cat"
    with pytest.raises(ConfigError, match="texts in double quotes of each prompt, and 'a cat' has none"):
        picture_scores.ocr(arguments("--metric", "ocr"), generator)


def test_minimums_are_accepted_only_for_metrics_that_grow_with_quality(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--checkpoint", "run", "--metric", "fid", "--minimum", "1"]) == 2
    assert "fid falls" in capsys.readouterr().err
