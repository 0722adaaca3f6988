"""Table of Weights & Biases with the samples shown by `energon_data.inspect`, one row and picture each."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit.errors import ConfigError
from energon_data.report.survey import Survey

COLUMNS = ("picture", "key", "caption", "frames", "height", "width", "tokens", "seconds")


def log_table(surveys: Sequence[Survey], project: str, patch: Sequence[int], folder: Path) -> str:
    """Log a run with the table `samples`, and counts of each data set in its summary.

    Args:
        folder: where the run is recorded; it stays there without a key or a network (`WANDB_MODE` has its usual
            effect).

    Returns:
        The URL of the run's page, or its folder if it was recorded offline.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("DATA", "CACHE", "CONFIG"):  # by default in the home directory
        os.environ.setdefault(f"WANDB_{kind}_DIR", str(folder / "wandb" / kind.lower()))
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--wandb needs wandb, which is not installed: pip install wandb") from error
    from energon_data.report.contact_sheet import tile_of

    settings = wandb.Settings(x_disable_stats=True, console="off", silent=True, disable_git=True, disable_code=True)
    arguments: dict[str, Any] = {"project": project, "job_type": "data", "dir": str(folder), "settings": settings}
    try:
        run = wandb.init(**arguments)
    except wandb.errors.Error:  # no key, or no network
        run = wandb.init(**arguments, mode="offline")
    table = wandb.Table(columns=["data", *COLUMNS])
    for survey in surveys:
        for one, frame in survey.shown:
            size = (*one.size[1:], one.tokens(patch), one.duration_s)
            table.add_data(str(survey.info.path), wandb.Image(tile_of(frame)), one.key, one.caption, *size)
        run.summary[str(survey.info.path)] = {
            "samples": survey.info.samples,
            "shards": len(survey.shards),
            "read": survey.num_read,
            "damaged": dict(survey.lost),
        }
    run.log({"samples": table})
    where = str(Path(run.dir).parent) if run.offline or run.url is None else run.url
    run.finish()
    return where
