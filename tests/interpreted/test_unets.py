"""Complete UNets with fused group norms give the numbers of the eager ones in float32."""

import pytest
import torch

from dit.models.efficient_unet.config import EfficientUNetConfig
from dit.models.imagen_config import ImagenConfig
from dit.models.ldm_unet.config import LDMUNetConfig
from dit.models.unet.config import UNetConfig
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.verify.trial import disturb_constants
from energon_data.mock import MockData, MockSource
from energon_data.packing import collate
from tests.parity.test_imagen import SIZES, pack

SMALL = {**SIZES, "channel_multipliers": [1, 2], "num_res_blocks": [1, 1], "attention_levels": [1]}
LDM = LDMUNetConfig(
    block_out_channels=[8, 16],
    transformer_layers=[1, 0],
    layers_per_block=1,
    num_attention_heads=2,
    norm_num_groups=4,
    context_size=12,
)
CASES = {"imagen": UNetConfig(**SMALL), "efficient": EfficientUNetConfig(**SMALL), "latent": LDM}
RTOL = 2e-5  # of the norm of each parameter's gradient: float32 sums in another order


def synthetic(config):
    spec = config.batch_spec(multiple_of=1)
    source = MockSource(MockData(height=8, width=12), spec, seed=0, split="train", stream=0, num_streams=1)
    return collate([source.sample(number) for number in range(2)], spec)


def step(config, groups, kernels):
    """Return the loss and the gradients."""
    chunks = build_model(config, ParallelConfig(), TrainingConfig(precision="fp32", kernels=kernels), groups)
    disturb_constants(chunks, groups)
    batch = pack(config, (3, 5)) if isinstance(config, ImagenConfig) else synthetic(config)
    time_S = torch.tensor([0.2, 0.7])
    loss = chunks[0](batch.latents_TC, time_S, batch).square().sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in chunks[0].named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_unet_has_the_eager_numbers(one_rank_world, config):
    loss, gradients = step(config, one_rank_world, "eager")
    fused, others = step(config, one_rank_world, "triton")
    torch.testing.assert_close(fused, loss, rtol=1e-5, atol=0)
    for name, expected in gradients.items():
        if expected is not None:
            assert (others[name] - expected).norm() <= RTOL * expected.norm().clamp(min=1e-3), name
