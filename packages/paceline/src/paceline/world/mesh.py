"""`Mesh` creates the process groups of a `Layout`. No other module creates groups for parallel training."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.torch_internals.device_mesh import concatenated, flattened
from paceline.torch_internals.dispatch import without_modes
from paceline.torch_internals.dtensor import forget_results
from paceline.torch_internals.groups import set_timeout, timeout_of
from paceline.world.layout import AXES, DATA_AXES, GRADIENT_AXES, Layout
from paceline.world.sharded import is_sharded
from paceline.world.world import World

Group = Any


# By the group and not by the mesh: meshes that cover all ranks share the default group, and so its tags. Not of all groups
# together: the stages of a pipeline register other numbers of units, each in a group of its own.
_num_units: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()
# Of this process and not of one `Accelerator`: a group has threads, sockets and buffers of its own until the default group is
# destroyed, so that a script which creates one `Accelerator` after another (folds, trials, a notebook) uses its groups again.
_meshes: dict[tuple[Layout, World, str], Mesh] = {}


def mesh_of(layout: Layout, world: World, device_type: str) -> Mesh:
    """Returns the mesh of a layout: the one that this process has created before, as long as its default group stands.

    Args:
        layout, world, device_type: as for `Mesh`.
    """
    key = (layout, world, device_type)
    mesh = _meshes.get(key)
    if mesh is None or mesh.everyone is not _default_group():
        mesh = Mesh(layout, world, device_type)
        _meshes[key] = mesh
    return mesh


def forget_meshes() -> None:
    """Forgets all meshes, whose groups were destroyed: what refers to a group keeps its connections open."""
    _meshes.clear()


def _default_group() -> Group:
    """Returns the group of all ranks; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD


class Mesh:
    """The groups of a layout.

    A layout with only one axis above 1 needs no group of its own: all ranks use the default group. Every other layout gets
    a `DeviceMesh`, which is created when a group is first asked for.

    Args:
        layout: ranks along each axis; its size is the world's.
        world: who this process is.
        device_type: "cpu", "cuda", ...

    Ranks:
        The first access to a group or to `device_mesh` communicates, so all ranks make it, in the same order.
    """

    def __init__(self, layout: Layout, world: World, device_type: str) -> None:
        assert layout.size() == world.size, f"{layout} is not a layout of {world.size} processes"
        self.layout = layout
        self.world = world
        self.device_type = device_type
        # Not the group itself, whose connections have to close when it is destroyed: other ranks may wait for a message.
        everyone = _default_group()
        self._everyone = None if everyone is None else weakref.ref(everyone)
        self._device_mesh: DeviceMesh | None = None
        self._flattened: dict[tuple[str, ...], DeviceMesh] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._beside_axes: dict[tuple[str, ...], Group] = {}
        self._more_gradient_groups: dict[tuple[int, tuple[str, ...]], Group] = {}

    @property
    def everyone(self) -> Group:
        """The default group in which the groups were created; None without one, or where it was destroyed."""
        return None if self._everyone is None else self._everyone()

    def group(self, axis: str) -> Group:
        """Returns the group of the ranks that differ from this one along `axis` alone; None for a world of one process."""
        return self._group((axis,))

    @property
    def data_group(self) -> Group:
        """The group of the ranks that read different samples: along replicate and shard together."""
        return self._group(DATA_AXES)

    @property
    def gradient_group(self) -> Group:
        """The group over which gradients are averaged: replicate, shard, ep and cp together."""
        return self._group(GRADIENT_AXES)

    def same_part_axes(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Returns the axes of `gradient_group` along which ranks hold the same part of a parameter: not `ep`, of experts."""
        if not is_sharded(parameter):
            return GRADIENT_AXES
        divided_over = parameter.device_mesh.mesh_dim_names or ()
        return tuple(axis for axis in GRADIENT_AXES if axis not in divided_over)

    def same_part_group(self, parameter: torch.Tensor) -> Group:
        """Returns the group of the ranks that hold the same part of a parameter, and average its gradients."""
        return self._group(self.same_part_axes(parameter))

    def gradient_group_of(self, number: int, axes: tuple[str, ...] = GRADIENT_AXES) -> Group:
        """Returns a group over which one of several models that train in a run averages gradients.

        Collectives of different groups may come in another order on each rank.

        Args:
            number: of the model among those of the run; the first one has `gradient_group` itself.
            axes: along which ranks hold the same part of a parameter; see `same_part_axes`.

        Ranks: all ranks of the group, the first time.
        """
        group = self._group(axes)
        if number == 0 or group is None:
            return group
        if (number, axes) not in self._more_gradient_groups:
            self._more_gradient_groups[(number, axes)] = self._beside(group)
        return self._more_gradient_groups[(number, axes)]

    @property
    def statistics_group(self) -> Group:
        """`layers_group` of the ranks of `data_group`."""
        return self.layers_group(*DATA_AXES)

    def layers_group(self, *axes: str) -> Group:
        """Returns a group of the ranks along some axes for what layers exchange in the middle of a pass.

        It is another one than that of `group`, in whose collectives gradients travel at the same time. None for a world of
        one process.

        Ranks: all of them, the first time.
        """
        group = self._group(axes)
        if group is None:
            return None
        if axes not in self._beside_axes:
            self._beside_axes[axes] = self._beside(group)
        return self._beside_axes[axes]

    def _beside(self, group: dist.ProcessGroup) -> Group:
        ranks = dist.get_process_group_ranks(group)
        limit = timeout_of(group, torch.device(self.device_type))
        return dist.new_group(ranks, timeout=limit, use_local_synchronization=True)

    def along(self, *axes: str | tuple[str, ...]) -> DeviceMesh:
        """A `DeviceMesh` of some axes, in this order; a tuple of axes counts as one.

        `along("tp")` is 1-D, `along("replicate", ("shard", "cp"))` is 2-D. Ranks: all, the first time.
        """
        parts = []
        for axis in axes:
            axes_of_part = (axis,) if isinstance(axis, str) else axis
            parts.append(self._flat(axes_of_part))
        if len(parts) == 1:
            return parts[0]
        return concatenated(parts)

    def _flat(self, axes: tuple[str, ...]) -> DeviceMesh:
        """Returns the 1-D mesh of axes that count as one; axes of one rank are left out of its name."""
        used = tuple(axis for axis in axes if self.layout.size(axis) > 1)
        used = used or axes[:1]  # a mesh of one rank needs a name, too
        if len(used) == 1:
            return self.device_mesh[used[0]]
        if used not in self._flattened:
            mesh = flattened(self.device_mesh[used], "_".join(used))
            self._limit(mesh.get_group())
            self._flattened[used] = mesh
        return self._flattened[used]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The `DeviceMesh` with all axes, named as in `Layout`; axes of one rank included."""
        if self._device_mesh is None:
            sizes = tuple(self.layout.size(axis) for axis in AXES)
            # `init_device_mesh` reads the values of a tensor of ranks, which a mode such as FakeTensorMode would take away.
            with without_modes():
                self._device_mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=tuple(AXES))
            # An equal mesh of an earlier run, whose groups were destroyed, may be in them.
            forget_results()
            for group in self._device_mesh.get_all_groups():
                self._limit(group)
        return self._device_mesh

    def _limit(self, group: dist.ProcessGroup) -> None:
        """Gives a group the time limits of the default group. `DeviceMesh` creates groups with torch's own: 30 minutes."""
        for device_type in {"cpu", self.device_type}:
            device = torch.device(device_type)
            if backend_name(group, device_type):
                limit = timeout_of(self.everyone, device)
                if limit is not None:
                    set_timeout(group, device, limit)

    def _group(self, axes: tuple[str, ...]) -> Group:
        if self.layout.size(*axes) == self.world.size:
            return self.everyone
        if self.everyone is None:
            return None
        if axes not in self._groups:
            self._groups[axes] = self._flat(axes).get_group()
        return self._groups[axes]


def register_unit(group: Group) -> int:
    """Returns a number for a unit that ranks gather or reduce separately. The number is the tag of its messages.

    Args:
        group: the ranks that exchange messages of the unit.

    Ranks: all of the group register the same units, in the same order.
    """
    number = _num_units.get(group, 0)
    _num_units[group] = number + 1
    return number


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Returns the backend for tensors of a device in a group, such as "gloo" or "nccl"; "" if the group has none for it."""
    for entry in dist.get_backend_config(group).split(","):
        carried, _, backend = entry.partition(":")
        if carried == device_type:
            return backend
    return ""


def cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of the same ranks that takes CPU tensors: `group` itself, or a new one over gloo.

    The caller keeps a new one, because each call creates another.

    Ranks:
        All ranks of `group`.
    """
    if backend_name(group, "cpu"):
        return group
    ranks = dist.get_process_group_ranks(group)
    beside: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return beside


def group_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Creates a gloo group of the same ranks with the timeout of `group`.

    A thread may communicate in it while the training loop communicates in `group`.

    Ranks:
        All ranks of the default group.
    """
    limit = None  # torch's default: a group without a backend for the CPU has no timeout for it
    if backend_name(group, "cpu"):
        limit = timeout_of(group, torch.device("cpu"))
    beside: dist.ProcessGroup = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=limit)
    return beside
