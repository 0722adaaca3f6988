"""Initial weights are a function of their address, so every layout starts from the same model."""

import math

import pytest
import torch
from torch import Tensor, nn

from dit.backends import init as addressed_init
from dit.backends.init import ONES, ZEROS, Init, draw, initialize_weights, normal, with_init, xavier_uniform
from dit.backends.sharding import ParameterSharding, set_sharding
from dit.errors import ConfigError

CPU = torch.device("cpu")
INITS = {"normal": normal(0.02), "uniform": xavier_uniform(37, 50), "ones": ONES, "zeros": ZEROS}


def full(init: Init, *, seed: int = 1, name: str = "layers.0.weight", rows: int = 50, columns: int = 37) -> Tensor:
    return draw(init, seed, name, range(rows), range(columns), CPU)


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_any_block_equals_a_part_of_the_full_matrix(init: Init):
    """A rank that draws only its slice gets the same values, also where the slice starts inside a block of four."""
    matrix = full(init)
    for rows, columns in [
        ((0, 50), (0, 37)),
        ((0, 25), (0, 37)),
        ((13, 40), (3, 6)),
        ((49, 50), (36, 37)),
        ((5, 6), (1, 30)),
    ]:
        block = draw(init, 1, "layers.0.weight", range(*rows), range(*columns), CPU)
        assert torch.equal(block, matrix[slice(*rows), slice(*columns)])


def test_seed_and_name_address_independent_values():
    base = full(normal(1.0), rows=200, columns=100)
    changes = [{"seed": 2}, {"seed": 1 + (1 << 32)}, {"name": "layers.1.weight"}, {"name": "layers.0.bias"}]
    for change in changes:
        other = full(normal(1.0), rows=200, columns=100, **change)
        correlation = (base * other).mean()
        # Five standard deviations of the mean of 20,000 products of independent normals.
        assert abs(correlation) < 5 / math.sqrt(20_000), change
    assert torch.equal(base, full(normal(1.0), rows=200, columns=100))


def test_normal_has_the_moments_of_a_normal():
    x = full(normal(0.02), rows=1000, columns=400) / 0.02
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)


def test_neighbours_are_independent():
    """Rows, columns and the four lanes of a counter are uncorrelated."""
    x = full(normal(1.0), rows=1000, columns=400)
    bound = 5 / math.sqrt(x.numel())
    for shift in (1, 2, 3, 4):
        assert abs((x[:, shift:] * x[:, :-shift]).mean()) < 1.01 * bound
        assert abs((x[shift:] * x[:-shift]).mean()) < 1.01 * bound


def test_xavier_fills_its_interval_evenly():
    """Uniform in +-sqrt(6 / (fan_in + fan_out)) of the global sizes: variance a^2 / 3, and the ends are reached."""
    x = full(xavier_uniform(300, 100), rows=1000, columns=400)
    bound = math.sqrt(6 / 400)
    assert x.abs().max() <= bound
    assert x.max() > 0.999 * bound
    assert x.min() < -0.999 * bound
    assert x.var().item() == pytest.approx(bound**2 / 3, rel=0.01)
    assert abs(x.mean()) < 5 * bound / math.sqrt(3 * x.numel())


class Shard(nn.Module):
    """The parameters of one of `tp_size` ranks: weights split by rows and by columns, a split and a full vector."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.column = self._split(torch.empty(24 // tp_size, 10), 0)
        self.row = self._split(torch.empty(10, 24 // tp_size), 1)
        self.bias = self._split(torch.empty(24 // tp_size), 0)
        self.vector = self._split(torch.empty(7), None)
        self.table = self._split(torch.empty(5, 3), None)
        self.kernel = self._split(torch.empty(4, 3, 2, 2), None, xavier_uniform(12, 16))

    @staticmethod
    def _split(x: Tensor, dim: int | None, init: Init = normal(1.0)) -> nn.Parameter:  # noqa: B008 (frozen)
        return set_sharding(with_init(nn.Parameter(x), init), ParameterSharding(split_dim=dim))


@pytest.mark.parametrize("tp_size", [2, 3, 8])
def test_ranks_join_to_the_model_of_one_rank(tp_size: int):
    """Split parameters concatenate along their split dimension; replicated ones are equal on every rank."""
    alone = Shard(1)
    initialize_weights(alone, 5, tp_rank=0)
    ranks = [Shard(tp_size) for _ in range(tp_size)]
    for rank, shard in enumerate(ranks):
        initialize_weights(shard, 5, tp_rank=rank)
    assert torch.equal(torch.cat([shard.column for shard in ranks]), alone.column)
    assert torch.equal(torch.cat([shard.row for shard in ranks], 1), alone.row)
    assert torch.equal(torch.cat([shard.bias for shard in ranks]), alone.bias)
    for shard in ranks:
        assert all(torch.equal(getattr(shard, n), getattr(alone, n)) for n in ("vector", "table", "kernel"))


def test_initial_values_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch):
    """Large tensors are drawn in chunks of rows to limit memory; the values equal those of one draw."""
    one, many = Shard(1), Shard(1)
    initialize_weights(one, 5, tp_rank=0)
    monkeypatch.setattr(addressed_init, "_CHUNK_ROWS_ELEMENTS", 23)
    initialize_weights(many, 5, tp_rank=0)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters()))


def test_lower_precision_starts_from_rounded_float32_weights():
    """A bf16 model starts from the rounded float32 weights."""
    full, half = Shard(1), Shard(1).bfloat16()
    initialize_weights(full, 5, tp_rank=0)
    initialize_weights(half, 5, tp_rank=0)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(full.parameters(), half.parameters()))


def test_a_parameter_without_an_initialisation_is_refused_by_name():
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        set_sharding(parameter, ParameterSharding())
    with_init(layer.weight, ZEROS)
    with pytest.raises(ConfigError, match=r"parameter bias of shape \(2,\) has no initialisation"):
        initialize_weights(layer, 1, tp_rank=0)
