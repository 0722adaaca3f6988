"""The training command: exit codes, and errors with their fix."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dit.monitoring import run_lock
from dit.planner.devices import DEVICES
from launch import cli, config_file, environment, train

OWN = "tests.unit.launch.recipes_for_tests.ending"
HEAVY = ("torch", "nemo_run", "megatron", "numpy", "yaml")


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("fine", 0),
        ("config", 2),
        ("data", 3),
        ("not_finite", 4),
        ("checkpoint", 5),
        ("unexpected", 70),
        ("no exception", 70),
        ("preempted", 75),
        ("interrupted", 130),
    ],
)
def test_the_exit_code_is_that_of_the_training(outcome, code, capsys):
    """nemo-run's main function returns 0 in all of these cases."""
    assert train.main(["--factory", OWN, "--yes", f"training.run_dir={outcome}"]) == code
    out, err = capsys.readouterr()
    assert ("trained" in out) == (code == 0)
    assert ("Traceback" in err) == (code == 70)


@pytest.mark.parametrize(
    ("outcome", "age_s", "message"),
    [("data", 1, "error: shard 7 is gone"), ("preempted", 0, "stopped on request; after a preemption, the same")],
)
def test_torchrun_reports_a_failure_before_the_ranks_that_it_stops(tmp_path, monkeypatch, outcome, age_s, message):
    """torchrun's root cause is the earliest failure, so a failed rank reports an earlier second than a stopped rank."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr("time.time", lambda: 1000.5)
    train.main(["--factory", OWN, "--yes", f"training.run_dir={outcome}"])
    written = json.loads(report.read_text())["message"]
    assert written["message"].startswith(message)
    assert int(written["extraInfo"]["timestamp"]) == 1000 - age_s


@pytest.mark.parametrize("name", ["wrapped", "wrapped_partial"])
def test_recipes_of_a_function_with_the_same_parts_are_checked_and_planned(name):
    recipe = train.call_recipe(f"tests.unit.launch.recipes_for_tests.{name}")
    assert config_file.built(recipe) == config_file.built(train.call_recipe("tiny_dit"))


def test_a_lost_peer_is_named_with_its_cause_on_one_line(monkeypatch, capsys):
    """No other rank may have an error, such as if the network interface is wrong."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--factory", OWN, "--yes", "training.run_dir=peer lost"]) == 70
    line = capsys.readouterr().err.splitlines()[-1]
    assert "see its error (RuntimeError: Connection closed by peer ?[1mxxx" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--factory", "--list"]),
        (["--yes", "--factory"], ["--factory needs a value; write --factory VALUE", "--help shows all flags"]),
        (["--help=all"], ["--help takes no value, got 'all'; write only --help\n"]),
        (["--factory", "leters_dit", "--yes"], ["leters_dit", "letters_dit"]),
        (["--factory", "zzz", "--yes"], ["zzz", "--list"]),
        (["--factory", "no_such_package.recipe", "--yes"], ["no_such_package"]),
        (["--factory", "tests.unit.launch.recipes_for_tests.not_a_recipe", "--yes"], ["int", "run.Partial"]),
        (["--factory", "own_data(dta='x')", "--yes"], ["own_data has no argument 'dta'", "; did you mean data?"]),
        (["--factory", "own_data(data='x', vae)", "--yes"], ["vae has no value; write vae=VALUE"]),
        (["--factory", "own_data(data='x'", "--yes"], ["own_data(data='x': a parenthesis at its end is missing"]),
        (["--factory", "own_data(data='x') y=1", "--yes"], ["a parenthesis at its end is missing; write own_data(..."]),
        (["--factory", "tiny_dit(size=1)", "--yes"], ["tiny_dit has no argument 'size', it takes no arguments"]),
        (["--factory", "finetune_prx(size=1)", "--yes"], ["finetune_prx has no argument 'size'"]),
        (["--factory", OWN, "--badflag", "--yes"], ["--badflag", "--help"]),
        (["--factory", OWN, "--yess"], ["--yess", "--yes"]),
        (["--factory", OWN, "--yes=1"], ["--yes takes no value, got '1'; write only --yes"]),
        (["--factory", OWN, "--yes", "--yaml", "a.yaml"], ["--factory", "--yaml"]),
        (["--factory", OWN, "--yes", "--world-size", "8"], ["--dryrun"]),
        (["--factory", OWN, "--dryrun", "--world-size", "none"], ["--world-size", "'none'"]),
        (["--factory", OWN, "--dryrun", "--world-size", "9" * 9], ["--world-size", "at most 1,048,576"]),
        (["--factory", OWN, "--dryrun", "--text-tokens", "9" * 5000], ["--text-tokens", "at most"]),
        (["--factory", OWN, "--dryrun", "--tokens", "9999x9999x9999"], ["--tokens", "such a product"]),
        (["--factory", "tiny_dit", "--dryrun", "data.shapes=['1x²x8']"], ["data.shapes", "8x16x16"]),
        (["--factory", "tiny_dit", "--dryrun", "data.shapes=['99999x99999x9']"], ["99999 x 99999 x 9", "at most"]),
        (["--factory", "letters_dit", "--dryrun", "model.patch_spatial=60000"], ["patch_spatial=60000", "features"]),
        (["--factory", OWN, "--yes", "--text-tokens", "8"], ["--dryrun"]),
        (["--factory", OWN, "--dryrun", "--tokens", "24x32"], ["--tokens", "'24x32'", "24x32x32"]),
        (["letters_dit", "--yes"], ["--factory letters_dit"]),
        (["--factory", "tiny_dit", "--yes", "training.num_stepz=3"], ["did you mean training.num_steps?"]),
        (["--factory", "tiny_dit", "--yes", "training.lr=3"], ["did you mean optimizer.lr?"]),
        (["--factory", "tiny_dit", "--yes", "training.hidden_size=3"], ["did you mean model.hidden_size?"]),
        (
            ["--factory", OWN, "--dryrun"],
            ["recipes_for_tests.pretrain does not take the parts of", "dit.training.pretrain.pretrain", "--yes"],
        ),
        (
            ["--factory", "tiny_dit", "--num_steps=5"],
            ["unknown flag --num_steps", "without dashes: training.num_steps=5 or sampling.num_steps=5\n"],
        ),
        (["--factory", "tiny_dit", "--training.num_steps=5"], ["without dashes: training.num_steps=5\n"]),
        (["--factory", "tiny_dit", "--yes", "--lr", "3e-4"], ["without dashes: optimizer.lr=3e-4\n"]),
        (["--factory", OWN, "--yes", "--run-dir"], ["without dashes: training.run_dir=VALUE\n"]),
        (
            ["--factory", "tiny_dit", "--no_such_setting=5"],
            ["--help shows all flags, and settings are", "key.path=value"],
        ),
        (["--factory", "leters_dit", "--num_stepz=5"], ["unknown flag --num_stepz; --help shows"]),
        (["--factory", "tiny_dit", "--yes", "optimizer.lr=-1"], ["optimizer.lr=-1.0", "at least 0"]),
        (["--factory", "tiny_dit", "--yes", "training.run_dir='\0'"], ["training.run_dir", "is not a path"]),
        (["--factory", OWN, "--yes", "model.hiden_size=3"], ["model.hiden_size", "model.hidden_size"]),
        (["--factory", OWN, "--yes", "modle.hidden_size=3"], ["modle", "model?"]),
        (["--factory", OWN, "--yes", "lr=3"], ["optimizer.lr?"]),
        (["--factory", OWN, "--yes", "model.hidden_size=wide"], ["model.hidden_size=wide", "a whole number"]),
        (["--factory", OWN, "--yes", "training.precision=fp8"], ["bf16, fp16, fp32"]),
        (["--factory", OWN, "--yes", "objective=emd"], ["objective=emd", "edm"]),
        (["--factory", OWN, "--yes", "objective=ddpm(predicton='v')"], ["objective=ddpm", "prediction"]),
        (["--factory", OWN, "--yes", "model.num_layers="], ["model.num_layers="]),
        (["--factory", OWN, "--yes", "objective=edm", "objective.p_std=-1"], ["p_std"]),
        (["--factory", OWN + "(num_steps=x)", "--yes"], ["(num_steps=x): num_steps=x is not a whole number\n"]),
        (["--yaml", "/no/such/file.yaml", "--yes"], ["/no/such/file.yaml", "--to-yaml"]),
    ],
)
def test_a_command_line_error_exits_with_code_2_and_names_the_cure(arguments, words, capsys, caplog):
    assert train.main(arguments) == 2
    assert not [record for record in caplog.records if record.name.startswith("nemo_run")], "a second message"
    out, err = capsys.readouterr()
    assert out == "" or OWN in arguments  # whose own training function refuses
    (error,) = [line for line in err.splitlines() if not line.endswith(": importing torch and Megatron-Core")]
    assert error.startswith("error: ")
    assert "Traceback" not in err
    assert "Fiddle" not in err
    for word in words:
        assert word in err


def test_the_settings_of_another_training_function_are_printed_and_written(tmp_path, capsys):
    """`launch/train.sh` writes them to read the run folder."""
    assert train.main(["--factory", OWN, "--print-config", "training.num_steps=7"]) == 0
    printed = capsys.readouterr().out
    record = yaml.safe_load(printed)
    assert record["_target_"] == "tests.unit.launch.recipes_for_tests.pretrain"
    assert (record["training"]["num_steps"], record["training"]["run_dir"]) == (7, "runs/default")
    file = tmp_path / "run.yaml"
    assert train.main(["--factory", OWN, "--to-yaml", str(file), "training.num_steps=7"]) == 0
    assert file.read_text() == printed
    assert train.main(["--yaml", str(file), "--yes"]) == 2
    assert "configures tests.unit.launch.recipes_for_tests.pretrain, not dit.training" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "tokens"), [("4096", (4096,)), ("24x32x32", (24, 32, 32))])
def test_tokens_are_a_number_or_patches(text, tokens):
    assert cli.parse(["--dryrun", "--tokens", text]).tokens == tokens


def test_training_without_a_terminal_needs_yes(capsys):
    assert train.main(["--factory", OWN]) == 2
    assert "--yes" in capsys.readouterr().err


def test_a_user_may_decline_at_the_prompt(monkeypatch, capsys):
    monkeypatch.setattr(environment, "can_ask", lambda: True)
    for answer, trained in (("n", False), ("", False), ("y", True)):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert train.main(["--factory", OWN]) == 0
        assert ("trained" in capsys.readouterr().out) == trained


def test_a_single_rank_in_the_folder_of_another_run_writes_its_code_for_train_sh(tmp_path, monkeypatch, capsys):
    """launch/train.sh would requeue an attempt without a code."""
    (tmp_path / "code").touch()
    monkeypatch.setenv("DIT_EXIT_CODE_FILE", str(tmp_path / "code"))
    monkeypatch.setattr(run_lock, "WAIT_S", 0)
    with run_lock.RunLock(tmp_path / "run"):
        code = train.main(["--yes", "--factory", "tiny_dit", f"training.run_dir={tmp_path / 'run'}"])
    assert (code, (tmp_path / "code").read_text()) == (2, "2")
    assert "is in use by process" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_recipe_takes_arguments(capsys):
    assert train.main(["--factory", OWN + "(num_steps=7)", "--yes", "training.seed=3"]) == 0
    assert "trained 7 steps" in capsys.readouterr().out


def test_only_rank_0_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--factory", OWN, "--print-config"]) == 0
    assert train.main(["--factory", OWN, "--yes", "lr=3"]) == 2
    assert capsys.readouterr() == ("", "")
    assert train.main(["--factory", OWN, "--yes", "training.run_dir=not_finite"]) == 4  # equal on all ranks
    assert capsys.readouterr() == ("", "")
    assert train.main(["--factory", OWN, "--yes", "training.run_dir=data"]) == 3
    assert "rank 1: error: shard 7 is gone" in capsys.readouterr().err


def test_help_lists_every_device_and_exit_code():
    runs = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    listed = cli.HELP.partition("exit codes\n")[2].partition("torchrun")[0]
    assert set(re.findall(r"\d+", listed)) == set(re.findall(r"^\| (\d+) \|", runs, re.MULTILINE))
    assert all(name in cli.HELP for name in DEVICES)


def test_help_list_and_misspelt_recipes_import_nothing_heavy():
    """A newcomer's first commands must answer at once: no torch, no nemo-run."""
    slip = ["--factory", "leters_dit", "--yes"]
    program = (
        "import sys; from launch import train; "
        f"codes = [train.main(line) for line in (['--list'], ['--help'], {slip})]; "
        f"print([m for m in {HEAVY!r} if m in sys.modules], codes)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] [0, 0, 2]"
    assert done.stdout.count("letters_dit") >= 2
    assert "error: --factory leters_dit: no such recipe; did you mean letters_dit" in done.stderr


def test_prepare_keeps_environment_variables_of_the_user():
    environ = {"TOKENIZERS_PARALLELISM": "true", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    environ["TORCH_FR_BUFFER_SIZE"] = "7"
    before = dict(environ)
    environment.prepare(environ)
    assert environ == before
    empty: dict[str, str] = {}
    environment.prepare(empty)
    wanted = {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert empty == wanted | {"NCCL_GRAPH_REGISTER": "0", "TORCH_FR_BUFFER_SIZE": "2000"}
    exported = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment.prepare(exported)
    assert exported["NCCL_GRAPH_REGISTER"] == "0"


def test_one_hardware_queue_for_tensor_and_context_parallelism_only():
    from dit.parallel.dims import ParallelConfig

    for sizes, expected in (
        ({}, None),
        ({"pipeline_model_parallel_size": 2}, None),
        ({"tensor_model_parallel_size": 2}, "1"),
        ({"context_parallel_size": 2}, "1"),
        ({"tensor_model_parallel_size": 2, "data_parallel": "fsdp"}, None),
    ):
        environ: dict[str, str] = {}
        environment.prepare_layout(ParallelConfig(**sizes), environ)
        assert environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
