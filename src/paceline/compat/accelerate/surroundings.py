"""The rest of `accelerate.utils`: the environment, versions, files, a progress bar."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from paceline.base import env
from paceline.checkpoint.files import load_object, save_object
from paceline.compat.accelerate.errors import CheckpointValueError, CompatValueError, MissingFile, refused_as
from paceline.compat.accelerate.state import PartialState

STR_OPERATION_TO_FUNC = {
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
    """Empties the environment for a block; what the block sets is gone afterwards."""
    before = env.snapshot()
    env.export(dict.fromkeys(before))
    try:
        yield
    finally:
        env.export({**dict.fromkeys(env.snapshot()), **before})


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorator: what a function sets of accelerate's variables is undone afterwards.

    Of a class, this counts for its methods `test_*`, `setUp` and the like, and for those of its subclasses.
    """
    return _purged_class(func_or_cls) if isinstance(func_or_cls, type) else _purged(func_or_cls)


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = env.snapshot()
        try:
            return function(*args, **kwargs)
        finally:
            names = [name for name in env.snapshot() | before if name.startswith("ACCELERATE_")]
            # A variable that was not there before is taken out again: its value is None.
            env.export({name: before.get(name) for name in names})

    return purged


def _purged_class(kind: Any) -> Any:
    _purge_methods(kind)
    inherited = kind.__init_subclass__

    def purge_subclass(subclass: type, /, **keywords: Any) -> None:
        inherited(**keywords)
        _purge_methods(subclass)

    kind.__init_subclass__ = classmethod(purge_subclass)
    return kind


def _purge_methods(kind: Any) -> None:
    """Wraps a class' own test methods, class methods and static methods included."""
    for name, member in list(vars(kind).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(kind, name, type(member)(_purged(member.__func__)))
        elif callable(member):
            setattr(kind, name, _purged(member))


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 (or True or False) for a yes/no word; ValueError for any other."""
    word = value.lower()
    try:
        # Paceline's own variables may be empty or have spaces around the word; here these are errors.
        is_true = env.parse_bool(word if word == word.strip() else "?")
    except ValueError:
        is_true = None
    if is_true is None or not word:
        raise ValueError(f"invalid truth value {value}: it is none of yes/no, true/false, 1/0, on/off")
    return is_true if to_bool else int(is_true)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A yes/no variable."""
    return bool(str_to_bool(env.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable as text."""
    return env.snapshot().get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Which of these modules are imported."""
    return [name for name in library_names if name in sys.modules]


def is_port_in_use(port: int | None = None) -> bool:
    """Whether somebody listens at a port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


# -- versions ------------------------------------------------------------------------------------------------


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compares a version, or that of a library named, such as `("torch", ">=", "2.0")`.

    Raises:
        CompatValueError: `compat-argument`, for an operation that there is not.
    """
    from packaging.version import parse

    if operation not in STR_OPERATION_TO_FUNC:
        raise CompatValueError(
            "compat-argument",
            f"`operation` must be one of {list(STR_OPERATION_TO_FUNC)}, received {operation}.",
            why="versions are compared by it",
            fix='use one of these, such as ">="',
        )

    if isinstance(library_or_version, str):
        library_or_version = parse(importlib.metadata.version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


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


def save(obj: object, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Saves on the main process (or on the first of each node).

    Args:
        f: a path, or a file that is open for writing.

    Raises:
        CheckpointValueError: `checkpoint-value`, for anything but tensors by name where safetensors are asked for.
        CheckpointError: as `save_object`.
    """
    state = PartialState()
    writes = state.is_local_main_process if save_on_each_node else state.is_main_process
    if not writes:
        return
    if hasattr(f, "write"):
        torch.save(obj, f)
        return
    with refused_as(CheckpointValueError, "checkpoint-value"):
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Reads a path or an open file without running code from it, unless the script says `weights_only=False`.

    Raises:
        MissingFile: `checkpoint-missing`. CheckpointError: as `load_object`.
    """
    if kwargs.get("weights_only") is False or hasattr(f, "read"):
        return torch.load(f, map_location=map_location, **kwargs)
    with refused_as(MissingFile, "checkpoint-missing"):
        return load_object(f, map_location=map_location)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """tqdm's bar, on the first process of each host alone unless told otherwise.

    Raises:
        CompatValueError: `compat-argument`, where the first argument is True or False, as it was in accelerate's early days.
    """
    if args and isinstance(args[0], bool):
        raise CompatValueError(
            "compat-argument",
            f"tqdm was given {args[0]} as what it iterates over.",
            why="the first argument is the iterable",
            fix=f"write `tqdm(iterable, main_process_only={args[0]})`",
        )
    from tqdm.auto import tqdm as bar

    is_hidden = main_process_only and PartialState().local_process_index != 0
    kwargs["disable"] = kwargs.get("disable", False) or is_hidden
    return bar(*args, **kwargs)


def get_pretty_name(obj: object) -> str:
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
