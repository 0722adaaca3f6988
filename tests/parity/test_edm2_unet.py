"""The EDM2 UNet has the outputs of its formulas, and unit mean square everywhere."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dit.errors import BatchError, ConfigError
from dit.models.edm2_unet.config import EDM2UNetConfig
from dit.models.edm2_unet.layer import Block, UnitWeight
from tests.conftest import BuildModel
from tests.parity.reference_edm2_unet import edm2_unet
from tests.parity.test_ddpm_unet import batch_of
from tests.support.reference import RTOL, relative_error

# Millions of parameters (table 2 of the paper) by the channels of the first level.
SIZES = {
    "two": {"block_out_channels": [16, 24], "layers_per_block": 1, "attention_levels": [1]},
    "three": {"block_out_channels": [8, 16, 12], "layers_per_block": 2, "attention_levels": [1], "head_size": 4},
    "flat": {"block_out_channels": [8], "layers_per_block": 1, "attention_levels": [], "num_classes": None},
}


def config_of(name: str) -> EDM2UNetConfig:
    config = EDM2UNetConfig(**{"num_classes": 5, "head_size": 8, **SIZES[name]})
    config.validate()
    return config


@pytest.mark.parametrize("name", SIZES)
def test_plain_functions_have_the_same_outputs_and_gradients(build_model: BuildModel, name: str) -> None:
    """Weights of any length; pictures with different noise levels and classes."""
    config = config_of(name)
    model, batch = build_model(config, perturb=0.3), batch_of(config, 8, 4, labels=[2, 0, 5])
    time_S = torch.tensor([-1.5, 0.0, 1.1])
    label = None if config.num_classes is None else batch.conditions["label"].values
    out_TC = model(batch.latents_TC, time_S, batch)
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    pictures = batch.dense(batch.latents_TC)[:, 0].permute(0, 3, 1, 2).double()
    sizes = len(config.block_out_channels), config.layers_per_block, config.head_size
    exact = edm2_unet(pictures, time_S.double(), label, weights, *sizes)
    exact_TC = exact.permute(0, 2, 3, 1).flatten(0, 2)
    assert relative_error(out_TC, exact_TC) <= RTOL
    cotangent_TC = torch.randn(out_TC.shape, generator=torch.Generator().manual_seed(6))
    out_TC.backward(cotangent_TC)
    exact_TC.backward(cotangent_TC.double())
    # The gradient of one gain is a sum of terms that cancel, so all gains are compared as one vector.
    gains = [n for n in weights if n.endswith("gain")]
    pairs = {n: (p.grad, weights[n].grad) for n, p in model.named_parameters() if n not in gains}
    pairs["gains"] = [torch.cat([w[n].grad for n in gains]) for w in (dict(model.named_parameters()), weights)]
    errors = {n: relative_error(*pair) for n, pair in pairs.items()}
    assert {n: error for n, error in errors.items() if not error <= RTOL} == {}


def test_initial_activations_have_unit_mean_square(build_model: BuildModel) -> None:
    """In large pictures, where few pixels are at a border of zeros. Attention averages values, which lowers it."""
    config = EDM2UNetConfig(num_classes=5, block_out_channels=[64, 128], layers_per_block=1, attention_levels=[])
    model, batch = build_model(config), batch_of(config, 32, 32, labels=[2, 0, 5])
    with torch.no_grad():
        model.gain.fill_(1.0)
    found: list[tuple[nn.Module, float]] = []
    for name, module in model.named_modules():
        if not name.endswith(("condition", "to_out")):  # the gain of the condition starts at 0
            module.register_forward_hook(lambda m, _, out: found.append((m, float(out.square().mean().sqrt()))))
    model(batch.latents_TC, torch.linspace(-1.5, 1.5, 3), batch)
    for kind, count, tolerance in ((Block, 10, 0.1), (UnitWeight, 29, 0.25)):
        of_kind = [rms for module, rms in found if isinstance(module, kind)]
        assert len(of_kind) == count
        assert of_kind == pytest.approx([1.0] * count, abs=tolerance)


def test_initial_filters_have_unit_mean_square(build_model: BuildModel) -> None:
    weights = [m.weight for m in build_model(config_of("three")).modules() if isinstance(m, UnitWeight)]
    for weight in weights:
        torch.testing.assert_close(weight.flatten(1).square().mean(1), torch.ones(len(weight)), rtol=1e-3, atol=0)


def test_pictures_that_cannot_be_halved_are_refused(build_model: BuildModel) -> None:
    config = config_of("three")
    batch = batch_of(config, 6, 8, labels=[0])
    with pytest.raises(BatchError, match=r"1/4, and a picture has 6 x 8 tokens; use .* multiples of 4, or fewer"):
        build_model(config)(batch.latents_TC, torch.zeros(1), batch)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_out_channels": []}, r"block_out_channels=\[\] needs at least one resolution"),
        ({"attention_levels": [4]}, r"attention_levels=\[4\]"),
        ({"attention_levels": [3, 3]}, "names a level twice"),
        ({"block_out_channels": [32, 96], "attention_levels": []}, r"levels \[1\] .* multiples of model.head_size=64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(EDM2UNetConfig(), **changes).validate()
