"""The mirror of a run on Weights & Biases."""

import logging
import netrc
import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

from dit.durable_files import write_atomic
from dit.errors import on_a_screen
from dit.media import open_image
from dit.monitoring.sinks import Sink
from dit.safe_files import make_folder, read_bytes

logger = logging.getLogger(__name__)

FINISH_S, UPLOAD_S = 20.0, 600.0
"""Seconds in which wandb must send the last records at the end of a run, without and with checkpoints; its own default
has no limit. A scheduler kills a stopped run after about 30 s, which is too short for checkpoints; `wandb sync` uploads
the rest. With `wandb_artifacts`, `training.hang_timeout_s` must be longer than `UPLOAD_S`."""


class WandbSink(Sink):
    """Mirrors records to Weights & Biases; all its files are inside the run folder.

    Without a key, or if the service does not respond, the run is recorded offline (`wandb sync` uploads it later), as
    are records that cannot be sent in time at the end. The id is stored in `run_dir/wandb_id`, so a resumed run
    continues the same page.

    The step is also a logged value, because wandb's own step must increase: wandb drops other records. It is the next
    one for steps that a rewound or resumed run repeats.

    Args:
        artifacts: upload each checkpoint as an artifact, from a copy that wandb makes immediately; offline, only refer
            to its folder.
    """

    def __init__(
        self,
        run_dir: Path | str,
        project: str,
        config: Mapping[str, Any],
        *,
        name: Optional[str] = None,
        group: Optional[str] = None,
        artifacts: bool = False,
    ) -> None:
        folder = make_folder(Path(run_dir).resolve() / "wandb")
        # wandb takes these three folders from the environment only; by default they are in the home directory.
        for kind in ("DATA", "CACHE", "CONFIG"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str(folder / kind.lower()))
        import wandb  # two seconds, and only rank 0 needs it

        self._wandb = wandb
        self._artifacts = artifacts
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            finish_timeout=UPLOAD_S if artifacts else FINISH_S,
            finish_timeout_raises=True,
        )
        arguments: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group,
            "id": _wandb_id(Path(run_dir) / "wandb_id"),
            "resume": "allow",
            "config": dict(config),
            "dir": str(folder.parent),
            "settings": settings,
            "mode": os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline"),
        }
        try:
            self._run = wandb.init(**arguments)
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            logger.warning("Weights & Biases is recorded offline: %s", on_a_screen(str(error)))
            self._run = wandb.init(**{**arguments, "mode": "offline"})
        if self._run.offline:
            parts = f"{shlex.quote(str(folder))}/offline-run-*"  # one of each attempt
            logger.info("wandb records offline; upload with: wandb sync %s", parts)
        self._next_step = self._run.starting_step
        self._run.define_metric("consumed_samples")
        self._run.define_metric("*", step_metric="consumed_samples")

    def scalars(self, step: int, values: Mapping[str, float], consumed_samples: int) -> None:
        self._log(step, {**values, "consumed_samples": consumed_samples})

    def image(self, name: str, step: int, picture: Path, caption: str = "") -> None:
        if picture.suffix == ".gif":
            self._log(step, {name: self._wandb.Video(str(picture), caption=caption, format="gif")})
        else:
            with open_image(picture) as image:
                self._log(step, {name: self._wandb.Image(image.convert("RGB"), caption=caption)})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._next_step = max(step, self._next_step)
        self._run.log({**values, "step": step}, step=self._next_step)
        self._next_step += 1

    def artifact(self, path: Path, metadata: Mapping[str, Any]) -> None:
        if not self._artifacts:
            return
        name = f"checkpoint-{self._run.id}-step_{metadata['step']}"
        artifact = self._wandb.Artifact(name, "checkpoint", metadata=dict(metadata))
        if self._run.offline:
            artifact.add_reference(Path(path).resolve().as_uri(), checksum=False)  # no copy, and no hashing
        else:
            artifact.add_dir(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(path: Path) -> str:
    """Return the id of this run's page, created at the first call."""
    if os.path.lexists(path):
        return read_bytes(path, follow=False).decode().strip()
    run_id = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    write_atomic(path, run_id + "\n")
    return run_id


def has_wandb_key() -> bool:
    """Return whether wandb can log in without a prompt, which would block the run on a terminal."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
