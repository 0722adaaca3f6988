"""Texts of samples: a pooled embedding never is the null vector instead; long prompts are truncated as in training."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dit.encoders.text import TextEncoders
from dit.errors import ConfigError
from dit.inference.preview import PictureWriter
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.objectives.flow_matching import FlowMatching
from dit.run_config import RunConfig
from dit.sampling.generate import empty_pack
from dit.settings import SamplingConfig
from energon_data.dataset import EnergonData
from launch.sample_requests import encode_prompts

MODEL = FluxConfig(
    in_channels=2,
    hidden_size=32,
    num_attention_heads=2,
    num_joint_layers=1,
    num_single_layers=1,
    context_size=6,
    pooled_size=5,
    rope_axes=[4, 6, 6],
)
SPEC = MODEL.batch_spec()
TEXTS = [torch.ones(3, 6)]


def test_texts_without_pooled_embeddings_are_refused_with_their_width() -> None:
    with pytest.raises(ConfigError, match=r"'context' is given without 'pooled'.*\[5\] features"):
        empty_pack(SPEC, (1, 4, 4), 1, torch.device("cpu"), {"context": TEXTS})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("identity", r"makes a text of 257 features, but the model takes \[384\]; set model.context_size to 257"),
        ("all-minilm-l6-v2", r"takes a pooled text \[5\] that .* does not make; set sampling.prompts=none"),
        ("text+pooled=all-minilm-l6-v2", r"makes a pooled text of 384 features, but the model takes \[5\]"),
    ],
)
def test_prompts_that_the_encoders_do_not_fit_are_refused_before_training(line: str, fault: str) -> None:
    model = replace(MODEL, context_size=384)
    with pytest.raises(ConfigError, match=fault):
        PictureWriter(model, FlowMatching(), model.batch_spec(), SamplingConfig(prompts=["the letter Q"]), None, line)
    PictureWriter(model, FlowMatching(), model.batch_spec(), SamplingConfig(), None, line)


@pytest.mark.parametrize("limit", [3, None])
def test_prompts_have_the_longest_text_of_the_data(limit: Any) -> None:
    model, line, prompts = DiTCrossConfig(context_size=257), "identity", ["abcdef"]
    [text] = TextEncoders(line).encode(prompts)["text"]
    config = RunConfig(model=model, data=EnergonData(path="x", max_text_tokens=limit), objective=FlowMatching())
    generator = SimpleNamespace(config=config, text_encoder=line, spec=model.batch_spec(), longest_text=limit)
    settings = replace(config.sampling, prompts=prompts)
    writer = PictureWriter(model, config.objective, generator.spec, settings, None, line, max_text_tokens=limit)
    for texts in (encode_prompts(cast(Any, generator), prompts), writer._encoded_prompts()):
        assert torch.equal(texts["context"][0], text[:limit])
