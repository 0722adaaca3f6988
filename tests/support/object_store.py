"""An object store on this machine, as S3 has it: moto's server behind a door that can err, hang and cut answers off."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import boto3
from botocore.loaders import JSONFileLoader
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "runs"
JSON_FILE = JSONFileLoader.load_file


class ObjectStore:
    """A running server.

    Attributes:
        door: called with method and path of each request; returns None to pass it on, or a status to answer with.
        requests: of all that came, method and path.
    """

    def __init__(self) -> None:
        self.door: Callable[[str, str], int | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._client: Any = None

    @property
    def environ(self) -> dict[str, str]:
        """What a client's process needs to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Return boto3's client: another one than that of the code under test."""
        if self._client is None:  # takes a tenth of a second
            self._client = boto3.client("s3", endpoint_url=self.environ["AWS_ENDPOINT_URL"])
        return self._client

    def clear(self) -> None:
        """Delete all objects, open the door, and forget the requests."""
        self.door = lambda method, path: None
        for entry in self.client().list_objects_v2(Bucket=BUCKET).get("Contents", []):
            self.client().delete_object(Bucket=BUCKET, Key=entry["Key"])
        self.requests.clear()

    def objects(self) -> dict[str, bytes]:
        """Return the content of all objects by key."""
        client = self.client()
        listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {o["Key"]: client.get_object(Bucket=BUCKET, Key=o["Key"])["Body"].read() for o in listed}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        status = self.door(method, path)
        if status is None:
            return self._app(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{status} Refused", [("Content-Length", "0")])
        return [b""]


@cache
def _parsed(path: str) -> Any:
    """Parse a file of botocore; every client would parse the same files again, for a tenth of a second."""
    return JSON_FILE(JSONFileLoader(), path)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start a store with one bucket, and tell this process and those it starts where it is."""
    store = ObjectStore()
    cached = patch.object(JSONFileLoader, "load_file", lambda _, path: _parsed(path))
    with patch.dict(os.environ, store.environ), cached:
        store.client().create_bucket(Bucket=BUCKET)
        store.requests.clear()
        try:
            yield store
        finally:
            store.close()


def hanging(seconds: float) -> Callable[[str, str], None]:
    """Return a door that answers no upload for a while."""

    def door(method: str, path: str) -> None:
        if method == "PUT":
            time.sleep(seconds)

    return door
