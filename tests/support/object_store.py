"""A local S3 object store: moto's server, with a function that can answer requests with errors or delay them."""

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
        door: called with method and path of each request; returns an HTTP status, or None to let the server answer.
        requests: method and path of all requests.
    """

    def __init__(self) -> None:
        self.door: Callable[[str, str], int | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise it logs every request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._client: Any = None

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which a client's process connects to the store."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """Return a boto3 client that is separate from that of the code under test."""
        if self._client is None:  # takes a tenth of a second
            self._client = boto3.client("s3", endpoint_url=self.environ["AWS_ENDPOINT_URL"])
        return self._client

    def clear(self) -> None:
        """Delete all objects, reset the door, and forget the requests."""
        self.door = lambda method, path: None
        listed = self.client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        if listed:
            self.client().delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": o["Key"]} for o in listed]})
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
    """Parse a file of botocore once; otherwise every client would parse it, which takes a tenth of a second."""
    return JSON_FILE(JSONFileLoader(), path)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start a store with one bucket; set its address in the environment of this process and its children."""
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
    """Return a door that delays every upload."""

    def door(method: str, path: str) -> None:
        if method == "PUT":
            time.sleep(seconds)

    return door
