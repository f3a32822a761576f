"""Single requests to whatever serves a URL, through fsspec: each ends within seconds, and refusals are coded errors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from paceline.base.errors import CheckpointError
from paceline.checkpoint.store.remote_errors import causes_of, code_of, coded_errors, no_bucket

ANSWER_S = 30.0
_LISTING_S = 120.0
_SMALL = 1 << 16
_CONDITION_FAILED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
# botocore waits up to 60 s for a connection and s3fs tries five times on top: minutes until an error.
_S3_PATIENCE = {"connect_timeout": 5, "read_timeout": 30, "retries": {"mode": "standard", "total_max_attempts": 3}}


def scheme(url: str) -> str:
    """`s3` of `s3://bucket/run`; empty for a path."""
    return url.partition("://")[0] if "://" in url else ""


def is_known(protocol: str) -> bool:
    """Whether fsspec knows a protocol, or was given it; its package may be missing still."""
    from fsspec.registry import known_implementations, registry

    return protocol in known_implementations or protocol in registry


def filesystem(url: str) -> Any:
    """The file system of a URL; fsspec keeps one for each process and set of options.

    Raises:
        CheckpointError: `checkpoint-store`, where its package is not installed.
    """
    import fsspec
    from fsspec.config import conf

    protocol = scheme(url)
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {**_S3_PATIENCE, **conf.get(protocol, {}).get("config_kwargs", {})}
    try:
        fs = fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise CheckpointError(
            "checkpoint-store",
            f"{url} needs a package that is not installed.",
            why=str(error),
            fix="`pip install s3fs`" if protocol in ("s3", "s3a") else "install what the reason names",
        ) from None
    if protocol in ("s3", "s3a"):
        fs.retries = 2
    return fs


def path_of(url: str) -> str:
    """A URL as its file system calls it."""
    from fsspec.core import strip_protocol

    filesystem(url)  # raises a coded error where the package of this protocol is missing
    return str(strip_protocol(url))


def _ask(url: str, request: str, *args: object, within_s: float = 0, **options: object) -> Any:
    fs = filesystem(url)
    path = path_of(url)
    with coded_errors(url):
        if fs.async_impl:
            return _answer(fs, getattr(fs, f"_{request}"), path, *args, within_s=within_s, **options)
        return getattr(fs, request)(path, *args, **options)


def _answer(fs: Any, request: object, *args: object, within_s: float = 0, **options: object) -> Any:
    """What an asynchronous request gives, within `ANSWER_S` unless told otherwise."""
    from fsspec.asyn import sync

    if is_s3(fs) and fs._s3 is None:
        fs.connect()  # reads megabytes of descriptions: on a busy machine that alone takes seconds, of no network
    return sync(fs.loop, request, *args, timeout=within_s or ANSWER_S, **options)


def kind(url: str) -> str:
    """`file` or `directory`, or empty where nothing lies there."""
    try:
        return str(_ask(url, "info")["type"])
    except FileNotFoundError:
        return ""


def size(url: str) -> int:
    """Bytes of a file; FileNotFoundError where there is none."""
    info = _ask(url, "info")
    if info["type"] != "file":
        raise FileNotFoundError(2, os.strerror(2), url)
    return int(info["size"])


def names(url: str) -> list[str]:
    """Names directly under a prefix, sorted."""
    return sorted(_below(url, lambda: _ask(url, "ls", detail=True, within_s=_LISTING_S)))


def sizes(url: str) -> dict[str, int]:
    """Every object under a prefix by its relative name, and its bytes."""
    entries = _below(url, lambda: _ask(url, "find", detail=True, within_s=_LISTING_S).values())
    sizes_of: dict[str, int] = {}
    for name, entry in sorted(entries.items()):
        if entry["type"] == "file":
            sizes_of[name] = int(entry["size"] or 0)
    return sizes_of


def _below(url: str, listing: Callable[[], Any]) -> dict[str, Any]:
    root = path_of(url).rstrip("/") + "/"
    try:
        entries = listing()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    below = {}
    for entry in entries:
        name = entry["name"]
        if name.startswith(root) and name != root:
            below[name.removeprefix(root).rstrip("/")] = entry
    return below


def read(url: str) -> bytes | None:
    """The content of a small object; None where there is none."""
    try:
        return bytes(_ask(url, "cat_file", start=0, end=_SMALL))
    except FileNotFoundError:
        return None


def write(url: str, content: bytes | bytearray, *, create: bool = False, within_s: float = 0) -> bool:
    """Writes an object at once; with `create`, false where one lies there already."""
    try:
        if is_s3(filesystem(url)):
            _put(url, content, create, within_s)
        else:
            _ask(url, "pipe_file", bytes(content), within_s=within_s, **({"mode": "create"} if create else {}))
    except FileExistsError:
        return False
    except FileNotFoundError as error:
        raise no_bucket(url, str(error)) from error
    except CheckpointError as error:
        # Stores differ in how they say that a condition of a write did not hold.
        if create and any(code_of(cause) in _CONDITION_FAILED for cause in causes_of(error)):
            return False
        raise
    return True


def _put(url: str, content: bytes | bytearray, create: bool, within_s: float) -> None:
    """What s3fs does too, but with a body that may be long: it gives bytes, at which aiohttp warns from 1 MB on."""
    fs = filesystem(url)
    bucket, key, _ = fs.split_path(url)
    options = {"IfNoneMatch": "*"} if create else {}
    with coded_errors(url):
        body = io.BytesIO(content)
        _answer(fs, fs._call_s3, "put_object", Bucket=bucket, Key=key, Body=body, within_s=within_s, **options)


def is_s3(fs: Any) -> bool:
    """Whether requests of S3's own can be made: uploads in parts, conditions of a write."""
    return hasattr(fs, "_call_s3")


def delete(url: str) -> None:
    """Deletes one object; none there is as well."""
    try:
        _ask(url, "rm_file")
    except FileNotFoundError:
        return


def delete_all(url: str) -> None:
    """Deletes every object under a prefix, in as few requests as the store allows."""
    if sizes(url):
        try:
            _ask(url, "rm", recursive=True, within_s=_LISTING_S)
        except FileNotFoundError:
            return


def abort_uploads(url: str) -> int:
    """Ends uploads in parts below a prefix that nobody completes any more: S3 bills their parts. Returns how many."""
    fs = filesystem(url)
    if not is_s3(fs):
        return 0
    bucket, key, _ = fs.split_path(url)
    with coded_errors(url):
        answer = _answer(fs, fs._call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=f"{key.rstrip('/')}/")
        stale = answer.get("Uploads", [])
        for upload in stale:
            _answer(fs, fs._abort_mpu, bucket, upload["Key"], upload["UploadId"])
    return len(stale)
