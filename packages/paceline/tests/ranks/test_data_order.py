"""Every process reads the order of one process under torch, whatever its own random streams are."""

from __future__ import annotations

import random

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from paceline import Accelerator, DataError
from paceline.testing import run_ranks

LENGTH = 23
DATA = [torch.tensor([float(number)]) for number in range(LENGTH)]


class FewShot(Sampler):
    """Draws each batch when it is asked for."""

    def __iter__(self):
        for _ in range(7):
            yield torch.randperm(LENGTH)[:6].tolist()


class Rounds(Sampler):
    """Endless, with a permutation for each round."""

    def __iter__(self):
        while True:
            yield from torch.randperm(LENGTH).tolist()


class EndlessBatches(Sampler):
    def __iter__(self):
        first = 0
        while True:
            yield [(first + offset) % LENGTH for offset in range(6)]
            first += 6


def generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "sequential": lambda: DataLoader(DATA, 6),
    "shuffle": lambda: DataLoader(DATA, 6, shuffle=True),
    "generator": lambda: DataLoader(DATA, 6, shuffle=True, generator=generator()),
    "replacement": lambda: DataLoader(DATA, 6, sampler=RandomSampler(DATA, replacement=True, num_samples=70)),
    "huge": lambda: DataLoader(DATA, 6, sampler=RandomSampler(DATA, replacement=True, num_samples=10**9)),
    "huge_weighted": lambda: DataLoader(DATA, 6, sampler=WeightedRandomSampler(torch.ones(LENGTH), 1_200_000)),
    "weighted": lambda: DataLoader(DATA, 6, sampler=WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 31)),
    "subset": lambda: DataLoader(DATA, 6, sampler=SubsetRandomSampler(range(3, 20))),
    "few_shot": lambda: DataLoader(DATA, batch_sampler=FewShot()),
    "endless": lambda: DataLoader(DATA, 6, sampler=Rounds()),
    "endless_batches": lambda: DataLoader(DATA, batch_sampler=EndlessBatches()),
    "workers": lambda: DataLoader(DATA, 6, shuffle=True, num_workers=1),
}


def seed(number=1):
    torch.manual_seed(number)
    random.seed(number)


def epoch(loader, gather, begin=0, end=9):
    batches = []
    for step, batch in enumerate(loader, begin + 1):
        batches.append(gather(batch).flatten().tolist())
        if step == end:
            break
    return batches


def plain(name):
    seed()
    loader = LOADERS[name]()
    return [epoch(loader, torch.Tensor.clone) for _ in range(2)], torch.get_rng_state().tolist()


def on_ranks(own_seeds, saved):
    """Returns two epochs of each loader, or the rest of the second one from its third batch on, and positions."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    seen = {}
    states = {}
    for name, make in LOADERS.items():
        seed(1 + accelerator.process_index if own_seeds else 1)
        loader = accelerator.prepare(make())
        if saved:
            loader.load_state_dict(saved[name])
            seen[name] = epoch(loader, accelerator.gather_for_metrics, begin=2), None
            continue
        epochs = [epoch(loader, accelerator.gather_for_metrics)]
        first = epoch(loader, accelerator.gather_for_metrics, end=2)
        state = loader.state_dict()
        states[name] = state
        seen[name] = [*epochs, first], torch.get_rng_state().tolist()
    return seen, states


def test_all_ranks_read_the_order_of_one_process():
    expected = {name: plain(name) for name in LOADERS}
    saved = {}
    for width, own_seeds in ((1, False), (2, True), (3, False)):
        for seen, states in run_ranks(on_ranks, width, args=(own_seeds, None)):
            for name, (epochs, streams) in seen.items():
                whole, whole_streams = expected[name]
                assert epochs == [whole[0], whole[1][:2]], (width, name)
                # A sampler that draws late has not drawn all in an interrupted epoch.
                late = name in ("few_shot", "endless")
                assert own_seeds or late or streams == whole_streams, (width, name)
            saved[width] = states
    for before, after in ((1, 2), (3, 1)):
        for seen, _ in run_ranks(on_ranks, after, args=(False, saved[before])):
            for name, (rest, _) in seen.items():
                # Those that draw late go on with the process's streams, which a checkpoint of the whole run restores.
                assert rest == expected[name][0][1][2:] or name in ("few_shot", "endless"), (before, after, name)


class Holes(Dataset):
    """Some of its samples are missing."""

    def __len__(self):
        return 19

    def __getitem__(self, index):
        return None if index < 3 or index == 17 else torch.tensor([float(index)])


def present(samples):
    return default_collate([sample for sample in samples if sample is not None])


def gathered_from_dropping():
    accelerator = Accelerator(cpu=True, split_batches=True)
    loader = accelerator.prepare(DataLoader(Holes(), 8, collate_fn=present))
    return [accelerator.gather_for_metrics(batch).flatten().tolist() for batch in loader]


def test_metrics_of_batches_whose_collation_drops_samples():
    expected = [[3.0, 4.0, 5.0, 6.0, 7.0], [float(number) for number in range(8, 16)], [16.0, 18.0]]
    assert run_ranks(gathered_from_dropping, 2) == [expected] * 2


class LargestFirst(Sampler):
    """Begins with the samples that had the largest losses; it remembers what it is told."""

    def __init__(self):
        self.losses = torch.zeros(LENGTH)

    def __iter__(self):
        return iter(self.losses.argsort(descending=True, stable=True).tolist())


def chosen_by_losses(is_gathered):
    accelerator = Accelerator(cpu=True, split_batches=True)
    sampler = LargestFirst()
    loader = accelerator.prepare(DataLoader(DATA, 6, sampler=sampler))
    for batch in loader:
        batch = accelerator.gather_for_metrics(batch) if is_gathered else batch
        sampler.losses[batch.flatten().long()] = batch.flatten()
    try:
        return torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).flatten().tolist()
    except DataError as error:
        return error.code


def test_a_sampler_that_remembers_what_its_own_rank_has_seen_is_refused():
    assert run_ranks(chosen_by_losses, 2, args=(False,)) == ["data-ranks-differ"] * 2
    assert run_ranks(chosen_by_losses, 2, args=(True,)) == [[float(number) for number in reversed(range(LENGTH))]] * 2
