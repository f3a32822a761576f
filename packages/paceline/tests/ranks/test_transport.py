"""Both forms of `Transport` give what their names say, on 2 and 3 processes: the one that GPUs use is tested here too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import ConfigError
from paceline.testing import run_ranks
from paceline.world.transport import NativeTransport, PairwiseTransport, Transport, transport_of

CPU = torch.device("cpu")
FORMS = {"pairwise": None, "native": "native"}


def the_transport() -> Transport:
    return transport_of(dist.group.WORLD, CPU)


def on_ranks(fn, form: str, world: int):
    return run_ranks(fn, world=world, env={"PACELINE_TRANSPORT": FORMS[form]})


@pytest.fixture(params=[2, 3])
def world(request) -> int:
    return request.param


@pytest.fixture(params=list(FORMS))
def form(request) -> str:
    return request.param


def test_the_setting_chooses_the_form() -> None:
    def kinds() -> tuple[bool, bool]:
        transport = the_transport()
        return isinstance(transport, PairwiseTransport), isinstance(transport, NativeTransport)

    assert on_ranks(kinds, "pairwise", 2) == [(True, False)] * 2
    assert on_ranks(kinds, "native", 2) == [(False, True)] * 2


def test_the_setting_takes_no_other_words() -> None:
    def refused() -> str:
        with pytest.raises(ConfigError) as error:
            the_transport()
        return error.value.problems[0].code

    assert run_ranks(refused, world=2, env={"PACELINE_TRANSPORT": "pairs"}) == ["env-value"] * 2


@pytest.mark.parametrize("average", [False, True])
def test_reduce_scatter(form: str, world: int, average: bool) -> None:
    def reduced() -> list[float]:
        transport = the_transport()
        whole = torch.arange(2.0 * transport.size) + 10 * transport.rank
        output = torch.full((2,), -1.0)
        transport.reduce_scatter(output, whole, average=average).wait()
        return output.tolist()

    total = world * torch.arange(2.0 * world) + 10 * sum(range(world))
    expected = total / world if average else total
    assert on_ranks(reduced, form, world) == expected.view(world, 2).tolist()


@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(form: str, world: int, in_place: bool) -> None:
    def gathered() -> list[float]:
        transport = the_transport()
        output = torch.full((3 * transport.size,), -1.0)
        own = output.view(transport.size, 3)[transport.rank] if in_place else torch.empty(3)
        own.fill_(transport.rank)
        transport.all_gather(output, own).wait()
        return output.tolist()

    expected = [float(rank) for rank in range(world) for _ in range(3)]
    assert on_ranks(gathered, form, world) == [expected] * world


def rows_of(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    """What a rank has for each rank: rows of its own number, counted on."""
    return [torch.full((size, 2), float(rank + 1)) for size in sizes]


SIZES = {"equal": [2, 2, 2], "unequal": [3, 1, 2], "empty": [2, 0, 0]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_reduce_parts(form: str, world: int, sizes: list[int]) -> None:
    def reduced() -> list[list[float]]:
        transport = the_transport()
        parts = rows_of(transport.rank, sizes[: transport.size])
        output = torch.full_like(parts[transport.rank], -1.0)
        transport.reduce_parts(output, parts).wait()
        return output.tolist()

    total = float(sum(range(1, world + 1)))
    assert on_ranks(reduced, form, world) == [[[total, total]] * size for size in sizes[:world]]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gather_parts(form: str, world: int, sizes: list[int]) -> None:
    def gathered() -> list[list[list[float]]]:
        transport = the_transport()
        parts = [torch.full((size, 2), -1.0) for size in sizes[: transport.size]]
        parts[transport.rank].fill_(transport.rank)
        transport.gather_parts(parts).wait()
        return [part.tolist() for part in parts]

    expected = [[[float(rank)] * 2] * size for rank, size in enumerate(sizes[:world])]
    assert on_ranks(gathered, form, world) == [expected] * world


@pytest.mark.parametrize("owner", [0, 1])
def test_collect_parts(form: str, world: int, owner: int) -> None:
    sizes = SIZES["unequal"][:world]

    def collected() -> list[list[list[float]]]:
        transport = the_transport()
        parts = [torch.full((size, 2), -1.0) for size in sizes]
        parts[transport.rank].fill_(transport.rank)
        transport.collect_parts(parts, owner).wait()
        return [part.tolist() for part in parts]

    expected = [[[float(rank)] * 2] * size for rank, size in enumerate(sizes)]
    ranks = on_ranks(collected, form, world)
    assert ranks[owner] == expected
    for rank in set(range(world)) - {owner}:
        others = [[[float(rank) if peer == rank else -1.0] * 2] * size for peer, size in enumerate(sizes)]
        assert ranks[rank] == others


def test_pairs_keep_apart_what_ranks_begin_in_other_orders(world: int) -> None:
    def gathered() -> list[list[float]]:
        transport = the_transport()
        outputs = {tag: torch.empty(transport.size) for tag in (1, 2)}
        order = (1, 2) if transport.rank else (2, 1)
        handles = [
            transport.all_gather(outputs[tag], torch.tensor([10.0 * tag + transport.rank]), tag) for tag in order
        ]
        for handle in handles:
            handle.wait()
        return [outputs[tag].tolist() for tag in (1, 2)]

    expected = [[10.0 * tag + rank for rank in range(world)] for tag in (1, 2)]
    assert on_ranks(gathered, "pairwise", world) == [expected] * world


def test_all_ranks_round_alike(form: str) -> None:
    """The sum of 0.1, 0.2 and 0.3 depends on the order in which they are added."""

    def reduced() -> float:
        transport = the_transport()
        output = torch.empty(1, dtype=torch.float64)
        own = torch.full((transport.size,), 0.1 * (transport.rank + 1), dtype=torch.float64)
        transport.reduce_scatter(output, own).wait()
        return output.item()

    ranks = on_ranks(reduced, form, 3)
    if form == "pairwise":
        assert len(set(ranks)) == 1
    assert ranks == pytest.approx([0.6] * 3)


def test_messages_that_nobody_waits_for_leave_the_connection_usable():
    def work():
        transport = PairwiseTransport(dist.group.WORLD)
        rows = 1 << 18
        for tag in range(12):
            # As after an error between the beginning of a message and its end.
            transport.all_gather(torch.empty(2 * rows), torch.ones(rows), tag)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(work, 2, timeout_s=30) == [2.0, 2.0]
