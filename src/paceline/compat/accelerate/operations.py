"""`accelerate.utils.operations`: functions between processes and on nested batches, for whoever has no accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch

from paceline.compat.accelerate.state import PartialState
from paceline.precision.policy import to_float32
from paceline.world import tree as trees


def _alone() -> bool:
    return PartialState().num_processes == 1


def gather(tensor: Any) -> Any:
    """Tensors of all processes, joined along dim 0; with one process as they are. Ranks: all."""
    return tensor if _alone() else PartialState().collectives.gather(tensor)


def gather_object(object: Any) -> Any:
    """The entries of all processes' lists in one list; with one process the object itself. Ranks: all."""
    if _alone():
        return object
    return [entry for part in PartialState().collectives.gather_object(object) for entry in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of one process, on all. Ranks: all."""
    return tensor if _alone() else PartialState().collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Puts the objects of one process into everybody's list. Ranks: all."""
    if not _alone():
        object_list[:] = PartialState().collectives.broadcast_object(list(object_list), from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Mean (or "sum") over processes; with one process the tensors as they are. Ranks: all."""
    return tensor if _alone() else PartialState().collectives.reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors as long as the longest of all processes. Ranks: all."""
    return PartialState().collectives.pad_across(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Returns when every process has called it. Ranks: all."""
    PartialState().wait_for_everyone()


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Gives every process rank 0's torch stream (or that of a generator). Ranks: all."""
    if _alone():
        return
    if generator is not None:
        generator.set_state(broadcast(generator.get_state()))
    else:
        torch.set_rng_state(broadcast(torch.get_rng_state()))


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """The same for several kinds of streams. Ranks: all."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator if str(rng_type) == "generator" else None)


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a tuple with named fields."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The values of `generator` in a container of `obj`'s class."""
    values = list(generator)
    return type(obj)(*values) if is_namedtuple(obj) else type(obj)(values)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Applies `func(leaf, *args, **kwargs)` to each leaf for which `test_type` holds; TypeError for others on request."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{func.__name__} takes nested containers of tensors; here is a {type(leaf).__name__}")
        return leaf

    return trees.map_leaves(apply, data)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """A nested batch on a device, but for the mapping entries named in `skip_keys`."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    moved = trees.to_device(tensor, device, non_blocking)
    if skipped and isinstance(tensor, Mapping):
        for key in tensor.keys() & set(skipped):
            moved[key] = tensor[key]
    return moved


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Batches of one structure, joined tensor by tensor."""
    columns = zip(*(trees.leaves(each) for each in data), strict=True)
    return trees.unflatten(data[0], [torch.cat(column, dim=dim) for column in columns])


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """The same rows of each tensor."""
    return trees.map_tensors(lambda tensor: tensor[tensor_slice], data)


def listify(data: Any) -> Any:
    """Tensors as lists of numbers."""
    return trees.map_tensors(lambda tensor: tensor.detach().cpu().tolist(), data)


def find_batch_size(data: Any) -> int | None:
    """Length along dim 0 of the first tensor; TypeError where there is none."""
    if not trees.tensors(data):
        raise TypeError(f"a batch of tensors is needed; this is a {type(data).__name__}")
    return trees.first_rows(data)


def ignorant_find_batch_size(data: Any) -> int | None:
    """The same; None where there is no tensor."""
    return trees.first_rows(data)


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor; None where there is none."""
    return next((tensor.device for tensor in trees.tensors(data)), None)


def convert_to_fp32(tensor: Any) -> Any:
    """Half-precision tensors as float32."""
    return to_float32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward function that hands out float32."""

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return to_float32(model_forward(*args, **kwargs))

    return forward
