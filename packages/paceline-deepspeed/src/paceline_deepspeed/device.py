"""`deepspeed.get_accelerator()`: this process's device under DeepSpeed's names, on `torch.accelerator`."""

from __future__ import annotations

import os
import resource
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from paceline.world.device import default_backend


class DeepSpeedAccelerator:
    """The kind of device that this machine has; the CPU where there is no other.

    What is not named here is looked up in torch's module of the device (`torch.cuda`, `torch.xpu`, `torch.cpu`).
    """

    def __init__(self) -> None:
        self._kind = "cpu"
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is not None:
            self._kind = current.type
        self._name = self._kind  # scripts read this attribute of DeepSpeed's
        # A text such as "cpu:gloo,cuda:nccl", of which the last is the device's own.
        backends = default_backend(torch.device(self._kind), None)
        self._communication_backend_name = backends.split(":")[-1].split(",")[0]
        self._module: Any = torch.get_device_module(self._kind)

    @property
    def _is_accelerator(self) -> bool:
        return self._kind != "cpu"

    # -- which device ----------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """Returns the name of the kind, or of one device."""
        if device_index is None or not self._is_accelerator:
            return self._kind
        return f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Returns a context in which a device is the current one."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> Any:
        if not self._is_accelerator:
            return 0
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self._is_accelerator:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Counts the devices; the CPU counts as one."""
        if not self._is_accelerator:
            return 1
        return torch.accelerator.device_count()

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        """Whether each operation is done when its call returns."""
        return not self._is_accelerator

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._kind

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    # -- work and memory -------------------------------------------------------------------------------------------

    def synchronize(self, device_index: int | None = None) -> None:
        """Returns once everything that was begun is done."""
        if self._is_accelerator:
            torch.accelerator.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._is_accelerator:
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in tensors; of a CPU, the most that this process has held."""
        return self._memory("allocated_bytes.all.current", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("allocated_bytes.all.peak", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory("reserved_bytes.all.current", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory("reserved_bytes.all.peak", device_index)

    def _memory(self, key: str, device_index: int | None) -> int:
        if self._is_accelerator:
            stats: Any = torch.accelerator.memory_stats(device_index)
            return int(stats.get(key, 0))
        # Of a CPU all four keys give the same number: the most that this process has held.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform == "darwin":
            return peak
        return peak * 1024  # KiB everywhere but on macOS

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._is_accelerator:
            torch.accelerator.reset_peak_memory_stats(device_index)

    # -- random numbers --------------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> Any:
        # torch's module of the CPU has no such function.
        if not self._is_accelerator:
            return torch.manual_seed(seed)
        return self._module.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if not self._is_accelerator:
            return torch.get_rng_state()
        index = self.current_device() if device_index is None else device_index
        state: torch.Tensor = self._module.get_rng_state(index)
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if not self._is_accelerator:
            torch.set_rng_state(new_state)
            return
        index = self.current_device() if device_index is None else device_index
        self._module.set_rng_state(new_state, index)

    # -- precision -------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        if not hasattr(self._module, "is_bf16_supported"):
            return True
        return bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16: every device here does, the CPU too."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Lists the dtypes in which a model can be trained."""
        dtypes = [torch.float32, torch.float16]
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    # -- streams ---------------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The class of a stream of work; that of the CPU does nothing."""
        if self._is_accelerator:
            return torch.Stream
        return torch.cpu.Stream

    @property
    def Event(self) -> Any:
        return torch.Event

    def stream(self, stream: Any) -> Any:
        """Returns a context in which work goes to a stream; a `torch.Stream` is one itself."""
        if self._is_accelerator:
            return stream
        return torch.cpu.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        if self._is_accelerator:
            return torch.accelerator.current_stream(device_index)
        return torch.cpu.current_stream()

    default_stream = current_stream

    def amp(self) -> Any:
        if self._is_accelerator:
            return self._module.amp
        return torch.amp

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Copies a tensor into pinned memory of the host, where there is a device to copy it to."""
        if not self._is_accelerator:
            return tensor
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._is_accelerator and tensor.is_pinned()

    def range_push(self, msg: str) -> None:
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_push(msg)

    def range_pop(self) -> None:
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_pop()

    def get_device_properties(self, device_index: int | None = None) -> Any:
        if self._is_accelerator:
            return self._module.get_device_properties(device_index)
        return SimpleNamespace(name="cpu", total_memory=self.total_memory())

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_accelerator:
            return int(torch.accelerator.get_memory_info(device_index)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_accelerator:
            return int(torch.accelerator.get_memory_info(device_index)[0])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module, name)


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator()


def is_current_accelerator_supported() -> bool:
    """Returns True: every device of torch's is supported."""
    return True
