"""What `prepare` says of arguments that it cannot take: what each is, and how to write the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from paceline.base.errors import PrepareError

_PREPARED = (
    "it prepares torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader and learning-rate schedulers"
)


def refused(value: Any) -> PrepareError:
    """The error `prepare-kind` for an object that is no model, optimizer, loader or scheduler."""
    what = f"`prepare` was given a {type(value).__name__}, which is no model, optimizer, loader or scheduler."
    why, fix = _PREPARED, "leave it out of the call; it needs no preparation"
    if isinstance(value, type):
        what = f"`prepare` was given the class {value.__name__} and no object of it."
        fix = f"make the object first: `{value.__name__.lower()} = {value.__name__}(...)`, and prepare that"
    elif isinstance(value, Mapping | Sequence) and _holds_objects(value):
        what = f"`prepare` was given one {type(value).__name__} of objects."
        why = "it takes the objects as arguments of their own, and returns them in the same order"
        star = "*objects.values()" if isinstance(value, Mapping) else "*objects"
        fix = f"write `prepare({star})`, or name them: `prepare(model, optimizer, loader)`"
    elif isinstance(value, Dataset):
        fix = "give it a loader: `DataLoader(dataset, batch_size=32)`"
    return PrepareError("prepare-kind", what, why=why, fix=fix)


def _holds_objects(value: Mapping[Any, Any] | Sequence[Any]) -> bool:
    """Whether a container was meant as the arguments of `prepare`: it holds a model, an optimizer or a loader."""
    if isinstance(value, str | bytes):
        return False
    items = value.values() if isinstance(value, Mapping) else value
    return any(isinstance(item, nn.Module | Optimizer) or hasattr(item, "dataset") for item in items)


def checked_placement(placement: Any, count: int) -> list[bool]:
    """`device_placement` as a list of one entry for each object.

    Raises:
        PrepareError: `prepare-placement`, where it is no list, or one of another length.
    """
    if isinstance(placement, Sequence) and not isinstance(placement, str) and len(placement) == count:
        return list(placement)
    given = f"{len(placement)} entries" if isinstance(placement, list | tuple) else repr(placement)
    raise PrepareError(
        "prepare-placement",
        f"device_placement does not say for each of {count} objects whether it is moved.",
        why=f"it is {given}",
        fix=f"write device_placement={[True] * count}, with False for what stays where it is; or leave it out",
    )
