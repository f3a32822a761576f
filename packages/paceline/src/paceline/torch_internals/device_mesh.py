"""The private side of `DeviceMesh`: meshes made of several axes of another."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A 1-D mesh, called `name`, of all ranks of `mesh` that talk with this one. Ranks: all of the root mesh."""
    return mesh._flatten(name)


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh that has the axes of several, which come from one root mesh, in order."""
    return DeviceMesh._concatenate(meshes)
