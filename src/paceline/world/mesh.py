"""Process groups, made here and nowhere else, from a `Layout`."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.world.layout import AXES, DATA_AXES, GRADIENT_AXES, Layout
from paceline.world.world import World

Group = Any

_cpu_groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()

# Of this process and not of one mesh: meshes that cover all ranks share the default group, and so its tags.
_unit_names: list[str] = []


class Mesh:
    """The groups of a layout.

    A layout with one used axis needs no group of its own: all ranks talk in the default group. Every other one gets a
    `DeviceMesh`, made when a group is first asked for.

    Args:
        layout: ranks along each axis; its size is the world's.
        world: who this process is.
        device_type: "cpu", "cuda", ...

    Ranks:
        Asking for a group or for `device_mesh` the first time communicates: all ranks ask, in the same order.
    """

    def __init__(self, layout: Layout, world: World, device_type: str) -> None:
        assert layout.size() == world.size, f"{layout} is not a layout of {world.size} processes"
        self.layout = layout
        self.world = world
        self.device_type = device_type
        self._device_mesh: DeviceMesh | None = None
        self._flattened: dict[tuple[str, ...], DeviceMesh] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._statistics: Group = None

    def group(self, axis: str) -> Group:
        """The group of the ranks that differ from this one along `axis` alone; None for a world of one process."""
        return self._group((axis,))

    @property
    def data_group(self) -> Group:
        """The group of the ranks that read different samples: along replicate and shard together."""
        return self._group(DATA_AXES)

    @property
    def gradient_group(self) -> Group:
        """The group over which gradients are averaged: replicate, shard and cp together."""
        return self._group(GRADIENT_AXES)

    @property
    def statistics_group(self) -> Group:
        """A group beside `data_group`, of the same ranks, for what layers exchange in the middle of a pass.

        Ranks: all ranks of `data_group`, the first time.
        """
        if self._statistics is None and self.data_group is not None:
            ranks = dist.get_process_group_ranks(self.data_group)
            limit = _timeout_of(self.data_group, self.device_type)
            self._statistics = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
        return self._statistics

    def along(self, *axes: str | tuple[str, ...]) -> DeviceMesh:
        """A `DeviceMesh` of some axes, in this order; a tuple of axes counts as one.

        `along("tp")` is 1-D, `along("replicate", ("shard", "cp"))` is 2-D. Ranks: all, the first time.
        """
        parts = [self._flat(axis if isinstance(axis, tuple) else (axis,)) for axis in axes]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def _flat(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The 1-D mesh of axes that count as one; axes of one rank are left out of its name."""
        used = tuple(axis for axis in axes if self.layout.size(axis) > 1) or axes[:1]
        if len(used) == 1:
            return self.device_mesh[used[0]]
        if used not in self._flattened:
            self._flattened[used] = self.device_mesh[used]._flatten("_".join(used))
        return self._flattened[used]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The `DeviceMesh` with all axes, named as in `Layout`; axes of one rank included."""
        if self._device_mesh is None:
            sizes = tuple(self.layout.size(axis) for axis in AXES)
            self._device_mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=AXES)
        return self._device_mesh

    def _group(self, axes: tuple[str, ...]) -> Group:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if axes not in self._groups:
            self._groups[axes] = self._find(axes)
        return self._groups[axes]

    def _find(self, axes: tuple[str, ...]) -> Group:
        if self.layout.size(*axes) == self.world.size:
            return dist.group.WORLD
        return self._flat(axes).get_group()


def register_unit(name: str) -> int:
    """A number for something that ranks gather or reduce by itself, as a tag for its messages.

    Ranks: all register the same ones, in one order.
    """
    _unit_names.append(name)
    return len(_unit_names) - 1


def unit_name(number: int) -> str:
    """The name with which `register_unit` was called."""
    return _unit_names[number]


def cpu_group(group: Group) -> Group:
    """A group of the same ranks that takes CPU tensors: `group` itself, or gloo beside it.

    Ranks:
        All ranks of the default group, the first time for each group that lacks gloo.
    """
    if torch.device("cpu") in group._device_types:
        return group
    if group not in _cpu_groups:
        _cpu_groups[group] = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
    return _cpu_groups[group]


def apart(group: Group) -> Group:
    """A gloo group of the same ranks beside `group`, with its timeout: a thread may talk there while the loop talks here.

    Ranks:
        All ranks of the default group.
    """
    beside = cpu_group(group)
    limit = _timeout_of(beside, "cpu")
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=limit)


def _timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """What a group was formed with; None where its backend keeps none, as that of `paceline plan`, which sends nothing."""
    options = group._get_backend(torch.device(device_type)).options
    return None if options is None else options._timeout
