"""`accelerate.utils.environment` and `.imports`: what this host and process have."""

from __future__ import annotations

import math
import os
import platform
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch

from paceline.base import env
from paceline.base.log import warn_once
from paceline.compat.absent import refuse
from paceline.compat.accelerate.available import has_package
from paceline.compat.accelerate.errors import CompatImportError, CompatValueError
from paceline.compat.accelerate.state import AcceleratorState, is_initialized
from paceline.world.world import World

USE_TORCH_XLA = False


# -- devices -------------------------------------------------------------------------------------------------


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of the CUDA devices."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def get_driver_version() -> str:
    """Version of NVIDIA's driver; FileNotFoundError where `nvidia-smi` is not installed."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return listed.stdout.strip().splitlines()[0]


def get_current_device_type() -> tuple[str, str]:
    """The kind of accelerator, and accelerate's word for several of them; CUDA's where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    return kind, "MULTI_GPU" if kind == "cuda" else f"MULTI_{kind.upper()}"


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs of this host can send to each other: those of NVIDIA's 4000 series could not before driver 550."""
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
    """Never: Gaudi 1 is not driven here."""
    return False


def install_xla(upgrade: bool = False) -> None:
    """Refused: TPUs are not driven here."""
    refuse("install_xla", "TPUs are not driven here", "use the CPU, or an accelerator that `torch.accelerator` knows")


# -- the host ------------------------------------------------------------------------------------------------


def check_os_kernel() -> None:
    """Warns where a Linux kernel is older than 5.5, under which processes were seen to hang."""
    if platform.system() != "Linux":
        return
    release = platform.release()  # such as "5.15.0-91-generic"
    version = release.split("-")[0].split(".")[:2]
    numbers = [int(number) for number in version if number.isdigit()]
    if numbers and tuple(numbers) < (5, 5):
        warn_once("compat", f"Linux {release} is older than 5.5: processes may hang. Update the kernel if they do.")


@dataclass
class CPUInformation:
    """Number of this process, and how many there are, in all and on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """What the launcher's variables say of this process."""
    world = World.detect()
    return CPUInformation(world.rank, world.size, world.local_rank, world.local_size)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Binds this process to the cores that are near its GPU; nothing happens without CUDA.

    Raises:
        CompatImportError: `compat-argument`, without the package `nvidia-ml-py`.
    """
    if not torch.cuda.is_available():
        return
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        raise CompatImportError(
            "compat-argument",
            "the cores near a GPU cannot be asked for.",
            why="the package nvidia-ml-py is not installed",
            fix="pip install nvidia-ml-py",
        ) from None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(local_process_index)
    # A mask of 64 cores in each word.
    num_words = math.ceil((os.cpu_count() or 1) / 64)
    words = pynvml.nvmlDeviceGetCpuAffinity(handle, num_words)
    cores: set[int] = set()
    for place, mask in enumerate(words):
        for bit in range(64):
            if mask >> bit & 1:
                cores.add(64 * place + bit)
    os.sched_setaffinity(0, cores)
    if verbose:
        print(f"Process {local_process_index} runs on cores {sorted(cores)}.")


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """The same, once a process."""
    override_numa_affinity(local_process_index, verbose)


def get_free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """The first of several variables that holds a number of 0 or more."""
    variables = env.snapshot()
    for key in env_keys:
        number = int(variables.get(key, -1))
        if number >= 0:
            return number
    return default


# -- what a function needs -----------------------------------------------------------------------------------


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function raises `CompatValueError` unless the accelerator was given a DeepSpeed plugin."""

    @wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_initialized() or AcceleratorState().deepspeed_plugin is None:
            raise CompatValueError(
                "compat-argument",
                f"{func.__name__} needs a DeepSpeed plugin.",
                why="the accelerator was given none",
                fix="write `Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))`",
            )
        return func(*args, **kwargs)

    return checked


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function raises `CompatImportError` unless torchao is installed."""

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
