"""What we rely on of the private side of DTensor."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from paceline_deepspeed.torch_internals import dtensor


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_shard_stands_for_a_whole_tensor_for_a_while(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    part = tensor.to_local()
    show_part_again = dtensor.show_as_replica(tensor, torch.full((4, 2), 3.0))
    assert tensor.placements == (Replicate(),) and tensor.to_local().tolist() == [[3, 3]] * 4
    show_part_again()
    assert tensor.placements == (Shard(0),) and tensor.to_local().data_ptr() == part.data_ptr()
