"""What `works.finish_threads` relies on in gloo's process groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from paceline.torch_internals import gloo


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_backends_are_those_of_all_groups(group: None) -> None:
    assert len(gloo.backends()) == 1
    dist.new_group([0])
    backends = gloo.backends()
    assert len(backends) == 2 and all(gloo.num_threads(backend) >= 1 for backend in backends)


def test_an_all_reduce_of_nothing_ends_by_itself(group: None) -> None:
    (backend,) = gloo.backends()
    future = gloo.begin_nothing(backend, torch.empty(0))
    future.wait()
    assert future.done()
