"""Files of a remote store as streams, for `RemoteStore.open`: written in parts and read in ranges, several at the same time.

One connection cannot use all of a network, so a few requests run at the same time in both directions. The memory is bounded
for a file of any length: writing takes `_AT_ONCE + 1` parts of 16 MiB, and reading takes `_AHEAD + 2` blocks of 32 MiB.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections import deque
from concurrent.futures import Future
from typing import Any, BinaryIO, cast

from paceline_hosts.stores import objects
from paceline_hosts.stores.remote_errors import coded_errors

_log = logging.getLogger("paceline.checkpoint")
PART = 1 << 24
BLOCK = 1 << 25
_AT_ONCE = 4
_AHEAD = 1
# S3 takes at most 10,000 parts. After so many parts of one size the next ones are larger, so that a file may have 800 GB.
_PARTS_OF_ONE_SIZE = 1000


class Upload:
    """A file that is being written. The object appears when the `with` block ends without an error, and not before."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._buffer = bytearray()
        self._parts: _S3Parts | _RemoteStream | None = None
        self._sent = self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Writes bytes or any buffer. It waits while `_AT_ONCE` parts are being sent."""
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
        """Does nothing, because a part has a smallest size."""

    def tell(self) -> int:
        """Returns the number of bytes that were written."""
        return self._size

    def close(self) -> None:
        """Sends the rest, and waits until the store confirms the file."""
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
                self._parts = _S3Parts(fs, self._url) if objects.is_s3(fs) else _RemoteStream(fs, self._url)
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
    """Sends a file that is too long for one request, by the multipart upload of S3."""

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
        body = io.BytesIO(content)  # aiohttp would send long bytes at once, and block its event loop meanwhile
        self._waiting.append(self._ask("upload_part", UploadId=self._id, PartNumber=number, Body=body))

    def _finish_first(self) -> None:
        answer = self._waiting.popleft().result()
        part = {"PartNumber": len(self._done) + 1, "ETag": answer["ETag"]}
        # S3 compares the checksum of each part that it has sent with the one in the request that completes the file.
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


class _RemoteStream:
    """Sends a file through the file system's own file object; it has the methods of `_S3Parts`."""

    def __init__(self, fs: Any, url: str) -> None:
        self._file = fs.open(objects.path_of(url), "wb")

    def send(self, content: bytearray) -> None:
        self._file.write(content)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        if hasattr(self._file, "discard"):
            self._file.discard()
        self._file.closed = True  # else fsspec would complete the file when it is garbage collected


class _Ranges(io.RawIOBase):
    """Reads a file of an asynchronous file system in blocks. While it is read in order, the next blocks are requested ahead."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._blocks: dict[int, Future[bytes]] = {}  # first: `close` reads it, also if a line below raises
        self._url = url
        self._size = objects.size(url)
        self._fs = objects.filesystem(url)
        self._path = objects.path_of(url)
        self._position = 0
        self._last = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = starts[whence] + offset
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
        """Returns a block, and requests the next ones if the file is read in order."""
        if number != self._last:
            in_order = number > 0 and number == self._last + 1
            # A reader that jumps about would only pay for blocks that it does not read.
            last_wanted = number + _AHEAD if in_order else number
            last_of_file = (self._size - 1) // BLOCK
            wanted = range(number, min(last_wanted, last_of_file) + 1)
            for block in self._blocks.keys() - set(wanted):
                self._blocks.pop(block).cancel()
            for block in wanted:
                if block not in self._blocks:
                    end = min((block + 1) * BLOCK, self._size)
                    self._blocks[block] = self._request(block * BLOCK, end)
            self._last = number
        with coded_errors(self._url):
            return memoryview(self._blocks[number].result())

    def _request(self, start: int, end: int) -> Future[bytes]:
        request = self._fs._cat_file(self._path, start=start, end=end)
        return asyncio.run_coroutine_threadsafe(request, self._fs.loop)

    def close(self) -> None:
        for block in self._blocks.values():
            block.cancel()
        self._blocks = {}
        super().close()


def open_reader(url: str) -> BinaryIO:
    """Opens a file for reading. Only the blocks that are read are fetched.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the store refuses.
    """
    fs = objects.filesystem(url)
    if fs.async_impl:
        return io.BufferedReader(_Ranges(url), 1 << 16)
    with coded_errors(url):
        return cast(BinaryIO, fs.open(objects.path_of(url), "rb"))
