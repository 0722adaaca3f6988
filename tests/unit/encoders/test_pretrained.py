"""Encoders run no code from their folder, and are refused if weights are missing."""

import builtins
import json
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from dit.encoders.pretrained import _variant_of
from dit.encoders.text import TextEncoders
from dit.encoders.vae import VAE
from dit.errors import ConfigError
from dit.evaluation.clip import ClipModel
from tests.support.encoders import save_clip, save_t5, save_vae
from tests.support.trap import Trap

Load = Callable[[Path], object]


def save_full_clip(folder: Path) -> Path:
    """Save a CLIP of two networks with a tokenizer, as scores of pictures read it."""
    save_clip(folder)
    small = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    text = CLIPTextConfig(vocab_size=80, max_position_embeddings=20, **small)
    vision = CLIPVisionConfig(image_size=16, patch_size=8, **small)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    settings = {"size": 16, "crop_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


ENCODERS: dict[str, tuple[Callable[[Path], Path], Load]] = {
    "vae": (save_vae, lambda folder: VAE(str(folder))),
    "t5": (save_t5, lambda folder: TextEncoders(str(folder))),
    "clip": (save_clip, lambda folder: TextEncoders(str(folder))),
    "clip for scores": (save_full_clip, lambda folder: ClipModel(folder, torch.device("cpu"))),
}


def weights_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("kept", ["none", "all but two", "all but four"])
def test_missing_weights_are_named_and_counted(tmp_path, name, kept, monkeypatch):
    """Otherwise random numbers would replace them, and every latent or text of a data set would be noise."""
    save, load = ENCODERS[name]
    folder = save(tmp_path / "encoder")
    load(folder)
    weights = load_file(weights_file(folder))
    names = sorted(weights)
    removed = {"none": names, "all but two": names[3:5], "all but four": names[3:7]}[kept]
    rest = {key: value for key, value in weights.items() if key not in removed}
    save_file(rest or {"other": torch.zeros(1)}, weights_file(folder), metadata={"format": "pt"})
    lines, handler = [], logging.Handler()
    monkeypatch.setattr(handler, "emit", lines.append)
    for library in ("transformers", "diffusers"):
        monkeypatch.setattr(logging.getLogger(library), "handlers", [handler])
    with pytest.raises(ConfigError) as caught:
        load(folder)
    said = str(caught.value)
    shared = name == "t5" and kept == "none"  # T5's embeddings have two names, and only one of them is stored
    assert f"lack weights ({len(removed) + shared}): " in said
    assert said.count(f" and {len(removed) + shared - 3} more") == (len(removed) > 3)
    assert "\n" not in said
    if kept != "none":
        assert sum(key.rpartition("encoder.")[2] in said for key in removed) >= 2
    assert lines == []


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_of_another_shape_are_named(tmp_path, name):
    save, load = ENCODERS[name]
    folder = save(tmp_path / "encoder")
    weights = load_file(weights_file(folder))
    changed = sorted(weights)[3]
    weights[changed] = torch.zeros(5)
    save_file(weights, weights_file(folder), metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"have weights of another shape \(1\): .*\[5\] instead of \["):
        load(folder)


@pytest.mark.parametrize("shard", ["10GB", "1KB"])
def test_the_only_variant_is_read(tmp_path, shard):
    """In one file, or in shards with an index."""
    encoders = VAE(str(save_vae(tmp_path / "vae"))), TextEncoders(str(save_t5(tmp_path / "t5"))).encoders[0]
    for encoder, name in zip(encoders, ("vae", "t5")):
        for path in (tmp_path / name).glob("*.safetensors*"):
            path.unlink()
        encoder._model.half().save_pretrained(tmp_path / name, variant="fp16", max_shard_size=shard)
        reader = ENCODERS[name][1](tmp_path / name)
        read = reader._model if name == "vae" else reader.encoders[0]._model
        assert all(map(torch.equal, read.parameters(), encoder._model.float().parameters()))


HUB = {
    "vae": (save_vae, "owner/name", lambda: VAE("owner/name")),
    "text encoder": (save_t5, "owner/name", lambda: TextEncoders("owner/name")),
    "part": (save_t5, "owner/name/t5", lambda: TextEncoders("owner/name/t5")),
}


@pytest.mark.parametrize("name", HUB)
def test_the_only_variant_of_a_repository_is_read(tmp_path, monkeypatch, name):
    """The hub lists the files, or without network the local cache, in which weights without variant may be absent."""
    save, address, load = HUB[name]
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    part = address.removeprefix("owner/name").lstrip("/")
    weights = weights_file(save(snapshot / part))
    weights.rename(weights.with_suffix(".fp16.safetensors"))
    (tmp_path / "models--owner--name/refs").mkdir()
    (tmp_path / "models--owner--name/refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load()
    listed = [f"{part}/{weights.name}".lstrip("/"), "other/model.safetensors"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dit.hub.check_reachable", lambda repository: None)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository: listed)
    assert _variant_of("owner/name", part) is None
    listed[0] = listed[0].replace("model.", "model.bf16.")
    assert _variant_of("owner/name", part) == "bf16"


@pytest.mark.parametrize("name", ["t5", "clip", "clip for scores"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_an_encoder_is_neither_run_nor_offered(tmp_path, monkeypatch, name, file):
    """A stranger's data set can name such an encoder; on a terminal, transformers would ask whether to run its code."""
    save, load = ENCODERS[name]
    folder = save(tmp_path / "encoder")
    marker = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Code: pass\n")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    auto_map = {key: "code.Code" for key in ("AutoConfig", "AutoModel")} | {"AutoTokenizer": ["code.Code", "code.Code"]}
    settings = json.loads((folder / file).read_text()) | {"auto_map": auto_map}
    settings |= {"model_type": "strange"} if file == "config.json" else {"tokenizer_class": "Strange"}
    (folder / file).write_text(json.dumps(settings))
    questions = []
    monkeypatch.setattr(builtins, "input", lambda question="": questions.append(question) or "y")
    with pytest.raises(ConfigError, match=r"^[^\n]+$") if name != "clip for scores" else suppress(ConfigError):
        load(folder)
    assert (questions, marker.exists()) == ([], False)


@pytest.mark.parametrize("name", ["t5", "clip", "clip for scores"])
@pytest.mark.parametrize("others", ["kept", "deleted"])
def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path, name, others):
    """Otherwise all words would be unknown, and every caption of a data set would have the same embedding."""
    save, load = ENCODERS[name]
    folder = save(tmp_path / "encoder")
    for file in folder.glob("tokenizer.json" if others == "kept" else "tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"^[^\n]*tokenizer[^\n]*cannot be loaded[^\n]*$"):
        load(folder)


@pytest.mark.parametrize("name", ENCODERS)
def test_truncated_weights_are_one_line(tmp_path, name):
    save, load = ENCODERS[name]
    file = weights_file(save(tmp_path / "encoder"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match=r"^[^\n]*cannot be loaded[^\n]*$"):
        load(file.parent)


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_are_safetensors_only(tmp_path, name):
    """A pickle under the names that transformers and diffusers also read is not opened."""
    save, load = ENCODERS[name]
    folder = save(tmp_path / "encoder")
    weights_file(folder).unlink()
    for file in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        (folder / file).write_bytes(pickle.dumps({"weight": Trap(tmp_path / "ran")}))
    with pytest.raises(ConfigError, match=r"^[^\n]+$"):
        load(folder)
    assert not (tmp_path / "ran").exists()
