"""What we rely on of DTensor's private names: a contract a function."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
import weakref
from collections.abc import Iterator
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


@pytest.fixture
def table() -> Iterator[dict[Any, Any]]:
    """torch's table of functions that run in the place of operators, as it is before the test and after it."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    yield handlers
    handlers.clear()
    handlers.update(before)


def test_a_function_answers_for_an_operator_on_dtensors(mesh: DeviceMesh, table: dict[Any, Any]) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    seen = []

    def function(operation: Any, args: Any, keywords: Any) -> str:
        seen.append((operation, args[0] is tensor, keywords))
        return dtensor.unanswered(operation, args, keywords)

    operation = torch.ops.aten.sum.dim_IntList
    dtensor.answer(operation, function)
    for _ in range(2):
        assert tensor.sum(dim=0).full_tensor().tolist() == [4, 4]
    assert seen == [(operation, True, {})] * 2
    assert torch.ones(4, 2).sum(dim=0).tolist() == [4, 4] and len(seen) == 2


def test_a_function_answers_where_dtensors_meet_plain_tensors(mesh: DeviceMesh, table: dict[Any, Any]) -> None:
    tensor = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    plain = torch.full((4, 2), 3.0)
    seen = []

    def is_mixture(operation: Any, args: Any, keywords: Any) -> bool:
        met = torch.utils._pytree.tree_leaves((args, keywords))
        return any(type(value) is torch.Tensor for value in met)

    def function(operation: Any, args: Any, keywords: Any) -> Any:
        seen.append(operation)
        assert torch.is_grad_enabled() == (operation is torch.ops.aten.sub.Tensor)
        local = torch.utils._pytree.tree_map_only(DTensor, lambda value: value._local_tensor, (args, keywords))
        return operation(*local[0], **local[1])

    passed: list[Any] = []
    dtensor.answer_mixtures((is_mixture, function, lambda operation, *_: passed.append(operation.__name__)))
    # Autograd stands above: it has recorded the operation, and it sends the plain gradient to the DTensor.
    hooked: list[Any] = []
    tensor.register_hook(
        lambda gradient: hooked.append(type(gradient)) or distribute_tensor(gradient, mesh, [Shard(0)])
    )
    difference = tensor - plain
    assert type(difference) is torch.Tensor and difference.requires_grad
    difference.sum().backward()
    assert hooked == [torch.Tensor] and isinstance(tensor.grad, DTensor)
    with torch.no_grad():
        plain.lerp_(tensor, 0.5)
        assert plain.unique().tolist() == [2]
        assert isinstance(tensor + tensor, DTensor)
        assert passed[-1] == "add.Tensor"
        torch._foreach_add_([plain], [tensor])
        assert plain.unique().tolist() == [3]
        assert isinstance(tensor.clamp(0, 1), DTensor) and passed[-1] == "clamp.default"
    with dtensor.mixtures_refused(LookupError), pytest.raises(LookupError, match="mul"):
        plain * tensor
    names = [operation.__name__ for operation in seen]
    assert names == ["sub.Tensor", "lerp_.Scalar", "_foreach_add_.List"]


def test_a_slice_of_rows_knows_what_it_was_taken_of(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    view = tensor[1:3]
    assert (
        dtensor.lost_view(tensor) is None and dtensor.lost_view(view) is None and dtensor.lost_view(tensor * 2) is None
    )
    # As where several ranks have rows: torch gathers them for the slice.
    view._local_tensor = view._local_tensor.clone()
    lost = dtensor.lost_view(view)
    assert lost is not None and lost[0] is tensor
    whole = torch.arange(8.0).view(4, 2)
    lost[1](whole).zero_()
    assert whole.tolist() == [[0, 1], [0, 0], [0, 0], [6, 7]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("placement", [Shard(0), _StridedShard(0, split_factor=2), Shard(1), Shard(-1)], ids=str)
def test_a_rank_gets_the_part_that_torch_cuts_for_it(placement: Any, rows: int, size: int) -> None:
    tensor = torch.arange(rows * 4).view(rows, 4)
    expected, _ = placement._split_tensor(tensor, size, with_padding=False)
    parts = [dtensor.shard_of(tensor, placement, size, rank) for rank in range(size)]
    assert [part.tolist() for part in parts if part.numel()] == [part.tolist() for part in expected if part.numel()]
    assert [part.numel() for part in parts] == [part.numel() for part in expected]


def test_a_dim_is_divided_a_second_time_by_a_placement_of_its_own() -> None:
    placement = dtensor.strided_shard(1, 2)
    assert isinstance(placement, _StridedShard) and (placement.dim, placement.split_factor) == (1, 2)


def test_redistribution_logs_under_this_name() -> None:
    from torch.distributed.tensor import _redistribute

    assert _redistribute.logger.name == dtensor.REDISTRIBUTION_LOG


def _ends_within(seconds: float, child: int) -> bool:
    for _ in range(int(seconds * 20)):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("frozen", [False, True])
def test_results_are_on_the_mesh_of_their_arguments_also_in_a_forked_process(frozen: bool) -> None:
    meshes = []
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        dtensor.forget_results()
        result = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]) * 2
        assert result.device_mesh is mesh
        dist.destroy_process_group()
        meshes.append(weakref.ref(mesh))
        del mesh, result
    # torch may keep the first mesh of a process. The second was in the results alone; the third still is, with its group.
    gc.collect()
    assert [mesh() is None for mesh in meshes[1:]] == [True, False]
    if frozen:
        gc.freeze()
    child = os.fork()
    if child == 0:
        model = torch.nn.Linear(1, 1)
        model.__dict__["itself"] = model
        own = weakref.ref(model)
        dtensor.forget_results()
        del model
        gc.collect()
        os._exit(0 if meshes[2]() is not None and own() is None else 1)
    if frozen:
        gc.unfreeze()
    assert _ends_within(60, child)


def test_a_forked_process_without_results_of_its_parent_copies_none_of_its_objects() -> None:
    """A list of all objects writes to each of them, and so copies the memory of the parent, in each rank that is forked."""
    dtensor.forget_results()
    objects = [[number] for number in range(100_000)]
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]) * 2
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        dtensor.forget_results()
        copied_pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        os._exit(0 if copied_pages * resource.getpagesize() < sys.getsizeof([0]) * len(objects) / 4 else 1)
    assert _ends_within(60, child)
