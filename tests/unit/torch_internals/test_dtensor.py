"""What we rely on of DTensor's private names: a contract a function."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from paceline.torch_internals import dtensor


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_the_own_tensor_shares_its_memory_and_knows_of_no_gradient(mesh: DeviceMesh, placement: Any) -> None:
    tensor = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [placement]))
    own = dtensor.local_tensor(tensor)
    assert type(own) is torch.Tensor and own.grad_fn is None
    with torch.no_grad():
        own.fill_(3)
        assert isinstance(tensor, DTensor) and tensor.full_tensor().tolist() == [[3, 3]] * 4


def test_a_shard_stands_for_a_whole_tensor_for_a_while(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    part = tensor.to_local()
    show_part_again = dtensor.show_as_replica(tensor, torch.full((4, 2), 3.0))
    assert tensor.placements == (Replicate(),) and tensor.to_local().tolist() == [[3, 3]] * 4
    show_part_again()
    assert tensor.placements == (Shard(0),) and tensor.to_local().data_ptr() == part.data_ptr()


def test_a_plain_tensor_beside_a_dtensor_is_recognised(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    plain = torch.ones(4, 2)
    operations = (lambda: plain.add_(tensor), lambda: torch._foreach_add_([plain], [tensor]))
    for operation in operations:
        with pytest.raises(RuntimeError) as caught:
            operation()
        assert dtensor.is_mixture(caught.value)
    assert not dtensor.is_mixture(RuntimeError("another"))


def test_a_shard_is_cut_into_runs_of_rows() -> None:
    parts = dtensor.cut(torch.arange(5), Shard(0), 4)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4], []]


def test_a_strided_shard_is_cut_into_runs_of_each_run() -> None:
    parts = dtensor.cut(torch.arange(8), _StridedShard(0, split_factor=2), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_dim_is_divided_a_second_time_by_a_placement_of_its_own() -> None:
    placement = dtensor.strided_shard(1, 2)
    assert isinstance(placement, _StridedShard) and (placement.dim, placement.split_factor) == (1, 2)


def test_redistribution_logs_under_this_name() -> None:
    from torch.distributed.tensor import _redistribute

    assert _redistribute.logger.name == dtensor.REDISTRIBUTION_LOG


def test_a_dtensor_refuses_to_be_computed_with_plain_tensors(mesh: DeviceMesh) -> None:
    class Refused(Exception):
        pass

    kept = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False)
    gradient = dtensor.refusing_mixtures(kept.clone(), Refused)
    with pytest.raises(Refused, match="add_"):
        torch.ones(4, 2).add_(gradient)
    with pytest.raises(Refused):
        torch.ones(4, 2).sub_(0.1 * gradient.clone())
    kept.add_(gradient)
    assert type(kept) is DTensor
    copies = (deepcopy(gradient), pickle.loads(pickle.dumps(gradient)))
    assert [type(copy) for copy in copies] == [DTensor, DTensor]
    assert all(copy.full_tensor().equal(torch.ones(4, 2)) for copy in copies)
    assert torch.nn.utils.get_total_norm([gradient]) == 8**0.5
