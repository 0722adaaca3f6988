"""Every layer is on exactly one stage, in order; invalid sizes are refused with numbers and a cure."""

import pytest

from dit.errors import ConfigError
from dit.models.dit.config import DiTConfig
from dit.parallel.dims import ParallelConfig, check_parallel
from dit.parallel.pipeline import layers_in_flight, split_layers, stages
from dit.settings import TrainingConfig

SPLITS = [
    (8, 1, None, None),
    (8, 4, None, None),
    (8, 2, 2, None),
    (12, 3, 4, None),
    (7, 3, None, [2, 3, 2]),
    (9, 2, 2, [1, 3, 3, 2]),
]


@pytest.mark.parametrize(("num_layers", "pp", "vpp", "layers"), SPLITS)
def test_consecutive_stages_equal_the_network(num_layers, pp, vpp, layers):
    by_rank = [stages(num_layers, pp, rank, vpp, layers) for rank in range(pp)]
    # Activations of chunk c go from the last rank to chunk c + 1 on the first rank.
    row = [by_rank[rank][chunk] for chunk in range(vpp or 1) for rank in range(pp)]
    assert [layer for stage in row for layer in stage.layers] == list(range(num_layers))
    assert [stage.first for stage in row] == [True] + [False] * (len(row) - 1)
    assert [stage.last for stage in row] == [False] * (len(row) - 1) + [True]
    assert [len(stage.layers) for stage in row] == (layers or [num_layers // len(row)] * len(row))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((7, 4), r"num_layers=7.*size=4; use parallel.pipeline_layers=\[2, 2, 2, 1\]"),
        ((6, 2, 2), r"num_layers=6.*2 x .*=2 = 4 stages; use parallel.pipeline_layers=\[1, 2, 2, 1\]"),
        ((3, 4), r"num_layers=3.*size=4; change the number of stages \(to one of \[1, 3\]\)"),
        ((8, 2, None, [3, 3, 2]), "has 3 stages but .* has 2"),
        ((8, 2, None, [3, 4]), "adds up to 7 .* num_layers=8"),
        ((8, 2, None, [8, 0]), "smallest stage 0"),
    ],
)
def test_a_wrong_split_is_refused_with_a_legal_one(arguments, says):
    with pytest.raises(ConfigError, match=says):
        split_layers(*arguments)


def test_the_suggested_split_is_legal():
    for num_layers in range(4, 12):
        try:
            split_layers(num_layers, 4)
        except ConfigError as error:
            suggested = str(error).split("pipeline_layers=[")[1].split("]")[0]
            split_layers(num_layers, 4, None, [int(n) for n in suggested.split(",")])


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_1f1b_saves_at_most_the_full_model_once(pp):
    split = split_layers(8, pp)
    in_flight = [layers_in_flight(split, pp, rank, micro_batches=8) for rank in range(pp)]
    assert in_flight[0] == 8
    assert in_flight[-1] == 8 // pp
    assert layers_in_flight(split, pp, 0, micro_batches=1) == 8 // pp


def test_interleaving_saves_more_activations_during_its_longer_warm_up():
    """On the first rank, (p - 1) / (p v) of the model more than 1F1B (Narayanan et al. 2021, section 2.2)."""
    assert layers_in_flight(split_layers(16, 4, 2), 4, 0, micro_batches=8) == 16 * (1 + 3 / 8)


def checked(world_size=8, num_layers=8, global_batch_size=8, **parallel):
    model, training = DiTConfig(num_layers=num_layers), TrainingConfig(global_batch_size=global_batch_size)
    return check_parallel(model, ParallelConfig(**parallel), training, world_size)


def test_pipeline_ranks_share_their_samples():
    dims = checked(pipeline_model_parallel_size=4)
    assert (dims.data_parallel_size, dims.micro_batches) == (2, 4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size=0 must be a whole number of at least 1"),
        ({"pipeline_model_parallel_size": 8, "num_layers": 12}, r"num_layers=12 .*pipeline_layers=\[1, 2, 2, 2, 2"),
        ({"pipeline_model_parallel_size": 3, "num_layers": 9}, "world size 8 .* PP 3 .* = 3; start 9 ranks"),
        ({"virtual_pipeline_model_parallel_size": 2}, "at least 2, got 1; set it to None"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1}, "=1 needs at least 2 chunks"),
        (
            {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "global_batch_size": 12},
            "no multiple of pipeline_model_parallel_size=4 micro-batches to each of 2 .* use 8 or 16",
        ),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused_with_numbers(settings, says):
    with pytest.raises(ConfigError, match=says):
        checked(**settings)
