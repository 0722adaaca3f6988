"""launch/train.sh: the commands that it starts, and its exit codes; tests/integration/test_slurm.py trains with it.

torchrun and the parsing of the command line are replaced by fast stand-ins; the script is the real one.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple, Optional

import pytest
from torch.distributed.run import get_args_parser

from launch import cli
from tests.support import slurm

TORCHRUN = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >>"{folder}/started"  # one write: nodes start at the same time
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >"{folder}/timeout"
cp "{folder}/record.json" "{folder}/run/exit.json" 2>/dev/null
cat "{folder}/refused" 2>/dev/null >"$DIT_EXIT_CODE_FILE"
exit "$(cat "{folder}/code")"
"""
PYTHON = """#!/bin/bash
if [[ "$1 $2" != "-m launch.train" ]]; then exec {python} "$@"; fi
[[ "$*" != *refused* ]] || exit 2
printf 'training:\\n  run_dir: {folder}/run\\n' >"${{@: -1}}"
"""


class Ended(NamedTuple):
    """A job that ended: its code, whether it is requeued, its output, and the command line of each torchrun."""

    code: int
    requeued: bool
    log: str
    started: list[list[str]]


def job(
    folder: Path,
    *arguments: str,
    flags: tuple[str, ...] = (),
    restarts: int = 0,
    make_run: bool = True,
    **environ: str,
) -> Ended:
    """Run the script to its end, with stand-ins for torchrun and for `python -m launch.train`."""
    slurm.commands(folder, torchrun=TORCHRUN, python=PYTHON)
    if make_run:
        (folder / "run").mkdir(exist_ok=True)
    (folder / "code").touch()
    process = slurm.sbatch(folder, flags, arguments, {**os.environ, **environ}, restarts)
    code = process.wait(timeout=60)
    started = folder / "started"
    lines = started.read_text().splitlines() if started.exists() else []
    return Ended(code, slurm.is_requeued(folder), (folder / "job.log").read_text(), [shlex.split(x) for x in lines])


def ends_with(folder: Path, code: int, recorded: Optional[int]) -> None:
    """Let torchrun end with a code, and the run with a record."""
    (folder / "code").write_text(str(code))
    if recorded is not None:
        (folder / "record.json").write_text(json.dumps({"code": recorded, "reason": "x"}, indent=1) + "\n")


@pytest.mark.parametrize(
    ("torchrun", "recorded", "restarts", "code", "requeued"),
    [
        (0, 0, 0, 0, False),
        (1, 75, 0, 75, True),
        (1, 75, 99, 75, True),
        (1, 70, 0, 70, True),
        (1, 70, 5, 70, True),
        (1, 3, 0, 3, False),
        (1, 5, 0, 5, False),
        (0, None, 0, 0, False),
        (1, None, 0, 70, True),
        (137, None, 0, 70, True),
    ],
)
def test_a_job_ends_with_the_code_of_its_run(tmp_path, torchrun, recorded, restarts, code, requeued):
    """A run that can continue is requeued, whatever Slurm's count; ranks without a record were killed, so retry."""
    ends_with(tmp_path, torchrun, recorded)
    ended = job(tmp_path, "--factory", "tiny_dit", restarts=restarts)
    assert (ended.code, ended.requeued) == (code, requeued), ended.log


@pytest.mark.parametrize("recorded", [None, 70, 75])
def test_a_job_in_the_folder_of_another_run_ends_with_its_own_code(tmp_path, recorded):
    """A refused attempt writes no record; `exit.json` may be that of the other run, and its folder is not changed."""
    ends_with(tmp_path, 1, recorded)
    (tmp_path / "refused").write_text("2")
    ended = job(tmp_path, "--factory", "tiny_dit")
    assert (ended.code, ended.requeued) == (2, False), ended.log
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"exit.json"}


def test_unexpected_errors_are_counted_and_preemptions_are_not(tmp_path):
    """Three errors are requeued, with any number of preemptions between them; Slurm's count includes preemptions."""
    requeued = []
    for restarts, code in enumerate((75, 70, 75, 75, 70, 75, 70, 75, 70)):
        ends_with(tmp_path, 1, code)
        requeued.append(job(tmp_path, "--factory", "tiny_dit", restarts=restarts).requeued)
    assert requeued == [True] * 8 + [False]


def test_only_the_task_of_an_array_is_requeued(tmp_path):
    """One task has the number of the array, with which Slurm would requeue all tasks."""
    ends_with(tmp_path, 1, 75)
    array = {"SLURM_ARRAY_JOB_ID": str(slurm.JOB_ID), "SLURM_ARRAY_TASK_ID": "3"}
    assert job(tmp_path, "--factory", "tiny_dit", **array).requeued


def test_errors_of_another_job_in_the_folder_do_not_count(tmp_path):
    ends_with(tmp_path, 1, 70)
    assert job(tmp_path, "--factory", "tiny_dit", MAX_RESTARTS="1").requeued
    assert not job(tmp_path, "--factory", "tiny_dit", restarts=1, MAX_RESTARTS="1").requeued
    (tmp_path / "run" / f"restarts.{slurm.JOB_ID}").rename(tmp_path / "run" / "restarts.4710")
    assert job(tmp_path, "--factory", "tiny_dit", MAX_RESTARTS="1").requeued


def test_an_error_before_the_folder_exists_is_counted_and_an_uncountable_error_is_not_requeued(tmp_path):
    """A job that cannot store its count would be requeued forever."""
    ends_with(tmp_path, 1, None)
    assert job(tmp_path, "--factory", "tiny_dit", make_run=False).requeued
    assert (tmp_path / "run" / f"restarts.{slurm.JOB_ID}").read_text() == "1\n"
    (tmp_path / "run" / f"restarts.{slurm.JOB_ID}").unlink()
    (tmp_path / "run" / f"restarts.{slurm.JOB_ID}").mkdir()
    ended = job(tmp_path, "--factory", "tiny_dit")
    assert (ended.code, ended.requeued) == (70, False)


def test_a_link_in_place_of_the_count_is_not_followed(tmp_path):
    """Writing through it would change a file outside of the run's folder."""
    ends_with(tmp_path, 1, None)
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("unchanged\n")
    (tmp_path / "run" / f"restarts.{slurm.JOB_ID}").symlink_to(tmp_path / "victim")
    ended = job(tmp_path, "--factory", "tiny_dit")
    assert (ended.code, ended.requeued) == (70, False), ended.log
    assert (tmp_path / "victim").read_text() == "unchanged\n"


def test_the_record_of_an_earlier_attempt_does_not_count(tmp_path):
    ends_with(tmp_path, 1, None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text(json.dumps({"code": 3, "reason": "data"}, indent=1))
    ended = job(tmp_path, "--factory", "tiny_dit")
    assert (ended.code, ended.requeued) == (70, True), ended.log


def test_every_node_passes_the_arguments_to_torchrun(tmp_path):
    """Four nodes use the first as rendezvous, a word with spaces stays one word, and signal and time match Slurm's."""
    ends_with(tmp_path, 0, 0)
    words = ("--factory", "dit_xl2_imagenet", "data.path=/data/with space", "training.run_dir=/shared/xl2")
    ended = job(tmp_path, *words, flags=("--nodes=4",), restarts=2)
    assert len(ended.started) == 4
    assert all(started == ended.started[0] for started in ended.started)
    parsed = get_args_parser().parse_args(ended.started[0])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend) == ("4", "8", "c10d")
    assert (parsed.rdzv_id, parsed.rdzv_endpoint) == (f"{slurm.JOB_ID}.2", f"localhost:{20000 + slurm.JOB_ID}")
    assert (parsed.module, parsed.training_script, parsed.numa_binding) == (True, "launch.train", None)
    options = cli.parse(parsed.training_script_args)
    assert (options.yes, options.factory, options.overrides) == (True, words[1], list(words[2:]))
    name, seconds = re.fullmatch(r"(\w+)@(\d+)", slurm.directives()["signal"]).groups()
    assert f"SIG{name}" in parsed.signals_to_handle.split(",")
    assert 30 < int((tmp_path / "timeout").read_text()) < int(seconds)


def test_a_torchrun_that_does_not_wait_for_ranks_to_save_is_named(tmp_path):
    """An older torch does not read TORCH_ELASTIC_SHUTDOWN_TIMEOUT. The script starts no torchrun to find this out."""
    ends_with(tmp_path, 0, 0)
    ended = job(tmp_path, "--factory", "tiny_dit")
    assert "warning" not in ended.log
    assert len(ended.started) == 1
    older = tmp_path / "older" / "torch"
    (older / "distributed").mkdir(parents=True)
    (older / "__init__.py").write_text("raise SystemExit('torch is imported')")
    (older / "distributed" / "run.py").write_text('"--signals-to-handle"')
    ended = job(tmp_path, "--factory", "tiny_dit", PYTHONPATH=str(older.parent))
    assert "kills ranks 30 s after a signal" in ended.log
    assert "torch is imported" not in ended.log


def test_a_refused_command_line_starts_no_process(tmp_path):
    ended = job(tmp_path, "--factory", "refused")
    assert (ended.code, ended.requeued, ended.started) == (2, False, [])


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NUMA": "node", "PATH": "/usr/bin:/bin"}, "NUMA=node needs numactl"),
        ({"RANKS_PER_NODE": "two"}, "give sbatch --gpus-per-node=N, or set RANKS_PER_NODE=N"),
    ],
)
def test_a_missing_requirement_of_a_node_is_named(tmp_path, environ, message):
    ended = job(tmp_path, "--factory", "tiny_dit", **environ)
    assert (ended.code, ended.started) == (2, [])
    assert message in ended.log


def test_numa_binding_uses_the_option_of_torchrun(tmp_path):
    """If numactl is installed, torchrun binds each rank to the cores near its GPU."""
    ends_with(tmp_path, 0, 0)
    numactl = tmp_path / "numactl"
    numactl.write_text("#!/bin/bash\n")
    numactl.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = job(tmp_path, "--factory", "tiny_dit", NUMA="node", PATH=path, RANKS_PER_NODE="4")
    parsed = get_args_parser().parse_args(ended.started[0])
    assert (parsed.numa_binding, parsed.nproc_per_node) == ("node", "4")


def test_the_script_names_the_alternative_outside_slurm(tmp_path):
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    ended = subprocess.run(["bash", slurm.SCRIPT, "--factory", "x"], env=environ, cwd=tmp_path, capture_output=True)
    assert ended.returncode == 2
    assert b"sbatch launch/train.sh --factory x; elsewhere start torchrun (launch/README.md)" in ended.stderr
