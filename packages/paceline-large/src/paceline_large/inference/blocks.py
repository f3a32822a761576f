"""What placing a model needs to know of it: its blocks, the bytes of each, and what a call needs beside the weights.

A *block* is what is placed as a whole. It is one of these:

    a repeated block (see `plan.blocks`), or a module of a class that the model names in `_no_split_modules`
    any other module that holds tensors of its own and no blocks below it, such as an embedding or a last norm
    the tensors that a module with blocks below it holds itself (`own` is then true)
    several of these that share a parameter
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.plan.blocks import repeated_blocks
from paceline.plan.facts import model_facts
from paceline.plan.fqn import joined, parent

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Block:
    """What is placed as a whole.

    Attributes:
        modules: names (FQNs) of its modules; several where they share a parameter.
        kind: the classes of the modules.
        parameters: names of its parameters, a shared one once.
        buffers: names of its buffers, a shared one once.
        parameter_bytes: bytes of its parameters in the dtype that they will have.
        buffer_bytes: bytes of its buffers, which are never offloaded: they are small, and files do not hold all of them.
        repeated: whether it is one of the repeated blocks, which hold the key-value cache of a transformer.
        own: whether it is what a module holds beside the blocks below it; such weights are needed in many calls, and
            are not offloaded either.
    """

    modules: tuple[str, ...]
    kind: str
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    repeated: bool = False
    own: bool = False

    @property
    def name(self) -> str:
        """Names of its modules; the model itself is "(model)"."""
        return " + ".join(module or "(model)" for module in self.modules)

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters and buffers."""
        return self.parameter_bytes + self.buffer_bytes


@dataclass(frozen=True)
class PlacementFacts:
    """Facts about one model; on the meta device they are the same as on a real one.

    Attributes:
        model: class of the model.
        blocks: in order of definition.
        widest: features of the widest activation that its linear and embedding layers make.
        cache_elements: keys and values that one token adds to a transformer's cache, in all layers together, as far as
            the model's `config` tells; else 0.
        itemsize: bytes of one activation element.
    """

    model: str
    blocks: tuple[Block, ...]
    widest: int = 0
    cache_elements: int = 0
    itemsize: int = 4

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)


Dtypes = Mapping[str, "torch.dtype"]


def placement_facts(
    model: nn.Module, dtype: torch.dtype | Dtypes | None = None, split_at: Collection[str] = ()
) -> PlacementFacts:
    """Reads the facts of a model; changes nothing.

    Args:
        model: on the meta device or not.
        dtype: what floating-point weights will be converted to, or the dtype that each parameter will have, by its first
            name; None leaves each as it is.
        split_at: names of modules that are blocks of their own, also where they lie inside a repeated block.
    """
    dtypes = {name: _dtype_of(name, parameter, dtype) for name, parameter in model.named_parameters()}
    blocks = _join_tied(model, list(_units(model, split_at)), dtypes)
    itemsizes = [own.itemsize for own in dtypes.values() if own.is_floating_point]
    return PlacementFacts(
        model=type(model).__name__,
        blocks=tuple(blocks),
        widest=_widest(model),
        cache_elements=_cache_elements(getattr(model, "config", None)),
        itemsize=max(itemsizes, default=4),
    )


@dataclass(frozen=True)
class _Unit:
    """One module of a block, before blocks that share parameters are joined."""

    name: str
    repeated: bool
    own: bool


def _units(model: nn.Module, split_at: Collection[str]) -> Iterator[_Unit]:
    """Yields the modules that are placed as a whole, in order of definition."""
    whole = set(repeated_blocks(model))
    # transformers' models name the classes whose residual connections need all inputs on one device.
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    for name, module in model.named_modules():
        if type(module).__name__ in no_split:
            whole.add(name)
    # A module above one that the caller wants to place alone cannot be placed as a whole, even if it is a repeated block.
    above_splits = _ancestors(split_at)
    whole = (whole | set(split_at)) - above_splits
    above_blocks = _ancestors(whole) | above_splits
    yield from _search(model, "", whole, above_blocks)


def _ancestors(names: Iterable[str]) -> set[str]:
    """Returns the names of all modules that a module of `names` lies in."""
    ancestors: set[str] = set()
    for name in names:
        while name:
            name = parent(name)
            ancestors.add(name)
    return ancestors


def _search(module: nn.Module, name: str, whole: set[str], above_blocks: set[str]) -> Iterator[_Unit]:
    """Yields the units in a module and below it, depth first.

    Args:
        module: where to search.
        name: its name in the model.
        whole: the names of the modules that are blocks.
        above_blocks: the names of the modules that have blocks below them.
    """
    has_own = next(_tensors(module, recurse=False), None) is not None
    if name in whole or (has_own and name not in above_blocks):
        # A block without any tensor, such as an activation function, needs no place.
        if next(_tensors(module, recurse=True), None) is not None:
            yield _Unit(name, repeated=name in whole, own=False)
        return
    if has_own:
        yield _Unit(name, repeated=False, own=True)
    for key, child in module.named_children():
        yield from _search(child, joined(name, key), whole, above_blocks)


def _tensors(module: nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _join_tied(model: nn.Module, units: list[_Unit], dtypes: Dtypes) -> list[Block]:
    """Blocks of the units: those that share a parameter or a buffer become one, at the place of the first."""
    first_names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    # Both lists have one entry for each block so far. Tensors are compared by `id`, since `==` compares their values.
    groups: list[list[_Unit]] = []
    tensors_of_groups: list[dict[int, torch.Tensor]] = []
    for unit in units:
        module = model.get_submodule(unit.name)
        tensors = {id(tensor): tensor for tensor in _tensors(module, recurse=not unit.own)}
        sharing = [index for index, other in enumerate(tensors_of_groups) if other.keys() & tensors.keys()]
        if not sharing:
            groups.append([unit])
            tensors_of_groups.append(tensors)
            continue
        first, *others = sharing
        groups[first].append(unit)
        tensors_of_groups[first] |= tensors
        # This unit may tie groups together that did not share anything before.
        for index in reversed(others):
            groups[first] += groups.pop(index)
            tensors_of_groups[first] |= tensors_of_groups.pop(index)

    blocks = []
    for group, tensors in zip(groups, tensors_of_groups, strict=True):
        parameters: list[str] = []
        buffers: list[str] = []
        parameter_bytes = 0
        buffer_bytes = 0
        for key, tensor in tensors.items():
            name = first_names[key]
            if name in dtypes:
                parameters.append(name)
                parameter_bytes += tensor.numel() * dtypes[name].itemsize
            else:
                buffers.append(name)
                buffer_bytes += tensor.nbytes
        modules = [unit.name for unit in group]
        kinds = [type(model.get_submodule(name)).__name__ for name in modules]
        is_repeated = all(unit.repeated for unit in group)
        is_own = any(unit.own for unit in group)
        block = Block(
            modules=tuple(modules),
            kind=" + ".join(kinds),
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            parameter_bytes=parameter_bytes,
            buffer_bytes=buffer_bytes,
            repeated=is_repeated,
            own=is_own,
        )
        blocks.append(block)
    return blocks


def _dtype_of(name: str, parameter: torch.Tensor, dtype: torch.dtype | Dtypes | None) -> torch.dtype:
    if isinstance(dtype, Mapping):
        return dtype.get(name, parameter.dtype)
    if dtype is None or not parameter.is_floating_point():
        return parameter.dtype
    return dtype


def _widest(model: nn.Module) -> int:
    """Returns the largest number of features that a linear or embedding layer puts out."""
    widest = 0
    for layer in model_facts(model).layers:
        # The weight of `nn.Linear` is (outputs, inputs), that of transformers' `Conv1D` (inputs, outputs), and that of
        # `nn.Embedding` (entries, outputs).
        weight = dict(layer.shapes).get("weight", ())
        if layer.role == "linear":
            widest = max(widest, weight[0])
        elif layer.role in ("conv1d", "embedding"):
            widest = max(widest, weight[1])
    return widest


def _cache_elements(config: object) -> int:
    """Keys and values of one token, by the attributes that configs of transformers have in common."""
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and heads):
        return 0
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    # One key and one value for each layer and head.
    return 2 * layers * key_value_heads * head_size
