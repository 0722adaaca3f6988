"""The stages of benchmarks/on_gpu.sh: command lines, cases and bars are valid, and a command may fail."""

import json
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import attention, ceilings, device_values, gpu_stages, layers, loss_curves, step
from benchmarks.gpu_stages import STAGES, Bar, Command, Stage, field, run_stage, started
from dit.errors import EXIT_OK

COMMANDS = [
    pytest.param(name, command, id=f"{name}-{command.name}")
    for name, stage in STAGES.items()
    for command in stage.commands
]
FIELDS_OF_A_STEP = {"tflops_per_rank_model": 400.0, "valid_tokens_per_s_per_rank": 1e4, "planned_ms": 1.0}


@pytest.mark.parametrize(("stage", "command"), COMMANDS)
def test_a_command_line_is_valid(stage: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Its module accepts all flags, also in a dry run; a recipe accepts all settings and fits one GPU."""
    module, *words = started(command, stage, tmp_path, dry=True)
    if module == "pytest":
        assert (Path(gpu_stages.__file__).parents[1] / words[0]).is_dir()
    elif module == gpu_stages.PLAN:
        args = step.build_parser().parse_args(words)
        step.config_of(args, str(tmp_path)).check(1)
    else:
        with pytest.raises(SystemExit) as ended:
            import_module(module).main(["--help"])
        assert ended.value.code == 0
        flags = {word for word in words if word.startswith("--")}
        assert flags <= set(capsys.readouterr().out.replace(",", " ").replace("]", " ").replace("[", " ").split())


def rows_of(main: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """Dry-run a command; replace numbers that it did not measure by 1."""
    assert main(["--dry", "--out", str(tmp_path / "rows")]) == EXIT_OK
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    return [{name: 1.0 if value is None else value for name, value in row.items()} for row in rows]


def test_every_bar_has_rows(tmp_path: Path):
    """Bars use the names of cases and fields in the rows that the commands write."""
    sizes = (*layers.KERNELS, layers.PLAIN, layers.PLAIN_COMPILED)
    measured = [
        {"batch": batch, "kernels": kernels, "ms": 1.0, "tflops": 1.0, "peak_bytes": 1}
        for batch in layers.layouts(1)
        for kernels in sizes
    ]
    known: gpu_stages.Rows = {
        "ceilings": rows_of(ceilings.main, tmp_path / "ceilings"),
        "attention": [
            {**row, "status": "ok", "forward_backward_tflops": 1.0} for row in rows_of(attention.main, tmp_path / "at")
        ],
        "layers": measured,
        "kernels": [{"case": bar.name.partition(", measured")[0], "measured": 1.0} for bar in STAGES["kernels"].bars],
        "tests": [{"failed": 0, "passed": 1}],
        "losses": [{"passed": True}],
    }
    for name, stage in STAGES.items():
        for number, command in enumerate(stage.commands):
            milliseconds = {"step_ms_p50": 10.0 + number}
            known.setdefault(command.name, [{**FIELDS_OF_A_STEP, **milliseconds}])
        for bar in stage.bars:
            assert isinstance(bar.value(known), float | int), (name, bar.name)


def test_the_values_have_recorded_losses():
    recorded = json.loads(device_values.CURVES.read_text())
    assert list(recorded) == list(loss_curves.RECIPES)
    assert {len(curves[loss_curves.ONE_RANK]) for curves in recorded.values()} == {loss_curves.STEPS}


def test_the_bar_of_losses_is_the_number_of_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("curve", "resumed", "samples"):
        monkeypatch.setattr(device_values, name, lambda *_: 0.0)
    assert device_values.main(["--jobs", "1", "--out", str(tmp_path / "rows")]) == EXIT_OK
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["check"] for row in rows} == set(device_values.names())
    [passed] = [bar for bar in STAGES["values"].bars if bar.name == "losses and samples within their bounds"]
    assert passed.value({"losses": rows}) == passed.low == len(rows)


def test_the_bars_of_kernels_name_operations():
    pytest.importorskip("triton")
    source = Path(import_module("benchmarks.kernels").__file__).read_text()
    for bar in STAGES["kernels"].bars:
        assert f'"{bar.name.partition(", measured")[0]}": lambda' in source


def test_rows_of_a_stage_survive_a_failed_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The first command ends with an error after its first row, the second one runs too long, the third one passes."""
    commands = tuple(Command(name, (name,), (), limit_s=5) for name in ("fails", "hangs", "works"))
    bars = tuple(Bar(name, field(name, "value"), low=2) for name in ("fails", "hangs", "works"))
    monkeypatch.setitem(STAGES, "values", Stage(commands, bars))

    child = (
        "import pathlib, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(600)']); pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); child.wait()"
    )
    row = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text('{{\"value\": {}}}\\n'); sys.exit({})"
    for name, program in (("fails", row.format(1, 1)), ("hangs", child), ("works", row.format(3, 0))):
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_stage("values", tmp_path, dry=False) == (False, False)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    out = capsys.readouterr().out
    assert (tmp_path / "values.md").read_text() in out
    assert "| fails | 1 | >= 2 |  | fail |" in out
    assert "| hangs | - | >= 2 |  | not measured |" in out
    assert "| works | 3 | >= 2 |  | pass |" in out
    assert json.loads((tmp_path / "values" / "fails.jsonl").read_text()) == {"value": 1}


def test_an_interrupted_stage_stops_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command interrupts the stage, as Ctrl-C does, and would then run for a minute."""
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "runs.py").write_text(f"import os, sys; print(os.getpid(), flush=True); {program}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu_stages.run_command(Command("runs", ("runs",)), "values", tmp_path, 60.0, dry=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not psutil.pid_exists(int((tmp_path / "values" / "runs.log").read_text()))
