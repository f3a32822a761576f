"""Bytes that a process holds: all that `malloc` has handed out, tensors and the C++ side's buckets alike, exactly.

torch's CPU allocator takes every tensor from `malloc`, and so do DistributedDataParallel's buckets and gloo's buffers,
which no walk over Python's objects would find. On an accelerator torch's own counter says the same.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _mallinfo() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if found is not None:
        found.restype = _Info
    return found


_MALLINFO = _mallinfo()
_PLAIN = (
    torch.Tensor.__torch_dispatch__,
    torch.nn.Parameter.__torch_dispatch__,
    torch._C._disabled_torch_dispatch_impl,
)


def held(device: str = "cpu") -> int:
    """Bytes in use by this process, on its accelerator or (glibc 2.33 and newer) from `malloc`."""
    if device != "cpu":
        return torch.accelerator.memory_allocated()
    info = _MALLINFO()
    return info.uordblks + info.hblkhd


def can_measure(device: str = "cpu") -> bool:
    """Whether `held` works here."""
    return device != "cpu" or _MALLINFO is not None


class Peak(TorchDispatchMode):
    """While it is open, the most bytes that were held after any operation of torch, forward or backward.

    On an accelerator operations run later than they are called: there torch's counter keeps the peak itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The mode is off in here, and with it what another kind of tensor (states in 8 bits) does inside of an operation.
        kinds = [kind for kind in types if kind is not DTensor and kind.__torch_dispatch__ not in _PLAIN]
        if kinds:
            with self:
                result = kinds[0].__torch_dispatch__(func, types, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self.bytes = max(self.bytes, held())
        return result


def measure(step: Any, base: int, device: str = "cpu") -> tuple[int, int]:
    """Bytes over `base` at rest after a step (gradients kept) and at its peak, once the first steps are over."""
    for _ in range(3):  # buckets, states and caches are there after these
        step()
    gc.collect()
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        step()
        torch.accelerator.synchronize()
        return held(device) - base, torch.accelerator.max_memory_allocated() - base
    with Peak() as peak:
        step()
    gc.collect()
    return held() - base, peak.bytes - base
