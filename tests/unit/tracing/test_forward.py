"""Operation counts of a forward pass: exact for every shape, from traces of a few."""

import random
from functools import cache

import pytest

from benchmarks.parallel_training import tiny_model
from dit.errors import ConfigError
from dit.models.dit.model import DiT
from dit.tracing.forward import ForwardCost, LinearForm
from dit.tracing.packs import PackShape

GRIDS = [(1, 4, 4), (1, 6, 3), (4, 4, 4), (2, 8, 8), (3, 4, 8), (1, 1, 1), (5, 3, 7)]


@pytest.mark.parametrize(
    "sizes",
    [{"backbone": "stdit", "num_layers": 4}, {"num_layers": 3, "num_experts": 4, "moe_capacity_factor": 1.3}],
    ids=["stdit", "expert_choice"],
)
def test_a_few_traces_count_every_shape(sizes, monkeypatch):
    """Also for attention within frames and columns, and for a capacity that is rounded up per sample."""
    model, draw, traced = tiny_model(hidden_size=64, **sizes), random.Random(3), []
    cost, exact = ForwardCost(model), cache(ForwardCost(model).traced)
    monkeypatch.setattr(cost, "traced", lambda pack, count=cost.traced: traced.append(pack) or count(pack))
    for _ in range(60):
        grid, text = draw.choice(GRIDS), draw.choice((1, 3, 8, 30))
        assert cost.of_sample(grid, text).total == exact(PackShape((grid,), (text,))).total
    assert len(traced) <= 20, len(traced)


def test_the_cost_of_layers_is_the_difference_to_a_second_run():
    few, more = (tiny_model(hidden_size=64, num_layers=n) for n in (2, 4))
    assert ForwardCost(few).of_sample((1, 4, 4)).layers * 2 == ForwardCost(more).of_sample((1, 4, 4)).layers
    ends = [cost.total - cost.layers for cost in (ForwardCost(m).of_sample((1, 4, 4)) for m in (few, more))]
    assert ends[0] == ends[1] > 0


def test_layers_that_differ_without_a_layer_kind_are_refused_with_the_cure(monkeypatch):
    """For example, in a backbone whose blocks read another block."""
    model = tiny_model(hidden_size=64, num_layers=3)
    monkeypatch.setattr(DiT, "layer_inputs", lambda self, *_: self.layers["2"])
    with pytest.raises(ConfigError, match=r"DiTConfig: the forward pass of layers 0 to 0 without.*define `layer_kind`"):
        ForwardCost(model).of_sample((1, 4, 4))


def test_samples_of_a_pack_add_up():
    cost = ForwardCost(tiny_model(backbone="dit_cross", hidden_size=64, num_layers=2))
    pack = cost.traced(PackShape(((1, 4, 4), (2, 3, 5)), (3, 7)))
    assert pack.total == cost.of_sample((1, 4, 4), 3).total + cost.of_sample((2, 3, 5), 7).total


def test_a_form_predicts_only_within_its_examples():
    """For 3 x + 2: it answers after two more examples than it needs, and never outside of their span."""
    form = LinearForm()
    for x in (1, 2, 5):
        form.learn([1, x, 0], [3 * x + 2])
        assert form.answer([1, 7, 0], 1) is None
    form.learn([1, 6, 0], [20])
    assert form.answer([1, 7, 0], 1) == [23]
    assert form.answer([1, 7, 1], 1) is None


def test_a_contradiction_discards_a_form():
    """A cost that is no linear function of its features is detected, and every shape is traced from then on."""
    form = LinearForm()
    for x in range(1, 6):
        form.learn([1, x], [x**3])
    assert not form.holds
    assert form.answer([1, 2], 1) is None
