"""Counter-based dropout: a function of only the sample's key and the layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.kernels.recompute import recompute_activations
from dit.layers.dropout import Dropout
from dit.layout import SequenceLayout
from dit.models.unet.config import UNetConfig
from dit.objectives.addressed_noise import AddressedNoise
from dit.objectives.edm import EDM
from dit.step.forward_step import training_forward_step
from energon_data.mock import MockData
from tests.conftest import BuildModel

KEYS = torch.tensor([5, 2**62 + 1, 2**33 + 5])


def test_dropout_has_the_requested_share_and_scale() -> None:
    """A quarter of 30,000 activations is zero, within four standard deviations; the others are divided by 3/4."""
    out = Dropout(0.25, 0)(torch.ones(3, 10, 100, 10), KEYS)
    share = float((out == 0).float().mean())
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / out.numel()) ** 0.5
    assert torch.equal(out[out != 0].unique(), torch.tensor([1 / 0.75]))


def test_dropout_depends_only_on_key_and_layer() -> None:
    """It depends neither on other pictures nor on the memory format; both halves of a key count."""
    x = torch.ones(3, 4, 6, 6)
    out = Dropout(0.5, 3)(x, KEYS)
    assert torch.equal(out[1:2], Dropout(0.5, 3)(x[:1], KEYS[1:2]))
    assert torch.equal(out, Dropout(0.5, 3)(x.contiguous(memory_format=torch.channels_last), KEYS))
    assert not torch.equal(out, Dropout(0.5, 4)(x, KEYS))
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(out[0], out[2]), "their keys differ in the upper half"


def test_dropout_without_a_key_is_the_identity() -> None:
    x = torch.randn(2, 4, 3, 3)
    assert Dropout(0.5, 0)(x, None) is x
    assert Dropout(0.0, 0)(x, KEYS[:2]) is x


def test_keys_differ_by_step_sample_and_draw() -> None:
    layout = SequenceLayout.from_lengths([2, 2])

    def keys(seed: int, step: int, draws: tuple[int, int]) -> Tensor:
        return AddressedNoise(seed, step, torch.tensor([7, 7]), layout, torch.tensor(draws)).keys_S("dropout")

    found = torch.cat([keys(1, 0, (0, 1)), keys(1, 1, (0, 1)), keys(2, 0, (0, 1))])
    assert len(found.unique()) == 6
    assert (found >= 0).all()
    assert torch.equal(keys(1, 0, (0, 1)), found[:2])


@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_a_recomputed_step_has_the_same_dropout(build_model: BuildModel, choice: Any) -> None:
    """The backward pass of a recomputed block uses the same mask; another step uses another mask."""
    config = UNetConfig(
        **{"hidden_size": 16, "channel_multipliers": [1, 2], "num_res_blocks": [1, 1], "attention_levels": [1]},
        **{"context_size": 8, "condition_size": 8, "head_size": 8, "norm_num_groups": 4, "dropout": 0.5},
    )
    spec = config.batch_spec(micro_batch_size=2)

    def gradients(step: int, choice: Any, config: UNetConfig = config) -> Tensor:
        network = build_model(config, perturb=0.1)
        for unit in network.units():
            recompute_activations(unit, choice)
        stream = MockData(height=4, width=4).build_train(spec, dp_rank=0, dp_size=1, seed=0, log_dir=None)
        prediction_TC, loss_of = training_forward_step(EDM(), config, 7, step)(stream, network)
        loss_of(prediction_TC)[0].backward()
        return torch.cat([p.grad.flatten() for p in network.parameters()])

    plain = gradients(0, "none")
    assert torch.equal(gradients(0, choice), plain)
    assert not torch.equal(gradients(0, choice, replace(config, dropout=0.0)), plain)
