"""The part of `accelerate.utils.operations` that does not communicate: functions over the tensors of a nested batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import update_wrapper, wraps
from typing import Any

import torch

from paceline.precision.policy import to_float32
from paceline.world import tree as trees
from paceline_accelerate.errors import CompatTypeError, CompatValueError

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
           torch.int64, torch.bool)  # fmt: skip
# Numbers of accelerate's, under which ranks send each other a dtype; the order of `_DTYPES` is theirs.
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in enumerate(_DTYPES, 1)}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, with which an empty one like it can be made."""

    shape: torch.Size
    dtype: torch.dtype


# -- kinds of values -----------------------------------------------------------------------------------------


def is_torch_tensor(tensor: object) -> bool:
    """Whether a value is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: object) -> bool:
    """Whether a value is a tensor on an XPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: object) -> bool:
    """Whether a value describes a tensor."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Whether a value is a tuple with named fields."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Puts the values of `generator` into a container of `obj`'s class."""
    container = type(obj)
    # A named tuple takes its fields as separate arguments, and other containers take one iterable.
    if is_namedtuple(obj):
        return container(*generator)
    return container(generator)


# -- a function on each leaf ---------------------------------------------------------------------------------


def recursively_apply(
    func: Callable[..., Any],
    data: object,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Applies `func(leaf, *args, **kwargs)` to each leaf for which `test_type` holds.

    Raises:
        CompatTypeError: `compat-argument`, for another leaf, with `error_on_other_type`.
    """
    values = trees.children(data)
    # A leaf may be a dataclass, such as a `TensorInformation`, which would otherwise be taken for a container.
    is_container = isinstance(data, list | tuple | Mapping) or not test_type(data)
    if values is not None and is_container:
        keywords = {"test_type": test_type, "error_on_other_type": error_on_other_type, **kwargs}
        results = [recursively_apply(func, value, *args, **keywords) for value in values]
        return trees.rebuild(data, results)
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise other_type(func, data)
    return data


def other_type(operation: Callable[..., Any], leaf: object) -> CompatTypeError:
    """Makes the error for a leaf that an operation on tensors cannot take."""
    return CompatTypeError(
        "compat-argument",
        f"unsupported type {type(leaf)} passed to `{getattr(operation, '__name__', operation)}`.",
        why="it takes only nested lists, tuples and dicts of tensors",
        fix="leave it out, or use `gather_object` or `broadcast_object_list`, which take any object",
    )


def send_to_device(tensor: object, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Moves a nested batch to a device, except entries of mappings (at any depth) that `skip_keys` names.

    An object that has its own method `to`, such as a tokenizer's batch, is moved by that method.
    """
    if isinstance(skip_keys, str):
        skip_keys = [skip_keys]
    skipped = set(skip_keys or ())
    # Tensors and plain containers come first, in a form that `torch.compile` follows without a break in the graph.
    kind = type(tensor)
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    if kind is dict:
        moved = {}
        for name, value in tensor.items():  # type: ignore[attr-defined]
            moved[name] = value if name in skipped else send_to_device(value, device, non_blocking, skip_keys)
        return moved
    if kind is list or kind is tuple:
        entries = [send_to_device(value, device, non_blocking, skip_keys) for value in tensor]  # type: ignore[attr-defined]
        return entries if kind is list else tuple(entries)
    to = getattr(tensor, "to", None)
    if callable(to):
        try:
            return to(device, non_blocking=non_blocking)
        except TypeError:  # the method has no argument `non_blocking`
            return to(device)
    values = trees.children(tensor)
    if values is None:
        return tensor
    # Only the entries of mappings have names.
    names: list[Any] = [None] * len(values)
    if isinstance(tensor, Mapping):
        names = list(tensor)
    results = []
    for name, value in zip(names, values, strict=True):
        stays = name is not None and name in skipped
        if not stays:
            value = send_to_device(value, device, non_blocking, skip_keys)
        results.append(value)
    return trees.rebuild(tensor, results)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenates batches of one structure tensor by tensor; mappings are matched by key, in any order of their keys.

    Raises:
        CompatTypeError: `compat-argument`, for several leaves that are no tensors.
        KeyError, IndexError: for a batch that lacks an entry of the first one.
    """
    first = data[0]
    values = trees.children(first)
    if values is None:
        if isinstance(first, torch.Tensor):
            return torch.cat(tuple(data), dim=dim)
        if len(data) == 1:
            return first
        raise other_type(concatenate, first)
    # For each place of the first batch, a column holds the entries that all batches have at that place.
    columns: list[list[Any]] = []
    if isinstance(first, Mapping | list | tuple):
        places = list(first) if isinstance(first, Mapping) else range(len(first))
        for place in places:
            columns.append([batch[place] for batch in data])
    else:  # such as a dataclass, which has no subscripts
        rows = [trees.children(batch) or () for batch in data]
        columns = list(map(list, zip(*rows, strict=True)))
    return trees.rebuild(first, [concatenate(column, dim) for column in columns])


def slice_tensors(data: object, tensor_slice: slice, process_index: object = None, num_processes: object = None) -> Any:
    """Takes the same rows of each tensor."""
    return trees.map_tensors(lambda tensor: tensor[tensor_slice], data)


def listify(data: object) -> Any:
    """Tensors as lists of numbers."""
    return trees.map_tensors(lambda tensor: tensor.detach().cpu().tolist(), data)


def pad_input_tensors(tensor: object, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Fills tensors up with zeros, so that `num_processes` can share a batch evenly.

    Shape:
        [..., batch_size, ...] with `batch_size` at `dim`; gives the next multiple of `num_processes` there.
    """
    missing = -batch_size % num_processes  # rows up to the next multiple

    def pad_input(leaf: torch.Tensor) -> torch.Tensor:
        if not missing:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad_input, tensor, error_on_other_type=True)


# -- what is asked of a batch --------------------------------------------------------------------------------


def find_batch_size(data: object) -> int:
    """Returns the length along dim 0 of the first tensor.

    Raises:
        CompatTypeError, CompatValueError: `compat-argument`, where the first leaf is no tensor, or there is none.
        IndexError: for a tensor of no dims.
    """
    values = trees.children(data)
    if values is not None:
        if not values:
            raise CompatValueError(
                "compat-argument",
                f"an empty {type(data).__name__} has no batch size.",
                why="the length of the first tensor is asked for, and there is none",
                fix="pass a batch with at least one tensor",
            )
        return find_batch_size(values[0])
    if not isinstance(data, torch.Tensor):
        raise other_type(find_batch_size, data)
    return data.shape[0]


def ignorant_find_batch_size(data: object) -> int | None:
    """Returns the number of rows of the first tensor; None where there is none."""
    try:
        return find_batch_size(data)
    except (CompatTypeError, CompatValueError):
        return None


def find_device(data: object) -> torch.device | None:
    """Returns the device of the first tensor; None where there is none."""
    return next((tensor.device for tensor in trees.tensors(data)), None)


def get_shape(data: object) -> Any:
    """Returns the structure with the shape of each tensor, as a list."""
    return trees.map_tensors(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: object) -> Any:
    """Returns the structure with a `TensorInformation` for each tensor."""
    return trees.map_tensors(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: object) -> Any:
    """Returns the structure with an empty tensor for each `TensorInformation`."""
    # First, for it is a dataclass, which would be taken for a container.
    if isinstance(data_structure, TensorInformation):
        return torch.empty(*data_structure.shape, dtype=data_structure.dtype)
    values = trees.children(data_structure)
    if values is None:
        return data_structure
    return trees.rebuild(data_structure, [initialize_tensors(value) for value in values])


# -- precision -----------------------------------------------------------------------------------------------


def convert_to_fp32(tensor: object) -> Any:
    """Casts half-precision tensors to float32."""
    return to_float32(tensor)


class ConvertOutputsToFp32:
    """A forward function that hands out float32.

    Raises:
        pickle.PicklingError: when it is pickled; the model that it belongs to is pickled without it.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return to_float32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        raise pickle.PicklingError(
            "A model that was prepared with mixed precision cannot be pickled: its forward function is a wrapper. Pickle "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a forward function so that its outputs are float32."""

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return to_float32(model_forward(*args, **kwargs))

    return forward
