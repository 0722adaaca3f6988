"""launch/kubernetes.yaml: names, limits and codes match, and the script ends with the exit code of the run."""

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from dit.errors import EXIT_CHECKPOINT, EXIT_CONFIG, EXIT_DATA, EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_SAVE
from launch import cli, train
from launch.config_file import built
from tests.support.repository import REPOSITORY

SERVICE, JOB = yaml.safe_load_all((REPOSITORY / "launch" / "kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
ENVIRONMENT = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}
[SCRIPT] = CONTAINER["args"]
TORCHRUN = """#!/bin/bash
if [[ $1 == --help ]]; then echo "$HELP"; exit; fi
trap 'cp "$0.record" "$RUN_DIR/exit.json"; exit 1' TERM
printf '%q ' "$@" >"$0.words"
if [[ -n $WAITS ]]; then sleep 30 & wait; fi
[[ ! -f $0.record ]] || cp "$0.record" "$RUN_DIR/exit.json"
exit "$CODE"
"""


def started(folder: Path, recorded: int | None, script: str = SCRIPT, **environ: str) -> subprocess.Popen:
    """Start the container's script with a stand-in for torchrun that writes a record and exits with `CODE`."""
    torchrun, run_dir = folder / "torchrun", folder / "run"
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    run_dir.mkdir(exist_ok=True)
    if recorded is not None:
        (folder / "torchrun.record").write_text(json.dumps({"code": recorded, "reason": "x"}, indent=1))
    own = {
        **ENVIRONMENT,
        "RUN_DIR": str(run_dir),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "WAITS": "",
        "HELP": "",
    }
    return subprocess.Popen([*CONTAINER["command"], script], env={**os.environ, **own, "CODE": "1", **environ})


@pytest.mark.parametrize(("recorded", "code"), [(75, 75), (3, 3), (0, 0), (None, 1)])
def test_a_pod_ends_with_the_code_of_the_run(tmp_path, recorded, code):
    assert started(tmp_path, recorded).wait(timeout=30) == code


@pytest.mark.parametrize(("text", "warns"), [("--shutdown-timeout SECONDS", False), ("--signals-to-handle", True)])
def test_a_torchrun_that_does_not_wait_for_ranks_to_save_is_named(tmp_path, text, warns, capfd):
    started(tmp_path, 0, HELP=text).wait(timeout=30)
    assert ("kills ranks 30 s after SIGTERM" in capfd.readouterr().err) == warns


def test_an_older_record_does_not_count(tmp_path):
    (tmp_path / "run").mkdir()
    record = tmp_path / "run" / "exit.json"
    record.write_text(json.dumps({"code": 75, "reason": "x"}, indent=1))
    os.utime(record, (1, 1))
    assert started(tmp_path, None).wait(timeout=30) == 1


@pytest.mark.parametrize("delay", ["", "sleep 0.5\n"], ids=["later", "at once"])
def test_an_evicted_pod_waits_until_its_ranks_have_saved(tmp_path, delay):
    """Kubernetes sends the signal only to the shell, which may not have continued after the start of torchrun."""
    script = SCRIPT.replace('"$RUN_DIR" &\n', f'"$RUN_DIR" &\n{delay}')
    assert delay in script
    pod = started(tmp_path, EXIT_PREEMPTED, script, WAITS="1")
    while not (tmp_path / "torchrun.words").exists():
        time.sleep(0.01)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=20) == EXIT_PREEMPTED


def test_a_pod_passes_its_arguments_to_torchrun_and_the_recipe_plans_on_its_ranks(tmp_path):
    started(tmp_path, 0).wait(timeout=30)
    parsed = get_args_parser().parse_args(shlex.split((tmp_path / "torchrun.words").read_text()))
    spec: dict[str, Any] = JOB["spec"]
    assert int(parsed.nnodes) == spec["completions"] == spec["parallelism"] == int(ENVIRONMENT["NODES"])
    assert int(parsed.nproc_per_node) == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    first = f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"
    assert parsed.rdzv_endpoint.partition(":")[0] == first
    task = train.resolve(cli.parse(parsed.training_script_args))
    built(task).check(int(parsed.nnodes) * int(parsed.nproc_per_node))


def test_names_time_limits_and_exit_codes_agree():
    """Pod names resolve through the Service, a save fits into the grace period, and codes are those of docs/runs.md."""
    spec = JOB["spec"]
    assert spec["completionMode"] == "Indexed"
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert 30 < int(ENVIRONMENT["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < POD["terminationGracePeriodSeconds"]
    assert POD["restartPolicy"] == "Never", "a pod failure policy asks for it"
    rules = {rule["action"]: rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert rules["FailJob"]["values"] == [EXIT_CONFIG, EXIT_DATA, EXIT_NOT_FINITE, EXIT_CHECKPOINT, EXIT_SAVE]
    assert rules["Ignore"]["values"] == [EXIT_PREEMPTED]
    assert {rule["containerName"] for rule in rules.values()} == {CONTAINER["name"]}
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}
