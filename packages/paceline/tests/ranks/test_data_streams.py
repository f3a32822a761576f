"""Iterable datasets on several processes: the stream's order, unequal shares, and agreement on the end."""

from __future__ import annotations

import logging

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.prepare import prepare_loader
from paceline.testing import run_ranks
from paceline.world.collectives import Collectives
from paceline.world.world import World


def me() -> tuple[World, Collectives]:
    world = World.detect()
    return world, Collectives(world, device=torch.device("cpu"))


def prepared(data, batch, loader_options=None, **options):
    world, collectives = me()
    loader = DataLoader(data, batch, **(loader_options or {}))
    return prepare_loader(
        loader, width=world.size, index=world.rank, device="cpu", collectives=collectives, seed=3, **options
    )


def steps_of(loader):
    """(rows, real, weights, loaded, last, position) of each step."""
    steps = []
    for batch in loader:
        info = loader.current
        rows = batch["x"].tolist() if isinstance(batch, dict) else batch.tolist()
        steps.append((rows, info.real, info.weights, info.loaded, info.last, loader.position.samples))
    return steps


def joined(ranks):
    """Real samples of each step, in rank order."""
    assert len({len(steps) for steps in ranks}) == 1
    return [
        [sample for index, part in enumerate(parts) for sample in part[0][: part[1][index]]]
        for parts in zip(*ranks, strict=True)
    ]


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Splitting(Stream):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers))


class Unequal(Stream):
    """Gives the first process two thirds of its samples."""

    def __iter__(self):
        info = get_worker_info()
        first = 2 * self.length // 3
        return iter(range(first) if info.id == 0 else range(first, self.length))


class Sharded(Stream):
    """Cuts itself, as `datasets.IterableDataset` does; the parts are very unequal."""

    def __init__(self, parts):
        self.parts, self.num_shards = parts, len(parts)

    def shard(self, num_shards, index):
        return Sharded(self.parts[index::num_shards])

    def __iter__(self):
        for part in self.parts:
            yield from part


class DividedByRank(Stream):
    """Cuts itself by the rank, as for DistributedDataParallel."""

    def __iter__(self):
        rank, width = me()[0].rank, me()[0].size
        return ({"x": torch.tensor(sample)} for sample in range(rank, self.length, width))


def test_a_stream_that_a_script_divides_by_itself_is_told():
    """Each rank takes its part of each stream, so that half of the samples would be read by none."""

    def run():
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("paceline.data").addHandler(handler)
        for stream in (Stream(26), Splitting(26), Sharded([[1, 2], [3, 4]]), Stream(0)):
            list(prepared(stream, 6))
        assert told == []
        loader = prepared(DividedByRank(26), 6)
        list(loader)
        list(loader)
        return told

    (message,), others = run_ranks(run, 2)
    assert "DividedByRank that begins with other samples" in message and not others


def test_order_of_one_process_at_every_width():
    def run():
        return steps_of(prepared(Stream(26), 12 // me()[0].size))

    expected = [list(range(12)), list(range(12, 24)), [24, 25]]
    for width in (2, 3):
        ranks = run_ranks(run, width)
        assert joined(ranks) == expected
        for rows, real, weights, loaded, last, samples in ranks[1][-1:]:
            assert (real, weights, loaded, last, samples) == ((2,) + (0,) * (width - 1),) * 2 + (2, True, 26)
            assert rows == [24, 25]  # of rank 0, weighing nothing


def test_workers_and_drop_last_and_resume():
    def run():
        dropped = steps_of(prepared(Stream(26), 6, {"drop_last": True}))
        loader = prepared(Stream(26), 6, {"num_workers": 1})
        whole = steps_of(loader)
        for _ in loader:
            state = loader.state_dict()
            break
        again = prepared(Stream(26), 6)
        again.load_state_dict(state)
        return dropped, whole, steps_of(again)

    dropped, whole, rest = zip(*run_ranks(run, 2), strict=True)
    assert joined(dropped) == joined(whole)[:2] and dropped[0][-1][4]
    assert joined(rest) == joined(whole)[1:]


def test_drop_last_drops_what_is_no_whole_global_batch_of_a_dataset_that_splits_itself():
    def run():
        equal = steps_of(prepared(Splitting(30), 6, {"drop_last": True}))
        return equal, steps_of(prepared(Unequal(30), 4, {"drop_last": True}))

    equal, unequal = zip(*run_ranks(run, 2), strict=True)
    assert [step[1] for step in equal[0]] == [(6, 6)] * 2 and [step[4] for step in equal[0]] == [False, True]
    assert [step[1] for step in unequal[0]] == [(4, 4)] * 2 and unequal[0][-1][4]


def test_a_rank_that_never_had_a_sample_gets_one_by_broadcast():
    def run():
        class Dicts(Stream):
            def __iter__(self):
                return ({"x": sample, "name": str(sample)} for sample in range(self.length))

        loader = prepared(Dicts(3), 4)
        kept = steps_of(loader)
        names = [batch["name"] for batch in loader]
        return kept, names

    (first, names), (second, others) = run_ranks(run, 2)
    assert first == [([0, 1, 2], (3, 0), (3, 0), 3, True, 3)]
    assert second == [([0, 1, 2], (3, 0), (3, 0), 3, True, 3)]
    assert names == others == [["0", "1", "2"]]


def test_unequal_shares_take_the_same_number_of_steps():
    def run():
        parts = [list(range(10)), [100, 101], [20, 21]]
        split = steps_of(prepared(Splitting(9), 2))
        loader = prepared(Sharded(parts), 4)
        whole = steps_of(loader)
        for step, _ in enumerate(loader):
            if step == 1:
                state = loader.state_dict()
                break
        loader.load_state_dict(state)
        return split, whole, steps_of(loader), [batch.tolist() for batch in prepared(Sharded(parts), 4, tail="pad")]

    split, whole, rest, _ = zip(*run_ranks(run, 2), strict=True)
    assert joined(split) == [[0, 2, 1, 3], [4, 6, 5, 7], [8]]
    assert joined(whole) == [[0, 1, 2, 3, 100, 101], [4, 5, 6, 7], [8, 9, 20, 21]]
    assert [step[1] for step in whole[1]] == [(4, 2), (4, 0), (4, 0)]
    assert joined(rest) == joined(whole)[2:]


def test_a_stream_with_fewer_shards_than_ranks_is_read_by_all():
    def run():
        return steps_of(prepared(Sharded([list(range(5))]), 2))

    assert joined(run_ranks(run, 2)) == [[0, 1, 2, 3], [4]]


def test_an_empty_stream_ends_at_once():
    assert run_ranks(lambda: steps_of(prepared(Stream(0), 2)), 2) == [[], []]


def test_dataset_state_serves_another_width():
    class Resumable(Stream):
        place = 0

        def __iter__(self):
            place, self.place = self.place, 0
            for sample in range(place, self.length):
                self.place = sample + 1
                yield sample

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]

    def save():
        loader = prepared(Resumable(30), 12 // me()[0].size)
        next(batches := iter(loader))
        state = loader.state_dict()
        batches.close()
        return state

    def resume(state):
        loader = prepared(Resumable(30), 12 // me()[0].size)
        loader.load_state_dict(state)
        return steps_of(loader)

    states = run_ranks(save, 3)
    assert states[0]["dataset"] == [4, {"place": 4}] and states[0]["samples"] == 12
    for width in (1, 2):
        ranks = run_ranks(resume, width, args=(states[0],))
        assert joined(ranks) == [list(range(12, 24)), list(range(24, 30))]
