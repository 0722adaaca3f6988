"""`python -m launch.plan`: the layout search from the command line."""

import json

import pytest

from dit.errors import EXIT_CONFIG, EXIT_OK
from dit.planner.devices import DEVICES
from dit.planner.time import PARTS
from launch import plan

SMALL = ["--factory", "tiny_dit", "--gpus", "4", "model.num_attention_heads=2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the output of the command, and its record; later searches of this file find its traces."""
    folder = tmp_path_factory.mktemp("plan")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))  # it has no traces yet
        with pytest.MonkeyPatch.context() as printing:
            printing.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(map(str, args))))
            code = plan.main([*SMALL, "--device", "h200", "--json", str(folder / "a.json")])
        assert code == EXIT_OK
        yield "\n".join(lines), json.loads((folder / "a.json").read_text())


def test_the_table_begins_with_the_fastest_and_accounts_for_all(written):
    text, record = written
    rows = record["fitting"]
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    assert rows[0]["layout"] in text
    counted = len(rows) + len(record["too_large"]) + sum(record["not_traced"].values())
    assert f"{counted:,} layouts of 4 h200" in text
    losers = [int(line.split()[0].replace(",", "")) for line in text.splitlines() if " slower because of " in line]
    assert sum(losers) == len(rows) - 1
    assert any("not allowed, for example: " in line for line in text.splitlines()) == bool(record["not_allowed"])


def test_every_trace_is_announced_before_the_table(written):
    """4 ranks and 2 heads give two tensor-parallel sizes; the last trace is of the fastest layout at full depth."""
    text, record = written
    *stages, last = [line for line in text.splitlines() if line.startswith("tracing ")]
    assert text.startswith("tiny_dit: importing torch and Megatron-Core\ntracing stage 1 of at most 4: one rank")
    assert [int(line.split()[2]) for line in stages] == list(range(1, len(stages) + 1))
    names = [line.partition(": ")[2] for line in stages]
    assert {*names, *record["not_traced"]} == {"one rank", "FSDP", "TP2", "TP2 FSDP"}
    assert len(names) + len(record["not_traced"]) == 4
    assert last == f"tracing the fastest layout at its full depth: {record['fitting'][0]['layout']}"


def test_rates_follow_from_the_time(written):
    """Tokens per second x step time x GPUs gives the tokens of a step; only hardware MFU counts recomputation."""
    _, record = written
    per_step = {row["tokens_per_s_per_gpu"] * row["step_s"] * 4 for row in record["fitting"]}
    assert max(per_step) == pytest.approx(min(per_step))
    for row in record["fitting"]:
        assert row["step_s"] == pytest.approx(sum(row["parts_s"].values()))
        assert row["mfu"]["model"] <= row["mfu"]["hardware"]
        assert ("recompute" in row["layout"]) == (row["mfu"]["model"] < row["mfu"]["hardware"])


def test_the_overrides_of_a_row_build_its_layout(written):
    """Applied to the recipe, they give the layout that the row names."""
    from launch.config_file import built
    from launch.overrides import apply_overrides
    from launch.train import call_recipe

    _, record = written
    for row in (record["fitting"][0], record["fitting"][-1]):
        task = call_recipe("tiny_dit")
        apply_overrides(task, ["model.num_attention_heads=2", *row["overrides"]])
        dims, _ = built(task).check(4)
        assert f"DP{dims.data_parallel_size} " in row["layout"]
        assert ("FSDP" in row["layout"]) == (task.parallel.data_parallel == "fsdp")


def test_an_unknown_device_is_an_error_that_names_the_others(capsys):
    with pytest.raises(SystemExit, match=f"{EXIT_CONFIG}"):
        plan.main([*SMALL, "--device", "a100"])
    assert "choose from 'h100', 'h200', 'b200'" in capsys.readouterr().err.replace(
        "from h100, h200, b200", "from 'h100', 'h200', 'b200'"
    )


@pytest.mark.parametrize("flags", [["--nodes-of", "0"], ["--text-tokens", "-3"], ["--tokens", "4x4"], ["--top", "x"]])
def test_a_number_out_of_its_range_is_refused_by_the_parser(flags, capsys):
    with pytest.raises(SystemExit, match=f"{EXIT_CONFIG}"):
        plan.main([*SMALL, *flags])
    assert f"argument {flags[0]}: must be a whole number of at least 1" in capsys.readouterr().err


MEAN_FLOW = [
    *("objective=mean_flow", "model.interval_conditioning=True", "training.precision=fp32"),
    "sampling.guidance_scale=1",
]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--factory", "tiny_dit_pack"], "micro-batch is one pack"),
        (["--factory", "tiny_dit", *MEAN_FLOW], "objective=mean_flow takes differences"),
        (["--factory", "tiny_dit", "training.cuda_graph=True", "training.precision=bf16"], "data_parallel=fsdp"),
        (["--factory", "tiny_dit", "data.num_streams=3"], "data.num_streams=3"),
    ],
)
def test_only_layouts_that_a_run_accepts_are_searched(settings, says):
    """The others are listed with the reason of the run."""
    from dit.planner.layouts import allowed, candidates

    problem, _ = plan.problem_of(plan.build_parser().parse_args([*settings, "--gpus", "4"]))
    found = allowed(problem, candidates(problem))
    assert any(says in example for _, example in found.refused.values())
    assert ("num_streams" in says) == (found.layouts == [])
    for candidate, dims in found.layouts:
        training = candidate.training(problem.training, problem.layers_of_chunk(candidate))
        assert problem.check(problem.layout_of(candidate), training) == dims


def test_refusals_have_a_cure_if_no_layout_is_allowed(capsys):
    """A UNet is not split, and four replicas cannot share the two samples of a step."""
    assert plan.main(["--factory", "tiny_ddpm_unet", "--gpus", "4", "training.global_batch_size=2"]) == EXIT_CONFIG
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not allowed, for example: " in line]
    assert "training.global_batch_size=2 is not a multiple of the data-parallel size 4; use 4, or " in line


def test_a_layout_whose_trace_does_not_fit_is_not_recommended(written, monkeypatch, tmp_path, capsys):
    """All but one layer fit by their price; the first one's trace needs more."""
    from dit.planner import plan as planned
    from dit.tracing.counter import StepTrace

    _, record = written
    first, second = record["fitting"][:2]
    traced, peaks = planned.plan, []

    def larger(*arguments, **options):
        found = traced(*arguments, **options)
        peaks.append(found.fullest.peak)
        if len(peaks) == 1:
            monkeypatch.setattr(StepTrace, "peak", property(lambda _: 10**15))
        else:
            monkeypatch.undo()
        return found

    monkeypatch.setattr(planned, "plan", larger)
    assert plan.main([*SMALL, "--device", "h200", "--json", str(tmp_path / "a.json")]) == EXIT_OK
    again = json.loads((tmp_path / "a.json").read_text())
    assert again["fitting"][0]["layout"] == second["layout"]
    assert first["layout"] in [row["layout"] for row in again["too_large"]]


def test_a_search_in_which_nothing_fits_has_a_cure(written, monkeypatch, tmp_path, capsys):
    """Numbers are printed in bytes here."""
    monkeypatch.setattr(plan, "GIB", 1)
    for module in ("devices", "search"):
        monkeypatch.setattr(f"dit.planner.{module}.MEMORY_SHARE", 1e-7)
    assert plan.main([*SMALL, "--json", str(tmp_path / "a.json")]) == EXIT_CONFIG
    smallest = min(
        sum(row["memory_bytes"].values()) for row in json.loads((tmp_path / "a.json").read_text())["too_large"]
    )
    room = 1e-7 * DEVICES["h100"].memory_bytes
    says = f"the smallest one needs {smallest:.1f} GiB, and tensors can use {room:.1f} GiB of each h100"
    cure = "use more --gpus or another --device, or optimizer.offload=True"
    assert f"no layout fits: {says}; {cure}" in capsys.readouterr().out


def test_every_part_of_a_step_has_a_cause():
    assert set(plan.CAUSES) == set(PARTS) - {"other"}
