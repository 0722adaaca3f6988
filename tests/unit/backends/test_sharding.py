"""Each parameter's sharding is declared once; Megatron-Core's attributes and the printed table are derived from it."""

import pytest
import torch
from torch import nn

from dit.backends.sharding import (
    AxisSizes,
    ParameterSharding,
    explain,
    megatron_attributes,
    replicate_on_all_stages,
    set_sharding,
    sharding_of,
    write_attributes,
)
from dit.errors import ConfigError
from dit.models.moviegen.config import MovieGenConfig
from dit.parallel.build import build_on_meta

SPLIT, EXPERT, EVERY_STAGE = ParameterSharding(split_dim=1), ParameterSharding(expert=True), {"every_stage": True}
TEXT, HEADS = ParameterSharding(gradient_covers="all_tokens"), ParameterSharding(gradient_covers="own_heads")


@pytest.mark.parametrize(
    ("sharding", "sequence_parallel", "copies", "summed"),
    [
        (ParameterSharding(), True, ("dp_cp", "tp"), ("dp_cp", "tp")),
        (ParameterSharding(), False, ("dp_cp", "tp"), ("dp_cp",)),
        (ParameterSharding(**EVERY_STAGE), True, ("dp_cp", "tp", "pp"), ("dp_cp", "tp", "pp")),
        (TEXT, True, ("dp_cp", "tp"), ("dp_cp",)),
        (HEADS, False, ("dp_cp", "tp"), ("dp_cp", "tp")),
        (SPLIT, True, ("dp_cp",), ("dp_cp",)),
        (EXPERT, True, ("expert_dp",), ("expert_dp",)),
    ],
)
def test_gradients_are_summed_over_ranks_with_different_tokens(sharding, sequence_parallel, copies, summed):
    """Gradients of copies are summed if each copy sees a part of the tokens, not if all see the same tokens."""
    assert sharding.replicated_over == copies
    assert sharding.reduced_over(sequence_parallel=sequence_parallel) == summed


def test_megatron_reads_exactly_these_sums():
    """`sequence_parallel`: over TP; `pipeline_parallel`: over stages; `allreduce=False`: over the expert's ranks."""
    for sharding in (ParameterSharding(), ParameterSharding(**EVERY_STAGE), TEXT, HEADS, SPLIT, EXPERT):
        read = megatron_attributes(sharding, sequence_parallel=True, pipeline=True, first_stage=False)
        summed = sharding.reduced_over(sequence_parallel=True)
        assert (read["sequence_parallel"], read["pipeline_parallel"]) == ("tp" in summed, "pp" in summed)
        assert read["allreduce"] == ("dp_cp" in summed)
        assert read["tensor_model_parallel"] == (sharding == SPLIT)
        assert read["partition_dim"] == (1 if sharding == SPLIT else -1)
        assert read["shared"] == read["shared_embedding"] == sharding.every_stage


@pytest.mark.parametrize(
    ("pipeline", "first", "shared"), [(False, True, False), (True, True, False), (True, False, True)]
)
def test_one_replica_of_several_stages_counts_in_the_gradient_norm(pipeline, first, shared):
    sharding = ParameterSharding(**EVERY_STAGE)
    read = megatron_attributes(sharding, sequence_parallel=False, pipeline=pipeline, first_stage=first)
    assert (read["shared"], read["shared_embedding"]) == (shared, pipeline)


def test_a_parameter_without_a_sharding_is_named():
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3)})
    set_sharding(model["stem"].weight, ParameterSharding())
    options = {"sequence_parallel": False, "pipeline": False, "first_stage": True, "sums_head_norms": False}
    with pytest.raises(ConfigError, match=r"parameter stem\.bias of shape \(8,\) has no sharding"):
        write_attributes(model, **options)
    with pytest.raises(ConfigError, match=r"stem\.bias"):
        explain(model, AxisSizes())
    replicate_on_all_stages([model["stem"].weight])
    assert sharding_of(model["stem"].weight) == ParameterSharding(every_stage=True)


@pytest.mark.parametrize(
    ("name", "summed", "fits"), [("q_layernorm", True, True), ("q_layernorm", False, False), ("norm", True, False)]
)
def test_a_norm_of_heads_must_have_the_name_that_megatron_sums(name, summed, fits):
    model = nn.ParameterDict({name: set_sharding(nn.Parameter(torch.ones(4)), HEADS)})
    options = {"sequence_parallel": False, "pipeline": False, "first_stage": True, "sums_head_norms": summed}
    if fits:
        write_attributes(model, **options)
        return
    with pytest.raises(ConfigError, match=rf"parameter {name} covers the heads.*qk_layernorm"):
        write_attributes(model, **options)


def test_every_parameter_has_its_sharding_on_every_axis():
    """TP 2 + SP, PP 2, EP 2, with four ranks each: experts have 2 copies, and each sum over ranks is listed once."""
    config = MovieGenConfig(
        hidden_size=32,
        num_layers=4,
        num_attention_heads=4,
        num_query_groups=2,
        num_experts=4,
        ffn_hidden_size=48,
        context_size=12,
    )
    sizes = AxisSizes({"tp": 2, "pp": 2, "dp_cp": 2, "expert_dp": 2}, experts=2, sequence_parallel=True)
    lines = explain(build_on_meta(config), sizes).splitlines()
    rows = {cells[0]: cells[1:] for cells in (tuple(filter(None, map(str.strip, line.split("  ")))) for line in lines)}
    layer, everywhere = "layers.0-3.", "TP 2, PP 2, DP x CP 2"
    assert rows == rows | {
        "parameter": ("global shape", "split over", "replicated over", "gradient reduced over"),
        f"{layer}attention.linear_qkv.weight": ("64 x 32", "TP 2, dim 0", "DP x CP 2", "DP x CP 2"),
        f"{layer}attention.linear_proj.weight": ("32 x 32", "TP 2, dim 1", "DP x CP 2", "DP x CP 2"),
        f"{layer}attention.q_layernorm.weight": ("8", "-", "TP 2, DP x CP 2", "TP 2 (own heads), DP x CP 2"),
        f"{layer}mlp.router.weight": ("4 x 32", "-", "TP 2, DP x CP 2", "TP 2 (sequence shards), DP x CP 2"),
        f"{layer}mlp.experts.0-3.linear_fc2.weight": ("32 x 48", "EP 2, by expert", "expert DP 2", "expert DP 2"),
        "text.null": ("12", "-", everywhere, "PP 2 (stages), DP x CP 2"),
        "conditioner.time.linear_1.bias": ("32", "-", everywhere, "TP 2 (sequence shards), PP 2 (stages), DP x CP 2"),
    }
