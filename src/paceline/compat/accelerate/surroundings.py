"""The rest of `accelerate.utils`: the environment, versions, files, a progress bar."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import operator
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from paceline.base import env
from paceline.checkpoint.files import load_object, save_object
from paceline.compat.absent import refuse
from paceline.compat.accelerate.state import PartialState
from paceline.optim import batch_size

_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


# -- environment ---------------------------------------------------------------------------------------------


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Sets variables, by upper-case name, for a block."""
    with env.patched({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empties the environment for a block."""
    with env.patched(dict.fromkeys(env.snapshot())):
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator: what a function (or each test of a class) sets of accelerate's variables is undone afterwards."""
    if isinstance(func_or_cls, type):
        for name, method in list(vars(func_or_cls).items()):
            if name.startswith("test_") and callable(method):
                setattr(func_or_cls, name, purge_accelerate_environment(method))
        return func_or_cls

    @wraps(func_or_cls)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = env.snapshot()
        try:
            return func_or_cls(*args, **kwargs)
        finally:
            now = env.snapshot()
            env.export({name: before.get(name) for name in now | before if name.startswith("ACCELERATE_")})

    return purged


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 (or True or False) for a yes/no word; ValueError for any other."""
    found = env.parse_bool(value)
    return found if to_bool else int(found)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A yes/no variable."""
    return bool(str_to_bool(env.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable as text."""
    return env.snapshot().get(key, str(default))


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """The first of several variables that holds a number of 0 or more."""
    texts = (env.snapshot().get(key) for key in env_keys)
    return next((int(text) for text in texts if text and int(text) >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Which of these modules are imported."""
    return [name for name in library_names if name in sys.modules]


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of the CUDA devices."""
    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def is_port_in_use(port: int | None = None) -> bool:
    """Whether somebody listens at a port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


# -- versions ------------------------------------------------------------------------------------------------


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compares a version, or that of a library named, such as `("torch", ">=", "2.0")`."""
    from packaging.version import parse

    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return bool(_COMPARE[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compares torch's version."""
    from packaging.version import parse

    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)


def is_tqdm_available() -> bool:
    """Whether tqdm is installed."""
    return importlib.util.find_spec("tqdm") is not None


def is_peft_model(model: Any) -> bool:
    """Whether a model is one of peft's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(getattr(model, "module", model), peft.PeftModel)


# -- files and other things ----------------------------------------------------------------------------------


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Saves on the main process (or on the first of each node)."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Reads a file without running code from it."""
    return load_object(f, map_location=map_location)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """tqdm's bar, on the first process of each host alone unless told otherwise."""
    from tqdm.auto import tqdm as bar

    hidden = main_process_only and PartialState().local_process_index != 0
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or hidden})


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a class or function, or of an object's class."""
    return getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Puts `source` into `destination`, nested mappings too."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`obj.a.b` for "a.b"."""
    return operator.attrgetter(attr)(obj)


# -- memory --------------------------------------------------------------------------------------------------


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives memory that nobody holds back to the device."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many Nones as objects, for `a, b = release_memory(a, b)`; then the device's cache is emptied."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an error is about memory."""
    return batch_size.is_out_of_memory(exception)


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """Calls a function with a batch size that fits, halved until it does."""
    if reduce_batch_size_fn is not None:
        refuse("find_executable_batch_size(reduce_batch_size_fn=...)", "sizes are halved", "leave it out")
    return batch_size.find_executable_batch_size(function, starting_batch_size)
