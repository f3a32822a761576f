"""What we rely on of `DeviceMesh`'s private names: a contract a function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.torch_internals import device_mesh


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    dist.destroy_process_group()


def test_two_axes_become_one(mesh: DeviceMesh) -> None:
    flat = device_mesh.flattened(mesh["a", "c"], "a_c")
    assert flat.mesh_dim_names == ("a_c",)
    assert flat.mesh.tolist() == [0, 1, 4, 5]
    assert dist.get_process_group_ranks(flat.get_group()) == [0, 1, 4, 5]


def test_meshes_are_put_together_in_order(mesh: DeviceMesh) -> None:
    flat = device_mesh.flattened(mesh["b", "c"], "b_c")
    both = device_mesh.concatenated([mesh["a"], flat])
    assert both.mesh_dim_names == ("a", "b_c")
    assert both.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
