"""Limits on the memory passes, kernels and saved tensors of a layer; the counts do not depend on the machine."""

import json

import pytest

from benchmarks.passes import CASES, OUTSIDE, main
from tests.integration import actions
from tests.support.ranks import Job, run_jobs

# Forward and backward passes of two sub-layers, and of three. The statistics of the norms and the texts (77 tokens per
# sample) add some tenths. One backward pass is sums of 32 rows for the gradients of modulations and biases (float32,
# written and read once; an H100's cache holds them).
BARS = {False: (16.1, 31.4), True: (26.2, 42.6)}
KERNELS, SAVED = {False: 18, True: 29}, 16
SELECTIVE = "fused, selective recompute"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Compute the table in another process: this process could not create a world of one rank afterwards."""
    arguments = {"main": main, "arguments": ["--json", "--kinds", "fused", SELECTIVE]}
    ended = run_jobs(tmp_path_factory.mktemp("passes"), {"table": Job(actions.command, arguments)})["table"]
    return json.loads(ended.out.splitlines()[-1])


def passes(row, direction):
    return row[direction]["passes"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_layers_meet_the_bars(table, case):
    row = table[f"{case.name}, fused"]
    for direction, bar in zip(("forward", "backward"), BARS[case.cross]):
        assert passes(row, direction) <= bar, row[direction]["largest"]
    assert row["forward"]["kernels"] + row["backward"]["kernels"] <= KERNELS[case.cross]
    assert round(table[f"{case.name}, {SELECTIVE}"]["saved"]) <= SAVED


def test_a_ragged_pack_with_padding_has_the_cost_of_a_dense_pack(table):
    """Modulation is not expanded to tokens, and padding is not removed by a copy."""
    dense, padded = (table[f"DiT {kind}, fused"] for kind in ("dense", "ragged + padding"))
    for direction in ("forward", "backward"):
        assert passes(padded, direction) == pytest.approx(passes(dense, direction), abs=0.1)


def test_recompute_counts_the_bytes_of_recomputed_operations(table):
    """GELU 8; two or three modulated norms, 2 each; queries and keys 6: reads and writes of complete tensors."""
    for name, again in (("DiT dense", 8 + 2 * 2), ("DiT-cross one sample", 8 + 3 * 2 + 6)):
        once, twice = (table[f"{name}, fused{kind}"] for kind in ("", ", selective recompute"))
        assert passes(twice, "backward") - passes(once, "backward") == pytest.approx(again, abs=0.1)
        assert passes(twice, "forward") == passes(once, "forward")


def test_the_fused_update_reads_and_writes_everything_once(table):
    """Gradient 1; weights, both moments and average 2 each; a copy of half the bytes 0.5.

    Two kernels: with weight decay and without. Eager: AdamW 4 + 3, and 1 for the clipped gradients that it writes back,
    copy 1 + 0.5, average 2 + 1.
    """
    fused, eager = (table[f"optimizer's update, {name}"] for name in ("fused", "eager"))
    assert fused["passes"] == pytest.approx(1 + 4 * 2 + 0.5, rel=1e-3)
    assert eager["passes"] == pytest.approx(7 + 1 + 1.5 + 3, rel=1e-2)
    assert [name for name, passes in fused["largest"] if passes > 1e-6] == ["adamw"]
    assert fused["kernels"] <= 2 + 9  # 9 on scalars: the factor, the guard, Adam's count


def test_a_step_outside_the_layers_is_little_more_than_plain_pytorch(table):
    """Plain: norm 1, clip 2, AdamW 7, average 3. Ours: gradients to the main ones 2, norm 1, then the update.

    Fused, that is AdamW and average in 9; eager, an AdamW that writes clipped gradients back, 8, and the average, 3.
    """
    counted = {name.rsplit(", ", 1)[1]: table[name]["passes"] for name in OUTSIDE}
    assert counted == pytest.approx({"eager": 2 + 1 + 8 + 3, "fused": 2 + 1 + 9, "plain PyTorch": 13}, rel=1e-4)
    assert max(counted.values()) <= 1.2 * counted["plain PyTorch"]


def test_the_plain_block_is_counted_as_by_hand(table):
    """Forward: two norms 2 + 2, scale 2 x 2 (1 + scale is per sample), shift 2 x 2, gates 2 x 2, sums 2 x 3, GELU 8.

    Saved: x, its norm and modulated norm, q, k, v, the attention's output, and so on: 20 tensors of the hidden size.
    """
    row = table["plain PyTorch DiT block"]
    assert passes(row, "forward") == pytest.approx(2 * 2 + 2 * 2 + 2 * 2 + 2 * 2 + 2 * 3 + 8, abs=0.1)
    assert row["saved"] == pytest.approx(20, abs=0.1)
    assert (row["forward"]["products"], row["backward"]["products"]) == (5 + 1, 5 * 2 + 1)
