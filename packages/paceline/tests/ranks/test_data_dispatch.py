"""One rank reads for all: parts, uneven tails, nesting, and errors that reach every rank."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.base.errors import DataError
from paceline.data.prepare import prepare_loader
from paceline.testing import run_ranks
from paceline.world.collectives import Collectives
from paceline.world.world import World


def prepared(data, batch, loader_options=None, **options):
    world = World.detect()
    collectives = Collectives(world, device=torch.device("cpu"))
    loader = DataLoader(data, batch, **(loader_options or {}))
    settings = {"width": world.size, "index": world.rank, "dispatch": True, "seed": 5, **options}
    return prepare_loader(loader, device="cpu", collectives=collectives, **settings)


class Numbers:
    """Fails where it is read on any rank but the first."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert World.detect().rank == 0
        return index


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        assert World.detect().rank == 0
        return iter(range(self.length))


def steps_of(loader):
    return [
        (batch.tolist(), loader.current.real, loader.current.loaded, loader.current.last, loader.position.samples)
        for batch in loader
    ]


def joined(ranks):
    return [
        [sample for index, part in enumerate(parts) for sample in part[0][: part[1][index]]]
        for parts in zip(*ranks, strict=True)
    ]


class Shuffles(Numbers):
    def __getitem__(self, index):
        return index


def test_parts_are_those_that_each_rank_would_have_read():
    def run(dispatch):
        options = {"shuffle": True}
        loader = prepared(Shuffles(22), 3, options, dispatch=dispatch)
        whole = [steps_of(loader), steps_of(loader)], len(loader)
        for _ in loader:
            ahead, state = loader.given.window_rows(9), loader.state_dict()
            break
        again = prepared(Shuffles(22), 3, options, dispatch=dispatch)
        again.load_state_dict(state)
        return whole, ahead, state, steps_of(again)

    assert run_ranks(run, 3, args=(True,)) == run_ranks(run, 3, args=(False,))


def test_only_the_first_rank_reads():
    expected = [list(range(8)), [8, 9]]
    assert joined(run_ranks(lambda: steps_of(prepared(Numbers(10), 4)), 2)) == expected
    assert joined(run_ranks(lambda: steps_of(prepared(Numbers(10), 4, {"num_workers": 1})), 2)) == expected


def test_streams_and_their_tails():
    def run():
        loader = prepared(Stream(10), 2)
        whole = steps_of(loader)
        for _ in loader:
            state = loader.state_dict()
            break
        again = prepared(Stream(10), 2)
        again.load_state_dict(state)
        return (
            whole,
            steps_of(again),
            steps_of(prepared(Stream(10), 2, {"drop_last": True})),
            steps_of(prepared(Stream(0), 2)),
        )

    whole, rest, dropped, empty = zip(*run_ranks(run, 3), strict=True)
    assert joined(whole) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert whole[2][-1] == ([6, 7], (2, 2, 0), 2, True, 10)
    assert joined(rest) == [[6, 7, 8, 9]]
    assert joined(dropped) == [[0, 1, 2, 3, 4, 5]]
    assert empty == ([], [], [])


def test_batches_of_any_nesting():
    class Nested(Stream):
        def __iter__(self):
            for sample in range(self.length):
                image = torch.full((2, 3), sample, dtype=torch.bfloat16)
                yield {"x": (image, sample), "flag": sample > 1, "name": f"n{sample}", "empty": torch.empty(0)}

    def run():
        return next(iter(prepared(Nested(4), 2)))

    for rank, batch in enumerate(run_ranks(run, 2)):
        image, numbers = batch["x"]
        assert numbers.tolist() == [2 * rank, 2 * rank + 1]
        assert image.dtype == torch.bfloat16 and image[0, 0, 0] == 2 * rank
        assert batch["flag"].tolist() == [rank > 0] * 2 and batch["name"] == [f"n{2 * rank}", f"n{2 * rank + 1}"]
        assert batch["empty"].shape == (2, 0)


def test_an_error_in_reading_is_raised_on_all_ranks():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise FileNotFoundError("no such picture: 5.png")
            return index

    class Stubborn(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    class Odd(Numbers):
        def __getitem__(self, index):
            raise Stubborn("this", "that")

    def run():
        seen = []
        with pytest.raises(FileNotFoundError, match=r"5\.png") as caught:
            for batch in prepared(Broken(8), 2):
                seen += batch.tolist()
        with pytest.raises((Stubborn, DataError), match="this and that") as odd:
            list(prepared(Odd(8), 2))
        return seen, getattr(caught.value, "__notes__", [""])[0], getattr(odd.value, "code", None)

    first, second = run_ranks(run, 2)
    assert (first[0], second[0]) == ([0, 1], [2, 3])
    assert "raised on rank 0" in second[1] and "__getitem__" in second[1]
    assert (first[2], second[2]) == (None, "data-dispatch")
