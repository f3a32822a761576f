"""The functions of `accelerate.utils` about this host: its devices, its cores, its kernel, its variables; for scripts."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch

from paceline.base import env
from paceline.base.log import warn_once
from paceline.launch.host import free_port
from paceline.world.world import World
from paceline_accelerate.available import has_package
from paceline_accelerate.errors import CompatImportError
from paceline_doors.absent import refuse

USE_TORCH_XLA = False


# -- devices -------------------------------------------------------------------------------------------------


def get_gpu_info() -> tuple[list[str], int]:
    """Returns the names and the number of the CUDA devices."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def get_driver_version() -> str:
    """Returns the version of NVIDIA's driver.

    Raises:
        FileNotFoundError: `nvidia-smi` is not installed.
    """
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    # It prints a line for each GPU, all with the same version.
    return finished.stdout.strip().splitlines()[0]


def get_current_device_type() -> tuple[str, str]:
    """Returns the type of this host's accelerator and accelerate's word for several of them; CUDA's if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cuda" if accelerator is None else accelerator.type
    distributed_type = "MULTI_GPU" if device_type == "cuda" else f"MULTI_{device_type.upper()}"
    return device_type, distributed_type


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs of this host can send to each other; NVIDIA's 4000 series can from driver 550.40.07 on."""
    names, count = get_gpu_info()
    has_series_4000 = any("RTX 40" in name for name in names)
    if count < 2 or not has_series_4000:
        return True
    version = tuple(map(int, get_driver_version().split(".")))
    return version >= (550, 40, 7)


@cache
def check_cuda_fp8_capability() -> bool:
    """Whether the GPU computes in 8 bits."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def is_habana_gaudi1() -> bool:
    """Returns False: Paceline does not run on Gaudi 1."""
    return False


def install_xla(upgrade: bool = False) -> None:
    """Raises `CompatError`: Paceline does not run on TPUs."""
    refuse(
        "install_xla", "Paceline does not run on TPUs", "use the CPU, or an accelerator that `torch.accelerator` knows"
    )


# -- the host ------------------------------------------------------------------------------------------------


def check_os_kernel() -> None:
    """Warns if a Linux kernel is older than 5.5. accelerate's authors have seen processes hang under such kernels."""
    if platform.system() != "Linux":
        return
    # Such as "5.15.0-91-generic".
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match[1]), int(match[2])) < (5, 5):
        warn_once("compat", f"Linux {release} is older than 5.5: processes may hang. Update the kernel if they do.")


@dataclass
class CPUInformation:
    """The rank of this process and the number of processes, in the run and on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Returns what the launcher's variables say about this process."""
    # Where the processes meet does not matter here, and may not be known yet.
    world = World.detect({**env.snapshot(), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    return CPUInformation(world.rank, world.size, world.local_rank, world.local_size)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Binds this process to the cores that are near its GPU. Without CUDA it does nothing.

    Raises:
        CompatImportError: `compat-argument`, without the package `nvidia-ml-py`.
    """
    if not torch.cuda.is_available():
        return
    try:
        import pynvml
    except ImportError:
        raise CompatImportError(
            "compat-argument",
            "the cores near a GPU cannot be asked for.",
            why="the package nvidia-ml-py is not installed",
            fix="pip install nvidia-ml-py",
        ) from None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(local_process_index)
    # The answer is a list of masks of 64 cores each, those of the first 64 cores first.
    num_masks = math.ceil((os.cpu_count() or 1) / 64)
    masks = pynvml.nvmlDeviceGetCpuAffinity(handle, num_masks)
    cores: set[int] = set()
    for index, mask in enumerate(masks):
        for bit in range(64):
            if mask & (1 << bit):
                cores.add(64 * index + bit)
    os.sched_setaffinity(0, cores)
    if verbose:
        print(f"Process {local_process_index} runs on cores {sorted(cores)}.")


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Calls `override_numa_affinity`; a second call with the same arguments does nothing."""
    override_numa_affinity(local_process_index, verbose)


def get_free_port() -> int:
    """Returns a port on which no process of this host listens."""
    return free_port()


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """Returns the number of the first variable that is set to 0 or more, else `default`."""
    variables = env.snapshot()
    for key in env_keys:
        number = int(variables.get(key, -1))
        if number >= 0:
            return number
    return default


# -- requirements of a function ------------------------------------------------------------------------------


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function, which then raises `CompatImportError` unless torchao is installed."""

    @wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not has_package("torchao"):
            raise CompatImportError(
                "compat-argument",
                f"{func.__name__} needs torchao.",
                why="it is not installed",
                fix="pip install torchao",
            )
        return func(*args, **kwargs)

    return checked
