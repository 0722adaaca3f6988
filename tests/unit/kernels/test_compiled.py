"""Compiled blocks are refused where they cannot run; tests/laws/test_options.py compares their numbers."""

from dataclasses import replace
from typing import Any

import pytest

from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.unet.config import UNetConfig
from dit.parallel.dims import ParallelConfig, check_supported
from dit.settings import TrainingConfig

CONFIG = UNetConfig()


@pytest.mark.parametrize(
    ("model", "data_parallel", "says"),
    [
        (DiTConfig(), "ddp", "model=DiTConfig with parallel.data_parallel=ddp has no such blocks"),
        (CONFIG, "fsdp", "model=UNetConfig with parallel.data_parallel=fsdp gathers and frees them"),
    ],
)
def test_what_cannot_be_compiled_is_refused(model: ModelConfig, data_parallel: Any, says: str) -> None:
    training, parallel = TrainingConfig(compile=True), ParallelConfig(data_parallel=data_parallel)
    with pytest.raises(ConfigError, match=says):
        check_supported(model, parallel, training)
    check_supported(model, parallel, replace(training, compile=False))
    check_supported(CONFIG, ParallelConfig(), training)
