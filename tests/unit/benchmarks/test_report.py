"""`benchmarks.report`: published rates, converted with our operation counts, next to our rows."""

import json

import pytest

from benchmarks import report
from benchmarks.rows import markdown
from dit.errors import EXIT_CONFIG, EXIT_OK
from recipes import registry

NEMO = {10052: (519, 359), 3409: (439, 385), 2510: (468, 307), 1386: (445, 357)}
"""TFLOPS as stated and of necessary work, by hand: 6 x 14 h^2 L + 12 L h s and the text; by the published tokens/s."""


@pytest.mark.parametrize("rate", NEMO)
def test_the_nemo_table_follows_from_the_nemo_convention_only(rate):
    [row] = [row for row in report.PUBLISHED if row.tokens_per_s == rate]
    work, (stated, executed) = report.work_of(row.recipe), NEMO[rate]
    assert row.tflops == stated
    assert rate / work.tokens * work.nemo == pytest.approx(stated, rel=0.006)
    assert rate / work.tokens * work.executed == pytest.approx(executed, rel=0.003)


def test_every_published_row_names_a_recipe_that_exists():
    names = {row.recipe for row in report.PUBLISHED if row.recipe}
    assert names <= {entry.name for entry in registry.recipes()}
    assert len(names) == 11


def test_wan_at_37k_tokens_has_the_flops_of_dfm():
    """By its authors' exact count, 165.0 GFLOP per token: 1974 tokens/s for 325.8 TFLOPS."""
    work = report.work_of("bench_wan14b_37k_tp2sp_cp4")
    assert work.tokens == 37_440
    assert 1e3 * work.executed / work.tokens == pytest.approx(165.0, rel=0.01)


def test_measured_rows_have_the_published_rate_and_the_plan(tmp_path, capsys):
    row = {"recipe": "bench_dit7b_8k_tp2sp", "layout": "own", "status": "ok", "world_size": 16, "device": "NVIDIA H200"}
    row |= {
        "overrides": ["training.recompute=full"],
        "step_ms_p50": 500.0,
        "planned_ms": 450.0,
        "valid_tokens_per_s_per_rank": 12565.0,
        "mfu": 0.45,
    }
    refused = {"recipe": "tiny_dit", "layout": "pp4", "status": "refused", "ranks": 2, "device": "CPU"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (row, refused)))
    text = markdown(["x"], [report.our_row(line) for line in (row, refused)])
    assert "| own | training.recompute=full | 16 x NVIDIA H200 | ok | 500.0 | 450.0 | 0.90 | 12,565 | 1.25 |" in text
    assert "| - | - | - | 45.0% |" in text
    assert "| tiny_dit | pp4 | - | 2 x CPU | refused | - |" in text
    assert report.main([str(file), "--out", str(tmp_path / "report.md")]) == EXIT_OK
    assert "No row of a GPU" not in (tmp_path / "report.md").read_text()
    assert report.main([str(tmp_path / "none.jsonl")]) == EXIT_CONFIG
    assert "benchmarks.step writes its rows to --out FILE" in capsys.readouterr().err
