"""Initializes a model that was built on the meta device, a few modules at a time, with the same values under every plan.

    Recipe(model)   runs each initializer once on meta tensors (nothing is computed) to see which tensors it writes
    Recipe.missing  returns a problem if no initializer writes some tensor, before anything is changed
    chain.apply     shards the meta tensors
    Recipe.run      initializes the tensors of one initializer on the host, and keeps this rank's part of them

The initializers of a module are its `reset_parameters()` and the `_init_weights(module)` of the model around it
(transformers). Each of them draws from a generator that is seeded by the run's seed and the module's name, so that values do
not depend on the layout. A tied parameter is initialized by the first module that holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn

from paceline.base.errors import Problem
from paceline.parallel.divided_parameters import part_of, refresh
from paceline.plan.fqn import joined, listed
from paceline.torch_internals.dispatch import written_arguments
from paceline.torch_internals.modules import buffer_table, child_table, parameter_table
from paceline.torch_internals.tensors import TorchDispatchMode, dtensor, memory_of
from paceline.world.sharded import is_sharded
from paceline.world.tree import tensors

Slot = tuple[str, str]  # name of a module, name of a parameter or buffer in it


class _Written(TorchDispatchMode):
    """Records the memory that operations write to. On the meta device nothing is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        self.memory.update(map(memory_of, tensors(written_arguments(func, args, keywords))))
        return func(*args, **keywords)


@dataclass
class _RecipePart:
    """Tensors that are initialized together, because one initializer writes several of them."""

    slots: list[Slot] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


class Recipe:
    """The initialization of a model on the meta device; to be constructed before its tensors are sharded.

    Args:
        model: the user's model, which is not changed here.
    """

    def __init__(self, model: nn.Module) -> None:
        slots: dict[int, list[Slot]] = {}  # for each tensor its places, those of the first module first
        without_values: list[int] = []
        for name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in _own(module):
                slots.setdefault(id(tensor), []).append((name, key))
                if tensor.is_meta:
                    without_values.append(id(tensor))
        # The first slot of each tensor without values -> all its slots.
        self._aliases = {slots[key][0]: slots[key] for key in without_values}
        self._failed: dict[str, str] = {}
        self._twin = _Twin(model)
        self._parts = self._observe([name for name, _ in model.named_modules()])

    def _observe(self, names: list[str]) -> list[_RecipePart]:
        """Runs each initializer once on meta tensors, and records the tensors that it writes or replaces."""
        twin = self._twin
        written: dict[str, list[Slot]] = {}
        for name in reversed(names):  # children before their parents
            for initialise in twin.initialisers(name):
                # An initializer may write into a tensor, or put a new one in its place.
                before = {slot: twin.memory(slot) for slot in self._aliases}
                mode = _Written()
                try:
                    with mode:
                        initialise()
                except RuntimeError as error:  # it reads values, which meta tensors do not have
                    self._failed[name] = str(error).splitlines()[0]
                    continue
                slots = written.setdefault(name, [])
                for slot, memory in before.items():
                    is_replaced = twin.memory(slot) != memory
                    if memory in mode.memory or is_replaced:
                        slots.append(slot)
        return _joined(written)

    def missing(self, kind: str) -> list[Problem]:
        """Returns a problem if some tensor is written by no initializer.

        Args:
            kind: the class name of the model.
        """
        initialised: set[Slot] = set()
        for part in self._parts:
            initialised.update(part.slots)
        lost = [slot for slot in self._aliases if slot not in initialised]
        if not lost:
            return []
        modules: dict[str, None] = {}  # a dict, which keeps the order
        tensors_lost: list[str] = []
        for name, key in lost:
            modules[name or kind] = None
            tensors_lost.append(joined(name, key))
        why = [f"nothing initialises {listed(tensors_lost, 4)}"]
        for name, message in list(self._failed.items())[:2]:
            why.append(f"the initialiser of {name or kind} failed: {message}")
        return [
            Problem(
                "model-meta",
                f"{kind} has no weights yet, and {len(lost)} of its tensors on the meta device have no way to get any.",
                why=why,
                fix=f"give {listed(modules)} a method `reset_parameters()` that fills them, or build the model outside of "
                "`torch.device('meta')`",
            )
        ]

    def run(self, model: nn.Module, device: torch.device, seed: int) -> None:
        """Initializes every tensor of `model` that is still on the meta device; all ranks compute the same values.

        Args:
            model: the same model; unsharded, sharded (DTensor), or a stage of a pipeline.
            device: the device of the values.
            seed: the same on all ranks.
        """
        present = dict(model.named_modules(remove_duplicate=False))
        for part in self._parts:
            wanted = {slot: self._holders(slot, present) for slot in part.slots}
            # In a stage of a pipeline most parts are on other ranks. Each has a seed of its own, so they can be left out.
            if not any(wanted.values()):
                continue
            values = self._drawn(part, seed)
            for slot, holders in wanted.items():
                if holders:
                    _place(holders, values.pop(slot), device)
        if any(is_sharded(parameter) for parameter in model.parameters()):
            refresh(model)

    def _holders(self, slot: Slot, present: dict[str, nn.Module]) -> list[tuple[nn.Module, str]]:
        """Returns the places of a tensor in a model at which it is still on the meta device."""
        holders = []
        for name, key in self._aliases[slot]:
            if name in present:
                tensor = dict(_own(present[name])).get(key)
                if tensor is not None and tensor.is_meta:
                    holders.append((present[name], key))
        return holders

    def _drawn(self, part: _RecipePart, seed: int) -> dict[Slot, torch.Tensor]:
        """Computes the unsharded values of a part on the host."""
        twin = self._twin
        for slot in part.slots:
            twin.put(slot, torch.empty_like(twin.value(slot), device="cpu"))
        state = torch.get_rng_state()
        try:
            for name in part.modules:
                for initialise in twin.initialisers(name):
                    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                    initialise()
        finally:
            torch.set_rng_state(state)
        values = {slot: twin.value(slot) for slot in part.slots}
        # The twin gives its values up, so that the host never has more than those of one part.
        for slot, value in values.items():
            twin.put(slot, torch.empty_like(value, device="meta"))
        return values


class _Twin:
    """A copy of a tree of modules, with plain tensors on the meta device, which `put` replaces.

    Each module has its own copy of a tied tensor; the values of the first module's copy are used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._around: dict[str, str] = {}  # the module whose `_init_weights` initializes this one, too
        self._build(model, "", {}, "")

    def _build(self, module: Any, name: str, twins: dict[int, nn.Module], around: str) -> Any:
        """Copies a module and all modules in it; a module in several places is copied once."""
        if id(module) in twins:
            return twins[id(module)]
        # Without `__init__`, whose arguments are not known, and which would allocate parameters.
        twin = object.__new__(type(module))
        twins[id(module)] = twin
        twin.__dict__.update(module.__dict__)
        if _takes(getattr(module, "_init_weights", None), 1):
            around = name
        self._modules[name] = twin
        self._around[name] = around
        children: dict[str, Any] = {}
        for key, child in child_table(module).items():
            children[key] = None
            if child is not None:
                children[key] = self._build(child, joined(name, key), twins, around)
        twin.__dict__.update(
            _parameters=_without_values(parameter_table(module)),
            _buffers=_without_values(buffer_table(module)),
            _modules=children,
        )
        return twin

    def initialisers(self, name: str) -> list[Callable[[], Any]]:
        """Returns the functions that initialize a module, in order."""
        twin: Any = self._modules[name]
        around = self._modules[self._around[name]]
        methods: list[Callable[[], Any]] = []
        for name_of_method in ("reset_parameters", "_reset_parameters", "_init_weights"):
            method: Any = getattr(twin, name_of_method, None)
            if _takes(method, 0):
                methods.append(method)
        of_model: Any = getattr(around, "_init_weights", None)  # transformers' models have one
        if _takes(of_model, 1):
            methods.append(lambda: of_model(twin))
        return [torch.no_grad()(initialise) for initialise in methods]

    def memory(self, slot: Slot) -> int:
        """Returns an identifier of the memory of the tensor in a slot."""
        return memory_of(self.value(slot))

    def value(self, slot: Slot) -> torch.Tensor:
        """Returns the tensor in a slot now; an initializer may have put a new one there."""
        return dict(_own(self._modules[slot[0]]))[slot[1]].detach()

    def put(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Replaces the tensor in a slot."""
        module = self._modules[slot[0]]
        key = slot[1]
        if key in parameter_table(module):
            parameter_table(module)[key] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        else:
            buffer_table(module)[key] = tensor


def _without_values(table: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Returns tensors of the same shapes and dtypes on the meta device."""
    copies: dict[str, torch.Tensor | None] = {}
    for key, tensor in table.items():
        if tensor is None:
            copies[key] = None
            continue
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        copies[key] = copy
    return copies


def _takes(method: object, count: int) -> bool:
    """Returns whether an object can be called with `count` positional arguments."""
    if not callable(method):
        return False
    num_parameters = 0
    num_needed = 0
    for parameter in signature(method).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            num_parameters += 1
            num_needed += parameter.default is parameter.empty
    return num_needed <= count <= num_parameters


def _own(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for table in (parameter_table(module), buffer_table(module)):
        for key, tensor in table.items():
            if tensor is not None:
                yield key, tensor


def _joined(written: dict[str, list[Slot]]) -> list[_RecipePart]:
    """Returns parts that have no tensor in common, each with its initializers in the order in which they run."""
    owner: dict[Slot, _RecipePart] = {}
    for name, slots in written.items():
        part = _RecipePart()
        for slot in dict.fromkeys(slots):
            other = owner.get(slot)
            if other is None:
                part.slots.append(slot)
            elif other is not part:
                # An earlier initializer writes this tensor too: both parts become one, with its initializers first.
                part.slots = other.slots + part.slots
                part.modules = other.modules + part.modules
            for own_slot in part.slots:
                owner[own_slot] = part
        part.modules.append(name)
    parts: dict[int, _RecipePart] = {id(part): part for part in owner.values()}
    return list(parts.values())


def _place(holders: list[tuple[nn.Module, str]], value: torch.Tensor, device: torch.device) -> None:
    """Replaces a tensor on the meta device by its value, or by this rank's part of it."""
    module, key = holders[0]
    old: Any = dict(_own(module))[key]
    new: Any = value.to(device)
    if is_sharded(old):
        part = part_of(value, old).clone().to(device)
        new = dtensor(part, old.device_mesh, old.placements, old.shape, old.stride())
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    for module, key in holders:
        table = parameter_table(module) if key in parameter_table(module) else buffer_table(module)
        table[key] = new
