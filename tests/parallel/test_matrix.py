"""The whole table of layouts; slow, so only `make test-parallel` runs it."""

import pytest

from benchmarks.parallel_matrix import MISSION, SMALL, Outcome, compare, not_carried, run, table, worse, write_readme

ROWS = [*SMALL, *MISSION]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(ROWS, tmp_path_factory.mktemp("matrix"))


@pytest.mark.matrix
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_layout_equals_one_rank(outcomes, row):
    assert outcomes[row.name].holds, outcomes[row.name]


def test_an_error_in_one_gradient_is_seen_and_shown():
    import torch

    one = {"gradients": {"a": torch.ones(3), "b": torch.ones(3)}, "losses": [1.0, 2.0], "drifted": []}
    off = {**one, "gradients": {"a": torch.ones(3), "b": torch.tensor([1.0, 1.0, 1.001])}}
    assert compare(one, one).holds
    found = worse(compare(one, one), compare(one, off))
    assert not found.holds
    assert found.worst == "b"
    assert "**differs** (b)" in table(ROWS[:1], {ROWS[0].name: found})
    assert not compare(one, {**one, "drifted": ["a"]}).holds
    assert not compare(one, {**one, "losses": [1.0, 2.1]}).holds


def test_a_bit_lost_in_a_checkpoint_is_seen_and_shown():
    import torch

    written = {"weight.a": torch.ones(2), "ema.a": torch.zeros(2), "drifted": [], "step": 7}
    read = {**written, "ema.a": torch.tensor([0.0, 1e-9])}
    assert not_carried(written, written) == ()
    assert not_carried(written, read) == ("ema.a",)
    row = ROWS[0]
    text = table([row], {row.name: Outcome(0.0, "a", 0.0, (), ("ema.a",))})
    assert "1 lost" in text
    assert "**differs**" in text


def test_readme_keeps_its_text_around_the_table(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- parallel matrix: start -->\nold\n<!-- parallel matrix: end -->\nafter\n")
    write_readme("new", path)
    assert path.read_text().split("\n") == [
        "before",
        "<!-- parallel matrix: start -->",
        "new",
        "<!-- parallel matrix: end -->",
        "after",
        "",
    ]
