"""The first line and the last two lines that a run prints."""

import math
import shlex
from types import SimpleNamespace

import pytest

from dit.monitoring.run_log import drawing_command, headline, how_it_went
from dit.monitoring.sinks import current_records
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


def test_the_closing_line_has_the_step_and_how_to_continue():
    assert how_it_went(8, 8, 185.0) == "finished step 8 of 8 after 3m05s"
    assert how_it_went(8, 9, 2.0) == "stopped at step 8 of 9 after 2s, the same command continues the run"
    assert how_it_went(8, 9, 2.0, 8).endswith("the same command without this training.stop_at_step continues the run")
    line = how_it_went(9, 8, 1.0)
    assert line.startswith("no step was trained, because this run has 9 steps and training.num_steps=8; give a larger")


@pytest.mark.parametrize("details", [None, [1], {}, {"to_step": None}, {"to_step": "x"}, {"to_step": math.inf}])
def test_a_rewind_with_damaged_details_drops_no_step(details):
    steps = [{"kind": "scalars", "step": step, "attempt": 1, "time": step} for step in (1, 2)]
    rewind = {"kind": "incident", "incident": "rewind", "details": details, "step": 3, "attempt": 1, "time": 3}
    assert current_records([*steps, rewind]) == [*steps, rewind]


@pytest.mark.parametrize(("takes_prompt", "words"), [(False, []), (True, ["--prompt", "a text"])])
def test_the_printed_command_is_accepted_by_a_shell_and_the_sampler(takes_prompt, words):
    words_of_command = shlex.split(drawing_command("runs/my run", takes_prompt=takes_prompt))
    assert words_of_command == ["python", "-m", "launch.sample", "--checkpoint", "runs/my run", *words]
    assert build_parser().parse_args(words_of_command[3:]).checkpoint == "runs/my run"
