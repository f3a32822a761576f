"""Gives a model that was built on the meta device its values, a few modules at a time, the same under every plan.

    Recipe(model)   which initialiser writes which tensors, seen by running each once on meta tensors (nothing computed)
    Recipe.missing  what none of them writes: an error before anything is touched
    chain.apply     divides shapes
    Recipe.run      tensors that one initialiser writes together -> whole on the host -> each rank keeps its part

A module's initialisers are its `reset_parameters()` and the `_init_weights(module)` of the model around it
(transformers). Each draws from a generator that is seeded by the run's seed and the module's name, so that no layout
changes a value; a tied parameter is drawn by the first module that holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn

from paceline.base.errors import Problem
from paceline.parallel.divided_parameters import part_of, refresh
from paceline.torch_internals.dispatch import written_arguments
from paceline.torch_internals.modules import buffer_table, child_table, parameter_table
from paceline.torch_internals.tensors import TorchDispatchMode, dtensor, memory_of
from paceline.world.sharded import is_sharded
from paceline.world.tree import tensors

Slot = tuple[str, str]  # name of a module, name of a parameter or buffer in it


class _Written(TorchDispatchMode):
    """Remembers which memory operations write to; on the meta device nothing else happens."""

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
class _Part:
    """Tensors that belong together, since some initialiser writes several of them."""

    slots: list[Slot] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


class Recipe:
    """How a model on the meta device gets its values; made before its tensors are divided.

    Args:
        model: as the user built it. It is only looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: dict[int, list[Slot]] = {}  # all slots of each tensor, the first holder's first
        meta = []
        for name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in _own(module):
                self._slots.setdefault(id(tensor), []).append((name, key))
                meta += [id(tensor)] if tensor.is_meta else []
        self._aliases = {self._slots[key][0]: self._slots[key] for key in meta}
        self._failed: dict[str, str] = {}
        self._twin = _Twin(model, {key: slots[0] for key, slots in self._slots.items()})
        self._parts = self._observe([name for name, _ in model.named_modules()])

    def _observe(self, names: list[str]) -> list[_Part]:
        twin = self._twin
        written: dict[str, list[Slot]] = {}
        for name in reversed(names):  # children before their parents
            for initialise in twin.initialisers(name):
                before = {slot: twin.memory(slot) for slot in self._aliases}
                mode = _Written()
                try:
                    with mode:
                        initialise()
                except RuntimeError as error:  # it asks for values, of which there are none yet
                    self._failed[name] = str(error).splitlines()[0]
                    continue
                new = [slot for slot, memory in before.items() if memory in mode.memory or twin.memory(slot) != memory]
                written.setdefault(name, []).extend(new)
        return _joined(written)

    def missing(self, kind: str) -> list[Problem]:
        """A problem where some tensor is written by no initialiser.

        Args:
            kind: class of the model.
        """
        initialised = {slot for part in self._parts for slot in part.slots}
        lost = [slot for slot in self._aliases if slot not in initialised]
        if not lost:
            return []
        modules = list(dict.fromkeys(name or kind for name, _ in lost))
        why = [f"nothing initialises {', '.join('.'.join(filter(None, slot)) for slot in lost[:4])}{_more(lost, 4)}"]
        why += [f"the initialiser of {name or kind} failed: {text}" for name, text in list(self._failed.items())[:2]]
        return [
            Problem(
                "model-meta",
                f"{kind} has no weights yet, and {len(lost)} of its tensors on the meta device have no way to get any.",
                why=why,
                fix=f"give {', '.join(modules[:3])}{_more(modules, 3)} a method `reset_parameters()` that fills them, or build "
                "the model outside of `torch.device('meta')`",
            )
        ]

    def run(self, model: nn.Module, device: torch.device, seed: int) -> None:
        """Fills every tensor of `model` that is still on the meta device; every rank computes the same values.

        Args:
            model: the same model, whole, divided (DTensor), or what a pipeline left of it.
            device: where values go.
            seed: the same on all ranks.
        """
        present = dict(model.named_modules(remove_duplicate=False))
        for part in self._parts:
            wanted = {slot: self._holders(slot, present) for slot in part.slots}
            if not any(wanted.values()):
                continue
            values = self._drawn(part, seed)
            for slot, holders in wanted.items():
                if holders:
                    _place(holders, values.pop(slot), device)
        if any(is_sharded(parameter) for parameter in model.parameters()):
            refresh(model)

    def _holders(self, slot: Slot, present: dict[str, nn.Module]) -> list[tuple[nn.Module, str]]:
        """Where a tensor lies in a model, if it has no values there yet."""
        places = [(present[name], key) for name, key in self._aliases[slot] if name in present]
        return [
            (module, key) for module, key in places if (own := dict(_own(module)).get(key)) is not None and own.is_meta
        ]

    def _drawn(self, part: _Part, seed: int) -> dict[Slot, torch.Tensor]:
        """The values of a part, whole and on the host."""
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
        for slot, value in values.items():
            twin.put(slot, torch.empty_like(value, device="meta"))
        return values


class _Twin:
    """The same tree of modules with plain tensors of its own, on the meta device until `put` says otherwise.

    A tied tensor is one at its first holder; to others it is scratch, so that only the first one's values count.
    """

    def __init__(self, model: nn.Module, first: dict[int, Slot]) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._around: dict[str, str] = {}
        self._build(model, "", first, {}, "")

    def _build(self, module: Any, name: str, first: dict[int, Slot], twins: dict[int, nn.Module], around: str) -> Any:
        if id(module) in twins:
            return twins[id(module)]
        twin = twins[id(module)] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        if _takes(getattr(module, "_init_weights", None), 1):
            around = name
        self._modules[name] = twin
        self._around[name] = around
        copies: dict[str, Any] = {}
        for kind, table in (("_parameters", parameter_table(module)), ("_buffers", buffer_table(module))):
            copies[kind] = {key: None if tensor is None else _empty(tensor) for key, tensor in table.items()}
        children = {
            key: None if child is None else self._build(child, f"{name}.{key}".lstrip("."), first, twins, around)
            for key, child in child_table(module).items()
        }
        twin.__dict__.update(_modules=children, **copies)
        return twin

    def initialisers(self, name: str) -> list[Callable[[], Any]]:
        """What initialises a module, in order."""
        twin: Any = self._modules[name]
        around = self._modules[self._around[name]]
        methods: list[Callable[[], Any]] = [
            getattr(twin, method)
            for method in ("reset_parameters", "_reset_parameters", "_init_weights")
            if _takes(getattr(twin, method, None), 0)
        ]
        of_model: Any = getattr(around, "_init_weights", None)  # transformers' models have one
        if _takes(of_model, 1):
            methods.append(lambda: of_model(twin))
        return [torch.no_grad()(initialise) for initialise in methods]

    def memory(self, slot: Slot) -> int:
        """Identifies the memory of what lies in a slot."""
        return memory_of(self.value(slot))

    def value(self, slot: Slot) -> torch.Tensor:
        """What lies in a slot now; an initialiser may have put a new tensor there."""
        return dict(_own(self._modules[slot[0]]))[slot[1]].detach()

    def put(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Replaces what lies in a slot."""
        module = self._modules[slot[0]]
        key = slot[1]
        if key in parameter_table(module):
            parameter_table(module)[key] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        else:
            buffer_table(module)[key] = tensor


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _takes(method: object, count: int) -> bool:
    """Whether something can be called with `count` values, and needs no other."""
    if not callable(method):
        return False
    parameters = [
        p for p in signature(method).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    needed = [p for p in parameters if p.default is p.empty]
    return len(needed) <= count <= len(parameters) and (count > 0 or not needed)


def _own(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for table in (parameter_table(module), buffer_table(module)):
        for key, tensor in table.items():
            if tensor is not None:
                yield key, tensor


def _joined(written: dict[str, list[Slot]]) -> list[_Part]:
    """Parts that share no tensor, each with its initialisers in the order in which they run."""
    owner: dict[Slot, _Part] = {}
    for name, slots in written.items():
        part = _Part()
        for slot in dict.fromkeys(slots):
            other = owner.get(slot)
            if other is None:
                part.slots.append(slot)
            elif other is not part:
                part.slots = other.slots + part.slots
                part.modules = other.modules + part.modules
            for own_slot in part.slots:
                owner[own_slot] = part
        part.modules.append(name)
    parts: dict[int, _Part] = {id(part): part for part in owner.values()}
    return list(parts.values())


def _place(holders: list[tuple[nn.Module, str]], value: torch.Tensor, device: torch.device) -> None:
    """Puts a value, or this rank's part of it, where a tensor without values was."""
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


def _more(items: list[Any], shown: int) -> str:
    return ", ..." if len(items) > shown else ""
