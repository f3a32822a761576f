"""Small names of `deepspeed.utils` that scripts use around their loops: logs, loaders, leaf modules."""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import nn

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.world.world import World
from paceline_deepspeed.device import get_accelerator

# -- logs ------------------------------------------------------------------------------------------------------------


def _logger() -> logging.Logger:
    """Prints to stdout from INFO on, as scripts expect of it."""
    deepspeed_logger = logging.getLogger("DeepSpeed")
    # A script may have given it a handler of its own before it imports this.
    if not deepspeed_logger.handlers:
        printer = logging.StreamHandler(sys.stdout)
        printer.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        deepspeed_logger.addHandler(printer)
        deepspeed_logger.setLevel(logging.INFO)
        deepspeed_logger.propagate = False
    return deepspeed_logger


logger = _logger()
_logged_once: set[str] = set()  # messages of `log_dist_once`


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on some ranks; None or [-1] means all."""
    rank = World.detect().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks, the first time alone that it comes up."""
    if message not in _logged_once:
        _logged_once.add(message)
        log_dist(message, ranks, level)


def set_log_level_from_string(log_level: str, custom_logger: logging.Logger | None = None) -> None:
    """Logs from a level on: debug, info, warning, error or critical."""
    (custom_logger or logger).setLevel(log_level.upper())


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs what this process's device holds, on rank 0, where `force` is set."""
    if force:
        device = get_accelerator()
        log_dist(
            f"{message} | allocated {device.memory_allocated() / 2**30:.2f} GiB, most so far "
            f"{device.max_memory_allocated() / 2**30:.2f} GiB",
            ranks=[0],
        )


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that torch's profiler shows it by its name, on any device."""

    @wraps(func)
    def shown(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return shown


# -- data ------------------------------------------------------------------------------------------------------------


class RepeatingLoader:
    """Begins a loader anew whenever it ends.

    A prepared loader has a new order each time. Of that which `initialize` makes, and of another one with a
    `DistributedSampler` that shuffles, the order stays what it was, as under DeepSpeed, unless the script calls
    `sampler.set_epoch`; a warning says so.

    Args:
        loader: anything that can be iterated more than once.

    Raises:
        DataError: `deepspeed-loader-empty`, where it gives nothing.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        # Twice: the rest of this pass, and a new one. If that is empty too, no pass has a batch.
        for _ in range(2):
            try:
                return next(self.data_iter)
            except StopIteration:
                self._warn()
                self.data_iter = iter(self.loader)
        raise DataError(
            "deepspeed-loader-empty",
            "a RepeatingLoader was asked for a batch, and its loader has none.",
            why=f"a new pass over {type(self.loader).__name__} gave nothing: it is empty, or can be read once only",
            fix="give it a loader with at least one batch (a smaller batch, or drop_last=False), not an iterator",
        )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def _warn(self) -> None:
        sampler = getattr(self.loader, "sampler", None)
        shuffles = getattr(sampler, "shuffle", False) and hasattr(sampler, "set_epoch")
        if shuffles and getattr(sampler, "epoch", None) == 0:
            warn_once(
                "compat",
                "RepeatingLoader begins its loader anew in the order of the pass before, for nobody calls "
                f"`{type(sampler).__name__}.set_epoch(n)`: call it once a pass.",
            )


# -- building --------------------------------------------------------------------------------------------------------


class OnDevice:
    """While it is open, tensors are made on a device, floating-point ones in a precision.

    Args:
        dtype: of floating-point tensors.
        device: such as "meta" or "cpu".
        enabled: False does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._place: AbstractContextManager[Any] | None = None
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._before = torch.get_default_dtype()
            self._place = torch.device(self.device)
            self._place.__enter__()
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._place is not None:
            place = self._place
            self._place = None
            torch.set_default_dtype(self._before)
            place.__exit__(*failure)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes and returns them.

    The marks alone change: Paceline gathers a unit whole, whatever branch it takes.

    Raises:
        ValueError: no module is of these classes, and `raise_if_not_found`.
    """
    return _mark_leaves(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the marks of `set_z3_leaf_modules` away; see there."""
    return _mark_leaves(model, leaf_module_classes, False, raise_if_not_found)


def _mark_leaves(model: nn.Module, classes: Sequence[Any], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    leaves: list[nn.Module] = []
    for module in model.modules():
        kind = type(module)
        # Scripts name a class by itself, or by its name with or without its module.
        names = (kind, kind.__name__, f"{kind.__module__}.{kind.__name__}")
        if any(wanted in names for wanted in classes):
            set_z3_leaf_module(module, flag)
            leaves.append(module)
    if raise_if_not_found and not leaves:
        raise ValueError(f"{type(model).__name__} has no module of these classes: {list(classes)}")
    return leaves


def set_z3_leaf_module(model: nn.Module, flag: bool = True) -> None:
    model.z3_leaf = flag  # type: ignore[assignment]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether `set_z3_leaf_modules` has marked a module."""
    return bool(getattr(model, "z3_leaf", False))


def z3_leaf_parameter(model_parameter: nn.Parameter) -> bool:
    """False: no parameter is gathered with a leaf alone."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def recursive_getattr(model: Any, module_name: str) -> Any:
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    parent_name, _, name = module_name.rpartition(".")
    parent = model
    if parent_name:
        parent = recursive_getattr(model, parent_name)
    setattr(parent, name, module)


# -- weights ---------------------------------------------------------------------------------------------------------------


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Returns the state of a model, or of the model of an engine; at stage 3, the parts of this rank.

    Scripts of random-LTD call it in each save, also where no layer drops tokens. None does here.
    """
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state under the names that it has without random-LTD, whose layers add `.random_ltd_layer` to names."""
    return {name.replace(".random_ltd_layer", ""): value for name, value in state_dict.items()}
