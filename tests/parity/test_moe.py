"""The DiT with experts has the outputs and gradients of the formulas, computed token by token."""

import pytest
import torch

from tests.conftest import BuildModel
from tests.parity.reference_moe import ReferenceMoEBlock
from tests.parity.test_dit import RTOL, check_gradients, config, relative_error, rows_of
from tests.parity.weights import copy_weights, reference_of
from tests.support.batches import Sample, pack

SAMPLES = [Sample((1, 4, 4), label=3), Sample((1, 2, 5)), Sample((1, 1, 3), label=0), Sample((1, 5, 2), label=3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_capacity_factor": 1.5, "moe_ffn_hidden_size": 40},
        {"moe_capacity_factor": 0.5, "add_bias": False, "qk_layernorm": True},
        {"moe_router": "top_k", "moe_top_k": 2, "moe_aux_loss_coeff": 0.4},
        {"moe_router": "top_k", "moe_top_k": 1, "moe_aux_loss_coeff": 0.0, "add_bias": False},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_experts_equal_the_formulas(build_model: BuildModel, changes: dict):
    """Compare a ragged, padded pack in our model with single samples in the float64 reference, with the balancing loss.

    Both backward passes start from sum(cotangent * output); our model adds the balancing loss internally.
    """
    model_config = config(num_experts=4, num_layers=2, **changes)
    batch = pack(SAMPLES, model_config, multiple_of=4, tail=4)
    model, reference = build_model(model_config, perturb=0.1), reference_of(model_config)
    copy_weights(model, reference, model_config.num_attention_heads)
    generator = torch.Generator().manual_seed(5)
    inputs, time = torch.randn(batch.latents_TC.shape, generator=generator), torch.rand(4, generator=generator)
    out = model(inputs, time, batch)
    cotangent = torch.randn(out.shape, generator=generator)
    loss = torch.zeros((), dtype=torch.float64)
    for i, (sample, rows) in enumerate(zip(SAMPLES, rows_of(batch.layout))):
        exact = reference(inputs[None, rows].double(), time[i : i + 1], sample.grid, [sample.label])[0]
        assert relative_error(out[rows], exact) <= RTOL, f"sample {i}"
        loss = loss + (exact * cotangent[rows].double()).sum()
    blocks = [block for block in reference.blocks if isinstance(block, ReferenceMoEBlock)]
    if model_config.moe_router == "top_k":
        loss = loss + model_config.moe_aux_loss_coeff * sum(torch.stack(block.aux).sum() for block in blocks)
    loss.backward()
    valid = batch.layout.valid_T
    (out[valid] * cotangent[valid]).sum().backward()
    check_gradients(model, reference, model_config.num_attention_heads)
    for i, block in enumerate(blocks):
        assert block.router.weight.grad.norm() > 0, i
