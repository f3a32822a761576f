"""Says what is wrong about an object that `prepare` cannot prepare, and what to pass instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

from paceline.base.errors import PrepareError
from paceline.world.layout import Layout, model_axes

_TAKEN = "it prepares torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader and learning-rate schedulers"
# Objects that can be iterated, and are no loaders of batches. A generator, `iter(loader)` and an open file are iterators.
_NO_LOADERS = (str, bytes, dict, list, tuple, type, torch.Tensor, Dataset, Sampler, Iterator)


def may_be_loader(value: object) -> bool:
    """Returns whether an object may be a loader. Those of other libraries are no `DataLoader`, but can be iterated."""
    return hasattr(value, "__iter__") and not isinstance(value, _NO_LOADERS)


def not_preparable(value: object) -> PrepareError:
    """Returns the error `prepare-kind` for an object that is no model, optimizer, loader or scheduler."""
    kind = type(value).__name__
    what = f"`prepare` was given an object of type {kind}, which is no model, optimizer, loader or scheduler."
    why = _TAKEN
    fix = "leave it out of the call; it needs no preparation"
    if isinstance(value, type):
        what = f"`prepare` was given the class {value.__name__} and not an instance of it."
        fix = f"construct it first: `{value.__name__.lower()} = {value.__name__}(...)`, and prepare that"
    elif _are_parameters(value):
        what = f"`prepare` was given parameters of a model ({kind}) and not the model."
        fix = "pass the model: `model, optimizer = accelerator.prepare(model, optimizer)`"
    elif isinstance(value, Mapping | Sequence) and _holds_objects(value):
        what = f"`prepare` was given one {kind} of objects."
        why = "it takes each object as an argument, and returns the prepared objects in the same order"
        star = "*objects.values()" if isinstance(value, Mapping) else "*objects"
        fix = f"write `prepare({star})`, or name them: `prepare(model, optimizer, loader)`"
    elif isinstance(value, Dataset):
        fix = "give it a loader: `DataLoader(dataset, batch_size=32)`"
    elif isinstance(value, Sampler):
        fix = "pass the loader that has it: `DataLoader(dataset, batch_size=32, sampler=sampler)`"
    elif isinstance(value, Iterator):
        why = "it can be read only once, and says nothing about the dataset behind it"
        fix = "pass the DataLoader itself, without `iter`, `enumerate` or `zip`"
        if isinstance(value, Generator):
            fix = "write an IterableDataset whose `__iter__` returns it, and pass a DataLoader of that"
    elif hasattr(value, "step") and hasattr(value, "zero_grad"):
        fix = "let its class inherit from torch.optim.Optimizer"
    elif isinstance(value, torch.amp.GradScaler):
        fix = 'leave it out of the call: `Accelerator(mixed_precision="fp16")` scales the loss'
    return PrepareError("prepare-kind", what, why=why, fix=fix)


def loose_under_axes(layout: Layout) -> PrepareError:
    """Returns the error `prepare-kind` for a parameter of no module, where ranks do not only divide samples."""
    axes = " and ".join(f"{axis}={layout.size(axis)}" for axis in model_axes() if layout.size(axis) > 1)
    return PrepareError(
        "prepare-kind",
        f"`prepare` was given a parameter that is in no module, under a plan with {axes}.",
        why="where ranks divide a model or its sequences, each may have a part of its gradient, and only a module tells which",
        fix="make it a parameter of the model: `self.log_alpha = nn.Parameter(log_alpha)`, and read it in its `forward`",
    )


def wrapped_already(model: DataParallel[nn.Module] | DistributedDataParallel) -> PrepareError:
    """Returns the error `prepare-kind` for a model that torch wraps already, so that gradients would be averaged twice."""
    kind = type(model).__name__
    return PrepareError(
        "prepare-kind",
        f"`prepare` was given a model that {kind} wraps already.",
        why=f"`prepare` does the work of {kind}: it moves the model to the device, and averages gradients over all ranks",
        fix=f"remove the line that calls {kind}, and pass the model itself",
    )


def divided_already() -> PrepareError:
    """Returns the error `prepare-kind` for a model whose parameters a script has divided itself."""
    return PrepareError(
        "prepare-kind",
        "`prepare` was given a model whose parameters are divided over ranks already (DTensors).",
        why="`prepare` divides models itself, as the plan says, and cannot tell what another division means for gradients",
        fix="remove the line that divides it, such as `fully_shard(model)`, and choose a plan: `Accelerator(plan={'zero': 3})`",
    )


def _are_parameters(value: object) -> bool:
    """Returns whether an object is a parameter, several of them, or what a method such as `model.parameters()` returns."""
    method = getattr(value, "__qualname__", "")
    if isinstance(value, Iterator) and method in ("Module.parameters", "Module.named_parameters"):
        return True
    if isinstance(value, OrderedDict):  # as `state_dict()` returns
        return bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(isinstance(item, nn.Parameter) for item in items)


def _holds_objects(value: Mapping[object, object] | Sequence[object]) -> bool:
    """Returns whether a container holds arguments for `prepare`: a model, an optimizer or a loader."""
    items = value.values() if isinstance(value, Mapping) else value
    return any(isinstance(item, nn.Module | Optimizer) or hasattr(item, "dataset") for item in items)
