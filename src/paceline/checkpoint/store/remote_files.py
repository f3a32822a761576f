"""Files of a remote store as streams: written in parts, read in ranges, several under way at a time.

One connection carries far less than a network does, so both directions keep a few requests in flight. Memory is bounded:
writing takes `_AT_ONCE + 1` parts of 16 MiB, reading `_AHEAD + 2` blocks of 32 MiB, however long the file is.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections import deque
from concurrent.futures import Future
from typing import Any, BinaryIO, Protocol, cast

from paceline.checkpoint.store import objects
from paceline.checkpoint.store.remote_errors import coded_errors

_log = logging.getLogger("paceline.checkpoint")
PART = 1 << 24
BLOCK = 1 << 25
_AT_ONCE = 4
_AHEAD = 1
_PARTS_OF_ONE_SIZE = 1000  # S3 takes 10,000 parts: they grow, so that a file may have 800 GB


class _Parts(Protocol):
    """A long file on its way."""

    def send(self, content: bytearray) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Upload:
    """A file that is there once its `with` block ends well, and not before: an object appears whole or not at all."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._buffer = bytearray()
        self._parts: _Parts | None = None
        self._sent = self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Takes bytes or any buffer; waits while enough parts are under way."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            size = PART * (1 + self._sent // _PARTS_OF_ONE_SIZE)
            if len(self._buffer) >= size:
                self._send()
            taken = view[start : start + size - len(self._buffer)]
            self._buffer += taken
            start += len(taken)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: a part has a least size."""

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def close(self) -> None:
        """Sends what is left; returns when the store says that it keeps the file."""
        self.__exit__(None)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.closed:
            return
        self.closed = True
        if kind is not None:
            self._abort()
            return
        try:
            if self._parts is None:
                objects.write(self._url, self._buffer, within_s=60.0)
            else:
                self._send()
                with coded_errors(self._url):
                    self._parts.finish()
        except BaseException:
            self._abort()
            raise

    def _send(self) -> None:
        with coded_errors(self._url):
            if self._parts is None:
                fs = objects.filesystem(self._url)
                self._parts = _S3Parts(fs, self._url) if objects.is_s3(fs) else _Stream(fs, self._url)
            self._parts.send(self._buffer)
        self._sent += 1
        self._buffer = bytearray()

    def _abort(self) -> None:
        if self._parts is None:
            return
        try:
            self._parts.abort()
        except Exception as error:  # the error that ended the upload is on its way; the next save cleans up
            _log.warning("could not abort the upload of %s (%s); the next save there tries again", self._url, error)


class _S3Parts:
    """S3's multipart upload."""

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self._bucket, self._key, _ = fs.split_path(url)
        self._waiting: deque[Future[dict[str, Any]]] = deque()
        self._done: list[dict[str, Any]] = []
        self._id = self._ask("create_multipart_upload").result()["UploadId"]

    def _ask(self, request: str, **options: object) -> Future[dict[str, Any]]:
        asked = self._fs._call_s3(request, Bucket=self._bucket, Key=self._key, **options)
        return asyncio.run_coroutine_threadsafe(asked, self._fs.loop)

    def send(self, content: bytearray) -> None:
        if len(self._waiting) >= _AT_ONCE:
            self._finish_first()
        number = len(self._done) + len(self._waiting) + 1
        body = io.BytesIO(content)  # aiohttp sends long bytes in one go, during which nothing else happens
        self._waiting.append(self._ask("upload_part", UploadId=self._id, PartNumber=number, Body=body))

    def _finish_first(self) -> None:
        answer = self._waiting.popleft().result()
        part = {"PartNumber": len(self._done) + 1, "ETag": answer["ETag"]}
        for name, value in answer.items():
            if name.startswith("Checksum") and name != "ChecksumType":
                part[name] = value
        self._done.append(part)

    def finish(self) -> None:
        while self._waiting:
            self._finish_first()
        self._ask("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": self._done}).result()

    def abort(self) -> None:
        for future in self._waiting:
            future.cancel()
        self._ask("abort_multipart_upload", UploadId=self._id).result()


class _Stream:
    """Whatever the file system itself makes of a long file."""

    def __init__(self, fs: Any, url: str) -> None:
        self._file = fs.open(objects.path_of(url), "wb")

    def send(self, content: bytearray) -> None:
        self._file.write(content)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        if hasattr(self._file, "discard"):
            self._file.discard()
        self._file.closed = True  # fsspec's files complete what they have when they are closed or collected


class _Ranges(io.RawIOBase):
    """A file of an asynchronous file system, by ranges; the next ones are asked for while it is read in order."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._size = objects.size(url)
        self._fs = objects.filesystem(url)
        self._path = objects.path_of(url)
        self._blocks: dict[int, Future[bytes]] = {}
        self._position = 0
        self._last = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        if self._position >= self._size or not view:
            return 0
        number, start = divmod(self._position, BLOCK)
        content = self._block(number)[start : start + len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _block(self, number: int) -> memoryview:
        if number != self._last:
            ahead = _AHEAD if number == self._last + 1 and number else 0
            wanted = range(number, min(number + ahead, (self._size - 1) // BLOCK) + 1)
            for block in self._blocks.keys() - set(wanted):
                self._blocks.pop(block).cancel()
            for block in wanted:
                if block not in self._blocks:
                    self._blocks[block] = self._ask(block * BLOCK, min((block + 1) * BLOCK, self._size))
            self._last = number
        with coded_errors(self._url):
            return memoryview(self._blocks[number].result())

    def _ask(self, start: int, end: int) -> Future[bytes]:
        return asyncio.run_coroutine_threadsafe(self._fs._cat_file(self._path, start=start, end=end), self._fs.loop)

    def close(self) -> None:
        for block in self._blocks.values():
            block.cancel()
        self._blocks = {}
        super().close()


def open_reader(url: str) -> BinaryIO:
    """Opens a file that is there; what is read of it is fetched, a block at a time, and no more.

    Raises:
        FileNotFoundError, and CheckpointError where the store refuses.
    """
    fs = objects.filesystem(url)
    if fs.async_impl:
        return io.BufferedReader(_Ranges(url), 1 << 16)
    with coded_errors(url):
        return cast(BinaryIO, fs.open(objects.path_of(url), "rb"))
