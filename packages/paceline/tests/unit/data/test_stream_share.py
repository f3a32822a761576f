"""Iterable datasets: which samples each rank and each worker takes, and resume, in one process."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.prepare import prepare_loader
from paceline.data.share import Share
from paceline.plan.data import DataPlan


class Stream(IterableDataset):
    """0 .. n-1, the same in each process; counts what was read."""

    def __init__(self, length):
        self.length, self.read = length, 0

    def __iter__(self):
        for sample in range(self.length):
            self.read += 1
            yield sample


class Splitting(Stream):
    """Reads torch's worker information, as torch's documentation does."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.length, step))


class AskingLate(Stream):
    """Looks at the worker information after it has begun, when it is too late to split."""

    def __iter__(self):
        for sample in range(self.length):
            yield sample
            assert get_worker_info().num_workers == 1


class Resumable(Stream):
    """Has a state of its own."""

    def __init__(self, length):
        super().__init__(length)
        self.place, self.loads = 0, 0

    def __iter__(self):
        place, self.place = self.place, 0
        for sample in range(place, self.length):
            self.read += 1
            self.place = sample + 1
            yield sample
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.loads += 1


def lists(loader):
    return [batch.tolist() for batch in loader]


def prepared(data, batch=4, **options):
    return prepare_loader(DataLoader(data, batch, **options), width=1, index=0, device="cpu", seed=3)


def share(data, width, index, micro, start=0):
    part = Share(data, DataPlan(micro * width, micro, width=width, index=index))
    part.now[1] = start
    return part


@pytest.mark.parametrize("start", [0, 5, 12, 29, 40])
def test_rows_of_the_ranks_joined_are_the_stream_at_every_width(start):
    for width in (2, 3, 4):
        parts = [list(share(Stream(31), width, index, 3, start)) for index in range(width)]
        joined = []
        for begin in range(0, 31, 3):
            joined += [sample for part in parts for sample in part[begin : begin + 3]]
        assert joined == list(range(start, 31))


def test_a_dataset_that_splits_itself_is_shown_all_workers():
    parts = [list(share(Splitting(10), 3, index, 2)) for index in range(3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert get_worker_info() is None


def test_a_dataset_that_asks_late_sees_the_whole_stream():
    assert list(share(AskingLate(8), 2, 1, 2)) == [2, 3, 6, 7]


def test_workers_take_turns_without_duplicates():
    expected = lists(prepared(Stream(22)))
    assert lists(prepared(Stream(22), num_workers=2)) == expected
    split = lists(prepared(Splitting(10), 2, num_workers=2))
    assert sorted(chain.from_iterable(split)) == list(range(10))


def test_one_process_knows_the_last_batch_and_its_rows():
    loader = prepared(Stream(10))
    seen = []
    for _ in loader:
        ahead = [loader.given.window_rows(count) for count in (1, 2)]
        seen.append((loader.current.real, loader.current.last, ahead))
    assert seen == [((4,), False, [4, None]), ((4,), False, [4, None]), ((2,), True, [2, 2])]
    assert len(list(prepared(Stream(10), drop_last=True))) == 2
    assert list(prepared(Stream(0))) == []


def test_resume_reads_over_what_was_used_and_says_so_once(caplog):
    loader = prepared(Stream(22))
    first = lists(loader)
    for step, _ in enumerate(loader):
        if step == 2:
            state = loader.state_dict()
            break
    assert (state["epoch"], state["samples"], state["length"]) == (1, 12, None)
    for workers in (0, 2):
        again = prepared(Stream(22), num_workers=workers)
        again.load_state_dict(state)
        assert lists(again) == first[3:]
        assert lists(again) == first
    assert caplog.text.count("state_dict") == 2  # once for each of its two methods: one sentence


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_dataset_with_a_state_goes_on_from_it(workers, caplog):
    loader = prepared(Resumable(22), num_workers=workers)
    first = lists(loader)
    for step, _ in enumerate(loader):
        if step == 2:
            state = loader.state_dict()
            break
    data = Resumable(22)
    again = prepared(data, num_workers=workers)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert lists(again) == first[3:]
    assert lists(again) == first
    assert not caplog.text
    if workers == 0:
        assert (data.loads, data.read) == (1, 10 + 22)


def test_persistent_workers_follow_epochs_and_states():
    class Epochs(Resumable):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return (100 * self.epoch + sample for sample in super().__iter__())

    loader = prepared(Epochs(10), num_workers=1, persistent_workers=True)
    assert [lists(loader)[0][0], lists(loader)[0][0]] == [0, 100]
    state = loader.state_dict()
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict(state)
    assert lists(loader) == [[204, 205, 206, 207], [208, 209]]
    assert lists(loader)[0][0] == 300


def test_a_generator_of_the_dataset_is_seeded_by_the_epoch():
    class Noise(IterableDataset):
        def __init__(self):
            self.generator = torch.Generator()

        def __iter__(self):
            return iter(torch.rand(4, generator=self.generator))

    loader, other = prepared(Noise()), prepared(Noise())
    first, second = lists(loader), lists(loader)
    assert first != second
    other.set_epoch(1)
    assert lists(other) == second


def test_without_automatic_batching_an_item_counts_its_own_rows():
    class Batches(IterableDataset):
        def __iter__(self):
            yield {"x": torch.zeros(3, 2), "y": torch.zeros(3)}
            yield {"x": torch.zeros(2, 2), "y": torch.zeros(2)}
            yield {"x": torch.zeros(4), "y": torch.zeros(2)}

    loader = prepared(Batches(), None)
    assert [(loader.current.weights, loader.position.samples) for _ in loader] == [((3,), 1), ((2,), 2), ((1,), 3)]


def test_length_is_that_of_the_dataset_where_it_has_one():
    class Sized(Stream):
        def __len__(self):
            return self.length

    assert len(prepared(Sized(10))) == 3
    with pytest.raises(TypeError):
        len(prepared(Stream(10)))


def test_what_a_script_does_to_its_batches_stays_there():
    loader = prepare_loader(DataLoader(Stream(6), 2), width=1, index=0, device="cpu")
    for batch in loader:
        batch.zero_()
    assert lists(loader) == [[0, 1], [2, 3], [4, 5]]
