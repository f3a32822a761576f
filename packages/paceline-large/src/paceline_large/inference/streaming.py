"""Copies the weights of an offloaded block to the device where it computes, and those of the next block meanwhile.

    MappedStream    the CPU computes on memory-mapped files: nothing is copied, and pages are read ahead
    BufferStream    an accelerator computes: weights are copied into buffers on it, on a separate stream

The order of events with two buffers A and B:

    enter(block 0)   block 0 is copied to A, and waited for; a thread begins to copy block 1 to B
    leave(block 0)   A is free as soon as the device has finished the work that it was given
    enter(block 1)   waits for the copy in B; the thread begins to copy block 2 to A
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline_large.inference.page_cache import MappedPages

_log = logging.getLogger("paceline_large.inference")
# Tensors begin at multiples of this in a buffer, since vector instructions and cuBLAS are faster on aligned memory.
_ALIGNMENT = 256


class Stream(Protocol):
    """Brings weights to a device. Threads may call it at the same time."""

    def enter(self, call: int) -> None:
        """Prepares the weights of the module number `call`, which is about to compute. They are ready when this returns."""

    def leave(self, call: int) -> None:
        """Notes that the forward of this module has returned; its device may still be computing."""

    def close(self) -> None:
        """Ends the thread; the parameters have their offloaded values again."""


class CallOrder:
    """Predicts which module is called after which: at first in the order of definition, then as it was the last time.

    Args:
        num_calls: the number of modules that are called. The last one is followed by the first one of the next forward pass.
    """

    def __init__(self, num_calls: int) -> None:
        self._next = [(call + 1) % num_calls for call in range(num_calls)]
        self._last = threading.local()

    def next_after(self, call: int) -> int:
        """Returns the module that is likely to be called after this one, which is being called now."""
        previous = getattr(self._last, "call", None)
        if previous is not None:
            self._next[previous] = call
        self._last.call = call
        return self._next[call]


class MappedStream:
    """The stream of a CPU, which computes on memory-mapped files.

    Args:
        weights: the mapped parameters of each module that is called.
    """

    def __init__(self, weights: Sequence[Sequence[Tensor]]) -> None:
        self._pages = [MappedPages(tensors) for tensors in weights]
        self._order = CallOrder(len(weights))
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="paceline-read-ahead")
        self._reading: Future[None] | None = None

    def enter(self, call: int) -> None:
        """Reads the pages of the next module in a thread, if some are missing and no other read is running."""
        pages = self._pages[self._order.next_after(call)]
        reading = self._reading
        if (reading is None or reading.done()) and not pages.resident():
            self._reading = self._reader.submit(pages.read)

    def leave(self, call: int) -> None:
        """Does nothing: pages stay in the page cache until the system needs their memory."""

    def close(self) -> None:
        """Ends the thread."""
        self._reader.shutdown(cancel_futures=True)


class StreamedBlock:
    """The parameters of one block, and their offloaded values.

    Args:
        targets: the parameters, whose `.data` is replaced.
        homes: the values in host memory or in mapped files, in the same order.

    Attributes:
        packed: all values in one flat tensor of pinned memory; None if they are not pinned.
        nbytes: the size of a buffer for them.
    """

    def __init__(self, targets: Sequence[Tensor], homes: Sequence[Tensor]) -> None:
        self._targets = list(targets)
        self.homes = list(homes)
        self.packed: Tensor | None = None
        self._offsets = []
        end = 0
        for home in self.homes:
            self._offsets.append(end)
            # Rounded up to the next multiple.
            end += -(-home.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Returns tensors of the values' shapes and dtypes as views of a flat buffer of bytes."""
        views = []
        for home, offset in zip(self.homes, self._offsets, strict=True):
            view = buffer[offset : offset + home.nbytes].view(home.dtype).view(home.shape)
            views.append(view)
        return views

    def pin(self) -> None:
        """Moves the values into one tensor of pinned memory, which an accelerator can read without the CPU."""
        pinned = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.write_to(pinned)
        self.homes = self.views(pinned)
        self.packed = pinned
        self.send_home()

    def write_to(self, buffer: Tensor) -> None:
        """Copies the values into a flat buffer of bytes."""
        for view, home in zip(self.views(buffer), self.homes, strict=True):
            view.copy_(home)

    def give(self, values: Sequence[Tensor]) -> None:
        """Makes these the values of the parameters."""
        for target, value in zip(self._targets, values, strict=True):
            target.data = value

    def send_home(self) -> None:
        """Makes the offloaded values those of the parameters again."""
        self.give(self.homes)


@dataclass
class _Buffer:
    """A buffer for the weights of one block on the device.

    Attributes:
        memory: a flat tensor of bytes.
        block: the block whose values it holds, or will hold after the copy.
        filled: is done when the thread has launched the copy on the device.
        users: the number of calls that use it now.
        last_used: the number of the call that used it last.
        copied: on an accelerator, the event at the end of the copy.
        computed: on an accelerator, the events at the end of the calls that used it since that copy, or of its allocation.
    """

    memory: Tensor
    block: StreamedBlock | None = None
    filled: Future[None] = field(default_factory=Future)
    users: int = 0
    last_used: int = 0
    copied: torch.Event | None = None
    computed: list[torch.Event] = field(default_factory=list)


class BufferStream:
    """The stream of an accelerator, into whose buffers it copies weights.

    A call that finds no free buffer gets a new one, which happens if several threads call the model at the same time.

    Args:
        blocks: the block of each module that is called; modules that share parameters have the same block.
        device: the device on which the blocks compute.
        num_buffers: 2, or 1 if there is no room to read ahead.
    """

    def __init__(self, blocks: Sequence[StreamedBlock], device: torch.device, num_buffers: int = 2) -> None:
        self._blocks = list(blocks)
        self._device = device
        self._nbytes = max(block.nbytes for block in blocks)
        self._order = CallOrder(len(blocks))
        self._lock = threading.Lock()
        self._num_calls = 0
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="paceline-copy")
        self._side = None if device.type == "cpu" else torch.Stream(device)
        self._staging: Tensor | None = None
        self._buffers = [self._new_buffer() for _ in range(num_buffers)]

    def enter(self, call: int) -> None:
        """Gives the module's parameters their values on the device; begins to copy those of the next module."""
        block = self._blocks[call]
        with self._lock:
            self._num_calls += 1
            # The block has a buffer already if the call before predicted this one. Otherwise its copy begins here.
            buffer = self._buffer_of(block) or self._fill(self._free_buffer(grow=True), block)
            buffer.users += 1
            buffer.last_used = self._num_calls
            # A prediction does not get a new buffer: reading ahead may only use memory that was planned for it.
            following = self._blocks[self._order.next_after(call)]
            if self._buffer_of(following) is None:
                free = self._free_buffer(grow=False)
                if free is not None:
                    self._fill(free, following)
        # The lock is not held here: other threads may enter and leave while this one waits for its copy.
        try:
            buffer.filled.result()
        except BaseException:
            # The buffer has no valid values, so that it must not be found for this block again.
            with self._lock:
                buffer.users -= 1
                buffer.block = None
            raise
        # The copy was only launched: the device, and not this thread, waits for its end.
        if buffer.copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(buffer.copied)
        with self._lock:
            block.give(block.views(buffer.memory))

    def leave(self, call: int) -> None:
        """Frees the buffer when no other call uses it."""
        block = self._blocks[call]
        with self._lock:
            buffer = self._buffer_of(block)
            assert buffer is not None, "a buffer that is used keeps its block"
            buffer.users -= 1
            # The device may still be computing with the buffer. The next copy into it waits for this event.
            if self._side is not None:
                buffer.computed.append(torch.accelerator.current_stream(self._device).record_event())
            if not buffer.users:
                block.send_home()

    def close(self) -> None:
        """Ends the thread; the parameters have their offloaded values again."""
        self._copier.shutdown(cancel_futures=True)
        if self._side is not None:
            self._side.synchronize()
        with self._lock:
            for block in self._blocks:
                block.send_home()
            self._buffers.clear()

    def _new_buffer(self) -> _Buffer:
        # The thread is not in inference mode, and could not write to a tensor that was made in it.
        with torch.inference_mode(False):
            buffer = _Buffer(torch.empty(self._nbytes, dtype=torch.uint8, device=self._device))
        # Operations that were launched earlier on this stream may still use this memory. The first copy waits for them.
        if self._side is not None:
            buffer.computed.append(torch.accelerator.current_stream(self._device).record_event())
        return buffer

    def _buffer_of(self, block: StreamedBlock) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.block is block), None)

    def _free_buffer(self, *, grow: bool) -> _Buffer | None:
        """Returns the free buffer that was unused for the longest time; without one, a new buffer or None."""
        free = [buffer for buffer in self._buffers if not buffer.users]
        if free:
            return min(free, key=lambda buffer: buffer.last_used)
        if not grow:
            return None
        _log.warning(
            "a further buffer of %d bytes on %s: more calls are under way at once than were planned",
            self._nbytes,
            self._device,
        )
        self._buffers.append(self._new_buffer())
        return self._buffers[-1]

    def _fill(self, buffer: _Buffer | None, block: StreamedBlock) -> _Buffer:
        assert buffer is not None, "there is always a buffer for the present call"
        buffer.block = block
        # A single thread copies in the order of the requests, so that no buffer is written by two copies at once.
        buffer.filled = self._copier.submit(self._copy, buffer, block, buffer.computed)
        buffer.computed = []
        return buffer

    def _copy(self, buffer: _Buffer, block: StreamedBlock, computed: Sequence[torch.Event]) -> None:
        if self._side is None:
            block.write_to(buffer.memory)
            return
        packed = self._pinned(block, self._side)
        with self._side:
            # Earlier calls may still compute with the present contents of the buffer.
            for event in computed:
                self._side.wait_event(event)
            buffer.memory[: block.nbytes].copy_(packed, non_blocking=True)
            buffer.copied = self._side.record_event()

    def _pinned(self, block: StreamedBlock, side: torch.Stream) -> Tensor:
        """Returns the values in pinned memory; those of files are first read into a staging buffer."""
        if block.packed is not None:
            return block.packed
        if self._staging is None:
            self._staging = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # The device may still be reading the previous contents of the staging buffer.
        side.synchronize()
        block.write_to(self._staging)
        return self._staging[: block.nbytes]
