"""The conditional DDPM UNet has the outputs and gradients of torch's modules."""

from dataclasses import replace

import pytest
import torch

from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.errors import ConfigError
from dit.layout import SequenceLayout
from dit.models.base import ModelConfig
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.patchify import grid_positions
from tests.conftest import BuildModel
from tests.parity.reference_ddpm_unet import ReferenceDDPMUNet
from tests.support.reference import RTOL, relative_error

SIZES = {
    "three": {"block_out_channels": [8, 12, 16], "mid_out_channels": [20, 8]},
    "two": {"block_out_channels": [16, 8], "mid_out_channels": [12], "num_attention_heads": 2, "in_channels": 1},
}


def batch_of(config: ModelConfig, height: int, width: int, labels: list[int]) -> PackedBatch:
    generator = torch.Generator().manual_seed(4)
    grids = [(1, height, width)] * len(labels)
    layout = SequenceLayout.from_lengths([height * width] * len(labels))
    conditions = Conditions(label=Entry("sample", torch.tensor(labels)))
    return PackedBatch(
        latents_TC=torch.randn(layout.total_tokens, config.token_channels, generator=generator),
        positions_T3=torch.cat([grid_positions(grid) for grid in grids]),
        layout=layout,
        sample_ids_S=torch.arange(len(labels)),
        grids=tuple(grids),
        keys=tuple(map(str, labels)),
        conditions=conditions,
    )


def reference_name(name: str) -> str:
    """Return the name in the reference of one of our parameters."""
    for actual, external in (
        ("label.", "classes."),
        ("down_blocks", "down"),
        ("up_blocks", "up"),
        ("mid_blocks", "middle"),
        ("condition.", "condition.1."),
        ("conv1.", "body.0."),
        ("attention.norm1.", "attention.norm."),
        ("attention.norm2.", "attention.mlp.0."),
        ("norm1.", "body.1."),
        ("conv2.", "body.3."),
        ("norm2.", "body.4."),
        ("to_qkv.", "heads.in_proj_"),
        ("to_out.", "heads.out_proj."),
        ("linear1.", "mlp.1."),
        ("linear2.", "mlp.3."),
    ):
        name = name.replace(actual, external)
    return name


@pytest.mark.parametrize("name", SIZES)
def test_modules_of_torch_have_the_same_outputs(build_model: BuildModel, name: str):
    """Outputs and gradients for pictures higher than wide, with different times and classes, one without class."""
    config = DDPMUNetConfig(num_classes=3, hidden_size=10, **SIZES[name])
    config.validate()
    model = build_model(config, perturb=0.1)
    external = ReferenceDDPMUNet(
        pixels=config.in_channels,
        classes=3,
        condition=config.hidden_size,
        channels=config.block_out_channels,
        middle=config.mid_out_channels,
        heads=config.num_attention_heads,
    ).double()
    external.load_state_dict({reference_name(n): p.detach() for n, p in model.named_parameters()})
    batch, step = batch_of(config, 8, 4, labels=[2, 0, 3]), torch.tensor([1.0, 500.0, 999.0])
    out_TC = model(batch.latents_TC, step / 1000, batch)
    pictures = batch.dense(batch.latents_TC)[:, 0].permute(0, 3, 1, 2).double()
    exact = external(pictures, step.double(), batch.conditions["label"].values)
    exact_TC = exact.permute(0, 2, 3, 1).flatten(0, 2)
    assert relative_error(out_TC, exact_TC) <= RTOL
    cotangent_TC = torch.randn(out_TC.shape, generator=torch.Generator().manual_seed(6))
    out_TC.backward(cotangent_TC)
    exact_TC.backward(cotangent_TC.double())
    gradients = {n: p.grad for n, p in external.named_parameters()}
    errors = {n: relative_error(p.grad, gradients[reference_name(n)]) for n, p in model.named_parameters()}
    assert {n: error for n, error in errors.items() if not error <= RTOL} == {}


@pytest.mark.parametrize("side", [1, 7])
def test_outputs_have_the_odd_sides_of_the_input(build_model: BuildModel, side: int):
    """A picture with odd sides is padded at the bottom and the right, and the output is cropped."""
    config = DDPMUNetConfig(num_classes=3, **SIZES["three"])
    batch = batch_of(config, side, 5, labels=[0])
    assert build_model(config, perturb=0.1)(batch.latents_TC, torch.zeros(1), batch).shape == batch.latents_TC.shape


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 9}, "hidden_size=9"),
        ({"block_out_channels": [8]}, r"block_out_channels=\[8\].* at least two resolutions"),
        ({"mid_out_channels": []}, "mid_out_channels="),
        ({"block_out_channels": [8, 6]}, "must be multiples of model.num_attention_heads=4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        replace(DDPMUNetConfig(), **changes).validate()
