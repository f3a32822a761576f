"""What we rely on of process groups' private names: a contract a function."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.torch_internals import groups

CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[dist.Store]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield store
    dist.destroy_process_group()


def test_a_group_knows_the_timeout_it_was_formed_with(store: dist.Store) -> None:
    assert groups.timeout_of(dist.group.WORLD, CPU) == timedelta(seconds=77)
    other = dist.new_group([0], timeout=timedelta(seconds=55))
    assert groups.timeout_of(other, CPU) == timedelta(seconds=55)


def test_the_timeout_of_a_group_can_be_changed(store: dist.Store) -> None:
    groups.set_timeout(dist.group.WORLD, CPU, timedelta(seconds=33))
    assert groups.timeout_of(dist.group.WORLD, CPU) == timedelta(seconds=33)


def test_the_fake_backend_has_no_timeout() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert groups.timeout_of(dist.group.WORLD, CPU) is None
    finally:
        dist.destroy_process_group()


def test_the_default_store_is_the_one_that_was_given(store: dist.Store) -> None:
    num_keys = store.num_keys()
    groups.default_store().set("written", "here")
    assert store.num_keys() == num_keys + 1


def test_a_group_is_remembered_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_backend", None)  # as in a fresh process
    assert not groups.was_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert groups.was_initialized()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_tcp_store_is_told_from_another_server(use_libuv: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    with socket.create_connection(("127.0.0.1", store.port), 10) as connection:
        assert groups.is_tcp_store(connection)
    ours, server = socket.socketpair()
    with ours, server:
        server.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert not groups.is_tcp_store(ours)
    assert store.add("counter", 1) == 1  # the connection that asked and closed has not disturbed it
