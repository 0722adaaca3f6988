"""Weights of online encoders are counted without loading, with the same result as for loaded encoders."""

import re

import pytest
import torch

from dit.condition_table import CONTEXT, POOLED
from dit.data_api import OnlineEncoding
from dit.encoders.text import TextEncoder
from dit.encoders.text_config import TextEncoderConfig
from dit.encoders.vae import VAE
from dit.encoders.weights import weight_bytes
from dit.errors import ConfigError
from launch import dry_run
from launch.train import call_recipe
from tests.support.encoders import save_clip, save_t5, save_vae


def loaded(model: torch.nn.Module) -> int:
    return sum(x.nbytes for x in {id(x): x for x in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_estimated_count_equals_that_of_loaded_encoders(tmp_path, precision):
    vae, t5 = save_vae(tmp_path / "vae"), save_t5(tmp_path / "t5")
    clip = save_clip(tmp_path / "clip", projected=True)
    sentence = "all-minilm-l6-v2"
    for texts in ({str(t5): "text", str(clip): "pooled"}, {sentence: "text"}):
        line = ",".join(f"{entry}={name}" for name, entry in texts.items())
        found = weight_bytes(OnlineEncoding(vae=str(vae), text_encoder=line, precision=precision), (CONTEXT, POOLED))
        expected = {str(vae): loaded(VAE(str(vae), precision=precision)._model)}
        for name, entry in texts.items():
            encoder = TextEncoder(TextEncoderConfig(name=name, makes=(entry,)), precision=precision)
            expected[name] = loaded(encoder._model)
        assert found == expected


def test_encoders_that_are_not_loaded_are_not_counted(tmp_path):
    """The model takes only tokens, so CLIP is not loaded; the identity encoder has no network."""
    t5, clip = save_t5(tmp_path / "t5"), save_clip(tmp_path / "clip")
    line = f"text={t5},pooled={clip}"
    assert set(weight_bytes(OnlineEncoding(text_encoder=line), (CONTEXT,))) == {str(t5)}
    assert weight_bytes(OnlineEncoding(vae="identity", text_encoder="identity"), (CONTEXT,)) == {"identity": 0}


def test_the_hub_is_not_contacted(tmp_path):
    with pytest.raises(ConfigError, match="google/t5-v1_1-xxl is not a local folder; download it"):
        weight_bytes(OnlineEncoding(text_encoder="google/t5-v1_1-xxl"), (CONTEXT,))


@pytest.mark.usefixtures("one_tracer")
def test_the_dry_run_adds_encoders_to_the_memory(tmp_path):
    """If their size is unknown, the report has a line about it."""
    task = call_recipe("own_data")
    task.model.num_layers = 1
    text = dry_run.report(task, world_size=1)
    alone = float(re.search(r"total +([\d.]+) GiB", text)[1])
    task.data.online_text_encoder = "all-minilm-l6-v2"
    text = dry_run.report(task, world_size=1)
    weights = float(re.search(r"weights of all-minilm-l6-v2 +([\d.]+) GiB", text)[1])
    assert weights == pytest.approx(22.7e6 * 4 / 2**30, rel=0.01)
    assert float(re.search(r"total +([\d.]+) GiB", text)[1]) == pytest.approx(alone + weights, abs=2e-3)
    task.data.online_text_encoder = "google/t5-v1_1-xxl"
    text = dry_run.report(task, world_size=1)
    assert "without the online encoders: google/t5-v1_1-xxl is not a local folder" in text
    assert float(re.search(r"total +([\d.]+) GiB", text)[1]) == pytest.approx(alone, abs=2e-3)
