"""Copies of checkpoints that are damaged, partly deleted or cannot be fetched are never used, and are replaced."""

import errno
import os
from dataclasses import replace

import pytest

from dit.checkpoint.background.remote import RemoteStore, copy_all, fetch_newer
from dit.checkpoint.manifest import MANIFEST
from dit.errors import CheckpointError
from tests.support.object_store import BUCKET
from tests.unit.checkpoint.checkpoints import leftovers, make_store, newest_step, save
from tests.unit.checkpoint.object_copies import ADDRESS, complete_copies, content, copied, put


def test_a_copy_without_a_manifest_is_copied_again(bucket, tmp_path):
    """Its deletion by hand had begun. Older copies are retained until it is replaced."""
    store = copied(tmp_path / "a", 1, 2)
    bucket.client().delete_object(Bucket=BUCKET, Key=f"mine/iter_0000002/{MANIFEST}")
    empty = make_store(tmp_path / "b", keep_last=1)
    copy_all(empty, RemoteStore(ADDRESS))
    assert complete_copies() == [1]
    copy_all(store, RemoteStore(ADDRESS))
    assert fetch_newer(empty, RemoteStore(ADDRESS)) == 2
    assert content(empty.path(2)) == content(store.path(2))


@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "manifest"])
def test_a_damaged_copy_is_skipped_and_the_previous_copy_fetched(how, bucket, tmp_path, caplog):
    copied(tmp_path / "a", 1, 2)
    name = MANIFEST if how == "manifest" else "rank_1.safetensors"
    key = f"mine/iter_0000002/{name}"
    now = bucket.objects()[key]
    if how == "removed":
        bucket.client().delete_object(Bucket=BUCKET, Key=key)
    else:
        body = now[:-7] if how == "cut" else now[:50] + bytes([now[50] ^ 1]) + now[51:]
        bucket.client().put_object(Bucket=BUCKET, Key=key, Body=body)
    other = make_store(tmp_path / "b")
    assert fetch_newer(other, RemoteStore(ADDRESS)) == 1
    assert (newest_step(other), leftovers(other)) == (1, [])
    messages = caplog.text.replace(str(tmp_path), "")  # the folder has the name of this test
    assert name in messages or "damaged" in messages


def test_a_copy_that_failed_its_verification_is_replaced_by_the_same_tensors(bucket, tmp_path):
    """The run repeats its steps to the bit, so its manifest has the SHA-256 of the damaged object."""
    store, again, empty = (make_store(tmp_path / name, keep_last=2) for name in ("a", "b", "c"))
    for step in (1, 2):
        save(store, step)
    copy_all(store, RemoteStore(ADDRESS))
    body = bucket.objects()["mine/iter_0000002/rank_1.safetensors"]
    put(bucket, "iter_0000002/rank_1.safetensors", bytes([body[0] ^ 1]) + body[1:])
    assert fetch_newer(again, RemoteStore(ADDRESS)) == 1
    assert RemoteStore(ADDRESS).copies()[2] is None
    save(again, 2)
    copy_all(again, RemoteStore(ADDRESS))
    assert fetch_newer(empty, RemoteStore(ADDRESS)) == 2
    assert content(empty.path(2)) == content(store.path(2)) | {MANIFEST: (again.path(2) / MANIFEST).read_bytes()}
    assert not any(key.endswith("damaged") for key in bucket.objects())


def test_a_file_of_another_size_is_copied_again(bucket, tmp_path):
    store, empty = copied(tmp_path / "a", 3), make_store(tmp_path / "b")
    put(bucket, "iter_0000003/state.json", b"cut")
    store.attach(3, {"held_out_loss": 0.5})
    copy_all(store, RemoteStore(ADDRESS))
    assert fetch_newer(empty, RemoteStore(ADDRESS)) == 3


def test_a_manifest_cannot_write_outside_the_folder(bucket, tmp_path):
    store = make_store(tmp_path / "a")
    manifest = save(store, 3)
    outside = replace(manifest, files={"../../evil": next(iter(manifest.files.values()))})
    put(bucket, "iter_0000003/manifest.json", outside.to_text().encode())
    put(bucket, "evil", b"x")
    other = make_store(tmp_path / "b" / "checkpoints")
    with pytest.raises(CheckpointError, match="a path outside the checkpoint"):
        fetch_newer(other, RemoteStore(ADDRESS))
    assert not list(tmp_path.rglob("evil"))


def test_copies_that_all_fail_to_fetch_are_an_error(bucket, tmp_path, monkeypatch):
    """With an empty folder, the run would start at step 0; with an older checkpoint, it resumes from that."""
    store, empty, older = (make_store(tmp_path / name, keep_last=2) for name in ("a", "b", "c"))
    for step in (4, 6):
        save(store, step)
    save(older, 2)
    remote = RemoteStore(ADDRESS)
    copy_all(store, remote)

    def fail(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(remote._files, "get_file", fail)
    with pytest.raises(CheckpointError) as error:
        fetch_newer(empty, remote)
    assert str(error.value) == (
        f"none of the 2 complete copies at {ADDRESS} could be fetched; the newest is step 6: {ADDRESS}: OSError: "
        "[Errno 28] No space left on device; free space; correct this, or delete the copies to start at step 0"
    )
    assert fetch_newer(older, remote) is None
    assert leftovers(empty) == leftovers(older) == []
