"""On one process a prepared loader draws what torch's DataLoader draws, from the same streams at the same moments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data.active import ActiveLoaders
from paceline.data.prepare import prepare_loader

LENGTH = 23


class Noisy(Dataset):
    """Draws from every stream for each sample."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()])


class NoisyStream(IterableDataset):
    """A stream that draws as it is read."""

    def __iter__(self):
        for index in range(LENGTH):
            yield torch.tensor([float(index), torch.rand(()).item()])


class FewShot(Sampler):
    """Draws each batch when it is asked for."""

    def __len__(self):
        return 7

    def __iter__(self):
        for _ in range(7):
            yield torch.randperm(LENGTH)[:4].tolist()


class Rounds(Sampler):
    """Endless, with a permutation for each round."""

    def __iter__(self):
        while True:
            yield from torch.randperm(LENGTH).tolist()


class AtOnce(Sampler):
    """Draws in `__iter__`."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


Loaders = dict[str, Callable[..., DataLoader]]
LOADERS: Loaders = {
    "sequential": lambda **options: DataLoader(Noisy(), 4, **options),
    "shuffle": lambda **options: DataLoader(Noisy(), 4, shuffle=True, **options),
    "drop_last": lambda **options: DataLoader(Noisy(), 4, shuffle=True, drop_last=True, **options),
    "generator": lambda **options: DataLoader(Noisy(), 4, shuffle=True, generator=generator(), **options),
    "replacement": lambda **options: DataLoader(
        Noisy(), 4, sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=70), **options
    ),
    "many": lambda **options: DataLoader(Noisy(), 4, sampler=RandomSampler(range(LENGTH), num_samples=50), **options),
    "many_generator": lambda **options: DataLoader(
        Noisy(), 4, sampler=RandomSampler(range(LENGTH), num_samples=50, generator=generator()), **options
    ),
    "weighted": lambda **options: DataLoader(
        Noisy(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), 31), **options
    ),
    "subset": lambda **options: DataLoader(Noisy(), 4, sampler=SubsetRandomSampler([1, 4, 6, 8, 9]), **options),
    "few_shot": lambda **options: DataLoader(Noisy(), batch_sampler=FewShot(), **options),
    "endless": lambda **options: DataLoader(Noisy(), 4, sampler=Rounds(), **options),
    "at_once": lambda **options: DataLoader(Noisy(), 4, sampler=AtOnce(), **options),
    "distributed": lambda **options: DataLoader(
        Noisy(), 4, sampler=DistributedSampler(range(LENGTH), num_replicas=1, rank=0), **options
    ),
    "no_batches": lambda **options: DataLoader(Noisy(), None, shuffle=True, **options),
    "stream": lambda **options: DataLoader(NoisyStream(), 4, **options),
}


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def prepared(loader: DataLoader, active: ActiveLoaders | None = None) -> Any:
    return prepare_loader(loader, width=1, index=0, device="cpu", drawn=True, active=active)


def steps(loader: Any, count: int = 15) -> list[Any]:
    """Batches of one epoch, with draws of the loop's own in between, as dropout makes them."""
    batches = []
    for step, batch in enumerate(loader, 1):
        batches.append(batch.tolist())
        torch.rand(3)
        random.random()
        if step == count:
            break
    return batches


def trace(loader: Any) -> list[Any]:
    epochs = []
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        epochs.append((steps(loader), torch.get_rng_state().tolist(), random.getstate()))
    return epochs


@pytest.mark.parametrize("name", LOADERS)
def test_draws_what_torch_draws(name):
    seed()
    expected = trace(LOADERS[name]())
    seed()
    assert trace(prepared(LOADERS[name]())) == expected


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("name", ["shuffle", "few_shot"])
def test_draws_what_torch_draws_with_workers(name, options):
    seed()
    expected = trace(LOADERS[name](**options))
    seed()
    assert trace(prepared(LOADERS[name](**options))) == expected


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_epoch_draws_what_its_rest_would_have_drawn(name):
    seed()
    loader = prepared(LOADERS[name]())
    steps(loader, 2)  # an epoch before it, so that generators have moved
    batches = []
    saved: Any = None
    for step, batch in enumerate(loader, 1):
        batches.append(batch.tolist())
        torch.rand(3)
        random.random()
        if step == 2:
            saved = loader.state_dict(), torch.get_rng_state(), random.getstate(), np.random.get_state()
        if step == 15:
            break
    following = steps(loader)
    again = prepared(LOADERS[name]())
    again.load_state_dict(saved[0])
    torch.set_rng_state(saved[1])
    random.setstate(saved[2])
    np.random.set_state(saved[3])
    assert steps(again, 13) == batches[2:]
    assert steps(again) == following


def test_zipped_iterators_draw_their_seeds_first():
    def pairs(wrap):
        seed()
        first, second = wrap(LOADERS["shuffle"]()), wrap(LOADERS["weighted"]())
        return [
            (one.tolist(), other.tolist()) for one, other in zip(first, second, strict=False)
        ], torch.get_rng_state()

    expected, ours = pairs(lambda loader: loader), pairs(prepared)
    assert ours[0] == expected[0] and torch.equal(ours[1], expected[1])


def test_a_seed_gives_each_sample_its_numbers_at_every_width():
    def samples(width, **options):
        seed()
        torch.rand(width)
        loaders = []
        for index in range(width):
            loader = DataLoader(Noisy(), 12 // width, shuffle=True, **options)
            loaders.append(prepare_loader(loader, width=width, index=index, device="cpu", seed=3))
        before = torch.get_rng_state()
        batches = [torch.cat(parts) for parts in zip(*loaders, strict=True)]
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat(batches)

    expected = samples(1)
    assert torch.equal(samples(2), expected)
    assert torch.equal(samples(1, num_workers=1), expected)


@pytest.mark.parametrize("lengths", [(8, 8), (8, 12), (12, 8), (8, 12, 8)])
@pytest.mark.parametrize("when", ["in the loop", "after the loop"])
def test_zipped_loaders_that_were_saved_at_the_end_of_an_epoch_go_on_with_the_next(lengths, when):
    def loaders():
        active = ActiveLoaders()
        return [prepared(DataLoader(range(length), 4), active) for length in lengths]

    def run(zipped, epochs, save_at=None):
        seen = []
        states = None
        for epoch in epochs:
            for step, batches in enumerate(zip(*zipped, strict=False), 1):
                seen.append((epoch, [batch.tolist() for batch in batches]))
                if (epoch, step) == save_at and when == "in the loop":
                    states = [loader.state_dict() for loader in zipped]
            if save_at is not None and epoch == save_at[0] and when == "after the loop":
                states = [loader.state_dict() for loader in zipped]
        return seen, states

    shortest = min(lengths) // 4
    seen, states = run(loaders(), range(3), save_at=(0, shortest))
    resumed = loaders()
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    again, _ = run(resumed, range(3) if when == "in the loop" else range(1, 3))
    assert again == seen[shortest:]
