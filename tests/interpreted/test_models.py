"""Complete backbones with fused kernels give the numbers of the eager ones in float32, on one rank and sharded."""

import gc
from dataclasses import replace

import pytest
import torch

from benchmarks.parallel_training import run_world
from dit.kernels.recompute import recompute_activations
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.models.stdit.config import STDiTConfig
from dit.models.streams.families import Lumina2Config
from dit.parallel.build import build_model
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from dit.verify.trial import disturb_constants
from tests.support.reference import LiveBytes, assert_equal_training
from tests.unit.kernels.test_recompute import MODELS, TEXT, VALUES, a_pack

ROTARY = {"position_embedding": "rope_3d", "qk_layernorm": True}
SANDWICH = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_joint_layers": 1, "num_single_layers": 1, "in_channels": 4},
    **{"context_size": 12, "ffn_hidden_size": 48, "rope_axes": [2, 4, 2]},
}
# One layer, or one of each kind, or two that are joined (`VALUES`): the interpreter is slow.
# The last `DiTCrossConfig` uses all kernels of a plain one.
ALL = [
    *(
        config if isinstance(config, FluxConfig) else replace(config, num_layers=1)
        for config in MODELS
        if config is not VALUES and not isinstance(config, DiTCrossConfig)
    ),
    replace(VALUES, num_layers=2),
    DiTConfig(hidden_size=32, num_layers=1, num_attention_heads=4, num_classes=5, **ROTARY),
    DiTCrossConfig(**{**TEXT, "num_layers": 1}, **ROTARY, add_bias=True, num_query_groups=2),
    STDiTConfig(**TEXT),
    Lumina2Config(**SANDWICH, num_query_groups=2),
]
RECOMPUTED = (DiTConfig, FluxConfig, Lumina2Config)
"""Models that the slow rows also test with recompute: modulated layers, two streams, and norms after the layers."""
SUM_RTOL = 2e-5  # of the norm of each parameter's gradient: float32 sums in another order


def step(config, groups, kernels: str, recompute: str = "none"):
    """Return the loss, the gradients, and the bytes alive between forward and backward."""
    training = TrainingConfig(precision="fp32", kernels=kernels)
    chunks = build_model(config, ParallelConfig(), training, groups)
    disturb_constants(chunks, groups)
    for layer in chunks[0].units():
        recompute_activations(layer, recompute)
    batch, time_S = a_pack(config)
    with LiveBytes() as live:
        loss = chunks[0](batch.latents_TC, time_S, batch).square().sum()
        gc.collect()  # Triton 3.8's interpreter holds storages in a reference cycle
        saved = live.total()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in chunks[0].named_parameters()}, saved


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=() if c is ALL[0] else pytest.mark.slow) for c in ALL],
    ids=lambda config: type(config).__name__,
)
def test_a_backbone_has_the_eager_numbers(one_rank_world, config):
    loss, gradients, _ = step(config, one_rank_world, "eager")
    fused, others, saved = step(config, one_rank_world, "triton")
    torch.testing.assert_close(fused, loss, rtol=1e-5, atol=0)
    for name, expected in gradients.items():
        assert expected.norm() > 0, f"{name} has no gradient, so the comparison shows nothing"
        assert (others[name] - expected).norm() <= SUM_RTOL * expected.norm(), name
    if isinstance(config, RECOMPUTED) and config is not ALL[0]:
        again, recomputed, less = step(config, one_rank_world, "triton", "selective")
        assert torch.equal(again, fused)
        assert less < saved
        for name, expected in others.items():
            assert (recomputed[name] - expected).norm() <= 1e-6 * expected.norm(), name


LAYOUTS = {
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "fsdp2": {"data_parallel": "fsdp"},
}
CASE = {"packed": True, "model": {"backbone": "dit_cross", "num_layers": 2, **ROTARY}}
CPU = {"timeout_s": 1800.0}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Train on one rank and under every layout; the ranks inherit the setting of the interpreter."""
    folder = tmp_path_factory.mktemp("worlds")
    common = {"recompute": {"kernels": "triton"}, "micro_batches": 2, "steps": 1, **CASE}
    (one,) = run_world(1, [{"parallel": {"data_parallel": "ddp"}, **common}], folder / "1", **CPU)
    many = run_world(2, [{"parallel": layout, **common} for layout in LAYOUTS.values()], folder / "2", **CPU)
    return {"one": one, **dict(zip(LAYOUTS, many))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_rank(results, layout):
    assert_equal_training(results["one"], results[layout])
