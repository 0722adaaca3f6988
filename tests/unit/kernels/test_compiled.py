"""Compiled blocks compute what the plain ones do, and are refused where they cannot run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.errors import ConfigError
from dit.kernels.compiled import compile_layers
from dit.kernels.recompute import recompute_activations
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.unet.config import UNetConfig
from dit.objectives.edm import EDM
from dit.parallel.dims import ParallelConfig, check_supported
from dit.settings import TrainingConfig
from dit.training.step import training_forward_step
from energon_data.mock import MockData
from tests.conftest import BuildModel

CONFIG = UNetConfig(
    **{"hidden_size": 16, "channel_multipliers": [1, 2], "num_res_blocks": [1, 1], "attention_levels": [1]},
    **{"context_size": 8, "condition_size": 8, "head_size": 8, "norm_num_groups": 4, "dropout": 0.3},
)
COMPILED_RTOL = 1e-5  # fp32; fused operations round less often


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_give_the_same_step(build_model: BuildModel, recompute: Any) -> None:
    """Loss and every gradient, dropout included, also where activations are recomputed."""
    spec = CONFIG.batch_spec(micro_batch_size=2)

    def gradients(*, compiled: bool) -> Tensor:
        network = build_model(CONFIG, perturb=0.1)
        if compiled:
            compile_layers(module for module in network.modules() if isinstance(module, network.compiled_units))
        for unit in network.units():
            recompute_activations(unit, recompute)
        stream = MockData(height=4, width=4).build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
        prediction_TC, loss_of = training_forward_step(EDM(), CONFIG, 7, 0)(stream, network)
        loss = loss_of(prediction_TC)[0]
        loss.backward()
        return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in network.parameters())])

    plain = gradients(compiled=False)
    found = gradients(compiled=True)
    assert (found - plain).norm() <= COMPILED_RTOL * plain.norm()


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
