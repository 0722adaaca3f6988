"""Layouts and models whose products cannot be quantised consistently are refused before training, with a cure."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dit.backends.init import ZEROS
from dit.backends.provider import LINEARS, LayerProvider
from dit.errors import ConfigError
from dit.kernels.fp8 import BLOCKS
from dit.layers.tokens import pad_tokens
from dit.layout import SequenceLayout
from dit.models.base import Stage
from dit.models.ddpm_unet.config import DDPMUNetConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.flux.config import FluxConfig
from dit.parallel.build import build_on_one_rank, megatron_config
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.parallel.implementations import fp8_of, implementations
from dit.settings import TrainingConfig

DIT = DiTConfig(hidden_size=256, num_layers=2, num_attention_heads=4)


def provider(fp8: Any, tp: int = 1) -> LayerProvider:
    """Return a provider for a number of tensor-parallel ranks, without communication."""
    config = megatron_config(DIT, ParallelConfig(), "fp32", meta=True)
    group = SimpleNamespace(size=lambda: tp, rank=lambda: 0)
    return LayerProvider(config, SimpleNamespace(tp=group, tp_cp=group), fp8=fp8)


ONE_RANK = "use 64 or 96, or training.fp8=None"


@pytest.mark.parametrize(
    ("fp8", "tp", "replicated", "split", "says"),
    [
        (
            "blockwise",
            2,
            256,
            384,
            "384 on 2 tensor-parallel ranks are 192; use 256 or 512, tensor_model_parallel_size=1, or",
        ),
        ("blockwise", 4, 256, 256, "256 on 4 tensor-parallel ranks are 64; use 512, tensor_model_parallel_size=2, or"),
        ("mxfp8", 1, 72, 128, f"72 on 1 tensor-parallel rank are 72; {ONE_RANK}"),
        ("mxfp8", 2, 96, 96, "96 on 2 tensor-parallel ranks are 48; use 64 or 128, tensor_"),
        ("tensorwise", 2, 32, 48, "48 on 2 tensor-parallel ranks are 24; use 32 or 64, tensor_"),
    ],
)
@pytest.mark.parametrize("row", [False, True])
def test_a_block_of_features_is_never_cut(fp8, tp, replicated, split, says, row):
    layers = provider(fp8, tp)
    build = layers.row_linear if row else layers.column_linear
    sizes = (split, replicated) if row else (replicated, split)
    message = f"training.fp8={fp8} needs a multiple of {BLOCKS[fp8]} features .*, and {says}"
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        build(*sizes, bias=True, init=ZEROS)


@pytest.mark.parametrize(
    ("fp8", "parallel", "multiple"),
    [
        ("blockwise", {}, 1),
        ("blockwise", {"context_parallel_size": 2}, 256),
        ("mxfp8", {"context_parallel_size": 2, "context_split": "load_balanced"}, 128),
        ("mxfp8", {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True}, 64),
        ("tensorwise", {"context_parallel_size": 2}, 32),
        (None, {"context_parallel_size": 2}, 2),
    ],
)
def test_samples_are_padded_so_that_no_block_of_tokens_is_cut(fp8, parallel, multiple):
    layout = ParallelConfig(**parallel)
    ranks = layout.context_parallel_size * layout.tensor_model_parallel_size
    assert check_parallel(DIT, layout, TrainingConfig(fp8=fp8), ranks).token_multiple == multiple


@pytest.mark.parametrize(
    ("fp8", "parallel", "multiple"),
    [
        ("mxfp8", {}, 32),
        ("tensorwise", {}, 16),
        ("nvfp4", {}, 32),
        ("mxfp8", {"tensor_model_parallel_size": 2}, 32),
        ("mxfp8", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 64),
        ("blockwise", {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, 512),
        (None, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    ],
)
def test_transformer_engine_gets_whole_blocks_of_tokens_on_every_rank(fp8, parallel, multiple):
    """Otherwise its products fail with an assertion."""
    layout, training = ParallelConfig(**parallel), TrainingConfig(fp8=fp8, linears="transformer_engine")
    ranks = layout.context_parallel_size * layout.tensor_model_parallel_size
    assert check_parallel(DIT, layout, training, ranks).token_multiple == multiple


ENGINE, OTHERS = LINEARS.implementations[0], LINEARS.implementations[1:]


@pytest.mark.parametrize(("fp8", "tokens"), [("mxfp8", 64), (None, 40)])
def test_transformer_engine_gets_whole_blocks_of_text_tokens(monkeypatch, fp8, tokens):
    """FLUX has a separate stream of text tokens. Megatron-Core's linears stand in for the package."""
    stand_in = replace(ENGINE, load=OTHERS[-1].load, requires=())
    monkeypatch.setattr("dit.backends.provider.LINEARS", replace(LINEARS, implementations=(stand_in, *OTHERS)))
    layers = LayerProvider(megatron_config(DIT, ParallelConfig(), "fp32", meta=True), None, ENGINE.name, fp8=fp8)
    assert pad_tokens(SequenceLayout.from_lengths([33, 7]), layers).total_tokens == tokens


@pytest.mark.parametrize(
    ("fp8", "capability", "precision", "needs"),
    [
        ("mxfp8", (9, 0), "bf16", "compute capability 10.0 or higher with training.fp8=mxfp8, not 9.0"),
        ("mxfp8", (10, 0), "fp32", None),
        ("nvfp4", (9, 0), "bf16", "compute capability 10.0 or higher with training.fp8=nvfp4, not 9.0"),
        ("nvfp4", (10, 0), "fp32", "training.precision=bf16 with training.fp8=nvfp4"),
        ("nvfp4", (10, 0), "bf16", None),
        ("blockwise", (8, 9), "bf16", "compute capability 9.0 or higher with training.fp8=blockwise, not 8.9"),
        ("tensorwise", (8, 6), "bf16", "compute capability 8.9 or higher with training.fp8=tensorwise, not 8.6"),
        ("tensorwise", (8, 9), "bf16", None),
        (None, (8, 0), "bf16", None),
    ],
)
def test_a_gpu_or_precision_that_transformer_engine_cannot_use_is_refused(
    monkeypatch, fp8, capability, precision, needs
):
    monkeypatch.setattr("dit.kernels.choice.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("dit.parallel.implementations.local_device", lambda: torch.device("cuda"))
    monkeypatch.setattr("dit.parallel.implementations.verified_here", frozenset)
    training = TrainingConfig(fp8=fp8, linears="transformer_engine", precision=precision)
    if needs is None:
        assert implementations(DIT, training)["linears"].name == "transformer_engine"
        return
    with pytest.raises(
        ConfigError, match=re.escape(f"training.linears='transformer_engine' needs {needs}; or use 'auto'")
    ):
        implementations(DIT, training)


@pytest.mark.parametrize(
    ("model", "parallel", "training", "says"),
    [
        (DDPMUNetConfig(), {}, {}, "model=DDPMUNetConfig has no .* can quantise; use training.fp8=None$"),
        (DiTConfig(num_experts=4), {}, {}, "model.num_experts=4 experts are not quantised; use training.fp8=None$"),
        (
            FluxConfig(),
            {"context_parallel_size": 2},
            {},
            "context_parallel_size=2 .* of model=Flux.*; use context_.*=1, or training.fp8=None$",
        ),
        (
            replace(DIT, ffn_hidden_size=96),
            {"tensor_model_parallel_size": 2},
            {},
            "32 features of model.ffn_hidden_size on each rank, and 96 on 2 .* are 48; use 64 or 128, tensor_.*=1, or",
        ),
        (DIT, {}, {"kernels": "compile"}, "training.kernels=compile is not available: training.fp8=mxfp8 cannot be"),
    ],
)
def test_layers_that_cannot_be_quantised_are_refused(model, parallel, training, says):
    layout, settings = ParallelConfig(**parallel), TrainingConfig(fp8="mxfp8", **training)
    with pytest.raises(ConfigError, match=says):
        check_parallel(model, layout, settings, layout.context_parallel_size * layout.tensor_model_parallel_size)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"training.fp8=mxfp8 needs training.precision=bf16 or fp32, got fp16; set"):
        TrainingConfig(fp8="mxfp8", precision="fp16").validate()
    TrainingConfig(fp8="mxfp8").validate()


def quantised(model: Any) -> set[str]:
    """Return the names of the linear layers with quantised products."""

    def with_fp8(config: Any) -> LayerProvider:
        return LayerProvider(config, fp8="mxfp8")

    with torch.device("meta"):
        network: nn.Module = build_on_one_rank(model, Stage(range(2)), with_fp8)
    return {name for name, module in network.named_modules() if getattr(module, "fp8", None) is not None}


def test_the_linears_of_blocks_are_quantised_and_no_others():
    """Not quantised: embeddings, modulations, the last layer, and keys and values of a text, which is not split."""
    linears = ("attention.linear_qkv", "attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert quantised(DIT) == {f"layers.{i}.{name}" for i in range(2) for name in linears}
    cross = DiTCrossConfig(hidden_size=256, num_layers=2, num_attention_heads=4, context_size=12)
    more = (*linears, "cross_attention.linear_q", "cross_attention.linear_proj")
    assert quantised(cross) == {f"layers.{i}.{name}" for i in range(2) for name in more}


def test_an_adapter_of_a_quantised_linear_is_not_quantised():
    layers = provider("mxfp8")
    layers.config.use_cpu_initialization = True
    base = layers.column_linear(64, 96, bias=True, init=ZEROS)
    assert base.fp8 is not None
    assert [getattr(part, "fp8", None) for part in layers.adapter(base, 3)] == [None, None]


def test_a_run_reports_emulated_products():
    for training, says in (
        (TrainingConfig(), ""),
        (TrainingConfig(fp8="tensorwise"), " with fp8 tensorwise (emulated, slower than without)"),
    ):
        assert fp8_of(training, implementations(DIT, training)) == says
    others = implementations(DIT, TrainingConfig(fp8="tensorwise"))["fp8"].others
    assert others["scaled_mm"].startswith("needs CUDA")
