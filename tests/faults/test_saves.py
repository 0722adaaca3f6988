"""Killed saves and resumes: the campaign described in docs/checkpoints.md."""

from pathlib import Path

import pytest

from tests.faults.kill_campaign import ASYNC, ENTERED, KILLS, KINDS, RESUME, SYNC, campaign, table
from tests.integration import actions
from tests.integration.runs import mock
from tests.support.ranks import Job, run_jobs

BLOCKING = 0.25  # of the duration of a synchronous save
LARGE = {"model__hidden_size": 512, "model__num_layers": 3, "model__num_attention_heads": 8}


@pytest.mark.slow
def test_a_run_killed_in_every_phase_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """`campaign` compares losses, samples and the last checkpoint to the bit; kills hit every phase in both modes."""
    rows = campaign(tmp_path, KILLS)
    print(table(rows))
    assert len(rows) == KILLS
    for mode, phases in (("synchronous", SYNC), ("asynchronous", ASYNC)):
        struck = {row.phase for row in rows if row.mode == mode}
        seen_in_time = set(ENTERED) - (
            {"sealing"} if mode == "asynchronous" else set()
        )  # the other phases may end before the kill
        assert struck >= {*RESUME, *phases} & seen_in_time, mode
        assert {row.what for row in rows if row.mode == mode} >= set(KINDS)
    assert any(row.what == "a writer" for row in rows)


@pytest.mark.slow
def test_a_background_save_blocks_at_most_a_quarter_of_a_synchronous_save(tmp_path: Path) -> None:
    """Applies to wall time and CPU time of the training process: medians of alternating saves of about 200 MB."""
    job = Job(actions.save_cost, {"arguments": mock(tmp_path, **LARGE), "rounds": 7, "folder": tmp_path / "disk"})
    cost = run_jobs(tmp_path / "world", {"cost": job})["cost"]
    print(cost)
    assert 0.15 < cost["state_gib"] < 0.3
    assert cost["cpu"] <= BLOCKING
    assert cost["wall"] <= BLOCKING
