# SPDX-License-Identifier: Apache-2.0
"""Values in a bucket of an S3-compatible server; needs the package boto3.

The URL is `s3://BUCKET/PREFIX?endpoint=http://HOST:PORT`; without an endpoint it is Amazon's. The
credentials are those that boto3 finds (environment, profile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from kvconform.refimpl.cache.backend import MissingPackage, Refused, StoreError

T = TypeVar("T")

GONE = ("404", "NoSuchKey", "NoSuchBucket")
"""Error codes of a value that does not exist."""
REGION = "us-east-1"
"""Region if the environment names none: servers of other makers ignore it."""


class S3Backend:
    """A client; `patience`: seconds until a call fails. Makes the bucket if there is none."""

    def __init__(self, url: str, patience: float) -> None:
        try:
            from botocore.config import Config

            session = _session()
        except ModuleNotFoundError:
            raise MissingPackage("a store at s3:", "boto3") from None
        parts = urlsplit(url)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self._client: Any = session.client(
            "s3",
            endpoint_url=parse_qs(parts.query).get("endpoint", [None])[0],
            region_name=session.region_name or REGION,
            config=Config(
                connect_timeout=patience, read_timeout=patience, retries={"total_max_attempts": 1}
            ),
        )

    def _call(self, call: Callable[[], T], gone: T | None = None) -> T | None:
        """Return the result of a call; `gone` if the value or the bucket does not exist."""
        try:
            return call()
        except Exception as error:  # a damaged response raises errors of any kind
            code = _code(error)
            if code in GONE:
                return gone
            if code:
                raise Refused(f"S3: {code}") from error
            raise StoreError(f"S3: {type(error).__name__}") from error

    def _named(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def exists(self, key: str) -> bool:
        return self._call(lambda: self._client.head_object(**self._named(key))) is not None

    def get(self, key: str) -> bytes | None:
        return self._call(lambda: self._client.get_object(**self._named(key))["Body"].read())

    def set(self, key: str, value: bytes) -> None:
        def put() -> Any:
            return self._client.put_object(**self._named(key), Body=value)

        if self._call(put) is None:  # there is no bucket
            self._call(lambda: self._client.create_bucket(Bucket=self._bucket))
            if self._call(put) is None:
                raise Refused("S3: there is no bucket, although it was made")

    def list(self, prefix: str = "") -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        none: list[str] = []
        found = self._call(
            lambda: [entry["Key"] for page in pages for entry in page.get("Contents", ())], none
        )
        return iter([name.removeprefix(self._prefix) for name in found or ()])

    def delete(self, key: str) -> None:
        self._call(lambda: self._client.delete_object(**self._named(key)))

    def close(self) -> None:
        self._client.close()


@cache
def _session() -> Any:
    """Return the session of this process: it reads descriptions of services for a second."""
    import boto3

    return boto3.Session()


def _code(error: Any) -> str:
    """Return the code of a server's refusal; "" if the error is of another kind."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
