"""Rows of the table of layouts, with checkpoints to and from one rank; `make test-parallel` runs the slow ones."""

import math

import pytest
import torch

from benchmarks.parallel_matrix import MISSION, Outcome, not_carried, run, table, write_page
from dit.verify.compare import BOUNDS, compare_training
from tests.support.reference import assert_equal_training

ROWS = MISSION  # `test_layouts.py` has the smaller layouts


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(ROWS, tmp_path_factory.mktemp("matrix"))


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_layout_equals_one_rank(outcomes, row):
    assert outcomes[row.name].differences == ()


def training(**changes) -> dict:
    """Return the report of three training steps with two parameters, with `changes`."""
    named = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(4)}
    reported = {"losses": [1.0, 0.8, 0.7], "grad_norms": [2.0, 1.0, 0.5], "gradients": named, "parameters": named}
    return {**reported, "drifted": [], **changes}


def with_b(*values: float) -> dict:
    return {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(values)}


EQUAL = training()
UNEQUAL = {
    "NaN gradient": (EQUAL, training(gradients=with_b(1.0, math.nan, 1.0, 1.0)), "gradients of b"),
    "NaN loss": (EQUAL, training(losses=[1.0, math.nan, 0.7]), "losses of step 1"),
    "no gradient on one rank": (training(gradients=with_b(0.0, 0.0, 0.0, 0.0)), EQUAL, "gradients of b"),
    "no gradient on either": (training(gradients=with_b(0.0, 0.0, 0.0, 0.0)),) * 2 + ("gradients of b",),
    "gradient that a layout lacks": (EQUAL, training(gradients={"a": torch.tensor([3.0, 4.0])}), "gradients of b"),
    "gradient that one rank lacks": (training(gradients={"a": torch.tensor([3.0, 4.0])}), EQUAL, "gradients of b"),
    "wrong gradient": (EQUAL, training(gradients=with_b(1.0, 1.0, 1.0, 1.00004)), "gradients of b"),
    "gradient of one element": (EQUAL, training(gradients=with_b(1.0)), "gradients of b"),
    "wrong weights after three steps": (EQUAL, training(parameters=with_b(1.0, 1.0, 1.0, 1.0004)), "parameters of b"),
    "weights that a layout lacks": (EQUAL, training(parameters={"a": torch.tensor([3.0, 4.0])}), "parameters of b"),
    "five times the gradient norm": (EQUAL, training(grad_norms=[2.0, 5.0, 0.5]), "grad_norms of step 1"),
    "wrong loss": (EQUAL, training(losses=[1.0, 0.8, 0.70002]), "losses of step 2"),
    "a step less": (EQUAL, training(losses=[1.0, 0.8]), "losses of step 2"),
    "copies that drifted": (EQUAL, training(drifted=["b"]), "b: its copies differ"),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_every_difference_is_detected_and_shown(case):
    """Each case has exactly one named difference, also if the other batch of the layout is equal."""
    one, many, expected = UNEQUAL[case]
    with pytest.raises(AssertionError, match=expected):
        assert_equal_training(one, many)
    compared = compare_training(one, many)
    assert len(compared.differences) == 1
    for comparisons in ((compared, compare_training(EQUAL, EQUAL)), (compare_training(EQUAL, EQUAL), compared)):
        outcome = Outcome(comparisons, lost=())
        assert outcome.differences == compared.differences
        assert f"**differs** ({expected}" in table(ROWS[:1], {ROWS[0].name: outcome})
        failed = [kind for kind, error in outcome.errors.items() if not error <= BOUNDS[kind]]
        assert failed == [kind for kind in BOUNDS if expected.startswith(f"{kind} of")]


def test_equal_trainings_are_equal():
    """Differences of another summation order are within the bounds."""
    gradients, parameters = (with_b(1.0, 1.0, 1.0, last) for last in (1.00001, 1.0001))
    rounded = training(losses=[1.0, 0.8, 0.7000001], gradients=gradients, parameters=parameters)
    outcome = Outcome((compare_training(EQUAL, EQUAL), compare_training(EQUAL, rounded)), lost=())
    assert outcome.differences == ()
    assert table(ROWS[:1], {ROWS[0].name: outcome}).endswith("e-06")
    assert outcome.errors["parameters"] == pytest.approx(5e-5, rel=1e-2)  # 1e-4 of a vector of norm 2


def test_an_empty_comparison_is_not_equality():
    with pytest.raises(ValueError, match="0 values"):
        compare_training(training(losses=[]), training(losses=[]))


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({}, ()),
        ({"ema.a": torch.tensor([0.0, 1e-9])}, ("ema.a",)),
        ({"step": 6}, ("step",)),
        ({"drifted": ["a"]}, ("a",)),
    ],
)
def test_a_wrong_bit_in_a_checkpoint_is_detected_and_shown(changed, lost):
    written = {"weight.a": torch.ones(2), "ema.a": torch.zeros(2), "drifted": [], "step": 7}
    assert not_carried(written, {**written, **changed}) == lost
    outcome = Outcome((compare_training(EQUAL, EQUAL),), lost)
    text = table(ROWS[:1], {ROWS[0].name: outcome})
    assert ("a checkpoint changes it" in text) == ("**differs**" in text) == bool(outcome.differences) == bool(lost)


def test_the_page_keeps_its_text_around_the_table(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- parallel matrix: start -->\nold\n<!-- parallel matrix: end -->\nafter\n")
    write_page("new", path)
    assert path.read_text().split("\n") == [
        "before",
        "<!-- parallel matrix: start -->",
        "new",
        "<!-- parallel matrix: end -->",
        "after",
        "",
    ]
