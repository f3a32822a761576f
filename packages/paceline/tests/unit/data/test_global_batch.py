"""The global batch of the run that saved, at another width: kept, unless the script asks for another."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.base.errors import DataError
from paceline.data.prepare import prepare_loader
from paceline.plan.data import DataPlan


def ranks(width, batch=4, data=range(57), loader=None, **options):
    made = DataLoader(data, batch) if loader is None else loader
    return [prepare_loader(made, width=width, index=at, device="cpu", seed=7, **options) for at in range(width)]


def read(loaders):
    """The batches of all ranks by step, without filler."""
    steps = []
    for parts in zip(*loaders, strict=True):
        infos = [loader.current for loader in loaders]
        assert [len(part) for part in parts] == [info.loaded for info in infos]
        assert all(info.loaded == max(1, info.weights[info.index]) for info in infos)
        steps.append([part[: info.real[info.index]].tolist() for part, info in zip(parts, infos, strict=True)])
    return steps


def after(loaders, steps):
    for number, _ in enumerate(zip(*loaders, strict=True), 1):
        if number == steps:
            return loaders[0].state_dict()
    raise AssertionError


def joined(steps):
    return [list(chain.from_iterable(step)) for step in steps]


@pytest.mark.parametrize("tail", ["divide", "pad", "drop"])
@pytest.mark.parametrize("width", [1, 2, 5, 13])
def test_it_is_kept_and_divided_as_evenly_as_it_goes(width, tail, caplog):
    before = ranks(3, tail=tail)
    expected = joined(read(before))
    for loader in before:
        loader.set_epoch(0)
    state = after(before, 2)
    now = ranks(width, tail=tail)
    for loader in now:
        loader.load_state_dict(state)
    rest = read(now)
    assert joined(rest) == expected[2:]
    sizes = [len(part) for part in rest[0]]
    assert sum(sizes) == 12 and max(sizes) - min(sizes) <= 1
    assert caplog.text.count("a global batch stays 12 samples") == 1
    assert now[0].state_dict()["global_batch"] == 12
    home = ranks(3, tail=tail)
    for loader in home:
        loader.load_state_dict(now[0].state_dict())
    assert len(caplog.records) == 1 and home[0].total_batch_size == 12


def test_every_rank_is_padded_to_what_it_reads_at_other_times():
    plan = DataPlan(global_batch=7, micro_batch=3, width=3, tail="pad")
    assert (plan.rows(7), plan.rows(4), plan.rows(2)) == ((3, 2, 2), (3, 1, 0), (2, 0, 0))
    assert plan.info(4, last=True).weights == (3, 2, 2)


def test_a_batch_size_that_the_script_has_changed_counts(caplog):
    state = after(ranks(3), 2)
    (now,) = ranks(1, batch=5)
    now.load_state_dict(state)
    assert now.total_batch_size == 5 and [len(batch) for batch in now] == [5] * 6 + [3]
    assert "batch_size 4 to 5" in caplog.text


def test_items_that_come_as_they_are(caplog):
    loader = DataLoader(range(12), batch_size=None)
    state = after(ranks(3, loader=loader), 2)
    now = ranks(2, loader=loader)
    for each in now:
        each.load_state_dict(state)
    assert now[0].total_batch_size == 2 and "batch_size=None" in caplog.text


def test_batches_of_a_sampler_stay_together():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    loader = DataLoader(range(11), batch_sampler=batches)
    before = ranks(2, loader=loader)
    expected = joined(read(before))
    for each in before:
        each.set_epoch(0)
    state = after(before, 1)
    for width in (1, 3):
        now = ranks(width, loader=loader)
        for each in now:
            each.load_state_dict(state)
        assert now[0].state_dict()["group"] == 2
        rest = joined(read(now))
        assert rest == expected[1:]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(50))


class Splitting(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 50, info.num_workers) if info else range(50))


def test_a_stream_whose_ranks_would_have_nothing_to_read():
    state = {**ranks(1, batch=2)[0].state_dict(), "samples": 4, "global_batch": 2}
    (loader,) = ranks(1, loader=DataLoader(Numbers(), 4))
    with pytest.raises(DataError, match="data-reshard"):
        loader._feed.replan(0, 0)
    loader.load_state_dict({**state, "batch_size": 4})
    assert next(iter(loader)).tolist() == [4, 5]


def test_a_dataset_that_splits_itself_over_other_workers():
    (loader,) = ranks(1, loader=DataLoader(Splitting(), 4, num_workers=2))
    state = after([loader], 2)
    for workers in (1, 0):
        (other,) = ranks(1, loader=DataLoader(Splitting(), 4, num_workers=workers))
        other.load_state_dict(state)
        with pytest.raises(DataError, match="data-reshard"):
            next(iter(other))


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([random.random(), float(np.random.rand()), torch.rand(()).item()])


class Whole(Noise):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_augmentation_in_workers_is_that_of_the_place():
    loader = DataLoader(Noise(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    (alone,) = ranks(1, loader=loader)
    epochs = [torch.cat(list(alone)) for _ in range(2)]
    assert len({tuple(row) for epoch in epochs for row in epoch.tolist()}) == 48
    pair = ranks(2, loader=DataLoader(Noise(), 2, shuffle=True, num_workers=1))
    for each in pair:
        each.load_state_dict({"epoch": 1, "samples": 8, "seed": 7, "length": 24})
    parts = [list(each) for each in pair]
    rest = torch.cat([row for step in zip(*parts, strict=True) for row in step])
    assert torch.equal(rest, epochs[1][8:])
    whole = [torch.cat(list(ranks(1, loader=DataLoader(Whole(), 4, num_workers=each))[0])) for each in (1, 2)]
    assert torch.equal(*whole)


def test_workers_see_the_dataset_that_the_script_made():
    seen = DataLoader(Noise(), None, num_workers=1, worker_init_fn=lambda _: _check(get_worker_info().dataset))
    assert len(list(ranks(1, loader=seen)[0])) == 24


def _check(dataset):
    assert type(dataset) is Noise
