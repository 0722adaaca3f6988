"""The id of a run, and the check that `checkpoint.copy_to` belongs to this run.

The id is random. It is stored in `run_dir/run_id`, in the manifest of each checkpoint, and with the run's settings in
`owner.yaml` at `checkpoint.copy_to`. A run with another id neither reads nor changes the copies at that address.

A folder without an id belongs to a new run, or to a run whose disk was lost. The settings distinguish the two: a run
with the same `training.run_dir`, and the same settings that determine the weights, continues the run at the address.
"""

import json
import logging
import os
import secrets
from contextlib import suppress
from typing import Optional

from dit.checkpoint.background.remote import OWNER, Owner, RemoteStore, fetch_newer
from dit.checkpoint.records import usable
from dit.checkpoint.resume_check import changes
from dit.checkpoint.store import CheckpointStore
from dit.errors import CheckpointError, ConfigError
from dit.run_config import RunConfig
from dit.safe_files import read_bytes

logger = logging.getLogger(__name__)

RUN_FILE = "run_id"
RUN_DIR = "training.run_dir"


def join_run(store: CheckpointStore, config: RunConfig) -> str:
    """Return the id of the run in this folder, after fetching a newer checkpoint from `checkpoint.copy_to`.

    Raises:
        ConfigError: the copies belong to another run; nothing was fetched.
        CheckpointError: the address cannot be read, and this folder has no checkpoint; or the folder of checkpoints is
            a link without a target.
    """
    store.check_link()
    run, address = _stored_id(store), config.checkpoint.copy_to
    if address is not None:
        remote = RemoteStore(address)
        try:
            owner = remote.owner()
            if owner is not None:
                check_owner(address, owner, run, config)
                run = run or owner.run
            run = run or secrets.token_hex(8)
            if owner is None:
                with suppress(CheckpointError, FileNotFoundError):  # the first copy tries again and reports the error
                    remote.put_owner(Owner(run, config.to_record()))
            fetch_newer(store, remote)
        except CheckpointError as error:
            if not store.complete():
                raise
            logger.warning("the checkpoints of %s are used: %s", store.root, error)
    return run or secrets.token_hex(8)


def check_owner(address: str, owner: Owner, run: Optional[str], config: RunConfig) -> None:
    """Check that the copies at `checkpoint.copy_to` belong to this run; `run` is the id in its folder, None without."""
    accepted = config.checkpoint.accept_changes or []
    with usable(f"{address}/{OWNER}"):
        present = f"checkpoint.copy_to={address} has the copies of {owner}"
        different = [
            change
            for change in changes(owner.settings, config)
            if change.identifies_run and not change.is_in(accepted)
            if change.path != RUN_DIR or os.path.abspath(str(change.old)) != os.path.abspath(str(change.new))
        ]
    if run not in (None, owner.run):
        raise ConfigError(
            f"{present}, and {RUN_DIR}={config.training.run_dir} is run {run}; give this run another address, or "
            "delete the copies there"
        )
    if run is not None:
        different = [change for change in different if change.path == RUN_DIR]
    if different:
        accept = json.dumps([*accepted, *(change.path for change in different)], separators=(",", ":"))
        raise ConfigError(
            f"{present}, which has other settings: {'; '.join(map(str, different))}. Give this run another "
            f"address; or, if it continues that run, accept the changes with 'checkpoint.accept_changes={accept}'"
        )


def _stored_id(store: CheckpointStore) -> Optional[str]:
    with suppress(OSError):
        if run := read_bytes(store.root.parent / RUN_FILE, follow=False).decode(errors="replace").strip():
            return run
    manifests = store.complete()
    return manifests[max(manifests)].run if manifests else None
