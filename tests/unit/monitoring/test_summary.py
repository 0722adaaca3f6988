"""The first line and the last two lines that a run prints."""

import math
import shlex
from types import SimpleNamespace

import pytest

from dit.monitoring.run_log import drawing_command, headline, how_it_went
from dit.monitoring.sinks import JsonlSink, current_records
from dit.parallel.dims import ParallelConfig, ParallelDims
from launch.config_file import built
from launch.sample import build_parser
from launch.train import call_recipe


@pytest.mark.parametrize(("instances", "words"), [(1, "x DP 4 (fsdp) |"), (2, "x DP 4 (fsdp, 2 instances) |")])
def test_the_headline_names_the_instances_of_hybrid_sharding(instances, words):
    config = built(call_recipe("tiny_dit"))
    config.parallel = ParallelConfig(data_parallel="fsdp", num_distributed_optimizer_instances=instances)
    state = SimpleNamespace(shards=[], step=0)
    assert words in headline(config, ParallelDims(4, 4, 1, 2, 1), state, resumed=False)


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
    assert how_it_went(path, 8, 9, 2.0, 8).endswith(
        "the same command without this training.stop_at_step continues the run"
    )


def test_a_run_that_was_longer_before_tells_that_no_step_was_trained(tmp_path):
    line = how_it_went(tmp_path / "metrics.jsonl", 9, 8, 1.0)
    assert line.startswith("no step was trained, because this run has 9 steps and training.num_steps=8; give a larger")


@pytest.mark.parametrize("details", [None, [1], {}, {"to_step": None}, {"to_step": "x"}, {"to_step": math.inf}])
def test_a_rewind_with_damaged_details_drops_no_step(details):
    steps = [{"kind": "scalars", "step": step, "attempt": 1, "time": step} for step in (1, 2)]
    rewind = {"kind": "incident", "incident": "rewind", "details": details, "step": 3, "attempt": 1, "time": 3}
    assert current_records([*steps, rewind]) == [*steps, rewind]


def test_a_loss_that_is_not_a_number_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "scalars", "step": 9, "time": 1, "attempt": 1, "loss": [], "held_out/loss": "x"}\n')
    assert how_it_went(path, 9, 9, 1.0) == "finished step 9 of 9 after 1s"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, []),
        ({"frames": 8}, ["--out", "samples.gif"]),
        ({"text_encoder": "all-minilm-l6-v2"}, ["--prompt", "a text"]),
        ({"text_encoder": "all-minilm-l6-v2", "prompts": ["the letter Q"]}, []),
        ({"pictures": ["--reference", "--control"]}, ["--reference", "picture.png", "--control", "picture.png"]),
        ({"pictures": ["--first-frame"]}, ["--first-frame", "picture.png"]),
    ],
)
def test_the_printed_command_is_accepted_by_a_shell_and_the_sampler(arguments, words):
    command = drawing_command("runs/my run", **({"frames": 1, "text_encoder": None, "prompts": None} | arguments))
    words_of_command = shlex.split(command)
    assert words_of_command == ["python", "-m", "launch.sample", "--checkpoint", "runs/my run", *words]
    assert build_parser().parse_args(words_of_command[3:]).checkpoint == "runs/my run"


def test_the_printed_command_names_both_models_of_a_pair():
    high, low = (drawing_command("run", 1, None, None, times=times) for times in ((0.875, 1.0), (0.0, 0.875)))
    assert high.endswith("launch.sample --checkpoint run --low-noise LOW")
    assert low.endswith("launch.sample --checkpoint HIGH --low-noise run")
