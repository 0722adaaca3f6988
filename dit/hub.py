"""The Hugging Face hub: is it reachable, and the local copy of a model with an address such as `hf://owner/name`."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from dit.errors import ConfigError
from dit.terminal import announce

PREFIX = "hf://"


def download(address: str, files: Sequence[str], is_complete: Callable[[Path], bool]) -> Path:
    """Return the folder of a repository in the local cache, after downloading the files that the cache lacks.

    Args:
        address: `hf://owner/name`, or `hf://owner/name@revision`.
        files: patterns of the files; others are not downloaded.
        is_complete: whether a folder in the cache has all of them; another program may have downloaded only a part.
    """
    match = re.fullmatch(rf"{PREFIX}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", address)
    if match is None:
        raise ConfigError(
            f"{address} is not the address of a model; write hf://owner/name, or hf://owner/name@revision"
        )
    repository, revision = match.groups()
    from huggingface_hub import constants, snapshot_download

    find = partial(snapshot_download, repository, revision=revision, allow_patterns=list(files))
    with suppress(OSError, ValueError):  # not in the cache
        if is_complete(folder := Path(find(local_files_only=True))):
            return folder
    check_reachable(repository)
    announce(f"downloading {address}, with weights, to {constants.HF_HUB_CACHE}")
    try:
        return Path(find())
    except Exception as error:  # those of several HTTP libraries
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{address} cannot be downloaded: {reason:.300}; check the name and HF_TOKEN, or give a local folder"
        ) from error


def pinned(address: str, folder: Path) -> str:
    """Return an address with the revision of its folder in the local cache, `.../snapshots/REVISION/...`."""
    revision = re.search(".*/snapshots/([^/]+)", folder.as_posix())  # the last one: the cache may be below another
    return address if revision is None else f"{address.partition('@')[0]}@{revision[1]}"


def files_of(repository: str, is_complete: Callable[[Sequence[str]], bool]) -> Sequence[str]:
    """Return the paths of the files of a repository on the Hugging Face hub.

    Args:
        is_complete: whether the files in the local cache suffice; they are also returned if the hub lists none.
    """
    from huggingface_hub import constants, list_repo_files, snapshot_download

    cached: list[str] = []
    with suppress(OSError, ValueError):  # not in the cache
        folder = Path(snapshot_download(repository, local_files_only=True))
        cached = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    if constants.HF_HUB_OFFLINE or is_complete(cached):
        return cached
    with suppress(Exception):  # those of several HTTP libraries; a later download reports them
        check_reachable(repository)
        return list_repo_files(repository)
    return cached


def check_hub(repository: str, file: str = "config.json") -> None:
    """Check that a file of a repository is available, without the minute of retries of huggingface_hub."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(repository, file), str):
        return
    check_reachable(repository)


def check_reachable(repository: str) -> None:
    """Check that the Hugging Face hub can be reached."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # those of several HTTP libraries
        raise ConfigError(
            f"{repository} is not a local folder and not in the local cache, and {constants.ENDPOINT} cannot be "
            f"reached ({error}); copy the folder to this machine and name it, or connect to the network"
        ) from error
