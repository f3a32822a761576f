"""Collectives between real processes: structures, ragged sizes, every dtype, and disagreement that all ranks hear of."""

from __future__ import annotations

import random
from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import CollectiveError
from paceline.testing import run_ranks
from paceline.torch_internals.groups import timeout_of
from paceline.world import exchange
from paceline.world.arrived import CountsOf, RowCounts
from paceline.world.collectives import Collectives
from paceline.world.form import Form, Forms
from paceline.world.layout import Layout
from paceline.world.mesh import Mesh
from paceline.world.world import World

Pair = namedtuple("Pair", "left right")
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


def collectives(**options: Any) -> Collectives:
    exchange._MOST_BYTES_OF_TWO = 1 << 16  # so that what is long for more ranks is long for two
    world = World(dist.get_rank(), dist.get_world_size(), source="test")
    return Collectives(world, device=torch.device("cpu"), **options)


def errors(call: Callable[[], object]) -> tuple[str, str]:
    """Code and text of the error that `call` raises."""
    with pytest.raises(CollectiveError) as caught:
        call()
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [3, 40_000])  # inside the first message, and beyond it
def test_gather(size: int, length: int) -> None:
    def work():
        ours = collectives()
        rank = ours.rank
        tree = {
            "x": torch.full((length + rank, 2), float(rank)),
            "p": Pair(torch.tensor(rank), [torch.ones(1, rank > 9)]),
        }
        found = ours.gather(tree)
        weight = torch.ones(length, 3, requires_grad=True)
        assert not ours.gather(weight * 2).requires_grad
        with torch.inference_mode():
            ours.gather(weight[:, ::2])
        ours.gather(torch.arange(length)[::3])
        return found["x"][:, 0].long().bincount().tolist(), found["x"].shape, found["p"]

    for counts, shape, pair in run_ranks(work, size):
        assert counts == [length + rank for rank in range(size)]
        assert shape == (sum(counts), 2)
        assert type(pair) is Pair and pair.left.tolist() == list(range(size)) and pair.right[0].shape == (size, 0)


def test_every_dtype_travels_unharmed() -> None:
    def work():
        ours = collectives()
        for length in (3, 50_000):
            sent = [(torch.arange(length) % 2 + ours.rank).to(dtype) for dtype in DTYPES]
            wanted = [torch.cat([(torch.arange(length) % 2 + rank).to(dtype) for rank in range(2)]) for dtype in DTYPES]
            for got, want in zip(ours.gather(sent), wanted, strict=True):
                assert got.dtype == want.dtype and torch.equal(got, want)
            first = ours.broadcast(sent, src=1)
            assert all(torch.equal(got, want[length:]) for got, want in zip(first, wanted, strict=True))
        return True

    assert run_ranks(work, 2) == [True, True]


def rounds_and_collectives(ours: Collectives) -> Counter[str]:
    """Counts what this rank sends from now on: messages of all ranks to all, and collectives of the backend."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts[what] += 1
            return original(*arguments, **named)

        setattr(owner, name, call)

    ours.barrier()
    messages = ours._exchange._messages
    counted(messages, "gather", "messages")
    counted(messages, "combine", "messages")
    counted(exchange, "all_gather_single", "collectives")
    counted(dist, "all_reduce", "collectives")
    return counts


def rows(real: Sequence[int], loaded: Sequence[int] | None = None) -> CountsOf:
    """Counts of a batch with so many real rows on each rank."""
    return lambda _: RowCounts(real, real if loaded is None else loaded)


STEPS: dict[str, Callable[[Collectives], object]] = {
    "batch": lambda ours: ours.gather_rows(
        (torch.ones(100, 5), torch.ones(100), torch.tensor(1.0)), rows((100,) * ours.size)
    ),
    "long": lambda ours: ours.gather([torch.ones(10_000) for _ in range(20)]),
    "long, one rank has more": lambda ours: ours.gather(torch.ones(200_000 + ours.rank)),
    "one is short": lambda ours: ours.gather(torch.ones(200_000 if ours.rank else 1)),
    "many leaves": lambda ours: ours.gather([torch.ones(1) for _ in range(10_000)]),
    "many leaves, one longer": lambda ours: ours.gather([torch.ones(1 + ours.rank) for _ in range(10_000)]),
    "reduce": lambda ours: ours.reduce([torch.ones(2), torch.tensor(1)]),
    "reduce long": lambda ours: ours.reduce(torch.ones(200_000)),
    "barrier": lambda ours: ours.barrier(),
    "many numbers": lambda ours: ours.sum_ints(range(20_000)),
}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_how_often_the_ranks_talk(size: int) -> None:
    def work():
        ours = collectives()
        found = {}
        counts = rounds_and_collectives(ours)
        for name, step in STEPS.items():
            counts.clear()
            step(ours)
            found[name] = counts["messages"], counts["collectives"]
        return found

    wanted = {
        "batch": (1, 0),
        "long": (1, 1),
        "long, one rank has more": (2, 1),
        "one is short": (2, 1),
        "many leaves": (1, 1),
        "many leaves, one longer": (2, 1),
        "reduce": (1, 0),
        "reduce long": (1, 1),
        "barrier": (1, 0),
        "many numbers": (1, 1),
    }
    assert run_ranks(work, size) == [wanted] * size


def test_two_ranks_send_a_megabyte_inside_a_message() -> None:
    def work():
        ours = Collectives(World(dist.get_rank(), 2, source="test"), device=torch.device("cpu"))
        counts = rounds_and_collectives(ours)
        gathered = ours.gather(torch.full((300_000 + ours.rank,), float(ours.rank)))
        total = ours.reduce(torch.arange(400_000) + ours.rank)
        assert gathered[:300_000].eq(0).all() and gathered[300_000:].eq(1).all()
        return len(gathered), total.equal(2 * torch.arange(400_000) + 1), dict(counts)

    assert run_ranks(work, 2) == [(600_001, True, {"messages": 2, "collectives": 1})] * 2


def test_rows_of_real_samples_in_sample_order() -> None:
    real = (3, 2, 0)

    def work():
        ours = collectives()
        samples = torch.arange(3) + 10 * ours.rank
        loaded = max(real[ours.rank], 1)
        found = ours.gather_rows(
            {
                "p": (samples[:loaded], torch.tensor(ours.rank)),
                "text": [f"s{row}" for row in samples[:loaded].tolist()],
            },
            rows(real),
        )
        tokens = ours.gather_rows(torch.full((5 + ours.rank,), ours.rank), rows(real))
        objects = ours.gather_rows([{"boxes": torch.ones(ours.rank, 4)}] * loaded, rows(real), objects=True)
        return found["p"][0].tolist(), found["p"][1].tolist(), found["text"], tokens.tolist(), len(objects)

    texts = ["s0", "s1", "s2", "s10", "s11"]
    wanted = ([0, 1, 2, 10, 11], [0, 1], texts, [0] * 5 + [1] * 6, 5)
    assert run_ranks(work, 3) == [wanted] * 3


@pytest.mark.parametrize("length", [3, 40_000])
def test_reduce(length: int) -> None:
    def work():
        ours = collectives()
        tree = [torch.full((length,), ours.rank + 1.0), torch.tensor(ours.rank), torch.tensor(True)]
        total, mean = ours.reduce(tree), ours.reduce(tree, "mean", scale=2.0)
        half = ours.reduce(torch.ones(length, dtype=torch.bfloat16) * (ours.rank + 1))
        assert half.dtype == torch.bfloat16 and half[0] == 10
        assert ours.reduce(tree, "none", scale=3.0)[0][0] == 3 * (ours.rank + 1)
        return [one.flatten()[0].item() for one in total + mean], total[1].dtype, mean[1].dtype

    assert run_ranks(work, 4) == [([10, 6, True, 5.0, 3.0, 2.0], torch.int64, torch.float32)] * 4


def test_objects_flags_and_numbers() -> None:
    def work():
        ours = collectives()
        rank = ours.rank
        assert ours.gather_object({"rank": rank, "text": "x" * 30_000 * rank})[1]["rank"] == 1
        assert ours.broadcast_object("small" if rank == 1 else None, src=1) == "small"
        assert len(ours.broadcast_object("y" * 100_000 if rank == 0 else "ignored")) == 100_000
        ours.barrier()
        return ours.any(rank == 2), ours.any(False), ours.sum_ints([1, rank]), ours.sum_ints([])

    assert run_ranks(work, 3) == [(True, False, [3, 3], [])] * 3


def test_padding() -> None:
    def work():
        ours = collectives()
        tree = {"a": torch.ones(2, ours.rank + 1), "b": torch.tensor(1.0)}
        after, before = ours.pad_across(tree, dim=1, pad_index=7), ours.pad_across(tree, -1, pad_first=True)
        assert after["b"] == 1 and after["a"].shape == before["a"].shape == (2, 3)
        flags, halves = (
            ours.pad_across(torch.ones(ours.rank, dtype=torch.bool)),
            ours.pad_across(torch.ones(2).int(), 0, 0.5),
        )
        assert flags.tolist() == [rank < ours.rank for rank in range(2)] and halves.dtype == torch.float32
        assert ours.pad_across(torch.ones(ours.rank, dtype=torch.bool), 0, -1).tolist() == [1] * ours.rank + [-1] * (
            2 - ours.rank
        )
        return after["a"][0].tolist(), before["a"][0].tolist()

    assert run_ranks(work, 3)[0] == ([1, 7, 7], [0, 0, 1])


CASES: dict[str, Callable[[Collectives], object]] = {
    "shape": lambda ours: ours.gather(torch.ones(2, 3 + (ours.rank == 1))),
    "dtype": lambda ours: ours.gather(torch.ones(2, dtype=torch.float64 if ours.rank == 1 else torch.float32)),
    "dims": lambda ours: ours.gather(torch.ones(2) if ours.rank == 1 else torch.tensor(1.0)),
    "structure": lambda ours: ours.gather([torch.ones(2)] * (1 + ours.rank)),
    "keys": lambda ours: ours.gather({f"k{ours.rank}": torch.ones(2)}),
    "operation": lambda ours: ours.barrier() if ours.rank == 1 else ours.gather(torch.ones(2)),
    "reduce rows": lambda ours: ours.reduce(torch.ones(2 + ours.rank)),
    "reduce big": lambda ours: ours.reduce(torch.ones(40_000 + ours.rank)),
    "reduction": lambda ours: ours.reduce(torch.ones(2), "mean" if ours.rank == 1 else "sum"),
    "source": lambda ours: ours.broadcast(torch.ones(2), src=ours.rank),
    "counts": lambda ours: ours.sum_ints([1] * ours.rank),
    "pad dims": lambda ours: ours.pad_across(torch.ones([2] * (1 + ours.rank))),
    "one has a string": lambda ours: ours.gather([torch.ones(2), "x"][ours.rank == 1]),
    "one cannot pickle": lambda ours: ours.gather_object((lambda: 1) if ours.rank == 1 else 2),
    "one names no rank": lambda ours: ours.broadcast(torch.ones(2), src=9 if ours.rank == 1 else 0),
}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_disagreement_is_the_same_error_on_all_ranks_and_the_group_lives_on(size: int) -> None:
    def work():
        ours, found = collectives(), {}
        for name, call in CASES.items():
            found[name] = errors(lambda call=call: call(ours))
            ours.barrier()
        no_rank = errors(lambda: ours.broadcast_object(1, src=-1))
        assert no_rank[0] == "collective-source"
        return found

    first, odd, *rest = run_ranks(work, size, timeout_s=60)
    own = {
        "one has a string": "collective-leaf",
        "one cannot pickle": "collective-object",
        "one names no rank": "collective-source",
    }
    for name in CASES:
        (code, text), (odd_code, odd_text) = first[name], odd[name]
        assert code == "collective-mismatch", name
        assert odd_code == own.get(name, "collective-mismatch"), name
        assert "rank 0" in text and "rank 1" in text
        assert ": _ of" not in text and not any(line.endswith(": ") for line in text.splitlines())
        # The first line of each names the operation that this rank itself called.
        lines = text.splitlines()[1:]
        assert name in own or lines == odd_text.splitlines()[1:]
        assert all(ranks[name][1].splitlines()[1:] == lines for ranks in rest)
    assert "float32[*, 3]" in first["shape"][1] and "float32[*, 4]" in first["shape"][1]
    assert "rank 1: gather: cannot: the value is a str" in first["one has a string"][1]


OPERATIONS: dict[str, Callable[[Collectives], object]] = {
    "barrier": lambda ours: ours.barrier(),
    "any": lambda ours: ours.any(ours.rank == 0),
    "sum": lambda ours: ours.sum_ints([1, ours.rank]),
    "many numbers": lambda ours: ours.sum_ints([1] * 9_000),
    "gather": lambda ours: ours.gather(torch.full((3 + ours.rank,), 1.0)).sum(),
    "gather doubles": lambda ours: ours.gather(torch.ones(3, dtype=torch.float64)).sum(),
    "gather long": lambda ours: ours.gather(torch.ones(40_000)).sum(),
    "gather uneven": lambda ours: ours.gather(torch.ones(40_000 if ours.rank else 1)).sum(),
    "gather two": lambda ours: ours.gather([torch.ones(30_000), torch.ones(2)])[1].sum(),
    "reduce": lambda ours: ours.reduce(torch.tensor(1.0)),
    "reduce long": lambda ours: ours.reduce(torch.ones(30_000)).sum(),
    "reduce other": lambda ours: ours.reduce(torch.ones(30_001)).sum(),
    "rows": lambda ours: ours.gather_rows((torch.ones(4, 2), ["a"] * 4), rows((4,) * ours.size)),
    "object": lambda ours: ours.gather_object({"rank": "x" * 100 * ours.rank}),
    "long object": lambda ours: ours.gather_object("x" * 70_000),
    "broadcast": lambda ours: ours.broadcast(torch.ones(5), src=1),
    "broadcast long": lambda ours: ours.broadcast(torch.ones(70_000), src=1),
    "broadcast object": lambda ours: ours.broadcast_object("x", src=1),
    "pad": lambda ours: ours.pad_across(torch.ones(2, 1 + ours.rank), dim=1).sum(),
}


# Ranks may mix these, as they differ in dim 0 alone, or are objects of any size.
MIXABLE = ({"gather", "gather long", "gather uneven"}, {"object", "long object"})


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_calls_of_which_one_rank_makes_another(size: int, seed: int) -> None:
    """Never a hang, an abort or another rank's data: each call ends well on all ranks, or with an error on all."""

    def work():
        ours = collectives()
        alone = {name: str(call(ours)) for name, call in OPERATIONS.items()}
        draw = random.Random(seed)  # the same draws on all ranks
        found = []
        for _ in range(60):
            name, other = draw.choices(list(OPERATIONS), k=2)
            odd = draw.randrange(2 * size)  # half of the time no rank deviates
            own = other if ours.rank == odd else name
            mixed = odd < size and any({name, other} <= names for names in MIXABLE)
            try:
                is_right = str(OPERATIONS[own](ours)) == alone[own]
                outcome = "right" if is_right or mixed else "wrong"
            except CollectiveError as error:
                outcome = error.code
            found.append((outcome, "right" if odd >= size or name == other or mixed else "collective-mismatch"))
        return found

    for found in run_ranks(work, size, timeout_s=120):
        assert [outcome for outcome, _ in found] == [wanted for _, wanted in found]


def test_all_ranks_wrong_alike() -> None:
    def work():
        return errors(lambda: collectives().gather("text"))[0]

    assert run_ranks(work, 2) == ["collective-leaf"] * 2


def test_groups_of_a_mesh() -> None:
    layout = Layout(replicate=2, tp=2)

    def work():
        rank = dist.get_rank()
        world = World(rank, 4, source="test")
        mesh = Mesh(layout, world, "cpu")
        coordinate = mesh.device_mesh.get_coordinate()
        assert list(coordinate) == list(layout.coordinate(rank).values())
        others = {"tp": [rank // 2 * 2, rank // 2 * 2 + 1], "replicate": [rank % 2, rank % 2 + 2], "shard": [rank]}
        for axis, peers in others.items():
            group = mesh.group(axis)
            assert timeout_of(group, torch.device("cpu")) == timeout_of(dist.group.WORLD, torch.device("cpu"))
            ours = Collectives(world, device=torch.device("cpu"), group=group)
            assert ours.gather(torch.tensor(rank)).tolist() == peers
            assert ours.broadcast_object(rank, src=ours.size - 1) == peers[-1]
        data = dist.get_process_group_ranks(mesh.data_group)
        whole = Mesh(Layout(replicate=4), world, "cpu")
        assert whole.group("replicate") is whole.data_group is dist.group.WORLD
        return data

    assert run_ranks(work, 4) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_data_group_over_two_axes() -> None:
    def work():
        mesh = Mesh(Layout(replicate=2, shard=2), World(dist.get_rank(), 4), "cpu")
        small = Mesh(Layout(replicate=1, shard=2, tp=2), World(dist.get_rank(), 4), "cpu")
        return dist.get_process_group_ranks(mesh.data_group), dist.get_process_group_ranks(small.data_group)

    assert run_ranks(work, 4)[1] == ([0, 1, 2, 3], [1, 3])


def test_leaves_on_the_device_travel_beside_those_on_the_cpu(monkeypatch) -> None:
    """The path of an accelerator's tensors, with float64 tensors in the part of those on the device."""
    known = Forms.of

    def pretend(self, op, tree, exact=False):
        leaves, form, bad = known(self, op, tree, exact)
        there = tuple(i for i, leaf in enumerate(leaves) if leaf.dtype == torch.float64)
        return leaves, Form(form.topic, tuple(i for i in form.on_cpu if i not in there), there), bad

    monkeypatch.setattr(Forms, "of", pretend)

    def work():
        ours = collectives()
        rank = ours.rank
        for length in (2, 50_000):
            cpu, device = torch.full((length, 2), rank), torch.full((length + rank, 3), rank + 0.5, dtype=torch.float64)
            found = ours.gather({"c": cpu, "d": [device, device[:, :1]], "e": device[:0]})
            assert found["c"].shape == (2 * length, 2) and found["c"][length:].eq(1).all()
            assert found["d"][0].shape == (2 * length + 1, 3) and found["d"][1][:, 0].equal(found["d"][0][:, 0])
            assert found["d"][0][:length].eq(0.5).all() and found["d"][0][length:].eq(1.5).all()
            assert found["e"].shape == (0, 3)
            alone = ours.gather_rows((device[:length],), rows((length, 1), (length, length)))[0]
            assert alone.shape == (length + 1, 3) and alone[-1, 0] == 1.5
            total, first = ours.reduce((cpu, cpu.double())), ours.broadcast((cpu, cpu.double() + 3))
            assert total[0].eq(1).all() and total[1].eq(1).all() and first[1].eq(3).all() and first[0].eq(0).all()
        return ours.gather(device[:0]).shape

    assert run_ranks(work, 2) == [(0, 3)] * 2
