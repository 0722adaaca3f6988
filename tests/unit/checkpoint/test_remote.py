"""Copies of checkpoints in an object store are complete or absent, exact to the bit, and never end a run."""

import json
import shutil
import time
from contextlib import suppress
from functools import partial

import pytest

from dit.checkpoint.background import copies as copies_module
from dit.checkpoint.background import remote
from dit.checkpoint.background.copies import Copies
from dit.checkpoint.background.remote import OWNER, Owner, RemoteStore, copy_all, fetch_newer
from dit.checkpoint.manifest import MANIFEST, FileRecord, Manifest, verify_folder
from dit.errors import CheckpointError, ConfigError
from dit.settings import CheckpointConfig
from tests.support.object_store import hanging
from tests.unit.checkpoint.checkpoints import FILES, leftovers, make_store, newest_step, save
from tests.unit.checkpoint.object_copies import ADDRESS, complete_copies, content, copied, put

MINE, OTHER = (Owner(run, {"training": {"run_dir": f"runs/{run}"}}) for run in ("mine", "other"))


def steps_of(bucket):
    return sorted({int(key.split("/")[1][5:]) for key in bucket.objects() if not key.endswith(OWNER)})


def requests_of(bucket, action):
    """Return the result of an action, and the method and path of each request."""
    bucket.requests.clear()
    result = action()
    return result, [(method, path.partition("mine/")[2]) for method, path in bucket.requests]


def test_a_copy_is_bitwise_equal_and_can_be_fetched(bucket, tmp_path):
    store = make_store(tmp_path / "a", keep_last=2)
    save(store, 3, consumed_samples=12)
    sent = copy_all(store, RemoteStore(ADDRESS))
    assert {key.split("/", 2)[2]: value for key, value in bucket.objects().items()} == content(store.path(3))
    assert sent == sum(map(len, content(store.path(3)).values()))
    other = make_store(tmp_path / "b")
    assert fetch_newer(other, RemoteStore(ADDRESS)) == 3
    assert content(other.path(3)) == content(store.path(3))
    assert (verify_folder(other.path(3)).meta["consumed_samples"], leftovers(other)) == (12, [])


def test_an_interrupted_copy_is_invalid_and_copied_again(bucket, tmp_path):
    store, puts = make_store(tmp_path / "a"), []

    def door(method, path):
        puts.extend([path] if method == "PUT" else [])
        return 403 if len(puts) > 3 else None

    save(store, 3)
    bucket.door = door
    with pytest.raises(CheckpointError, match=r"s3://runs/mine: PermissionError.*check address, credentials"):
        copy_all(store, RemoteStore(ADDRESS))
    bucket.door = lambda method, path: None
    assert len(bucket.objects()) == 3
    assert complete_copies() == []
    assert fetch_newer(make_store(tmp_path / "b"), RemoteStore(ADDRESS)) is None
    copy_all(store, RemoteStore(ADDRESS))
    assert complete_copies() == [3]


def test_interrupted_copies_are_removed_later(bucket, tmp_path):
    """Its checkpoint was deleted meanwhile. Copies newer than all checkpoints of this folder are not touched."""
    for step in (2, 9):
        put(bucket, f"iter_000000{step}/state.json", b"{}")
    copied(tmp_path, 3)
    assert steps_of(bucket) == [3, 9]


def test_existing_files_are_not_sent_again(bucket, tmp_path):
    store = copied(tmp_path, 3, 6, keep_last=5)
    bucket.requests.clear()
    assert copy_all(store, RemoteStore(ADDRESS)) == 0
    assert "PUT" not in {method for method, _ in bucket.requests}
    store.attach(3, {"held_out_loss": 0.5})
    assert copy_all(store, RemoteStore(ADDRESS)) == len((store.path(3) / MANIFEST).read_bytes())
    assert RemoteStore(ADDRESS).manifest(3).held_out_loss == RemoteStore(ADDRESS).copies()[3].held_out_loss == 0.5


def test_a_step_that_is_saved_again_replaces_its_copy(bucket, tmp_path):
    """Also if a file has the same size. While its files are replaced, the copy does not count as complete."""
    store, other = copied(tmp_path / "a", 3), make_store(tmp_path / "b")
    folder = store.begin(3)
    (folder / "state.json").write_bytes(bytes((store.path(3) / "state.json").stat().st_size))
    store.publish(3, {})
    bucket.door = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(CheckpointError):
        copy_all(store, RemoteStore(ADDRESS))
    assert complete_copies() == []
    bucket.door = lambda method, path: None
    copy_all(store, RemoteStore(ADDRESS))
    assert fetch_newer(other, RemoteStore(ADDRESS)) == 3
    assert content(other.path(3)) == content(store.path(3))


MANY = 16


def test_characters_of_patterns_in_an_address_are_names() -> None:
    """Deleting a copy deletes no file of another run, which the address matches as a pattern."""
    import fsspec

    files = fsspec.filesystem("memory")
    for run in ("/bucket/run[1]*", "/bucket/run?", "/bucket/run1", "/bucket/run[1]*2"):
        for name in (MANIFEST, "rank_00000.safetensors", "data/0.json"):
            files.put_file(__file__, f"{run}/iter_0000003/{name}")
    for run in ("run[1]*", "run?"):
        remote = RemoteStore(f"memory://bucket/{run}")
        assert remote.steps() == [3]
        remote.delete(3)
        assert remote.steps() == []
        assert not files.find(f"/bucket/{run}")
        remote.delete(3)
    for run in ("run1", "run[1]*2"):
        assert len(files.find(f"/bucket/{run}")) == 3


@pytest.fixture
def many(bucket, tmp_path):
    """Return a bucket with copies of steps 1 to MANY, and a store with a newer checkpoint."""
    record = FileRecord(1, "00")
    for step in range(1, MANY + 1):
        manifest = Manifest(step, {"x": record}, {"held_out_loss": 0.0 if step == 7 else 1.0})
        put(bucket, f"iter_{step:07d}/{MANIFEST}", manifest.to_text().encode())
    store = make_store(tmp_path / "many", keep_last=3, keep_every=1, keep_best=1)
    save(store, MANY + 1)
    return bucket, store


def test_only_the_first_save_reads_all_manifests(many):
    bucket, store = many
    remote = RemoteStore(ADDRESS)
    _, first = requests_of(bucket, lambda: copy_all(store, remote))
    assert sum(path.endswith(MANIFEST) for method, path in first if method != "PUT") == MANY
    save(store, MANY + 2)
    _, second = requests_of(bucket, lambda: copy_all(store, remote))
    assert len(second) <= len(FILES) + 6
    assert RemoteStore(ADDRESS).steps() == list(range(1, MANY + 3))
    store.config.keep_every = 15
    _, third = requests_of(bucket, lambda: copy_all(store, remote))
    assert not any(path.endswith(MANIFEST) for method, path in third if method == "GET")
    assert RemoteStore(ADDRESS).steps() == [7, 15, MANY, MANY + 1, MANY + 2]


def test_the_process_reads_manifests_once(many):
    bucket, store = many
    RemoteStore(ADDRESS).put_owner(MINE)
    memory, config, read = {}, CheckpointConfig(copy_to=ADDRESS, keep_last=3, keep_every=1), []
    for step in (MANY + 1, MANY + 2):
        save(store, step)
        copying = partial(copies_module.execute, {"step": step}, str(store.root), config, MINE, memory)
        reply, requests = requests_of(bucket, copying)
        assert reply["error"] is None
        read.append(sum(method == "GET" and path.endswith(MANIFEST) for method, path in requests))
    assert read == [MANY, 0]


def test_a_start_reads_one_manifest(many, tmp_path):
    bucket, store = many
    copy_all(store, RemoteStore(ADDRESS))
    other = make_store(tmp_path / "b")
    step, paths = requests_of(bucket, lambda: fetch_newer(other, RemoteStore(ADDRESS)))
    assert step == MANY + 1
    assert sum(path.endswith(MANIFEST) for _, path in paths) == 1
    step, paths = requests_of(bucket, lambda: fetch_newer(other, RemoteStore(ADDRESS)))
    assert (step, len(paths)) == (None, 1)
    with pytest.raises(CheckpointError, match=rf"has {MANY + 1} checkpoints, but no owner.yaml that names their run; "):
        RemoteStore(ADDRESS).owner()


def copy_interrupted(bucket, store):
    """Interrupt a copy after 0, 1, 2, ... changes until it succeeds; return the number of attempts."""
    remote = RemoteStore(ADDRESS)
    for allowed in range(40):
        changes = []

        def door(method, path, allowed=allowed, changes=changes):
            changes.extend([path] if method in ("PUT", "DELETE", "POST") else [])
            return 403 if len(changes) > allowed else None

        bucket.door = door
        with suppress(CheckpointError):
            copy_all(store, remote)
        bucket.door = lambda method, path: None
        listed = {step for step, copy in remote.copies().items() if copy is not None}
        assert listed == {manifest.step for manifest in remote.manifests()}, allowed
        if len(changes) <= allowed:
            return allowed + 1
    raise AssertionError


def test_an_incomplete_copy_is_not_known(bucket, tmp_path):
    """At every point where replacing, adding or deleting a copy may be interrupted."""
    store = copied(tmp_path / "a", 1, 2)
    folder = store.begin(2)
    (folder / "state.json").write_bytes(b"other")
    store.publish(2, {})
    assert copy_interrupted(bucket, store) > 3
    save(store, 3)
    assert copy_interrupted(bucket, store) > len(FILES)
    assert complete_copies() == [2, 3]
    store.config.keep_last = 1
    store.prune()
    assert copy_interrupted(bucket, store) > 2
    assert complete_copies() == [3]


def test_only_newer_copies_are_fetched(bucket, tmp_path):
    copied(tmp_path / "a", 3)
    other = make_store(tmp_path / "b")
    save(other, 4)
    assert fetch_newer(other, RemoteStore(ADDRESS)) is None
    assert other.steps() == [4]
    # A damaged checkpoint of the same step does not prevent fetching.
    save(make_store(tmp_path / "c"), 3)
    (tmp_path / "c" / "iter_0000003" / FILES[1]).unlink()
    assert fetch_newer(make_store(tmp_path / "c"), RemoteStore(ADDRESS)) == 3
    assert newest_step(make_store(tmp_path / "c")) == 3
    fetched = make_store(tmp_path / "d")
    assert fetch_newer(fetched, RemoteStore(ADDRESS)) == 3
    fetched.attach(3, {"held_out_loss": 0.5})
    assert verify_folder(fetched.path(3)).held_out_loss == 0.5


def test_occasional_errors_of_a_store_are_retried(bucket, tmp_path):
    failed = []

    def door(method, path):
        if method in failed:
            return None
        failed.append(method)
        return 503

    store = make_store(tmp_path / "a")
    save(store, 3)
    bucket.door = door
    copy_all(store, RemoteStore(ADDRESS))
    assert fetch_newer(make_store(tmp_path / "b"), RemoteStore(ADDRESS)) == 3
    assert {"GET", "PUT"} <= set(failed)


def test_an_unreachable_store_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "ATTEMPTS", 1)
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:9"):
        RemoteStore(ADDRESS).steps()
    with pytest.raises(CheckpointError, match="gopher"):
        RemoteStore("gopher://somewhere/x")


def test_another_run_changes_no_copy(bucket, tmp_path, monkeypatch):
    """It would replace the copy of the same step and delete the others."""
    monkeypatch.setattr(copies_module.time, "sleep", lambda seconds: None)
    mine, other = make_store(tmp_path / "a", keep_last=2), make_store(tmp_path / "b", keep_last=1)
    config = CheckpointConfig(copy_to=ADDRESS)
    for step in (4, 6):
        save(mine, step)
    assert copies_module.execute({"step": 6}, str(mine.root), config, MINE, {})["error"] is None
    assert next(path for method, path in bucket.requests if method == "PUT").endswith(OWNER)
    before = bucket.objects()
    for step in (6, 7):
        save(other, step, consumed_samples=1)
    error = copies_module.execute({"step": 7}, str(other.root), config, OTHER, {})["error"]
    assert "has the copies of run mine in training.run_dir=runs/mine, and this is run other in" in error
    assert bucket.objects() == before
    moved = Owner("mine", {"training": {"run_dir": "runs/moved"}})
    assert copies_module.execute({"step": 6}, str(mine.root), config, moved, {})["error"] is None
    assert RemoteStore(ADDRESS).owner() == moved


@pytest.mark.parametrize("content", [b"\xff", b"run: [", b"- 1", b"{run: mine}", b""])
def test_a_damaged_owner_is_refused(bucket, content):
    put(bucket, OWNER, content)
    with pytest.raises(CheckpointError, match=OWNER):
        RemoteStore(ADDRESS).claim(MINE)
    assert bucket.objects() == {f"mine/{OWNER}": content}


@pytest.mark.parametrize("address", ["runs/mine", "s3:runs", "s3://key:word@bucket/x", "simplecache::s3://runs/x", ""])
def test_invalid_addresses_are_refused(address):
    with pytest.raises(ConfigError, match=r"checkpoint\.copy_to") as error:
        CheckpointConfig(copy_to=address).validate()
    assert "key:word" not in str(error.value)
    CheckpointConfig(copy_to=ADDRESS).validate()


class Failures(list):
    def __call__(self, step, error):
        self.append((step, error))


@pytest.fixture
def copying(bucket, tmp_path, monkeypatch):
    """Return a store, its copies and the list of their failures; the process does not retry."""
    made = []

    def make(**config):
        config = CheckpointConfig(copy_to=ADDRESS, **config)
        failures = Failures()
        made.append(Copies(tmp_path / "a", config, MINE, failures))
        return make_store(tmp_path / "a", keep_last=9), made[-1], failures

    yield make
    for one in made:
        one.close()


def until_idle(copies, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while copies.is_busy:
        assert time.monotonic() < deadline
        copies.poll()
        time.sleep(0.01)


def test_a_process_copies_and_reports(bucket, copying):
    store, copies, failures = copying()
    for step in (1, 2, 3):
        save(store, step)
        copies.copy(step)
    assert copies.is_busy
    until_idle(copies)
    assert (steps_of(bucket), failures, copies.error) == ([1, 2, 3], [], None)
    assert copies.longest_s > 0


def test_a_hanging_copy_is_cancelled_and_the_next_copy_sends_all_files(bucket, copying):
    store, copies, failures = copying(save_timeout_s=4.0)
    save(store, 1)
    bucket.door = hanging(30.0)
    began = time.monotonic()
    copies.copy(1)
    until_idle(copies)
    assert 4.0 <= time.monotonic() - began < 15.0
    assert [(step, "save_timeout_s=4" in error) for step, error in failures] == [(1, True)]
    bucket.door = lambda method, path: None
    copies.config.save_timeout_s = 60.0  # a busy machine starts the new process slowly
    save(store, 2)
    copies.copy(2)
    until_idle(copies)
    assert (steps_of(bucket), copies.error) == ([1, 2], None)


def test_a_killed_process_is_named_and_replaced(bucket, copying):
    store, copies, failures = copying()
    save(store, 1)
    bucket.door = hanging(1.0)
    copies.copy(1)
    copies._process.process.kill()
    until_idle(copies)
    assert [step for step, _ in failures] == [1]
    assert "process that copies checkpoints was killed by SIGKILL" in failures[0][1]
    bucket.door = lambda method, path: None
    copies.copy(1)
    until_idle(copies)
    assert (steps_of(bucket), copies.error) == ([1], None)


def test_the_process_ends_with_its_training_process(bucket, copying):
    store, copies, _ = copying()
    save(store, 1)
    bucket.door = hanging(30.0)
    copies.copy(1)
    time.sleep(2.0)
    copies._process._connection.close()
    assert copies._process.process.wait(5.0) == 0


def test_a_request_is_retried_and_returns_its_error(bucket, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(copies_module.time, "sleep", waits.append)
    monkeypatch.setattr(copies_module, "copy_all", lambda store, there: shutil.copy("nothing", "there"))
    monkeypatch.setattr(RemoteStore, "claim", lambda store, owner: None)
    reply = copies_module.execute({"step": 4}, str(tmp_path), CheckpointConfig(copy_to=ADDRESS), MINE, {})
    assert reply["step"] == 4
    assert "FileNotFoundError" in reply["error"]
    assert waits == []  # the error is not from the store, so there is no retry

    def refuse(store, there):
        raise CheckpointError("no")

    monkeypatch.setattr(copies_module, "copy_all", refuse)
    assert (
        copies_module.execute({"step": 4}, str(tmp_path), CheckpointConfig(copy_to=ADDRESS), MINE, {})["error"] == "no"
    )
    assert waits == [2.0, 4.0]
    assert json.dumps(reply)
