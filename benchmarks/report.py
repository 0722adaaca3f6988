"""Compare our measurements with published ones: `python -m benchmarks.report ROWS.jsonl ... --out report.md`.

Published rates are converted to operations with our count for the same model and sequence: those of the model's
formulas ("model") and, for NeMo's table, in its convention, which counts adaLN once per token. The command reads
rows of `benchmarks.step` and `benchmarks.sweep`; a row with `planned_ms` shows the error of the plan.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from benchmarks.rows import markdown, read_rows
from benchmarks.step import OK
from benchmarks.sweep import settings_of
from dit.durable_files import write_atomic
from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.terminal import echo
from launch import environment

DENSE_BF16 = {"H100": 989.0, "GB200": 2500.0, "A100": 312.0}
"""TFLOPS of one device without sparsity, as published by its manufacturer."""


@dataclass(frozen=True)
class Published:
    """A published measurement of training.

    Attributes:
        system: name of the software.
        devices: number and kind.
        kind: a key of `DENSE_BF16`.
        what: model, sequence and layout.
        source: of the measurement.
        recipe: of this project, with the same model and sequence; None if there is none.
        tokens_per_s: per device; None if not published.
        samples_per_s: per device; for models of pixels.
        tflops: as published, per device, in the authors' convention.
        mfu: as published, a share of the peak.
    """

    system: str
    devices: str
    kind: str
    what: str
    source: str
    recipe: Optional[str] = None
    tokens_per_s: Optional[float] = None
    samples_per_s: Optional[float] = None
    tflops: Optional[float] = None
    mfu: Optional[float] = None


_NEMO = ("NeMo", "256 H100", "H100")
_TABLE = "NeMo diffusion, readme.rst"
_IMAGEN = "NeMo-Framework-Launcher, Imagen: steps/s x batch / 32"
PUBLISHED = (
    Published(*_NEMO, "DiT-7B, 8k tokens, TP 2 + SP", _TABLE, "bench_dit7b_8k_tp2sp", 10052, tflops=519),
    Published(*_NEMO, "DiT-7B, 74k, TP 2 + SP, CP 4", _TABLE, "bench_dit7b_74k_tp2sp_cp4", 3409, tflops=439),
    Published(*_NEMO, "DiT-28B, 8k, TP 4, PP 4", _TABLE, "bench_dit28b_8k_tp4pp4", 2510, tflops=468),
    Published(*_NEMO, "DiT-28B, 64k, FSDP, recomputed", _TABLE, "bench_dit28b_64k_fsdp_ckpt", 1386, tflops=445),
    Published(
        "DFM",
        "128 H100",
        "H100",
        "Wan 14B, 37,440, TP 2 + SP, CP 4",
        "performance-summary",
        "bench_wan14b_37k_tp2sp_cp4",
        tflops=325.8,
    ),
    Published(
        "torchtitan",
        "4 GB200",
        "GB200",
        "FLUX-dev, 1024 px",
        "torchtitan, FLUX",
        "bench_flux12b_1024",
        9294,
        tflops=490,
    ),
    *(
        Published(
            "NeMo",
            "32 H100",
            "H100",
            f"Imagen {size}, batch {batch}",
            _IMAGEN,
            f"bench_imagen_{name}",
            samples_per_s=rate * batch / 32,
        )
        for size, name, batch, rate in (
            ("500M, 64 px", "500m_res_64", 2048, 3.162),
            ("2B, 64 px", "2b_res_64", 512, 3.631),
            ("SR 400M, 256 px", "400m_res_256", 512, 3.166),
            ("SR 600M, 256 px", "600m_res_256", 2048, 2.668),
            ("SR 600M, 1024 px", "600m_res_1024", 2048, 2.837),
        )
    ),
    Published("NeMo VFM", "64 H100", "H100", "DiT with AdaLN-LoRA, up to", "arXiv:2503.12964", mfu=0.482),
    Published("Open-Sora 2.0", "H200", "H100", "MMDiT 11B, ZeRO-2", "arXiv:2503.09642", mfu=0.3819),
    Published("Seaweed-7B", "H100", "H100", "FSDP, Ulysses", "arXiv:2504.08685", mfu=0.38),
    Published("Cosmos-Predict2.5", "4096 H100", "H100", "2B, 720p, FSDP2, CP 2", "arXiv:2511.00062", mfu=0.3649),
    Published("Cosmos-Predict2.5", "4096 H100", "H100", "14B, 720p, FSDP2, CP 8", "arXiv:2511.00062", mfu=0.3308),
)


@dataclass(frozen=True)
class Work:
    """Operations of one training step of a recipe's sample.

    Attributes:
        tokens: of the sample.
        executed, nemo: TFLOP per sample in either convention.
    """

    tokens: int
    executed: float
    nemo: float


def work_of(recipe: str) -> Work:
    """Count a recipe's synthetic sample: forward and backward, without recomputation."""
    from dit.layout import SequenceLayout
    from dit.monitoring.flops import PackFlops
    from energon_data.mock import MockData
    from launch.config_file import built
    from launch.train import call_recipe

    config = built(call_recipe(recipe))
    model, data = config.model, config.data
    if not isinstance(data, MockData):
        raise ConfigError(f"recipe {recipe} is not on synthetic data; its tokens are unknown")
    grid = (data.frames // model.patch_temporal, data.height // model.patch_spatial, data.width // model.patch_spatial)
    sample, text = (
        SequenceLayout.from_lengths([grid[0] * grid[1] * grid[2]]),
        SequenceLayout.from_lengths([data.text_tokens]),
    )
    counts = PackFlops(model)
    executed, nemo = (counts.training(sample, [grid], text, convention=c) / 1e12 for c in ("model", "nemo"))
    return Work(sample.valid_tokens, executed, nemo)


def cell(value: Optional[float], form: str = ",.0f") -> str:
    """Return a number as a cell of a table; a dash for none."""
    return "-" if value is None else format(value, form)


def published_row(row: Published) -> list[str]:
    """Return a published measurement with its operations by our count."""
    executed = nemo = None
    if row.recipe and row.tokens_per_s:
        work = work_of(row.recipe)
        executed, nemo = (row.tokens_per_s / work.tokens * count for count in (work.executed, work.nemo))
    share = executed / DENSE_BF16[row.kind] if executed else row.mfu
    rates = [cell(row.tokens_per_s), cell(row.samples_per_s)]
    numbers = [*rates, cell(row.tflops, ",.4g"), cell(executed), cell(nemo if row.source == _TABLE else None)]
    note = "" if executed or not share else " (stated)"
    return [row.system, row.devices, row.what, *numbers, cell(share, ".1%") + note, row.recipe or "-", row.source]


def our_row(row: dict[str, Any]) -> list[str]:
    """Return a measurement of ours, with the plan and the published rate of its recipe if available."""
    published = next((entry for entry in PUBLISHED if entry.recipe == row["recipe"]), None)
    published_rate, rate = published and published.tokens_per_s, row.get("valid_tokens_per_s_per_rank")
    ratio = rate / published_rate if rate and published_rate else None
    planned, measured = row.get("planned_ms"), row.get("step_ms_p50")
    return [
        row["recipe"],
        row.get("layout", "own"),
        " ".join(settings_of(row)) or "-",
        f"{row.get('world_size', row.get('ranks', 1))} x {row['device']}",
        row["status"],
        cell(measured, ",.1f"),
        cell(planned, ",.1f"),
        cell(planned / measured if planned and measured else None, ".2f"),
        cell(rate),
        cell(ratio, ".2f"),
        cell(row.get("samples_per_s"), ",.4g"),
        cell(row.get("tflops_per_rank_model"), ",.4g"),
        cell(row.get("tflops_per_rank_nemo"), ",.4g"),
        cell(row.get("mfu"), ".1%"),
        str(row.get("revision", "-")),
    ]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the report."""
    published = ["system", "devices", "what", "tokens/s per GPU", "samples/s per GPU", "TFLOPS, stated"]
    published += [
        "TFLOPS, model",
        "TFLOPS, NeMo's convention",
        "of dense bf16 peak, model",
        "our recipe",
        "source",
    ]
    columns = ["recipe", "layout", "settings", "devices", "status", "ms, measured", "ms, planned", "planned / measured"]
    columns += ["tokens/s per rank", "of the published rate", "samples/s", "TFLOPS, model"]
    columns += ["TFLOPS, NeMo's convention", "MFU", "revision"]
    return "\n".join(
        [
            "# Report",
            "",
            "Model: the operations of the model's formulas, by our count, without recomputation. NeMo's convention "
            "counts the adaLN projections once per token, although they run once per sample; compare tokens/s.",
            "",
            "## Published",
            "",
            markdown(published, [published_row(row) for row in PUBLISHED]),
            "",
            "## Ours",
            "",
            markdown(columns, [our_row(row) for row in rows]) if rows else "No rows were given.",
            "",
            *([] if any(row["status"] == OK and row["device"] != "CPU" for row in rows) else ["No row of a GPU.", ""]),
        ]
    )


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument(
        "rows", type=Path, nargs="*", metavar="ROWS.jsonl", help="of benchmarks.step or benchmarks.sweep"
    )
    parser.add_argument("--out", type=Path, help="write the page to this file instead of the console")
    args = parser.parse_args(argv)
    if absent := [str(path) for path in args.rows if not path.exists()]:
        raise ConfigError(f"there is no {', '.join(absent)}; benchmarks.step writes its rows to --out FILE")
    environment.prepare()
    text = page([row for path in args.rows for row in read_rows(path)])
    if args.out:
        write_atomic(args.out, text)
        echo(args.out)
    else:
        echo(text)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
