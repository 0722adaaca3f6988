"""Copies of checkpoints in the bucket of a test."""

from dit.checkpoint.background.remote import RemoteStore, copy_all
from tests.support.object_store import BUCKET
from tests.unit.checkpoint.checkpoints import make_store, save

ADDRESS = f"s3://{BUCKET}/mine"


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def complete_copies():
    return sorted(manifest.step for manifest in RemoteStore(ADDRESS).manifests())


def put(bucket, key, body):
    bucket.client().put_object(Bucket=BUCKET, Key=f"mine/{key}", Body=body)


def copied(folder, *steps, **keep):
    """Return a store with checkpoints that are copied."""
    store = make_store(folder, **{"keep_last": len(steps), **keep})
    for step in steps:
        save(store, step)
    copy_all(store, RemoteStore(ADDRESS))
    return store
