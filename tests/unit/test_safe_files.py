"""Reading and writing files that a stranger may have prepared: follow no link, wait for no pipe."""

import os
from pathlib import Path

import pytest

from dit.durable_files import write_atomic
from dit.errors import ConfigError
from dit.safe_files import make_folder, open_regular, read_bytes, refuse_links


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND])
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        open_regular(tmp_path / "pipe", flags)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(Path("/dev/zero"), os.O_RDONLY)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_bytes(tmp_path / "file", 4)


def test_a_link_is_followed_only_on_request(tmp_path: Path) -> None:
    """Also a link without a target: opening it would create a file outside of the folder."""
    (tmp_path / "target").write_text("content")
    for name in ("target", "missing"):
        (tmp_path / f"to_{name}").symlink_to(tmp_path / name)
        with pytest.raises(ConfigError, match=f"to_{name} is a link to .*{name}, .*delete the link"):
            open_regular(tmp_path / f"to_{name}", os.O_RDWR | os.O_CREAT, follow=False)
    assert read_bytes(tmp_path / "to_target") == b"content"
    assert not (tmp_path / "missing").exists()


def test_folders_that_are_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "target").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "run" / "target")
    refuse_links(tmp_path / "run", allowed=("checkpoints",))
    with pytest.raises(ConfigError, match="is a link"):
        refuse_links(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a link"):
        make_folder(tmp_path / "run" / "checkpoints")


def test_writing_atomically_follows_no_link(tmp_path: Path) -> None:
    """The file and the temporary file may both be links; a killed process may have left the latter."""
    (tmp_path / "victim").write_text("unchanged")
    for name in ("record", "part"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "record", "new", part=tmp_path / "part")
    assert (tmp_path / "record").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "unchanged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["record", "victim"]
