"""Loaders over indexed datasets: the same global batches in the same order at every width, and resume at any of them."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from paceline.data.prepare import prepare_loader


class Numbers:
    """Samples 0 .. n-1, which counts how often it is read."""

    def __init__(self, length: int) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def flat(parts):
    return list(chain.from_iterable(parts))


def prepared(loader, width=1, index=0, **options):
    return prepare_loader(loader, width=width, index=index, device="cpu", **{"seed": 7, **options})


def epoch_of(loaders):
    """Real samples of each step, ranks joined in order; also checks what the loaders say about themselves."""
    steps = []
    for batches in zip(*loaders, strict=True):
        infos = [loader.current for loader in loaders]
        assert all(info.real == infos[0].real and info.weights == infos[0].weights for info in infos)
        assert all(info.loaded == len(batch) for info, batch in zip(infos, batches, strict=True))
        assert len({loader.position for loader in loaders}) == 1
        steps.append([
            sample
            for info, batch in zip(infos, batches, strict=True)
            for sample in batch.tolist()[: info.real[info.index]]
        ])  # fmt: skip
    return steps


def at_width(width, length, batch, **options):
    shuffle, drop_last = options.pop("shuffle", True), options.pop("drop_last", False)
    loader = DataLoader(Numbers(length), batch_size=batch // width, shuffle=shuffle, drop_last=drop_last)
    return [prepared(loader, width, index, **options) for index in range(width)]


def test_one_process_visits_every_sample_once_and_shuffles_each_epoch_anew():
    (loader,) = at_width(1, 23, 4)
    first, second = epoch_of([loader]), epoch_of([loader])
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(23))
    assert first != second
    assert len(loader) == len(first) == 6


@pytest.mark.parametrize("tail", ["divide", "pad", "drop"])
def test_same_global_batches_at_every_width(tail):
    draw = random.Random(0)
    for _ in range(25):
        batch, shuffle = 12 * draw.randint(1, 3), draw.random() < 0.7
        length = draw.randint(batch if tail == "drop" else 1, 150)
        seed = draw.randint(0, 99)
        runs = {
            width: [epoch_of(loaders) for _ in range(2)]
            for width in (1, 2, 3, 4)
            for loaders in [at_width(width, length, batch, tail=tail, shuffle=shuffle, seed=seed)]
        }
        assert runs[1] == runs[2] == runs[3] == runs[4]


def test_position_resumes_with_the_next_sample_at_any_other_width():
    draw = random.Random(1)
    for _ in range(25):
        length, stop = draw.randint(50, 150), draw.randint(1, 4)
        before, after = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 4])
        whole = at_width(1, length, 12)
        epochs = [epoch_of(whole) for _ in range(3)]
        loaders, seen = at_width(before, length, 12), []
        epoch_of(loaders)  # the whole first epoch
        for step, parts in enumerate(zip(*loaders, strict=True), 1):
            seen.append(sorted(flat(part.tolist() for part in parts)))
            if step == stop:
                break
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        resumed = at_width(after, length, 12, seed=99)  # the seed comes from the state
        for loader in resumed:
            loader.load_state_dict(states[0])
        rest = epoch_of(resumed)
        assert seen + [sorted(step) for step in rest] == [sorted(step) for step in epochs[1]]
        assert epoch_of(resumed) == epochs[2]


def test_state_counts_batches_handed_out_not_those_that_workers_read_ahead():
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True, num_workers=1, prefetch_factor=4)
    (whole,) = at_width(1, 40, 4)
    expected = epoch_of([whole])
    first = prepared(loader)
    for step, batch in enumerate(first):
        assert batch.tolist() == expected[step]
        if step == 2:
            state = first.state_dict()
            break
    assert (state["epoch"], state["samples"]) == (0, 12)
    second = prepared(loader)
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == expected[3:]


def test_persistent_workers_follow_epochs_and_positions():
    loader = prepared(DataLoader(Numbers(10), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True))
    (plain,) = at_width(1, 10, 4)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == epoch_of([plain])
    loader.load_state_dict({"epoch": 1, "samples": 4, "seed": 7, "length": 10})
    plain.load_state_dict({"epoch": 1, "samples": 4, "seed": 7, "length": 10})
    assert [batch.tolist() for batch in loader] == epoch_of([plain])


def test_resuming_reads_no_sample_that_was_used():
    data = Numbers(1000)
    loader = prepared(DataLoader(data, batch_size=10, shuffle=True))
    loader.load_state_dict({"epoch": 3, "samples": 980, "seed": 7, "length": 1000})
    assert len(list(loader)) == 2
    assert data.reads == 20


def test_break_ends_the_epoch_for_the_next_loop_but_not_for_the_state():
    (loader,) = at_width(1, 20, 5)
    for _ in loader:
        break
    assert (loader.position.epoch, loader.position.samples) == (0, 5)
    assert loader.current is None
    assert sorted(flat(epoch_of([loader]))) == list(range(20))
    assert (loader.position.epoch, loader.position.samples) == (2, 0)


def test_state_after_the_last_batch_leaves_an_empty_rest():
    (loader,) = at_width(1, 20, 5)
    for _ in loader:
        state = loader.state_dict()
    assert state["samples"] == 20
    (again,) = at_width(1, 20, 5)
    again.load_state_dict(state)
    assert list(again) == []
    assert len(epoch_of([again])) == 4
    assert again.position.epoch == 2


def test_set_epoch_keeps_the_rest_that_was_loaded_for_this_very_epoch():
    (loader,) = at_width(1, 20, 5)
    state = {"epoch": 2, "samples": 10, "seed": 7, "length": 20}
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert len(list(loader)) == 2
    loader.load_state_dict(state)
    loader.set_epoch(5)
    rest = epoch_of([loader])
    loader.set_epoch(5)
    assert epoch_of([loader]) == rest and len(rest) == 4


def test_set_epoch_inside_a_loop_is_for_the_next_one():
    (loader,) = at_width(1, 20, 5)
    for _ in loader:
        loader.set_epoch(9)
        assert loader.position.epoch == 0
    epoch_of([loader])
    assert loader.position.epoch == 10


def test_a_loop_inside_a_loop_over_the_same_loader_leaves_the_outer_one_alone():
    (loader,) = at_width(1, 20, 5)
    for step, _ in enumerate(loader):
        before = loader.position, loader.current
        next(iter(loader))
        assert (loader.position, loader.current) == before
        assert loader.position.samples == 5 * (step + 1)
    assert loader.position.epoch == 1


def test_tail_is_divided_evenly_and_a_rank_without_a_sample_weighs_nothing():
    loaders = at_width(4, 18, 16, shuffle=False)
    steps = [list(loader) for loader in loaders]
    assert [len(step[1]) for step in steps] == [1, 1, 1, 1]
    assert [step[1].item() for step in steps] == [16, 17, 16, 16]
    for loader in loaders:
        for _ in loader:
            info = loader.current
        assert (info.real, info.weights, info.loaded, info.last, info.full) == ((1, 1, 0, 0),) * 2 + (1, True, False)


def test_padding_comes_from_the_start_of_the_epoch_as_often_as_it_takes():
    loaders = at_width(2, 3, 10, shuffle=False, tail="pad")
    parts = [next(iter(loader)).tolist() for loader in loaders]
    assert parts == [[0, 1, 2, 0, 1], [2, 0, 1, 2, 0]]
    for loader in loaders:
        for _ in loader:
            assert (loader.current.real, loader.current.weights) == ((3, 0), (5, 5))


def test_drop_last_drops_the_global_tail():
    loaders = at_width(2, 19, 4, drop_last=True)
    assert [len(loader) for loader in loaders] == [4, 4]
    assert len(epoch_of(loaders)) == 4


def test_window_rows_count_ahead_to_the_end_of_the_epoch():
    (loader,) = at_width(1, 22, 5)
    counts = [[loader.given.window_rows(count) for count in (1, 2, 100)] for _ in loader]
    assert counts == [[5, 10, 22], [5, 10, 17], [5, 10, 12], [5, 7, 7], [2, 2, 2]]
    assert loader.given is None
    first, _ = at_width(2, 5, 4, tail="pad")
    assert [loader.given.window_rows(9) for loader in [first] for _ in loader] == [8, 4]


SAMPLERS = {
    "sequential": lambda data: SequentialSampler(data),
    "random": lambda data: RandomSampler(data),
    "replacement": lambda data: RandomSampler(data, replacement=True, num_samples=50),
    "few": lambda data: RandomSampler(data, num_samples=17),
    "many": lambda data: RandomSampler(data, num_samples=100),
    "weighted": lambda data: WeightedRandomSampler([1.0] * len(data), 37),
    "subset": lambda data: SubsetRandomSampler(range(5, 30)),
    "list": lambda data: [3, 1, 4, 1, 5, 9, 2, 6],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_gives_one_order_at_every_width_and_leaves_the_random_state(name):
    def loaders(width):
        torch.manual_seed(width)  # what a rank does with its own random numbers must not matter
        data = Numbers(40)
        return [prepared(DataLoader(data, 12 // width, sampler=SAMPLERS[name](data)), width, i) for i in range(width)]

    runs = {}
    for width in (1, 2, 3):
        several = loaders(width)
        before = torch.get_rng_state(), random.getstate()
        runs[width] = [epoch_of(several) for _ in range(2)]
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert runs[1] == runs[2] == runs[3]
    counts = {"replacement": 50, "few": 17, "many": 100, "weighted": 37, "subset": 25, "list": 8}
    assert len(flat(runs[1][0])) == counts.get(name, 40)
    assert (runs[1][0] == runs[1][1]) == (name in ("sequential", "list"))


def test_replacement_and_count_of_random_sampler_are_kept():
    data = Numbers(40)
    few = flat(epoch_of([prepared(DataLoader(data, 5, sampler=RandomSampler(data, num_samples=17)))]))
    many = flat(epoch_of([prepared(DataLoader(data, 5, sampler=RandomSampler(data, num_samples=100)))]))
    assert len(set(few)) == 17
    assert sorted(many[:40]) == sorted(many[40:80]) == list(range(40)) and len(set(many[80:])) == 20


def test_a_generator_of_the_user_decides_the_order():
    def order(own, **options):
        loader = DataLoader(Numbers(30), 5, shuffle=True, generator=torch.Generator().manual_seed(own))
        return epoch_of([prepared(loader, **options)])

    assert order(1, seed=0) == order(1, seed=5) != order(2, seed=0)


def test_distributed_sampler_is_taken_over_with_one_notice(caplog):
    data = Numbers(20)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True)
    loaders = [prepared(DataLoader(data, 4, sampler=sampler), 2, index) for index in range(2)]
    assert sorted(flat(epoch_of(loaders))) == list(range(20))
    assert caplog.text.count("DistributedSampler") == 1


class Buckets(Sampler):
    """Batches of unequal sizes, in a random order."""

    def __init__(self, sizes):
        self.sizes, self.generator = sizes, None

    def __iter__(self):
        begin, batches = 0, []
        for size in self.sizes:
            batches.append(list(range(begin, begin + size)))
            begin += size
        return iter([batches[place] for place in torch.randperm(len(batches)).tolist()])


def test_batches_of_a_custom_batch_sampler_stay_whole():
    sizes = [3, 1, 4, 1, 5]
    loader = DataLoader(Numbers(14), batch_sampler=Buckets(sizes))
    (alone,) = [prepared(loader)]
    batches = epoch_of([alone])
    pair = [prepared(loader, 2, index) for index in range(2)]
    steps = epoch_of(pair)
    assert steps == [batches[0] + batches[1], batches[2] + batches[3], batches[4]]
    for _ in zip(*pair, strict=True):
        last = pair[1].current
    assert last.real[1] == 0 and last.weights[1] == 0 and last.loaded == 1
    for width in (1, 2):
        several = [prepared(loader, width, index) for index in range(width)]
        for _parts in zip(*several, strict=True):
            left = several[0].given.window_rows(99)
            state = several[0].state_dict()
            assert several[0].given.window_rows(1) == sum(several[0].current.weights)
            break
        assert left == 14 and state["samples"] == sum(len(part) for part in _parts)


def test_custom_batches_resume_at_another_width():
    loader = DataLoader(Numbers(14), batch_sampler=Buckets([3, 1, 4, 1, 5]))
    (alone,) = [prepared(loader)]
    batches = epoch_of([alone])
    alone.set_epoch(0)
    for step, _ in enumerate(alone, 1):
        if step == 2:
            state = alone.state_dict()
            break
    pair = [prepared(loader, 2, index) for index in range(2)]
    for part in pair:
        part.load_state_dict(state)
    assert epoch_of(pair) == batches[2:]  # one batch at a time, as before, cut in two


def test_custom_batches_can_be_padded_dropped_and_split():
    loader = DataLoader(Numbers(14), batch_sampler=[[0, 1, 2], [3], [4, 5]])
    padded = [prepared(loader, 2, index, tail="pad") for index in range(2)]
    assert [batch.tolist() for batch in padded[1]] == [[3], [0, 1, 2]]
    for _ in padded[1]:
        info, ahead = padded[1].current, padded[1].given.window_rows(1)
    assert (info.real, info.weights, ahead) == ((2, 0), (2, 3), 5)
    assert len(prepared(loader, 2, 0, tail="drop")) == 1
    split = [prepared(loader, 2, index, split_batches=True) for index in range(2)]
    assert epoch_of(split) == [[0, 1, 2], [3], [4, 5]]


class Lists:
    """A dataset that takes a list of indices at once and gives a batch of its own."""

    def __len__(self):
        return 10

    def __getitem__(self, indices):
        return torch.tensor(indices)


def test_without_automatic_batching():
    alone = prepared(DataLoader(TensorDataset(torch.arange(5)), batch_size=None))
    assert [sample.item() for (sample,) in alone] == [0, 1, 2, 3, 4]
    pair = [prepared(DataLoader(Numbers(5), batch_size=None), 2, index) for index in range(2)]
    assert [list(loader) for loader in pair] == [[0, 2, 4], [1, 3, 4]]
    lists = DataLoader(Lists(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 4, False))
    assert epoch_of([prepared(lists)]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert epoch_of([prepared(lists, 2, i) for i in range(2)]) == [list(range(8)), [8, 9]]
    own = DataLoader(Lists(), batch_size=None, sampler=[[1, 2], [3], [4, 5, 6]])
    assert epoch_of([prepared(own, 2, i) for i in range(2)]) == [[1, 2, 3], [4, 5, 6]]


def test_split_batches_reads_the_batch_size_as_the_global_one():
    loaders = [prepared(DataLoader(Numbers(20), 8), 2, index, split_batches=True) for index in range(2)]
    assert [(loader.plan.global_batch, loader.plan.micro_batch) for loader in loaders] == [(8, 4)] * 2
    assert epoch_of(loaders)[0] == list(range(8))


def test_the_rest_of_the_dataloader_is_kept_and_the_original_left_alone():
    calls = []

    class Own(DataLoader):
        def __iter__(self):
            calls.append("own")
            return super().__iter__()

    loader = Own(Numbers(9), batch_size=4, shuffle=True, collate_fn=tuple, num_workers=0)
    ours = prepared(loader)
    assert all(isinstance(batch, tuple) for batch in ours) and calls == ["own"]
    assert (ours.dataset, ours.collate_fn, ours.batch_size) == (loader.dataset, tuple, 4)
    assert ours.original is loader and isinstance(loader.batch_sampler.sampler, RandomSampler)
    assert (ours.total_batch_size, ours.total_dataset_length, ours.remainder) == (4, 9, 1)
    assert [ours.end_of_dataloader for _ in ours] == [False, False, True]
    assert not ours.end_of_dataloader


def test_iterating_does_not_touch_the_global_random_state():
    (loader,) = at_width(1, 20, 5)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_preparing_twice_with_the_same_arguments_changes_nothing():
    loader = DataLoader(Numbers(9), batch_size=4)
    first = prepared(loader)
    assert prepared(first) is first
    other = prepared(first, 2, 1)
    assert other is not first and other.original is loader and other.plan.width == 2


def test_epoch_is_told_to_datasets_that_ask():
    class Told(Numbers):
        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Told(6)
    loader = prepared(DataLoader(data, batch_size=3))
    loader.set_epoch(4)
    list(loader)
    assert data.epoch == 4


def test_rows_of_an_epoch_are_known_when_it_has_ended():
    loaders = at_width(4, 18, 16)
    for loader in loaders:
        list(loader)
    assert [tuple(loader.epoch_rows) for loader in loaders] == [(5, 5), (5, 5), (5, 4), (5, 4)]


def test_a_change_of_the_dataset_in_mid_epoch_is_said_once(caplog):
    (loader,) = at_width(1, 20, 5)
    loader.load_state_dict({"epoch": 0, "samples": 10, "seed": 7, "length": 30})
    assert "an epoch of 30" in caplog.text and "set_epoch(1)" in caplog.text


class _Holes(Dataset[Any]):
    """Eight samples, of which the first three are missing."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return None if index < 3 else torch.full((2,), float(index))


def _present(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def _two_lengths(samples: list[Any]) -> Any:
    return torch.zeros(len(samples)), torch.zeros(len(samples) + 1)


def test_a_loader_sees_the_rows_that_its_collation_leaves() -> None:
    plain = prepare_loader(DataLoader(_Holes(), batch_size=4), width=1, index=0, device="cpu")
    dropping = prepare_loader(DataLoader(_Holes(), batch_size=4, collate_fn=_present), width=1, index=0, device="cpu")
    odd = prepare_loader(DataLoader(_Holes(), batch_size=4, collate_fn=_two_lengths), width=1, index=0, device="cpu")
    assert [loader.may_drop for loader in (plain, dropping, odd)] == [False, True, True]
    assert [dropping.given.seen_rows for _ in dropping] == [1, 4]
    assert [odd.given.seen_rows for _ in odd] == [None, None]
    assert dropping.given is None
    seen = []
    for _ in dropping:
        seen += [dropping.given.seen_rows, *[dropping.given.seen_rows for _ in dropping], dropping.given.seen_rows]
    assert seen == [1, 1, 4, 1, 4, 1, 4, 4]
