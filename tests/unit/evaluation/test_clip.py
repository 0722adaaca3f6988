"""CLIP scores and features, compared with transformers' logits, for random weights in the published layout."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.errors import ConfigError
from dit.evaluation.clip import ClipModel
from dit.evaluation.features import load_features

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
SIDE = 16
TEXTS = ["a cat", "the letter q in a bold serif font", "a cat"]
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a CLIP of one layer with random weights, a tokenizer of single letters, and the preprocessor's settings."""
    path = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = transformers.CLIPTokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=12
    )
    tokenizer.save_pretrained(path)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": len(words), "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**small, "image_size": SIDE, "patch_size": 8}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(path)
    settings = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    (path / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": MEAN, "image_std": STD}))
    return path


def test_scores_equal_the_logits_of_the_model(folder: Path) -> None:
    images = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    theirs = transformers.CLIPModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=12, return_tensors="pt")
    pixels = ((images + 1) / 2 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        logits = theirs(pixel_values=pixels, **tokens).logits_per_image / theirs.logit_scale.exp()
    model = ClipModel(folder, CPU)
    torch.testing.assert_close(model.scores(images, TEXTS), (100 * logits.diagonal()).clamp(min=0))
    assert len(set(logits.diagonal().tolist())) == 3
    torch.testing.assert_close(load_features(folder, CPU)(images), model.image_features(images))


def test_a_picture_of_another_size_is_resized_and_cut_in_the_centre(folder: Path) -> None:
    """The same smooth picture, twice as large, and with borders at its sides, has about the same features."""
    model = ClipModel(folder, CPU)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 2, 2) * 2 - 1, size=(SIDE, SIDE), mode="bilinear")
    large = smooth.repeat_interleave(2, 2).repeat_interleave(2, 3)
    wide = torch.cat([torch.ones(1, 3, 2 * SIDE, 6), large, torch.ones(1, 3, 2 * SIDE, 6)], 3)
    expected = model.image_features(smooth)
    for images in (large, wide):
        found = model.image_features(images)
        assert (found - expected).norm() < 0.1 * (model.image_features(-smooth) - expected).norm()


def test_the_longer_side_has_the_size_of_transformers(folder: Path) -> None:
    """98 * 16 / 49 is 32, but 98 * (16 / 49) is below 32 in floating-point numbers."""
    model = ClipModel(folder, CPU)
    images = torch.rand(1, 3, 49, 98, generator=torch.Generator().manual_seed(2)) * 2 - 1
    resized = torch.nn.functional.interpolate(images, size=(16, 32), mode="bicubic", antialias=True).clamp(-1, 1)
    assert torch.equal(model.image_features(images), model.image_features(resized))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CLIP model at"):
        ClipModel(tmp_path, CPU)


class Halves(torch.nn.Module):
    """Returns the mean of each colour over the picture, or logits unless features are requested."""

    def forward(self, images: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        if return_features:
            return images.float().mean((2, 3))
        return images.float().mean((1, 2, 3))


def test_networks_of_one_name_and_other_weights_have_other_names(folder: Path, tmp_path: Path) -> None:
    """Stored statistics contain this name, so those of other weights are refused; a copy has the same name."""
    names = []
    for i, number in enumerate((1.0, 1.0, 2.0)):
        module = torch.nn.Conv2d(3, 1, 1)
        torch.nn.init.constant_(module.weight, number)
        torch.nn.init.constant_(module.bias, 0.0)
        (tmp_path / str(i)).mkdir()
        torch.jit.script(module).save(str(tmp_path / str(i) / "x.pt"))
        names.append(load_features(tmp_path / str(i) / "x.pt", CPU).network)
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch(r"TorchScript of x\.pt \([0-9a-f]{12}\)", name) for name in names)
    copy = shutil.copytree(folder, tmp_path / "clip")
    before = load_features(copy, CPU).network
    assert before == load_features(copy, CPU).network
    (file,) = copy.glob("*.safetensors")
    weights = load_file(file)
    weights[min(weights)] += 1
    save_file(weights, file, metadata={"format": "pt"})
    after = load_features(copy, CPU).network
    assert before != after
    assert re.fullmatch(r"CLIP of clip \([0-9a-f]{12}\)", after)


def test_a_torchscript_file_gets_bytes_and_returns_features(tmp_path: Path) -> None:
    torch.jit.script(Halves()).save(str(tmp_path / "x.pt"))
    images = torch.tensor([-1.0, 0.0, 1.0])[None, :, None, None].expand(2, 3, 4, 4)
    assert load_features(tmp_path / "x.pt", CPU)(images).tolist() == [[0, 128, 255]] * 2
    (tmp_path / "y.pt").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"y.pt cannot be read"):
        load_features(tmp_path / "y.pt", CPU)
