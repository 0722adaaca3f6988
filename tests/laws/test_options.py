"""Options for speed and memory do not change a step of Imagen's UNets beyond the tolerances below."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.backends.process_groups import ProcessGroups
from dit.models.base import ModelConfig
from dit.objectives.edm import EDM
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.step.forward_step import training_forward_step
from dit.verify.trial import disturb_constants
from tests.laws.backbones import config_of, pack

BASES = {"imagen": {"dropout": 0.3}, "efficient_unet": {}}
ONE_LEVEL = {"channel_multipliers": [1], "num_res_blocks": [1], "attention_levels": [0]}  # few blocks to compile
SUM_RTOL = 1e-5  # fp32: another order of sums, and fused operations round less often
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # model settings, training settings, largest relative error
    "stable_attention": ({"stable_attention": True}, {}, SUM_RTOL),
    "recompute_full": ({}, {"recompute": "full"}, 0.0),
    "recompute_selective": ({}, {"recompute": "selective"}, 0.0),
    "compiled": ({}, {"kernels": "compile"}, SUM_RTOL),
    "compiled_recompute_full": ({}, {"kernels": "compile", "recompute": "full"}, SUM_RTOL),
}
MARKS = {"imagen": pytest.mark.long, "efficient_unet": pytest.mark.slow}  # of compiled options
ROWS = [
    pytest.param(name, option, marks=() if "compiled" not in option else MARKS[name])
    for name in BASES
    for option in OPTIONS
]


def step(model: ModelConfig, training: dict[str, Any], groups: ProcessGroups) -> Tensor:
    """Return the loss and all gradients of a training step, concatenated."""
    settings = TrainingConfig(precision="fp32", **training)
    (network,) = build_model(model, ParallelConfig(data_parallel="ddp"), settings, groups)
    disturb_constants([network], groups)
    prediction_TC, loss_of = training_forward_step(EDM(), model, 7, 0)(iter([pack(model, [0, 1])]), network)
    loss = loss_of(prediction_TC)[0]
    loss.backward()
    return torch.cat([loss.detach()[None], *(p.grad.flatten() for p in network.parameters())])


@pytest.mark.parametrize(("name", "option"), ROWS)
def test_an_option_changes_no_number(one_rank_world: ProcessGroups, name: str, option: str) -> None:
    """Compared with the default: fused attention of torch, saved activations, no compilation."""
    of_model, of_training, rtol = OPTIONS[option]
    model = replace(config_of(name), **BASES[name], **(ONE_LEVEL if "kernels" in of_training else {}))
    expected = step(model, {}, one_rank_world)
    found = step(replace(model, **of_model), of_training, one_rank_world)
    assert expected.isfinite().all()
    assert (found - expected).norm() <= rtol * expected.norm()
