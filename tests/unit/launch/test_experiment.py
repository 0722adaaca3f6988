"""`launch.experiment`: grids, executors by name, and the output of a dry run; tests/integration runs an experiment."""

import argparse
import io
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dit.errors import EXIT_CONFIG, EXIT_OK, EXIT_UNEXPECTED, ConfigError
from dit.parallel.dims import ParallelConfig
from launch import cli, executors, experiment, grid, train

SLURM = "slurm(account='lab', partition='gpu', nodes=4, job_dir='/shared/scripts')"


def parallel(layout: str) -> ParallelConfig:
    """Return the settings of a layout, on a recipe that has others."""
    words = ["--factory", "tiny_dit", "parallel.tensor_model_parallel_size=4", "parallel.sequence_parallel=True"]
    task = train.resolve(cli.parse([*words, *grid.layout_overrides(layout)]))
    return ParallelConfig(**{f.name: getattr(task.parallel, f.name) for f in fields(ParallelConfig)})


def test_a_layout_is_written_as_recipes_spell_it():
    """Sizes that the layout does not name are 1, even if the recipe sets them; `own` keeps the recipe's sizes."""
    tp, pp, cp, ep = grid.SIZES.values()
    assert parallel("tp2sp_cp4") == ParallelConfig(**{tp: 2, cp: 4}, sequence_parallel=True, data_parallel="ddp")
    assert parallel("tp2+pp3+distopt") == ParallelConfig(**{tp: 2, pp: 3}, data_parallel="distributed_optimizer")
    assert parallel("fsdp") == ParallelConfig(data_parallel="fsdp")
    assert parallel("ep2") == ParallelConfig(**{ep: 2}, data_parallel="ddp")
    assert parallel("own") == ParallelConfig(**{tp: 4}, sequence_parallel=True, data_parallel="ddp")


@pytest.mark.parametrize("layout", ["tp", "tp0", "2tp", "tp2tp4", "fsdp_ddp", "spsp", "zero3", "tp2 sp"])
def test_an_invalid_layout_is_named(layout):
    with pytest.raises(ConfigError, match=r"layout .* is unknown or repeated; write sizes as tp, pp, cp, ep"):
        grid.layout_overrides(layout)


def parsed(*words: str) -> list[grid.Cell]:
    parser = argparse.ArgumentParser()
    grid.add_arguments(parser)
    args = parser.parse_intermixed_args(words)
    return grid.cells_of(args, grid.overrides_of(args), reserved=["training.run_dir"])


def test_a_grid_has_every_combination_and_a_variant_wins():
    common = "training.num_steps=5"
    variants = ("training.num_steps=7 data.shapes=['1x8x8', '1x8x16']", "")
    vary = [word for variant in variants for word in ("--vary", variant)]
    cells = parsed(*vary, "--factory", "tiny_dit", "tiny_wan", "--layouts", "own", "tp2", common)
    assert len({cell.name for cell in cells}) == len(cells) == 8
    assert cells[0].overrides == [common, *variants[0].split(" ", 1)]
    assert cells[3].overrides == [common, *grid.layout_overrides("tp2")]
    assert {cell.recipe for cell in cells[4:]} == {"tiny_wan"}
    assert all(Path(cell.name).name == cell.name and not shlex.quote(cell.name).startswith("'") for cell in cells)


def test_long_variants_have_different_names_that_a_file_system_accepts(tmp_path):
    """Two variants of 300 bytes differ in the last setting."""
    prompts = "sampling.prompts=['" + "白い鳥" * 30 + "']"
    vary = [word for n in (1, 2) for word in ("--vary", f"{prompts} training.num_steps={n}")]
    cells = parsed("--factory", "tiny_dit", *vary)
    assert len({cell.name for cell in cells}) == 2
    for cell in cells:
        assert cell.name.startswith("tiny_dit.own.sampling.prompts=_白い鳥")
        (tmp_path / f"{cell.name}.0123abcd.jsonl").touch()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--factory", "tiny_dti"], "no such recipe; did you mean tiny_dit"),
        (["--factory", "tiny_dit", "--layouts", "tp2", "tp2"], "tiny_dit.tp2 twice"),
        (["--factory", "tiny_dit", "--vary", "training.run_dir=x"], "is set by the command for each run"),
        (["--factory", "tiny_dit", "--vary", "faster"], "'faster' is not key=value"),
    ],
)
def test_a_grid_that_cannot_run_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parsed(*words)


@pytest.fixture(autouse=True)
def nemo_run_home(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "home"))


def dry_run(tmp_path: Path, capsys: pytest.CaptureFixture, *words: str) -> str:
    where = ["--runs", str(tmp_path / "runs"), "--dryrun"]
    code = experiment.main([*words, *where, "--factory", "tiny_dit", "--layouts", "ddp", "tp2", *OVERRIDES])
    out, err = capsys.readouterr()
    assert (code, err) == (EXIT_OK, "")
    assert not (tmp_path / "runs").exists()
    return out


OVERRIDES = ["training.num_steps=5", "training.global_batch_size=128", "data.shapes=['1x8x8', '1x8x16']"]


def test_a_dry_run_on_this_machine_prints_command_lines(tmp_path, capsys):
    """torchrun and launch.train parse them, including values with spaces."""
    out = dry_run(tmp_path, capsys, "--executor", "torchrun(ranks=2)")
    start = "python -m torch.distributed.run "
    commands = [line.removeprefix(start) for line in out.splitlines() if line.startswith(start)]
    for line, layout in zip(commands, ("ddp", "tp2"), strict=True):
        found = get_args_parser().parse_args(shlex.split(line))
        assert (found.nproc_per_node, found.module, found.training_script) == ("2", True, "launch.train")
        options = cli.parse(found.training_script_args)
        run_dir = f"training.run_dir={tmp_path / 'runs' / f'tiny_dit.{layout}'}"
        assert options.overrides == [*OVERRIDES, *grid.layout_overrides(layout), run_dir]
        assert (options.factory, options.yes) == ("tiny_dit", True)


def test_a_dry_run_for_slurm_prints_scripts(tmp_path, capsys, monkeypatch):
    """Each is a valid bash script that requests four nodes and signals the ranks before its time limit."""
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nemo-run copies files with a library that reads stdin
    out = dry_run(tmp_path, capsys, "--executor", SLURM, "executor.qos=high", "--name", "my (first) grid")
    scripts = [text.partition("\n# tiny_dit.")[0] for text in out.split("#!/bin/bash")[1:]]
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        asked = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
        wanted = ("account=lab", "partition=gpu", "qos=high", "nodes=4", "ntasks-per-node=1", "gpus-per-node=8")
        assert set(wanted) <= set(asked)
        seconds = int(next(line for line in asked if line.startswith("signal=TERM@")).partition("@")[2])
        assert 30 < executors.SAVE_S < seconds
        assert "--nnodes 4 --nproc-per-node 8" in script
        (output,) = [line.removeprefix("output=") for line in asked if line.startswith("output=")]
        assert re.fullmatch(r"/shared/scripts/experiments/(my_first_grid)/\1_\d+/tiny_dit\.\w+/sbatch_\S+\.out", output)


@pytest.mark.parametrize("folder", [None, "", "/shared/scripts"])
def test_scripts_are_written_to_the_folder_of_slurm(tmp_path, monkeypatch, folder):
    """The folder is `job_dir`, and `--folder` may name it again; other executors use the folder of `--folder`."""
    monkeypatch.chdir("/")
    executor = experiment.executor_of(SLURM)
    requested = None if folder is None else Path(folder or "shared/scripts")
    executor.tunnel._set_job_dir("title_1")
    submitted = Path(executor.tunnel.job_dir)
    folder = executors.folder_of(experiment.executor_of(SLURM), requested)
    assert folder / "experiments" / "title" / "title_1" == submitted
    assert executors.folder_of(experiment.executor_of("local"), tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("executor", "words", "message"),
    [
        (SLURM.replace("/scripts", "/my scripts"), [], "'/shared/my scripts/experiments': nemo-run writes this into a"),
        (SLURM, ["executor.env_vars={'HF_HOME': '/my models'}"], "'/my models': nemo-run writes this into a Slurm"),
        (SLURM, ["--folder", "/other"], "write scripts to /other/experiments and submit those in /shared/scripts/exp"),
        (SLURM.replace("/shared", "shared"), [], "give slurm(job_dir=...) as an absolute path, and leave out --folder"),
        (SLURM.replace("scripts", "nemo_run"), [], "/shared/nemo_run/experiments: nemo-run replaces every '/nemo_run'"),
        (SLURM, ["logging.wandb_name=/nemo_runs"], "=/nemo_runs: nemo-run replaces every '/nemo_run' in a"),
    ],
)
def test_folders_that_nemo_run_would_confuse_are_refused(capsys, executor, words, message):
    grid = ["--factory", "tiny_dit", "training.global_batch_size=128", "--runs", "/runs", "--dryrun"]
    code = experiment.main(["--executor", executor, *grid, *words])
    [line] = capsys.readouterr().err.splitlines()
    assert code == EXIT_CONFIG
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slum"], "--executor slum: no such executor; use one of local, torchrun, slurm"),
        (["slurm(nodes=2)"], "missing 2 required positional arguments: 'account' and 'job_dir'"),
        (["torchrun(rank=2)"], "torchrun has no argument 'rank', it takes ranks; did you mean ranks?"),
        (["torchrun", "executor.nodez=2"], "did you mean nodes?"),
        (["torchrun(ranks=2)", "--layouts", "ddp", "tp3"], "error: tiny_dit.tp3 (ranks of --executor: 2): "),
        (["local", "--layouts", "tp2"], "error: tiny_dit.tp2 (ranks of --executor: 1): world size 1 is not a multiple"),
        (
            ["local", "--vary", "optimizer.lr=1", "--vary", "optimizer.lr=fast"],
            "tiny_dit.own.optimizer.lr=fast (ranks of",
        ),
    ],
)
def test_an_executor_that_cannot_be_built_and_settings_that_cannot_run_are_named(capsys, words, message):
    assert experiment.main(["--executor", *words[:1], "--factory", "tiny_dit", *words[1:]]) == EXIT_CONFIG
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny_dit", "training.num_stepz=5"], "did you mean training.num_steps?"),
        (["tiny_dit", "optimizer.lr=-1"], "optimizer.lr=-1.0"),
        (["tiny_dit", "training.global_batch_size=128", "sampling.vae=/in/the/container"], None),
        (["own_data", "model.class_dropoud=0.2"], None),  # its folder, and so its model, are in the container
        (["finetune(base='/in/the/container')", "training.num_stepz=5"], None),
        (["recipes.of_the_container.mine", "training.num_stepz=5"], None),
        (["tiny_dit", "objective=mine", "executor.env_vars={'DIT_PACKAGES': 'mine'}"], None),
    ],
)
def test_settings_of_runs_in_a_container_are_checked_if_they_depend_on_no_folder(monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    where = ["--executor", SLURM, "--runs", "/runs", "executor.container_image=image"]
    code = experiment.main([*where, "--dryrun", "--factory", *words])
    error = capsys.readouterr().err
    assert code == (EXIT_OK if message is None else EXIT_CONFIG), error
    assert (message or "") in error


def test_a_job_that_slurm_refuses_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: Invalid --time' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    words = ["--factory", "tiny_dit", "training.global_batch_size=128", "--runs", str(tmp_path / "runs"), "--detach"]
    assert experiment.main(["--executor", SLURM.replace("/shared", str(tmp_path)), *words]) == EXIT_CONFIG
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == "error: sbatch: error: Invalid --time; correct the executor, or start this on a login node of Slurm"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_experiment_stops_its_run_and_starts_no_other(tmp_path, name):
    """nemo-run waits for the end of the run, whose stand-in interrupts the experiment and sleeps."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background of a shell
    began, log = time.monotonic(), tmp_path / "started"
    text = f"import os, signal, time; open({str(log)!r}, 'a').write('x'); os.kill(os.getppid(), signal.{name})"
    text += "; time.sleep(200)"
    tasks = {run: ["-n1", "-r1", text] for run in "ab"}
    with pytest.raises(KeyboardInterrupt):
        experiment.execute("title", "timeit", tasks, experiment.executor_of("local"), folder=tmp_path)
    assert log.read_text() == "x"
    assert time.monotonic() - began < 180


def test_variables_of_a_user_are_added_to_those_of_the_executor():
    """torchrun would kill ranks while they save without TORCH_ELASTIC_SHUTDOWN_TIMEOUT."""
    variables = experiment.executor_of(SLURM, ["env_vars={'HF_HOME': '/models', 'OMP_NUM_THREADS': 2}"]).env_vars
    assert variables == {**executors.ENVIRONMENT, "HF_HOME": "/models", "OMP_NUM_THREADS": "2"}


def test_one_failed_run_fails_the_command(capsys):
    """A submitted run has not failed yet."""
    states = {"a": "SUCCEEDED", "b": "FAILED", "c": "UNKNOWN"}
    assert experiment.conclude(states, detached=False) == EXIT_UNEXPECTED
    assert "2 of 3 runs did not succeed: b, c; without Slurm's accounting (sacct) only" in capsys.readouterr().err
    assert experiment.conclude({"a": "SUCCEEDED"}, detached=False) == EXIT_OK
    assert experiment.conclude({"a": "SUBMITTED"}, detached=True) == EXIT_OK
