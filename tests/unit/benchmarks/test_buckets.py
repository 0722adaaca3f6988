"""Losses of aspect buckets and of packs: small lists by hand, and the numbers of the page."""

import re

import pytest

from benchmarks.buckets import cover, losses
from benchmarks.packing import main
from energon_data.prepare.pictures import Fit
from tests.unit.launch.pages import ROOT


def test_a_picture_covers_the_nearest_bucket():
    """The bucket nearest to 3:2 is 1216 x 832; 1500 x 1000 is scaled to its height."""
    assert cover(1500, 1000) == (1248, 832, 1216, 832)
    assert cover(1024, 1024) == (1024, 1024, 1024, 1024)
    assert cover(512, 512) == (1024, 1024, 1024, 1024)


def test_bucket_shares_equal_a_calculation_by_hand():
    """Two squares, one enlarged, fill a batch of two; the third picture loses 32 columns and fills no batch."""
    found = losses([(2048, 2048), (512, 512), (1500, 1000)], cover, batch=2)
    cut, scaled = 2 * 1024**2 + 1216 * 832, 2 * 1024**2 + 1248 * 832
    assert found["cut"] == pytest.approx(1 - cut / scaled)
    kept, stored = 1024**2 + 512**2 + 1248 * 832, 2048**2 + 512**2 + 1500 * 1000
    assert found["shrunk"] == pytest.approx(1 - kept / stored)
    assert (found["enlarged"], found["dropped"]) == (1 / 3, 1 / 3)
    native = losses([(100, 70)], Fit(multiple_of=16).target)
    assert native == {"cut": pytest.approx(1 - 96 * 64 / 7000), "shrunk": 0, "enlarged": 0, "dropped": 0}


def test_the_page_has_the_numbers_of_the_command(capsys):
    assert main(["--pictures", "10000"]) == 0
    _, _, *rows = capsys.readouterr().out.strip().splitlines()
    buckets, packs, _ = (row.strip("| ").split(" | ")[1:] for row in rows)
    section = (
        (ROOT / "docs/data.md").read_text().partition("Of pictures of 512 to 2,048 pixels")[2].partition("\n\n")[0]
    )
    assert packs[2:] == ["0.0 %", "0.0 %"]
    assert re.findall(r"[\d.]+ %", section) == [packs[0], buckets[0], *buckets[2:]]
