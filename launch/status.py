"""How a run is doing: `python -m launch.status RUN_DIR [RUN_DIR ...]`, while it runs or afterwards."""

import argparse
import base64
import html
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from dit.durable_files import write_atomic
from dit.errors import EXIT_OK, ConfigError, one_line_errors
from dit.safe_files import read_bytes
from dit.terminal import echo
from launch.run_status import HELD_OUT, RunStatus, describe, lines, read_status

# Title, scalar, logarithmic.
PANELS = (
    ("loss", "loss", True),
    ("held-out loss", HELD_OUT, True),
    ("gradient norm", "grad_norm", True),
    ("samples per second", "samples_per_s", False),
    ("share of the time waiting for data", "data_wait_share", False),
)
MAX_GRID_BYTES = 32 << 20
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #1a1a1a; }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(30rem, 1fr)); gap: 1rem; }
.run { border: 1px solid #ccc; border-radius: 8px; padding: 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .6rem; } table { border-collapse: collapse; width: 100%; }
td, th { padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; color: #555; } img { width: 100%; margin: 1rem 0; }
figure { margin: 1rem 0 0; } figure img { width: auto; max-width: 100%; margin: .3rem 0; } figcaption { color: #555; }
"""


def figure_bytes(runs: Sequence[RunStatus]) -> bytes:
    """Draw the runs in one picture, PNG; dotted lines are steps of incidents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for axes, (title, name, logarithmic) in zip(panels, PANELS):
        for number, run in enumerate(runs):
            values = run.series.get(name, {})
            steps = [step for step in sorted(values) if math.isfinite(values[step])]
            heights = [values[step] for step in steps]
            axes.plot(steps, heights, marker="." if len(steps) < 40 else "", linewidth=0.9, color=f"C{number}")
            for incident in run.incidents:
                if isinstance(incident.get("step"), int):
                    axes.axvline(incident["step"], color=f"C{number}", linestyle=":", linewidth=0.8)
            if logarithmic and heights and min(heights) > 0:
                axes.set_yscale("log")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if not any(run.series.get(name) for run in runs):
            axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color="gray")
    legend = figure.axes[-1]
    legend.set_axis_off()
    for number, run in enumerate(runs):
        legend.plot([], [], color=f"C{number}", label=str(run.run_dir))
    legend.plot([], [], color="gray", linestyle=":", label="incident")
    legend.legend(loc="center", frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100, metadata={"Software": None})
    return out.getvalue()


def page(runs: Sequence[RunStatus]) -> str:
    """Return one HTML page of the runs that needs no other file and runs no script."""
    boxes = []
    for run in runs:
        head, *rest = lines(run)
        rows = "".join(
            f"<tr><th>{html.escape(line[:12].strip())}</th><td>{html.escape(line[12:])}</td></tr>" for line in rest
        )
        grids = "".join(_figure(run.run_dir, *run.pictures[name]) for name in sorted(run.pictures))
        boxes.append(f'<section class="run"><h2>{html.escape(head)}</h2><table>{rows}</table>{grids}</section>')
    picture = base64.b64encode(figure_bytes(runs)).decode()
    rows_of_incidents = "".join(
        f"<tr><th>{html.escape(str(run.run_dir))}</th><td>{html.escape(describe(incident))}</td></tr>"
        for run in runs
        for incident in run.incidents
    )
    incidents = f"<h2>Incidents</h2><table>{rows_of_incidents}</table>" if rows_of_incidents else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Runs</title>'
        f'<style>{STYLE}</style></head><body><div class="runs">{"".join(boxes)}</div>'
        f'<img alt="losses, gradient norm and rates by step" src="data:image/png;base64,{picture}">'
        f"{incidents}</body></html>\n"
    )


def _figure(run_dir: Path, step: int, grid: Path) -> str:
    """Return a grid of samples, embedded; only its name if it cannot be read."""
    name = html.escape(f"{grid.relative_to(run_dir)}, step {step}")
    try:
        data = base64.b64encode(read_bytes(grid, MAX_GRID_BYTES, follow=False)).decode()
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link"
        return f"<figure><figcaption>{name}: {html.escape(str(reason))}</figcaption></figure>"
    source = f"data:image/{grid.suffix[1:]};base64,{data}"
    return (
        f'<figure><figcaption>{html.escape(name)}</figcaption><img alt="{html.escape(name)}" src="{source}"></figure>'
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.status",
        description="Say in a few lines how a run is doing, from the files in its folder; draw several side by side.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="training.run_dir of a run")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw losses, gradient norm, rate and waits for data")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one file with the same and the newest samples")
    return parser


@one_line_errors
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    runs = [read_status(run_dir) for run_dir in args.runs]
    echo("\n\n".join("\n".join(lines(run)) for run in runs))
    if args.png is not None:
        _write(args.png, lambda: args.png.write_bytes(figure_bytes(runs)))
    if args.html is not None:
        _write(args.html, lambda: write_atomic(args.html, page(runs)))
    return EXIT_OK


def _write(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:  # of a failed write, it does not name the file
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from error


if __name__ == "__main__":
    sys.exit(main())
