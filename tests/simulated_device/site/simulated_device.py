"""The device `sim`: an accelerator as PyTorch sees one, in the memory of the host. `device.cpp` says how.

With this folder on PYTHONPATH, `import torch` registers the device in every process by itself (the entry point
`torch.backends`). `SIMULATED_DEVICES` says how many there are (1), `SIMULATED_NAME` what torch calls them; build it first:
`python simulated_device.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = os.environ.get("SIMULATED_NAME", "sim")  # "npu", "tpu": names for which torch has no devices of its own
HERE = Path(__file__).resolve().parent.parent
MEMORY_BYTES = 8 << 30


def build_folder() -> Path:
    """Where the compiled device lies: a folder for each release of torch and Python."""
    import torch

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return HERE.parent.parent / "build" / "simulated-device" / f"torch-{torch.__version__}-python-{python}"


def build() -> None:
    """Compiles the device; needs a C++ compiler and ninja."""
    from torch.utils.cpp_extension import load

    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    source = str(HERE / "device.cpp")
    load("sim_device", [source], build_directory=str(folder), extra_cflags=["-O1", "-w"], is_python_module=False)


def register() -> None:
    """Makes `sim`, or what `SIMULATED_NAME` says, the accelerator of this process."""
    import importlib.util

    import torch
    import torch.distributed

    file = build_folder() / "sim_device.so"
    if not file.exists():
        raise FileNotFoundError(
            f"the simulated device is not compiled: run {sys.executable} {Path(__file__).resolve()}"
        )
    spec = importlib.util.spec_from_file_location("sim_device", file)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():
        _register_communication(extension)


def _register_communication(extension: Any) -> None:
    from torch.distributed import Backend

    def of_ranks(store: Any, rank: int, size: int, milliseconds: int) -> Any:
        from torch.distributed import ProcessGroupGloo

        gloo = ProcessGroupGloo(store, rank, size, timedelta(milliseconds=milliseconds))
        return extension.over_gloo(gloo, of_ranks, milliseconds)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return of_ranks(store, rank, size, timeout // timedelta(milliseconds=1))

    Backend.register_backend("simccl", create, devices=[NAME])


def _device_module(extension: Any) -> ModuleType:
    """`torch.sim`, with what generic code asks of such a module."""
    import torch

    accelerator = torch.accelerator
    module: Any = ModuleType(f"torch.{NAME}")
    module.Stream = torch.Stream
    module.Event = torch.Event
    module._is_in_bad_fork = lambda: False
    module.is_initialized = lambda: True
    module.init = lambda: None
    module.is_available = lambda: extension.device_count() > 0
    module.device_count = extension.device_count
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.synchronize = accelerator.synchronize
    module.current_stream = accelerator.current_stream
    module.set_stream = accelerator.set_stream
    module.empty_cache = accelerator.empty_cache
    module.memory_stats = accelerator.memory_stats
    module.memory_allocated = accelerator.memory_allocated
    module.max_memory_allocated = accelerator.max_memory_allocated
    module.memory_reserved = accelerator.memory_reserved
    module.reset_peak_memory_stats = accelerator.reset_peak_memory_stats
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda: True
    module.get_device_name = lambda device=None: "simulated device"
    module.mem_get_info = lambda device=None: (MEMORY_BYTES, MEMORY_BYTES)
    module.default_generators = [extension.default_generator(index) for index in range(16)]

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    def get_rng_state(device: Any = NAME) -> torch.Tensor:
        return module.default_generators[index_of(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        module.default_generators[index_of(device)].set_state(state)

    def manual_seed(seed: int) -> None:
        module.default_generators[accelerator.current_device_index()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in module.default_generators:
            generator.manual_seed(seed)

    def get_device_properties(device: Any = None) -> Any:
        properties: Any = ModuleType("properties")
        properties.name, properties.total_memory = "simulated device", MEMORY_BYTES
        return properties

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = accelerator.current_stream(chosen.device)
        accelerator.set_stream(chosen)
        try:
            yield
        finally:
            accelerator.set_stream(before)

    @contextlib.contextmanager
    def device(chosen: Any) -> Iterator[None]:
        before = accelerator.current_device_index()
        accelerator.set_device_index(index_of(chosen))
        try:
            yield
        finally:
            accelerator.set_device_index(before)

    for function in (get_rng_state, set_rng_state, manual_seed, manual_seed_all, get_device_properties, stream, device):
        setattr(module, function.__name__, function)
    return module


if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    build()
