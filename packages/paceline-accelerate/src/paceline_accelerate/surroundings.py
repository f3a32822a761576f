"""Small functions of `accelerate.utils` for scripts: about the environment, versions, files and a progress bar.

Some modules of this package use them too. Functions about the host are in `host`, and `is_*_available` in `available`.
"""

from __future__ import annotations

import importlib.metadata
import operator
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from paceline.base import env
from paceline.checkpoint.files import NUMPY_VALUES, load_object, save_object
from paceline_accelerate.errors import CheckpointValueError, CompatValueError, MissingFile, refused_as
from paceline_accelerate.state import PartialState

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
    """Sets environment variables for a `with` block; their names are changed to upper case."""
    with env.patched({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Empties the environment for a `with` block, and restores it afterwards."""
    before = env.snapshot()
    # `export` removes a variable whose value is None.
    env.export(dict.fromkeys(before))
    try:
        yield
    finally:
        set_in_block = dict.fromkeys(env.snapshot())
        env.export(set_in_block | before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorates a function, after which accelerate's variables have the values again that they had before it.

    For a class it decorates all methods whose names begin with "test", also those of its subclasses.
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
            # A variable that was not set before gets None, which removes it.
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
    """Decorates the test methods that a class defines itself, including class methods and static methods."""
    for name, member in list(vars(kind).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(kind, name, type(member)(_purged(member.__func__)))
        elif callable(member):
            setattr(kind, name, _purged(member))


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Returns 1 or 0 for a yes/no word; True or False if `to_bool`.

    Raises:
        ValueError: for any other word.
    """
    # `parse_bool` takes an empty text and blanks around a word, which are errors under accelerate.
    is_word = value != "" and value == value.strip()
    try:
        is_true = env.parse_bool(value if is_word else "not a word")
    except ValueError:
        raise ValueError(f"invalid truth value {value}: it is none of yes/no, true/false, 1/0, on/off") from None
    return is_true if to_bool else int(is_true)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Returns the value of a yes/no variable; `default` if it is not set."""
    return bool(str_to_bool(env.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Returns the text of a variable; `default` if it is not set."""
    return env.snapshot().get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Returns those of the modules that are imported."""
    return [name for name in library_names if name in sys.modules]


def is_port_in_use(port: int | None = None) -> bool:
    """Whether a process listens on a port of this host; None is accelerate's usual port, 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


# -- versions ------------------------------------------------------------------------------------------------


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compares the version of a library with another one.

    Args:
        library_or_version: the name of an installed library, or a version of `packaging`.
        operation: one of the keys of `STR_OPERATION_TO_FUNC`.
        requirement_version: the version that it is compared with.

    Raises:
        CompatValueError: `compat-argument`, for an unknown operation.
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
    """Compares torch's version with another one."""
    from packaging.version import parse

    # Without the part behind the plus sign of "2.13.0+cpu".
    release = parse(torch.__version__).base_version
    return compare_versions(parse(release), operation, version)


def is_peft_model(model: Any) -> bool:
    """Whether a model, or the one that it wraps, is one of peft's."""
    # Before peft is imported there can be no such model, and an import would take time.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(getattr(model, "module", model), peft.PeftModel)


# -- files and other things ----------------------------------------------------------------------------------


def writes_files(save_on_each_node: bool) -> bool:
    """Whether this rank writes files: the main process does, or the first one of each node."""
    state = PartialState()
    return state.is_local_main_process if save_on_each_node else state.is_main_process


def save(obj: object, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Saves an object on the main process.

    Args:
        obj: tensors by name, or with `safe_serialization=False` anything that `torch.save` takes.
        f: a path, or a file that is open for writing.
        save_on_each_node: whether the first process of each node saves too.
        safe_serialization: whether the file is one of safetensors.

    Raises:
        CheckpointValueError: `checkpoint-value`, for anything but tensors by name with `safe_serialization`.
        CheckpointError: as `save_object`.
    """
    if not writes_files(save_on_each_node):
        return
    if hasattr(f, "write"):
        torch.save(obj, f)
        return
    # The state of a model, whose tied weights are written once.
    if (
        safe_serialization
        and isinstance(obj, OrderedDict)
        and all(isinstance(each, torch.Tensor) for each in obj.values())
    ):
        from paceline_accelerate.wrapping import clean_state_dict_for_safetensors

        obj = clean_state_dict_for_safetensors(obj)
    with refused_as(CheckpointValueError, "checkpoint-value"):
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Loads a file. No code from the file is run, unless the script says `weights_only=False`; it may have numpy's arrays.

    Args:
        f: a path, or a file that is open for reading.
        map_location: as for `torch.load`.
        kwargs: for `torch.load`; of a path only `weights_only` counts.

    Raises:
        MissingFile: `checkpoint-missing`.
        CheckpointError: as `load_object`.
    """
    if kwargs.get("weights_only") is False or hasattr(f, "read"):
        return torch.load(f, map_location=map_location, **kwargs)
    with refused_as(MissingFile, "checkpoint-missing"), torch.serialization.safe_globals(NUMPY_VALUES):
        return load_object(f, map_location=map_location)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Returns tqdm's bar, which is shown on the first process of each host.

    Args:
        args: for tqdm.
        main_process_only: False shows it on every process.
        kwargs: for tqdm.

    Raises:
        CompatValueError: `compat-argument`, where the first argument is True or False: older releases of accelerate took
            `main_process_only` as the first one.
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
    """Returns the qualified name of a class or function, or that of an object's class."""
    return getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or type(obj).__qualname__


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Copies the entries of `source` into `destination`, those of nested mappings one by one, and returns `destination`."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
