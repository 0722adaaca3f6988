"""The last two lines that a run prints."""

import math
import shlex

import pytest

from dit.monitoring.run_log import drawing_command, how_it_went
from dit.monitoring.sinks import JsonlSink


def test_the_best_held_out_loss_is_that_of_all_attempts(tmp_path):
    """Lower is better and nan does not count; of a repeated step, the last value counts."""
    path = tmp_path / "metrics.jsonl"
    for steps in ({2: 0.9, 4: 0.1, 6: math.nan}, {4: 0.5, 6: 0.75, 8: 0.625}):
        sink = JsonlSink(path)
        for step, held_out in steps.items():
            sink.scalars(step, {"loss": step / 16}, 8 * step)
            sink.scalars(step, {"held_out/loss": held_out}, 8 * step)
        sink.close()
    assert how_it_went(path, 8, 8, 185.0) == (
        "finished step 8 of 8 after 3m05s, loss 0.5000, best held-out loss 0.5000 at step 4"
    )
    assert how_it_went(path, 8, 9, 2.0).startswith("stopped at step 8 of 9 after 2s")
    assert how_it_went(path, 8, 9, 2.0).endswith("the same command continues the run")
    assert how_it_went(path, 8, 9, 2.0, 8).endswith("a later training.stop_at_step, or none, continues the run")


def test_a_run_that_was_longer_before_tells_that_no_step_was_trained(tmp_path):
    line = how_it_went(tmp_path / "metrics.jsonl", 9, 8, 1.0)
    assert line.startswith("no step was trained, because this run has 9 steps and training.num_steps=8; give a larger")


DAMAGED = {
    "zeros": b"\0" * 200,
    "no table": b"[1]",
    "no step": b'{"kind": "scalars"}',
    "incident without a step": b'{"kind": "incident", "time": 1, "attempt": 1, "incident": "rewind"}',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"kind": "\xff"}',
    "step of 400 digits": b'{"kind": "scalars", "step": 1' + b"0" * 400 + b', "time": 1, "attempt": 1}',
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_damaged_line_does_not_end_a_run(tmp_path, name, place, caplog):
    """The line is skipped and counted; the number of the next attempt is still right."""
    path = tmp_path / "metrics.jsonl"
    for step in (4, 8):
        if place == ("first" if step == 4 else "middle"):
            path.write_bytes((path.read_bytes() if path.exists() else b"") + DAMAGED[name] + b"\n")
        sink = JsonlSink(path)
        assert sink.attempt == step // 4
        sink.scalars(step, {"loss": step / 16, "held_out/loss": 1 / step}, 8 * step)
        sink.close()
    if place == "last":
        path.write_bytes(path.read_bytes() + DAMAGED[name] + b"\n")
    sink = JsonlSink(path)
    assert sink.attempt == 3
    sink.close()
    losses = "loss 0.5000, best held-out loss 0.1250 at step 8"
    assert how_it_went(path, 8, 8, 1.0) == f"finished step 8 of 8 after 1s, {losses}"
    assert "skipped 1 damaged lines of 3" in caplog.text


def test_a_loss_that_is_not_a_number_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "scalars", "step": 9, "time": 1, "attempt": 1, "loss": [], "held_out/loss": "x"}\n')
    assert how_it_went(path, 9, 9, 1.0) == "finished step 9 of 9 after 1s"


def test_a_run_without_lines_has_no_losses_in_its_summary(tmp_path):
    JsonlSink(tmp_path / "metrics.jsonl").close()
    assert how_it_went(tmp_path / "metrics.jsonl", 4, 4, 1.0) == "finished step 4 of 4 after 1s"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, []),
        ({"frames": 8}, ["--out", "samples.gif"]),
        ({"text_encoder": "all-minilm-l6-v2"}, ["--prompt", "a text"]),
        ({"text_encoder": "all-minilm-l6-v2", "prompts": ["the letter Q"]}, []),
        ({"pictures": ["--reference", "--control"]}, ["--reference", "picture.png", "--control", "picture.png"]),
    ],
)
def test_the_printed_command_is_accepted_by_a_shell_and_the_sampler(arguments, words):
    from launch.sample import build_parser

    command = drawing_command("runs/my run", **({"frames": 1, "text_encoder": None, "prompts": None} | arguments))
    words_of_command = shlex.split(command)
    assert words_of_command == ["python", "-m", "launch.sample", "--checkpoint", "runs/my run", *words]
    assert build_parser().parse_args(words_of_command[3:]).checkpoint == "runs/my run"
