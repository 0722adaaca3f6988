"""Context-parallel settings: valid layouts, and the messages for invalid ones."""

import pytest

from dit.errors import ConfigError
from dit.models.base import ModelConfig
from dit.models.dit.config import DiTConfig
from dit.models.dit_cross.config import DiTCrossConfig
from dit.models.sana.config import SanaConfig
from dit.parallel.dims import ParallelConfig, ParallelDims, check_parallel
from dit.settings import TrainingConfig


def check(world_size: int = 8, heads: int = 12, groups: int | None = None, **parallel) -> ParallelDims:
    model = DiTCrossConfig(num_attention_heads=heads, num_query_groups=groups, num_layers=4)
    return check_parallel(model, ParallelConfig(**parallel), TrainingConfig(global_batch_size=8), world_size)


def test_context_ranks_share_samples():
    """Only data-parallel ranks, which remain after tensor and context parallelism, read different samples."""
    dims = check(context_parallel_size=2, tensor_model_parallel_size=2)
    assert (dims.data_parallel_size, dims.micro_batches) == (2, 4)


@pytest.mark.parametrize(
    ("parallel", "multiple"),
    [
        ({}, 1),
        ({"context_split": "load_balanced"}, 1),
        ({"context_parallel_size": 4}, 4),
        ({"context_parallel_size": 4, "context_split": "load_balanced"}, 8),
        ({"context_parallel_size": 4, "tensor_model_parallel_size": 2}, 4),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, 4),
        (
            {
                "context_parallel_size": 2,
                "context_split": "load_balanced",
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
            },
            8,
        ),
    ],
)
def test_samples_are_padded_so_that_all_ranks_hold_equally_much(parallel, multiple):
    assert check(**parallel).token_multiple == multiple


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"context_parallel_size": 8, "context_comm": "a2a"},
            r"12 heads of keys / tensor_model_parallel_size=1 = 12 heads .* context_parallel_size=8",
        ),
        (
            {"context_parallel_size": 4, "context_comm": "a2a", "tensor_model_parallel_size": 2},
            r"= 6 heads over context_parallel_size=4 ranks; use one of \[1, 2, 3, 6\] ranks",
        ),
        (
            {"context_parallel_size": 8, "context_comm": "a2a+p2p"},
            r"cannot have parallel.context_a2a_size=None; use one of \[2, 4\]",
        ),
        (
            {"context_parallel_size": 8, "context_comm": "a2a+p2p", "context_a2a_size": 8},
            r"context_a2a_size=8; use one of \[2, 4\]",
        ),
        (
            {"context_parallel_size": 2, "context_comm": "a2a+p2p", "context_a2a_size": 2},
            r"no size divides both, so use 'p2p' or 'all_gather'",
        ),
        ({"context_parallel_size": 4, "context_a2a_size": 2}, r"context_a2a_size=2 .*; set it to None"),
        ({"context_parallel_size": 3}, r"world size 8 is not a multiple of .* CP 3"),
    ],
)
def test_impossible_layouts_are_refused_with_the_numbers(parallel, message):
    with pytest.raises(ConfigError, match=message):
        check(**parallel)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor_model_parallel_size": 4}, r"num_query_groups=2 cannot be split over tensor_model_parallel_size=4"),
        (
            {"context_parallel_size": 4, "context_comm": "a2a"},
            r"2 heads of keys / tensor_model_parallel_size=1 = 2 heads over context_parallel_size=4",
        ),
        (
            {"context_parallel_size": 8, "context_comm": "a2a+p2p", "context_a2a_size": 4},
            r"2 heads of keys per rank cannot have parallel.context_a2a_size=4; use one of \[2\]",
        ),
    ],
)
def test_context_parallelism_splits_groups_of_keys(parallel, message):
    """12 query heads could be split, but their keys are in only 2 groups."""
    check(**parallel)
    with pytest.raises(ConfigError, match=message):
        check(groups=2, **parallel)


TP2, ULYSSES = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2, "context_comm": "a2a"}


@pytest.mark.parametrize(
    ("model", "parallel", "fp8", "message"),
    [
        (DiTCrossConfig(ffn_hidden_size=101), TP2, None, "ffn_hidden_size=101 cannot be split over tensor_model_"),
        (DiTConfig(wide_head=[1, 96, 3]), TP2, None, "num_attention_heads=3 of model.wide_head cannot be split over"),
        (DiTConfig(wide_head=[1, 96, 3]), ULYSSES, None, "cannot split 3 heads of keys of model.wide_head / tensor_"),
        (DiTConfig(wide_head=[1, 192, 4]), {}, "blockwise", "128 features of hidden_size of model.wide_head on each"),
        (SanaConfig(num_cross_attention_heads=5), TP2, None, "num_cross_attention_heads=5 cannot be split over tensor"),
        (
            SanaConfig(ffn_hidden_size=101),
            {"context_parallel_size": 2},
            None,
            "has 101 pairs of channels .* divisor of 101",
        ),
    ],
)
def test_every_part_of_a_network_is_checked_before_it_is_built(
    model: ModelConfig, parallel: dict, fp8: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(model, ParallelConfig(**parallel), TrainingConfig(fp8=fp8, global_batch_size=8), 2)


def test_the_unused_width_of_dense_layers_does_not_matter_with_experts() -> None:
    model = DiTConfig(num_experts=4, moe_ffn_hidden_size=48, ffn_hidden_size=101)
    check_parallel(model, ParallelConfig(**TP2, sequence_parallel=True), TrainingConfig(global_batch_size=8), 2)
