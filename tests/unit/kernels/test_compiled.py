"""Compiled blocks and layers are refused where they cannot run.

tests/laws/test_options.py and test_graph_layers.py compare their numbers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dit.errors import ConfigError
from dit.kernels.choice import Target, choose
from dit.kernels.resolve import LAYERS
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.flux.config import FluxConfig
from dit.models.unet.config import UNetConfig
from dit.parallel.dims import ParallelConfig, check_supported
from dit.settings import TrainingConfig

CONFIG = UNetConfig()


@pytest.mark.parametrize(
    ("model", "data_parallel", "says"),
    [
        (DiTConfig(), "ddp", "model=DiTConfig with parallel.data_parallel=ddp has no such blocks"),
        (CONFIG, "fsdp", "model=UNetConfig with parallel.data_parallel=fsdp gathers and frees the weights"),
    ],
)
def test_what_cannot_be_compiled_is_refused(model: ModelConfig, data_parallel: Any, says: str) -> None:
    training, parallel = TrainingConfig(compile=True), ParallelConfig(data_parallel=data_parallel)
    with pytest.raises(ConfigError, match=says):
        check_supported(model, parallel, training)
    check_supported(model, parallel, replace(training, compile=False))
    check_supported(CONFIG, ParallelConfig(), training)


@pytest.mark.parametrize(
    ("model", "parallel", "training", "says"),
    [
        (CONFIG, {}, {}, "the layers of model=UNetConfig need layouts that a compiled graph does not support"),
        (FluxConfig(), {}, {}, "the layers of model=FluxConfig need layouts"),
        (
            DiTConfig(num_experts=4),
            {},
            {},
            "with model.num_experts=4 the number of tokens per expert",
        ),
        (
            DiTConfig(),
            {"context_parallel_size": 2},
            {},
            "parallel.context_parallel_size=2 communicates keys",
        ),
        (DiTConfig(), {"data_parallel": "fsdp"}, {}, "parallel.data_parallel=fsdp gathers and frees the weights"),
        (DiTConfig(), {}, {"attention": "varlen"}, "training.attention=varlen cannot be compiled"),
        (
            DiTConfig(),
            {},
            {"linears": "transformer_engine"},
            "training.linears=transformer_engine cannot be compiled",
        ),
    ],
)
def test_layers_that_are_no_graph_are_refused(
    model: ModelConfig, parallel: dict[str, Any], training: dict[str, Any], says: str
) -> None:
    settings = ParallelConfig(**parallel), TrainingConfig(kernels="compile", **training)
    with pytest.raises(
        ConfigError, match=f"training.kernels=compile is not available: {says}.*use training.kernels=auto"
    ):
        check_supported(model, *settings)
    if not training:
        check_supported(model, settings[0], TrainingConfig(kernels="eager"))
    check_supported(DiTConfig(), ParallelConfig(), TrainingConfig(kernels="compile"))


def test_without_a_compiler_of_cplusplus_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(torch.device("cpu"), torch.float32)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"kernels='compile' needs a C\+\+ compiler, and no-such-compiler is not"):
        choose(LAYERS, target, "compile")
    assert choose(LAYERS, target).name == "eager"
