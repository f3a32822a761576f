"""Single requests to a remote store, through fsspec. Each has a time limit, and refusals become errors with a code."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from paceline.base.errors import CheckpointError
from paceline_hosts.stores.remote_errors import causes_of, code_of, coded_errors, no_bucket

ANSWER_S = 30.0
_LISTING_S = 120.0
_CONDITION_FAILED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
# By default botocore waits up to 60 s for a connection, and s3fs tries five times: an error would take minutes.
_S3_PATIENCE = {"connect_timeout": 5, "read_timeout": 30, "retries": {"mode": "standard", "total_max_attempts": 3}}


def scheme(url: str) -> str:
    """Returns the protocol of a URL, such as "s3" for "s3://bucket/run"; "" for a path."""
    return url.partition("://")[0] if "://" in url else ""


def is_known(protocol: str) -> bool:
    """Returns whether fsspec knows a protocol. The package for it may not be installed."""
    from fsspec.registry import known_implementations, registry

    return protocol in known_implementations or protocol in registry


def filesystem(url: str) -> Any:
    """Returns the file system of a URL. fsspec keeps one for each process and set of options.

    Raises:
        CheckpointError: `checkpoint-store`, if its package is not installed.
    """
    import fsspec
    from fsspec.config import conf

    protocol = scheme(url)
    options: dict[str, Any] = {"use_listings_cache": False}
    is_s3_url = protocol in ("s3", "s3a")
    if is_s3_url:
        options["config_kwargs"] = {**_S3_PATIENCE, **conf.get(protocol, {}).get("config_kwargs", {})}
    try:
        fs = fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise CheckpointError(
            "checkpoint-store",
            f"{url} needs a package that is not installed.",
            why=str(error),
            fix="`pip install s3fs`" if is_s3_url else "install what the reason names",
        ) from None
    if is_s3_url:
        fs.retries = 2
    return fs


def path_of(url: str) -> str:
    """Returns the path of a URL in its file system."""
    from fsspec.core import strip_protocol

    filesystem(url)  # raises a coded error where the package of this protocol is missing
    return str(strip_protocol(url))


def _ask(url: str, request: str, *args: object, within_s: float = 0, **options: object) -> Any:
    """Calls a method of the file system with the path of a URL.

    Args:
        url: the URL.
        request: the name of the method.
        args, options: further arguments of the method.
        within_s: seconds that it may take; 0 for `ANSWER_S`.
    """
    fs = filesystem(url)
    path = path_of(url)
    with coded_errors(url):
        if fs.async_impl:
            return _answer(fs, getattr(fs, f"_{request}"), path, *args, within_s=within_s, **options)
        return getattr(fs, request)(path, *args, **options)


def _answer(fs: Any, request: object, *args: object, within_s: float = 0, **options: object) -> Any:
    """Runs an asynchronous method, and returns its result. The arguments are those of `_ask`."""
    from fsspec.asyn import sync

    if is_s3(fs) and fs._s3 is None:
        # This reads megabytes of descriptions of AWS from the disk. On a busy machine that takes seconds, which must not count
        # as time without an answer from the network.
        fs.connect()
    return sync(fs.loop, request, *args, timeout=within_s or ANSWER_S, **options)


def kind(url: str) -> str:
    """Returns "file" or "directory"; "" if there is neither."""
    try:
        return str(_ask(url, "info")["type"])
    except FileNotFoundError:
        return ""


def size(url: str) -> int:
    """Returns the size of a file in bytes.

    Raises:
        FileNotFoundError: there is no such file.
    """
    info = _ask(url, "info")
    if info["type"] != "file":
        raise FileNotFoundError(2, os.strerror(2), url)
    return int(info["size"])


def names(url: str) -> list[str]:
    """Returns the names directly below a prefix, sorted."""
    return sorted(_below(url, lambda: _ask(url, "ls", detail=True, within_s=_LISTING_S)))


def sizes(url: str) -> dict[str, int]:
    """Returns the size of every object below a prefix, by its relative name."""
    entries = _below(url, lambda: _ask(url, "find", detail=True, within_s=_LISTING_S).values())
    sizes_of: dict[str, int] = {}
    for name, entry in sorted(entries.items()):
        if entry["type"] == "file":
            sizes_of[name] = int(entry["size"] or 0)
    return sizes_of


def _below(url: str, listing: Callable[[], Any]) -> dict[str, Any]:
    """Returns the entries of a listing by their names relative to a prefix; {} if there is no such prefix."""
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
    """Returns the content of a small object, in one request: of one that is being replaced, the old content or the new one.

    None if there is no such object.
    """
    try:
        return bytes(_ask(url, "cat_file"))
    except FileNotFoundError:
        return None


def write(url: str, content: bytes | bytearray, *, create: bool = False, within_s: float = 0) -> bool:
    """Writes an object in one request.

    Args:
        url: the URL.
        content: what is written.
        create: whether the object must not exist yet.
        within_s: seconds that it may take; 0 for `ANSWER_S`.

    Returns:
        Whether it was written: False if `create` is set and the object exists.
    """
    try:
        if is_s3(filesystem(url)):
            _put(url, content, create, within_s)
        else:
            options = {"mode": "create"} if create else {}
            _ask(url, "pipe_file", bytes(content), within_s=within_s, **options)
    except FileExistsError:
        return False
    except FileNotFoundError as error:
        raise no_bucket(url, str(error)) from error
    except CheckpointError as error:
        # Stores use different codes for a condition of a write that does not hold.
        condition_failed = any(code_of(cause) in _CONDITION_FAILED for cause in causes_of(error))
        if create and condition_failed:
            return False
        raise
    return True


def _put(url: str, content: bytes | bytearray, create: bool, within_s: float) -> None:
    """Writes an object on S3 as s3fs does, but from a stream: s3fs passes bytes, and aiohttp warns if they exceed 1 MB."""
    fs = filesystem(url)
    bucket, key, _ = fs.split_path(url)
    options = {"IfNoneMatch": "*"} if create else {}
    with coded_errors(url):
        body = io.BytesIO(content)
        _answer(fs, fs._call_s3, "put_object", Bucket=bucket, Key=key, Body=body, within_s=within_s, **options)


def is_s3(fs: Any) -> bool:
    """Returns whether a file system takes requests of S3 itself: uploads in parts, and conditions of a write."""
    return hasattr(fs, "_call_s3")


def delete(url: str) -> None:
    """Deletes one object, if it exists."""
    try:
        _ask(url, "rm_file")
    except FileNotFoundError:
        return


def delete_all(url: str) -> None:
    """Deletes every object below a prefix, in as few requests as the store allows."""
    if sizes(url):
        try:
            _ask(url, "rm", recursive=True, within_s=_LISTING_S)
        except FileNotFoundError:
            return


def abort_uploads(url: str) -> int:
    """Aborts uploads in parts below a prefix that nobody will complete, because S3 bills their parts. Returns their number."""
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
