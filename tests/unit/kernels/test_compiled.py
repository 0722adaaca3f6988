"""Compiled blocks and layers are refused if they cannot run.

tests/laws/test_options.py and test_compiled_layers.py compare their results.
"""

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


@pytest.mark.parametrize(
    ("model", "parallel", "training", "says"),
    [
        (FluxConfig(), {}, {}, "the layers of model=FluxConfig have inputs that torch.compile does not support"),
        (DiTConfig(), {"data_parallel": "fsdp"}, {}, "parallel.data_parallel=fsdp gathers and frees the weights"),
        (UNetConfig(), {"data_parallel": "fsdp"}, {}, "parallel.data_parallel=fsdp gathers and frees the weights"),
        (
            DiTConfig(),
            {},
            {"linears": "transformer_engine"},
            "training.linears=transformer_engine cannot be compiled",
        ),
        (
            DiTConfig(),
            {},
            {"recompute": "selective", "recompute_layers": 2},
            "training.recompute=selective with training.recompute_layers=2: the layers share their graphs",
        ),
    ],
)
def test_layers_that_cannot_be_compiled_are_refused(
    model: ModelConfig, parallel: dict[str, Any], training: dict[str, Any], says: str
) -> None:
    settings = ParallelConfig(**parallel), TrainingConfig(kernels="compile", **training)
    with pytest.raises(
        ConfigError, match=f"training.kernels=compile is not available: {says}.*use training.kernels=auto"
    ):
        check_supported(model, *settings)
    if not training:
        check_supported(model, settings[0], TrainingConfig(kernels="eager"))
    for supported in (DiTConfig(), DiTConfig(num_experts=4), UNetConfig()):
        check_supported(supported, ParallelConfig(), TrainingConfig(kernels="compile"))


def test_without_a_compiler_of_cplusplus_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(torch.device("cpu"), torch.float32)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"kernels='compile' needs a C\+\+ compiler, and no-such-compiler is not"):
        choose(LAYERS, target, "compile")
    assert choose(LAYERS, target).name == "eager"
