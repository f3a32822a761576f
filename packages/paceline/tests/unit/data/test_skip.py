"""`skip_first_batches`: an epoch without its beginning, over prepared and plain loaders."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.prepare import prepare_loader
from paceline.data.skip import skip_first_batches


class Numbers:
    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def lists(loader):
    return [batch.tolist() for batch in loader]


def prepared(loader):
    return prepare_loader(loader, width=1, index=0, device="cpu", seed=3)


def test_a_prepared_loader_goes_on_after_the_skipped_part():
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True))
    first, second = lists(loader), lists(loader)
    again = prepared(DataLoader(Numbers(20), 4, shuffle=True))
    rest = skip_first_batches(again, 3)
    assert len(rest) == 2 and rest.batch_size == 4
    assert lists(rest) == first[3:]
    assert lists(again) == second
    assert len(again.dataset.read) == 8 + 20


def test_the_position_is_that_of_the_whole_epoch():
    loader = prepared(DataLoader(Numbers(20), 4))
    for _ in skip_first_batches(loader, 3):
        assert loader.state_dict()["samples"] == 16
        break


def test_a_restored_position_is_not_skipped_twice():
    loader = prepared(DataLoader(Numbers(20), 4, shuffle=True))
    first = lists(loader)
    loader.load_state_dict({"epoch": 0, "samples": 12, "seed": 3, "length": 20})
    assert lists(skip_first_batches(loader, 3)) == first[3:]


def test_skipping_twice_adds_up_and_beyond_the_end_leaves_nothing():
    loader = prepared(DataLoader(Numbers(20), 4))
    assert lists(skip_first_batches(skip_first_batches(loader, 1), 2)) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    beyond = skip_first_batches(loader, 9)
    assert len(beyond) == 0 and lists(beyond) == []


def test_batches_of_a_sampler_of_the_users_own_and_streams():
    whole = prepared(DataLoader(Numbers(6), batch_sampler=[[0, 1, 2], [3], [4, 5]]))
    assert lists(skip_first_batches(whole, 1)) == [[3], [4, 5]]
    stream = prepared(DataLoader(Stream(), 4))
    assert lists(skip_first_batches(stream, 1)) == [[4, 5, 6, 7], [8, 9]]
    assert lists(stream) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_plain_loaders_skip_without_reading():
    plain = DataLoader(Numbers(20), 4)
    assert lists(skip_first_batches(plain, 4)) == [[16, 17, 18, 19]]
    assert plain.dataset.read == [16, 17, 18, 19]
    alone = DataLoader(Numbers(3), batch_size=None)
    assert list(skip_first_batches(alone, 2)) == [2]
    assert lists(skip_first_batches(DataLoader(Stream(), 4), 2)) == [[8, 9]]
    assert torch.is_tensor(next(iter(skip_first_batches(plain, 0))))
