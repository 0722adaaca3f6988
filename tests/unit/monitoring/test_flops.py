"""Operation counts against torch's counter, the paper's figure and NeMo's published table."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step import Recording, recomputed_share
from dit.batch import PackedBatch
from dit.conditions import Conditions, Entry
from dit.fixed_packs import PackMaxima
from dit.kernels.recompute import recompute_activations
from dit.layers.embeddings import CONDITION_FEATURES
from dit.layout import SequenceLayout
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.monitoring.flops import Convention, PackFlops
from dit.parallel.build import build_on_meta, count_parameters
from dit.parallel.dims import ParallelConfig
from dit.settings import TrainingConfig
from tests.conftest import BuildModel

MID = DiTConfig(hidden_size=192, num_layers=5, num_attention_heads=6, num_classes=4, context_size=40, out_channels=8)
MOE = DiTConfig(hidden_size=64, num_layers=2, num_attention_heads=4, num_experts=6, moe_ffn_hidden_size=40)
MOE_TOP_K = replace(MOE, moe_router="top_k", moe_top_k=3)
XL_2 = DiTConfig(
    hidden_size=1152, num_layers=28, num_attention_heads=16, in_channels=4, out_channels=8, num_classes=1000
)

LAYOUTS = {
    "ragged": SequenceLayout.from_lengths([100, 7, 64, 7, 31]),
    "padded": SequenceLayout.from_lengths([100, 7, 64, 7, 31], multiple_of=16, total_tokens=320),
}


def shape_of(layout: SequenceLayout, *texts: SequenceLayout) -> tuple:
    """Return the shape of a pack of lines of patches."""
    return layout, [(1, 1, n) for n in layout.lengths], *texts


def batch_of(layout: SequenceLayout, config: DiTConfig) -> PackedBatch:
    S, T = layout.num_samples, layout.total_tokens
    context_layout = SequenceLayout.from_lengths(list(range(1, S + 1)))
    return PackedBatch(
        latents_TC=torch.zeros(T, config.token_channels),
        positions_T3=torch.zeros(T, 3, dtype=torch.long),
        layout=layout,
        sample_ids_S=torch.arange(S),
        grids=tuple((1, 1, n) for n in layout.lengths),
        keys=tuple(map(str, range(S))),
        conditions=Conditions(
            label=Entry("sample", torch.zeros(S, dtype=torch.long)),
            context=Entry(
                "text",
                torch.ones(context_layout.total_tokens, config.context_size or 1),
                context_layout,
                torch.arange(S) == 0,
            ),
        ),
    )


@pytest.mark.parametrize(("settings", "share"), [({}, 1.0), ({"recompute_layers": 2}, 0.4)], ids=["all", "two_of_five"])
def test_recomputed_layers_are_counted_as_the_device_runs_them(build_model: BuildModel, settings: dict, share: float):
    training = TrainingConfig(recompute="full", **settings)
    assert recomputed_share(training, ParallelConfig(), MID) == share
    layout = LAYOUTS["padded"]
    model, batch = build_model(MID, perturb=0.1), batch_of(layout, MID)
    for layer in list(model.units())[: training.recompute_layers]:
        recompute_activations(layer, training.recompute)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch.latents_TC, torch.rand(layout.num_samples), batch).sum().backward()
    inputs = layout.total_tokens * MID.token_channels + layout.num_samples * CONDITION_FEATURES
    flops, shape = PackFlops(MID), shape_of(layout, batch.conditions["context"].layout)
    counted = flops.training(*shape, convention="hardware", recomputed=share)
    assert counter.get_total_flops() == counted - 2 * inputs * MID.hidden_size
    assert flops.training(*shape, recomputed=share) == flops.training(*shape)


def test_layers_recomputed_per_chunk_add_up():
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_layers=[1, 4])
    assert recomputed_share(TrainingConfig(recompute="full", recompute_layers=2), parallel, MID) == 3 / 5
    assert recomputed_share(TrainingConfig(recompute="selective"), parallel, MID) == 0


def test_blocks_of_a_unet_are_recomputed_one_by_one():
    unet = DDPMUNetConfig(block_out_channels=[8, 16], mid_out_channels=[16], hidden_size=32)
    units = len(list(build_on_meta(unet).units()))
    assert recomputed_share(TrainingConfig(recompute="full", recompute_layers=2), ParallelConfig(), unet) == 2 / units


def test_a_pack_padded_for_a_cuda_graph_has_the_operations_of_its_samples():
    """A benchmark records the packs that the device computes, with empty samples."""
    batch = batch_of(LAYOUTS["ragged"], MID)
    padded = PackMaxima(tokens=320, samples=8, text_tokens=32).pad(batch)
    recording = Recording(iter([padded]))
    next(recording)
    assert PackFlops(MID).training(*recording.shapes[0]) == PackFlops(MID).of_pack(batch)


def test_a_benchmark_counts_reference_tokens():
    layout = SequenceLayout.from_lengths([12])
    batch = replace(batch_of(layout, MID), grids=((1, 2, 2),))  # 4 of 12 tokens
    recording = Recording(iter([batch]))
    next(recording)
    texts = batch.conditions.layout("context")
    assert PackFlops(MID).training(*recording.shapes[0]) == PackFlops(MID).training(layout, [(1, 1, 12)], texts)


def test_xl_2_has_the_flops_of_the_paper():
    """The paper's "118.6 Gflops" for DiT-XL/2 at 256 px are multiply-adds."""
    layout = SequenceLayout.from_lengths([256])
    counted = PackFlops(XL_2).forward(layout, [(1, 16, 16)])
    assert counted / 2e9 == pytest.approx(118.6, abs=0.05)


def test_padding_counts_in_device_flops_and_not_in_model_flops():
    """Padding only changes the hardware count; without padding, both counts are equal."""
    ragged, padded = (shape_of(LAYOUTS[name]) for name in ("ragged", "padded"))
    flops = PackFlops(MID)
    for convention in ("model", "nemo"):
        assert flops.training(*ragged, convention=convention) == flops.training(*padded, convention=convention)
    assert flops.training(*ragged, convention="hardware") == flops.training(*ragged)
    assert flops.training(*padded, convention="hardware") > flops.training(*padded)


def test_rows_of_one_rank_do_not_change_the_pack():
    """Under sequence parallelism, a rank has a part of the rows; the count is that of the full pack."""
    layout = LAYOUTS["padded"]
    part, whole = shape_of(layout.select(torch.arange(80))), shape_of(layout)
    flops = PackFlops(MID)
    for convention in ("model", "hardware", "nemo"):
        assert flops.training(*part, convention=convention) == flops.training(*whole, convention=convention)


def test_expert_choice_has_the_flops_of_a_dense_mlp_of_its_mean_width():
    """64 experts of width 1024 at capacity factor 8 cost a dense MLP of width 8192, except the router (EC-DiT 1B)."""
    dense = DiTConfig(hidden_size=2048, num_layers=16, num_attention_heads=32, ffn_hidden_size=8192)
    sparse = replace(dense, num_experts=64, moe_ffn_hidden_size=1024, moe_capacity_factor=8.0)
    layout = SequenceLayout.from_lengths([256, 1024])
    router = 2 * 16 * layout.valid_tokens * 2048 * 64
    shape = layout, [(1, 16, 16), (1, 32, 32)]
    assert PackFlops(sparse).forward(*shape) == PackFlops(dense).forward(*shape) + router


@pytest.mark.parametrize("convention", ["model", "hardware", "nemo"])
def test_samples_add_up(convention: Convention):
    """The cost of a pack is the sum over its samples: attention is per sample, conditioning runs once for each."""
    flops, alone = PackFlops(MID), [SequenceLayout.from_lengths([n]) for n in (100, 7, 64)]
    pack = flops.training(*shape_of(SequenceLayout.from_lengths([100, 7, 64])), convention=convention)
    assert pack == sum(flops.training(*shape_of(layout), convention=convention) for layout in alone)


def nemo_flops_per_token(num_parameters: float, num_layers: int, hidden_size: int, sequence_length: int) -> float:
    """Return 6 N + 12 L h s, with the adaLN projections, which run once per sample, in N.

    Source: fitted to the four rows of the NeMo diffusion README (Nov 2024); each agrees within 0.6 %.
    """
    return 6 * num_parameters + 12 * num_layers * hidden_size * sequence_length


def test_the_nemo_convention_of_a_config_equals_the_formula():
    shape = shape_of(SequenceLayout.from_lengths([4096]))
    formula = nemo_flops_per_token(count_parameters(XL_2), XL_2.num_layers, XL_2.hidden_size, 4096)
    assert PackFlops(XL_2).training(*shape, convention="nemo") / 4096 == pytest.approx(formula)


@pytest.mark.parametrize(("config", "idle"), [(MOE, 4), (MOE_TOP_K, 3)], ids=["expert_choice", "top_k"])
def test_the_nemo_convention_counts_the_experts_of_a_token(config: DiTConfig, idle: int):
    """A token has 2 or 3 of 6 experts, with two matrices and two biases each."""
    weights = count_parameters(config) - config.num_layers * idle * (2 * 40 * 64 + 40 + 64)
    formula = nemo_flops_per_token(weights, config.num_layers, config.hidden_size, 4096)
    counted = PackFlops(config).training(*shape_of(SequenceLayout.from_lengths([4096])), convention="nemo")
    assert counted / 4096 == pytest.approx(formula)
