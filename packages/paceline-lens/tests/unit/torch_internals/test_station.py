"""What we rely on of torch's operators between their callers and their kernels: a contract a function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline_lens.torch_internals.station import Station, awaited_work


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_collective_passes_a_station_until_it_is_closed(group: None) -> None:
    seen: list[tuple[Any, ...]] = []

    def observe(pass_on: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        seen.append(args)
        return pass_on()

    station = Station("c10d")
    assert "process_group" in station.argument_names("allreduce_")
    station.observe("allreduce_", observe)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (len(seen) == 1 and seen[0][0][0] is tensor) or torch.equal(seen[0][0][0], tensor)
    station.close()
    dist.all_reduce(tensor)
    assert len(seen) == 1


def test_a_closed_station_lets_go_of_its_observer() -> None:
    class Observer:
        def __call__(self, pass_on: Callable[[], Any], args: tuple[Any, ...]) -> Any:
            return pass_on()

    observer = Observer()
    reference = weakref.ref(observer)
    station = Station("c10d")
    station.observe("allreduce_", observer)
    del observer
    assert reference() is not None
    station.close()
    assert reference() is None


def test_a_work_without_a_future_says_when_somebody_has_waited(group: None) -> None:
    completed: list[str] = []
    work = dist.all_reduce(torch.ones(2), async_op=True)
    awaited = dist.Work.unbox(awaited_work(work, lambda: completed.append("waited")))
    assert completed == []
    assert awaited.wait()
    assert completed == ["waited"]
