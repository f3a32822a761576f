"""Loaders that cannot work say why, and what does; all problems of one loader at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Sampler, Subset, TensorDataset

from paceline.base.errors import DataError
from paceline.data import beginnings
from paceline.data.beginnings import beginning_of
from paceline.data.prepare import prepare_loader
from paceline.data.skip import skip_first_batches

DATA = TensorDataset(torch.arange(10))


def prepared(loader, width=1, **options):
    return prepare_loader(loader, width=width, index=0, device="cpu", **options)


def code_of(make):
    with pytest.raises(DataError) as caught:
        make()
    return caught.value.code


class Sharded(Sampler):
    num_replicas, rank = 4, 1

    def __iter__(self):
        return iter([1, 5, 9])


class Unsized:
    def __getitem__(self, index):
        return index


def test_only_dataloaders_are_prepared():
    assert code_of(lambda: prepared([1, 2, 3])) == "data-loader-kind"
    assert code_of(lambda: skip_first_batches(iter([]), 1)) == "data-loader-kind"


def test_an_indexed_dataset_needs_a_length():
    assert code_of(lambda: prepared(DataLoader(Unsized()))) == "data-no-length"
    assert len(prepared(DataLoader(Unsized(), sampler=[1, 2]))) == 2


def test_a_loader_without_samples():
    assert code_of(lambda: prepared(DataLoader(TensorDataset(torch.empty(0)), batch_size=4))) == "data-empty"
    assert code_of(lambda: prepared(DataLoader(DATA, sampler=[]))) == "data-empty"
    assert code_of(lambda: prepared(DataLoader(DATA, batch_sampler=[]))) == "data-empty"


def test_a_batch_that_cannot_be_split():
    with pytest.raises(DataError, match="batch_size=9 or 6") as caught:
        prepared(DataLoader(DATA, batch_size=8), 3, split_batches=True)
    assert caught.value.code == "data-split"
    assert code_of(lambda: prepared(DataLoader(DATA, batch_size=None), 2, split_batches=True)) == "data-split"


def test_problems_come_together():
    with pytest.raises(DataError, match="2 problems") as caught:
        prepared(DataLoader(TensorDataset(torch.empty(0)), batch_size=8), 3, split_batches=True)
    assert [problem.code for problem in caught.value.problems] == ["data-empty", "data-split"]


def test_samplers_that_cannot_be_taken_over():
    assert code_of(lambda: prepared(DataLoader(DATA, sampler=Sharded()))) == "data-sampler-sharded"
    assert code_of(lambda: prepared(DataLoader(DATA, batch_sampler=Sharded()))) == "data-sampler-sharded"


def test_dropping_all_there_is():
    assert code_of(lambda: prepared(DataLoader(DATA, batch_size=4, drop_last=True), 3)) == "data-no-batch"


def test_a_negative_skip():
    for count in (-1, 2.0, True):
        assert code_of(lambda count=count: skip_first_batches(prepared(DataLoader(DATA)), count)) == "data-skip"


def test_a_state_of_something_else():
    loader = prepared(DataLoader(DATA))
    for state in ({}, {"epoch": 0, "samples": -1, "seed": 0}, {"epoch": "0", "samples": 1, "seed": 0}):
        assert code_of(lambda state=state: loader.load_state_dict(state)) == "data-state"


class Ranks:
    """Collectives of which every rank but this one saw something else."""

    def __init__(self, **others):
        self.others = others

    def gather_object(self, facts):
        return [facts, {**facts, **self.others}]


def test_ranks_that_differ_learn_of_it_before_the_first_batch():
    with pytest.raises(DataError, match=r"length: \[10, 9\], by rank") as caught:
        prepared(DataLoader(DATA), 2, collectives=Ranks(length=9))
    assert caught.value.code == "data-ranks-differ"
    assert (
        code_of(lambda: prepared(DataLoader(DATA), 2, collectives=Ranks(problems=["data-empty"])))
        == "data-ranks-differ"
    )
    assert prepared(DataLoader(DATA), 2, collectives=Ranks()).plan.width == 2


@pytest.mark.parametrize(
    ("own", "other", "is_told"),
    [
        (Subset(DATA, [3, 1, 2]), Subset(DATA, range(3)), True),
        (Subset(DATA, range(3)), Subset(DATA, torch.arange(3)), False),
        (Subset(DATA, np.arange(3)), Subset(DATA, range(3)), False),
        (TensorDataset(torch.ones(4, 2)), TensorDataset(torch.tensor([[1.0, 0.9999]]).expand(4, 2)), False),
        (TensorDataset(torch.arange(8)), TensorDataset(torch.arange(8).flip(0)), True),
        (["a.png", "b.png"], ["b.png", "a.png"], True),
        ([(torch.ones(2), object(), math.nan)], [(torch.ones(2), object(), math.nan)], False),
        (
            ConcatDataset([TensorDataset(torch.eye(2).to_sparse())]),
            ConcatDataset([TensorDataset(torch.ones(2).to_sparse())]),
            False,
        ),
    ],
)
def test_datasets_that_begin_with_other_samples_are_told(own, other, is_told, monkeypatch):
    """A split that is not seeded, or a part for each rank."""
    words = []
    monkeypatch.setattr(beginnings, "warn_once", lambda _, text: words.append(text))
    prepared(DataLoader(own, 1), 2, collectives=Ranks(beginning=beginning_of(other)))
    assert bool(words) is is_told
