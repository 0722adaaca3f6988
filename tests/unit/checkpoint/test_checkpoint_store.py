"""Checkpoint folders are complete or refused, and one is always retained."""

import errno
import logging
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dit.checkpoint import manifest, reader_lock
from dit.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_same_model,
    model_fingerprint,
    stored_shapes,
    verify_folder,
)
from dit.checkpoint.reader_lock import being_read
from dit.checkpoint.reading import candidates, find_checkpoint
from dit.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.checkpoints import FILES, leftovers, make_store, newest_step, newest_valid, save

NUM_FLIPS = 60


def test_a_published_folder_has_the_written_files(tmp_path):
    """Names, bytes and metadata come back unchanged, and no other file is left."""
    store = make_store(tmp_path / "checkpoints")
    assert newest_valid(store) is None
    assert store.steps() == []
    meta = {"consumed_samples": 1600, "held_out_loss": 0.1 + 0.2, "versions": {"torch": "x"}}
    save(store, 400, **meta)
    path, manifest = newest_valid(store)
    assert path == tmp_path / "checkpoints" / "iter_0000400"
    assert set(manifest.files) == set(FILES)
    assert manifest.size_bytes == sum((path / name).stat().st_size for name in FILES)
    assert (manifest.step, manifest.meta) == (400, meta)
    assert manifest.held_out_loss == 0.1 + 0.2
    assert leftovers(store) == []
    assert verify_folder(path) == manifest


# --- damage ---------------------------------------------------------------------------------------------------------


def flip_bit(path, rng):
    data = bytearray(path.read_bytes())
    position = rng.randrange(8 * len(data))
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


def truncate(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def swap(folder, rng):
    a, b = rng.sample([folder / name for name in FILES], 2)
    text = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(text)


def edit_manifest(folder, **changes):
    """Change the manifest as an attacker would: with a matching digest."""
    old = Manifest.from_text((folder / MANIFEST).read_text())
    fields = {"step": old.step, "files": dict(old.files), "meta": old.meta} | changes
    (folder / MANIFEST).write_text(Manifest(**fields).to_text())


def list_outside_file(folder, name):
    old = Manifest.from_text((folder / MANIFEST).read_text())
    edit_manifest(folder, files={**old.files, name: old.files["empty"]})


def link_file(folder):
    shutil.copy(folder / "state.json", folder.parent.parent / "outside.pt")
    (folder / "state.json").unlink()
    (folder / "state.json").symlink_to(folder.parent.parent / "outside.pt")


def link_folder(folder):
    (folder / "loader").rename(folder.parent.parent / "loader")
    (folder / "loader").symlink_to(folder.parent.parent / "loader", target_is_directory=True)


def manifest_is_a_pipe(folder):
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def link_checkpoint(folder):
    folder.rename(folder.parent.parent / folder.name)
    folder.symlink_to(folder.parent.parent / folder.name, target_is_directory=True)


DAMAGE = {
    "missing file": lambda folder, rng: (folder / rng.choice(FILES)).unlink(),
    "missing manifest": lambda folder, rng: (folder / MANIFEST).unlink(),
    "missing folder": lambda folder, rng: shutil.rmtree(folder / "loader"),
    "truncated file": lambda folder, rng: truncate(folder / rng.choice(FILES[:-1]), rng),
    "truncated manifest": lambda folder, rng: truncate(folder / MANIFEST, rng),
    "grown file": lambda folder, rng: (folder / rng.choice(FILES)).open("ab").write(b"\0"),
    "swapped files": swap,
    "garbage manifest": lambda folder, rng: (folder / MANIFEST).write_bytes(rng.randbytes(300)),
    "deep manifest": lambda folder, rng: (folder / MANIFEST).write_text("[" * 100_000),
    "other json": lambda folder, rng: (folder / MANIFEST).write_text(rng.choice(["[]", "{}", "null", '{"files": 3}'])),
    "spaces in manifest": lambda folder, rng: (folder / MANIFEST).open("a").write(" "),
    "manifest of another step": lambda folder, rng: edit_manifest(folder, step=19),
    "unlisted file": lambda folder, rng: (folder / "planted.pt").write_bytes(b"code"),
    "path to the parent": lambda folder, rng: list_outside_file(folder, "../iter_0000010/empty"),
    "absolute path": lambda folder, rng: list_outside_file(folder, "/etc/hostname"),
    "roundabout path": lambda folder, rng: list_outside_file(folder, "loader/./dp_00000.pt"),
    "file is a link": lambda folder, rng: link_file(folder),
    "folder is a link": lambda folder, rng: link_folder(folder),
    "checkpoint is a link": lambda folder, rng: link_checkpoint(folder),
    "manifest is a pipe": lambda folder, rng: manifest_is_a_pipe(folder),
    "pipe": lambda folder, rng: os.mkfifo(folder / "pipe"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_detected_and_an_older_checkpoint_used(two_checkpoints, tmp_path, caplog, kind, seed):
    """Every kind of damage is an error that names the place; resuming uses an older checkpoint and logs it."""
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))
    folder = store.path(20)
    DAMAGE[kind](folder, random.Random(seed))
    with pytest.raises(CheckpointError) as raised:
        verify_folder(folder)
    assert str(folder) in str(raised.value)
    cures = ("delete or restore", "remove that file", "remove it, or restore", "give the real folder")
    assert any(cure in str(raised.value) for cure in cures)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path)[1] == 10
    assert str(raised.value) in caplog.text


def test_a_run_folder_may_be_named_like_a_checkpoint(two_checkpoints, tmp_path):
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "iter_mine" / "checkpoints"))
    assert find_checkpoint(tmp_path / "iter_mine") == (store.path(20), 20)
    assert candidates(tmp_path / "iter_mine") == store.newest_first()
    assert candidates(store.path(10)) == [store.path(10)]


def test_every_flipped_bit_is_detected(two_checkpoints, tmp_path):
    """One flipped bit anywhere, also in the manifest, refuses the checkpoint."""
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))
    rng = random.Random(0)
    targets = [store.path(20) / name for name in (*FILES[:-1], MANIFEST)]
    for _ in range(NUM_FLIPS):
        path = rng.choice(targets)
        sound = path.read_bytes()
        flip_bit(path, rng)
        with pytest.raises(CheckpointError, match=path.name):
            verify_folder(store.path(20))
        path.write_bytes(sound)
    assert newest_step(store) == 20


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_unreadable_file_is_named(two_checkpoints, monkeypatch, code):
    """A file that cannot be opened refuses the checkpoint, like a damaged file."""
    store = make_store(two_checkpoints)
    opened = os.open

    def refuse(path, *args):
        if str(path) == str(store.path(20) / "state.json"):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        verify_folder(store.path(20))


def test_unfinished_and_foreign_names_never_count(two_checkpoints, tmp_path):
    """Only a folder with an exact name counts, even if the content is a valid checkpoint."""
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))
    for name in ("iter_0000030.tmp", "iter_0000030.trash", "iter_30", "best", "iter_0000030.tmp.tmp"):
        shutil.copytree(store.path(20), store.root / name)
    assert newest_step(store) == 20
    assert store.steps() == [10, 20]
    store.begin(40)
    assert {p.name for p in store.root.iterdir()} >= {"iter_30", "best", "iter_0000010", "iter_0000020"}
    assert leftovers(store) == ["iter_0000030.tmp.tmp", "iter_0000040.tmp"]


def test_link_in_a_finished_write_is_not_published(tmp_path):
    """The target of a link could change after it was hashed."""
    store = make_store(tmp_path)
    folder = store.begin(1)
    (folder / "weights").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="link"):
        store.publish(1, {})
    assert leftovers(store) == []


# --- retention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True], ids=["with the save", "after the save"])
def test_keep_rules_are_exact(tmp_path, later):
    """After every save exactly the newest two, the multiples of ten and the two best remain.

    The loss may be known when the checkpoint is saved, or be attached later. In the second case, the checkpoint is
    first saved with the loss of an older step, which must not count for it.
    """
    store = make_store(tmp_path, keep_last=2, keep_every=10, keep_best=2)
    rng = random.Random(0)
    losses = {}
    for step in range(1, 31):
        losses[step] = rng.choice([0.25, 0.5, math.nan, 1.0, None]) if step % 3 else rng.random()
        if later:
            save(store, step, held_out_loss=0.0, held_out_step=step - 1)
            store.attach(step, {"held_out_loss": losses[step], "held_out_step": step})
        else:
            save(store, step, held_out_loss=losses[step])
        measured = [s for s in losses if losses[s] is not None and not math.isnan(losses[s])]
        present = {s for s in measured if store.path(s).exists() or s == step}
        best = set(sorted(present, key=lambda s: (losses[s], -s))[:2])
        # A best checkpoint is only deleted after two better ones, so the best of those present are the best of all.
        assert best == set(sorted(measured, key=lambda s: (losses[s], -s))[:2])
        assert set(store.steps()) == {step, max(step - 1, 1)} | set(range(10, step + 1, 10)) | best


def test_the_only_valid_checkpoint_is_never_deleted(tmp_path, caplog):
    """Damaged newer checkpoints count for no rule, and the older valid one is not deleted because of them."""
    store = make_store(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        save(store, step)
    for step in (2, 3):
        flip_bit(store.path(step) / "state.json", random.Random(step))
    lean = make_store(tmp_path, keep_last=1)
    assert lean.prune() == []
    assert "deleting no checkpoint" in caplog.text
    assert newest_step(lean) == 1
    save(lean, 4)
    assert lean.steps() == [4]


@pytest.mark.parametrize("fault", ["the disk fails", "a file is added", "a link is added"])
def test_a_checkpoint_that_may_be_intact_is_not_deleted(two_checkpoints, tmp_path, monkeypatch, fault):
    """A rule selects the checkpoint, but it does not verify: a disk may fail for a moment, a user may add a file."""
    store = make_store(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"), keep_last=1, keep_every=10)
    opened, added, failed = os.open, store.path(10) / ".DS_Store", []

    def fail(path, *args, **options):
        if fault == "the disk fails" and str(path) == str(store.path(10) / MANIFEST):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *args, **options)

    if fault == "a file is added":
        added.touch()
    if fault == "a link is added":
        added.symlink_to(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        save(store, 25)
    added.unlink(missing_ok=True)
    assert bool(failed) == (fault == "the disk fails")
    assert store.steps() == [10, 20, 25]
    verify_folder(store.path(10))


def test_a_loss_is_not_attached_after_a_failed_save(two_checkpoints, tmp_path):
    """A checkpoint of a former attempt may have this step; with the loss, it would count as verified."""
    root = shutil.copytree(two_checkpoints, tmp_path / "checkpoints")
    losses = []
    for failure in (("begin",), ("abort",), ()):  # a writer that is restarted only aborts
        store = make_store(root, keep_last=1)
        for method in failure:
            getattr(store, method)(20)
        store.attach(20, {"held_out_loss": 0.5, "held_out_step": 20})
        losses.append(verify_folder(store.path(20)).held_out_loss)
    assert losses == [None, None, 0.5]  # a run that resumes from step 20 may validate it


def test_checkpoints_ahead_of_the_run_do_not_push_out_the_new_one(tmp_path):
    """After a fallback from damaged checkpoints, the new one stays, and the run later replaces the damaged ones."""
    store = make_store(tmp_path, keep_last=1)
    save(store, 5)
    (store.path(5) / "state.json").unlink()
    save(store, 3)
    assert newest_step(store) == 3
    save(store, 4)
    assert store.steps() == [4, 5]
    save(store, 5)
    assert store.steps() == [5]
    assert newest_step(store) == 5


def test_a_crash_before_a_deletion_leaves_at_most_one_extra_checkpoint(tmp_path, monkeypatch):
    """A run that always dies between publishing and deleting does not fill the disk."""
    store = make_store(tmp_path, keep_last=2)
    prune = store.prune
    monkeypatch.setattr(store, "prune", lambda **limits: None if "verified" in limits else prune(**limits))
    for step in range(1, 9):
        save(store, step)
        assert store.steps() == list(range(max(1, step - 2), step + 1))


def test_failed_deletion_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    store = make_store(tmp_path, keep_last=1)
    save(store, 1)

    def refuse(path):
        raise PermissionError(errno.EPERM, "refused", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        save(store, 2)
    assert "delete it by hand" in caplog.text
    assert newest_step(store) == 2
    assert store.steps() == [2]
    store.begin(3)
    assert leftovers(store) == ["iter_0000003.tmp"]


def test_an_empty_save_is_not_a_checkpoint(tmp_path):
    store = make_store(tmp_path)
    store.begin(1)
    with pytest.raises(CheckpointError, match="empty"):
        store.publish(1, {})


# --- the manifest ---------------------------------------------------------------------------------------------------


def test_checkpoint_of_another_model_names_the_first_differences(tmp_path):
    """Order and container of shapes do not matter; a name or a size does."""
    shapes = {"layers.0.weight": (4, 8), "layers.0.bias": (8,), "head.weight": (8, 2)}
    store = make_store(tmp_path)
    save(store, 1, fingerprint=model_fingerprint(shapes))
    saved = stored_shapes(newest_valid(store)[1])
    check_same_model(saved, {k: list(v) for k, v in reversed(shapes.items())}, "")
    other = {"layers.0.weight": (4, 16), "layers.0.bias": (8,), "tail.weight": (8, 2)}
    with pytest.raises(ConfigError) as raised:
        check_same_model(saved, other, "the checkpoint of step 1")
    message = str(raised.value)
    assert "the checkpoint of step 1 is of another model: 3 of 4 parameters differ" in message
    assert "layers.0.weight is [4, 8] in the checkpoint and [4, 16] in the model" in message
    assert "head.weight [8, 2] is only in the checkpoint" in message
    assert "tail.weight [8, 2] is only in the model" in message
    with pytest.raises(ConfigError, match="and 98 more"):
        check_same_model(saved, {f"p{i}": (i,) for i in range(100)}, "")


def test_ranks_that_verify_together_read_every_file_once(two_checkpoints, monkeypatch):
    """Each of three ranks reads other files; together they read all, the largest files first."""
    folder = two_checkpoints / "iter_0000020"
    hashed = manifest.hash_file
    read: list[Path] = []
    monkeypatch.setattr(manifest, "hash_file", lambda path: read.append(path) or hashed(path))
    shares = []
    for rank in range(3):
        verified = manifest.verify_folder(folder, share=(rank, 3))
        shares.append({str(path.relative_to(folder)) for path in read})
        read.clear()
    assert sorted(name for share in shares for name in share) == sorted(verified.files)
    largest = sorted(verified.files, key=lambda name: -verified.files[name].size_bytes)[:3]
    assert all(name in share for name, share in zip(largest, shares, strict=True))


# --- readers --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_read_is_deleted_when_its_readers_have_ended(tmp_path):
    """One of the two readers is another process, which is killed."""
    store = make_store(tmp_path, keep_last=1)
    save(store, 1)
    code = "import sys, time; from dit.checkpoint.reader_lock import being_read; from pathlib import Path\n"
    code += "with being_read(Path(sys.argv[1])): print('reads', flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code, str(store.path(1))]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other, being_read(store.path(1)):
        assert other.stdout.readline() == b"reads\n"
        save(store, 2)
        assert store.steps() == [1, 2]
        verify_folder(store.path(1))
        other.kill()
    save(store, 3)
    assert store.steps() == [3]


def test_a_late_reader_is_refused(tmp_path, monkeypatch):
    """Retention deletes the checkpoint after the reader has opened the folder and before it has the lock."""
    store = make_store(tmp_path, keep_last=1)
    save(store, 1)
    lock = reader_lock._lock

    def late(descriptor, operation):
        monkeypatch.setattr(reader_lock, "_lock", lock)
        save(store, 2)
        return lock(descriptor, operation)

    monkeypatch.setattr(reader_lock, "_lock", late)
    with pytest.raises(CheckpointError, match="deleted at this moment"), being_read(store.path(1)):
        pass
    with pytest.raises(CheckpointError, match="No such file"), being_read(store.path(1)):
        pass


def test_checkpoints_are_deleted_on_a_disk_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(reader_lock.fcntl, "flock", refuse)
    store = make_store(tmp_path, keep_last=1)
    save(store, 1)
    with being_read(store.path(1)):
        save(store, 2)
    assert store.steps() == [2]
