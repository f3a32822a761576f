"""Which loader is being iterated, and the batch that is copied ahead (with streams that only keep a diary)."""

from __future__ import annotations

import contextlib
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import prefetch
from paceline.data.active import ActiveLoaders
from paceline.data.prefetch import on_device
from paceline.data.prepare import prepare_loader


@pytest.fixture
def pair():
    active = ActiveLoaders()
    data = TensorDataset(torch.arange(6.0))
    options = {"width": 1, "index": 0, "device": "cpu", "active": active}
    return active, prepare_loader(DataLoader(data, 2), **options), prepare_loader(DataLoader(data, 3), **options)


def test_the_innermost_loop_is_on_top(pair):
    active, train, evaluate = pair
    assert active.top is None
    for _ in train:
        assert active.top is train
        for _ in evaluate:
            assert active.top is evaluate
        assert active.finished is evaluate
        assert active.top is train and train.current is not None and evaluate.current is None
    assert active.top is None and active.finished is train
    assert train.current is None


def test_break_and_errors_leave_nothing_behind(pair):
    active, train, _ = pair
    for _ in train:
        break
    assert active.top is None and active.finished is None
    with pytest.raises(KeyError):
        for _ in train:
            raise KeyError("x")
    assert len(active) == 0 and train.current is None


def test_a_number_stands_for_the_loss_of_one_of_two_batches(pair):
    """A pipeline computes losses after their factor is known."""
    active, train, evaluate = pair
    for (x,), (y,) in zip(train, evaluate, strict=False):
        for loader, batch in ((train, x), (evaluate, y), (train, x)):
            one = torch.ones(())
            active.stand_for(one, (batch, "a name"))
            assert active.source_of(one).loader() is loader


def test_loops_that_are_interleaved_by_hand_end_in_any_order(pair):
    active, train, evaluate = pair
    first, second = iter(train), iter(evaluate)
    next(first), next(second)
    list(first)
    assert active.top is evaluate
    second.close()
    assert len(active) == 0


def test_the_first_batches_of_a_zip_are_told_from_a_loop_in_a_loop(pair):
    active, train, evaluate = pair
    for _ in zip(train, evaluate, strict=False):
        assert active.beside_top == [train]
        break
    for _ in train:
        for _ in evaluate:
            assert active.beside_top == []
    # An iterator that never begins tells nothing.
    iter(evaluate)
    for _ in train:
        for _ in evaluate:
            assert active.beside_top == []
            break
    assert not active._created


def test_the_last_batch_of_a_validation_that_is_held_open_ends_no_window(pair):
    active, validation, train = pair
    weight = torch.ones((), requires_grad=True)
    validated = iter(validation)
    for _ in range(2):
        for _ in train:
            assert active.source_of(weight * 1.0) is train.given
            next(validated, None)
            # As `accumulate` asks whose batch is taken inside of it.
            assert active.ends_window() == train.current.last


@pytest.mark.parametrize("is_computed_before", [True, False])
def test_a_loss_of_the_batch_before_loops_overlap_is_that_of_its_loader(pair, is_computed_before):
    active, outer, inner = pair
    model = nn.Linear(1, 1)
    active._events.several_batches.subscribe(partial(active.origins.watch, model))
    others = None
    for (x,) in outer:
        loss = model(x[:, None]).sum()
        others = others or iter(inner)
        (z,) = next(others, (x,))
        if not is_computed_before:
            loss = model(x[:, None]).sum()
        inner_loss = model(z[:, None]).sum()
        if inner.current is not None:
            assert active.source_of(inner_loss) is inner.given
        assert active.source_of(loss) is outer.given


@pytest.mark.parametrize("kind", ["detached", "half", "unknown"])
def test_the_loader_of_a_loss_is_known_or_the_user_is_told(kind, caplog):
    active = ActiveLoaders()
    model = nn.Linear(1, 1)
    if kind == "half":  # as FSDP2 converts the inputs of a model
        model.register_forward_pre_hook(lambda _, args: (args[0].double().float(),))
    options = {"width": 2, "index": 1, "device": "cpu", "active": active}
    first = prepare_loader(DataLoader(TensorDataset(torch.arange(8.0)), 2), **options)
    second = prepare_loader(DataLoader(TensorDataset(torch.arange(7.0)), 2), **options)
    active._events.several_batches.subscribe(partial(active.origins.watch, model))
    for (x,), (y,) in zip(first, second, strict=True):
        assert active.source_of(model(y[:, None]).sum()) is second.given
        inputs = {"detached": model(x[:, None]).detach(), "half": x[:, None], "unknown": x[:, None] + 1.0}[kind]
        source = active.source_of(model(inputs).sum())
        if kind != "unknown":
            assert source is first.given
    assert ("num_items" in caplog.text) == (kind == "unknown")


def test_a_rank_is_idle_where_the_batch_of_the_model_has_no_sample_for_it():
    active = ActiveLoaders()
    model = nn.Sequential(nn.Linear(1, 1))
    idle = []
    model[0].register_forward_pre_hook(lambda *_: idle.append(active.idle))
    options = {"width": 2, "index": 1, "device": "cpu", "active": active}
    full = prepare_loader(DataLoader(TensorDataset(torch.arange(8.0)), 2), **options)
    short = prepare_loader(DataLoader(TensorDataset(torch.arange(5.0)), 2), **options)
    active._events.several_batches.subscribe(partial(active.origins.watch, model))
    for (x,), (y,) in zip(full, short, strict=True):
        model(x[:, None])
        model(y[:, None])
    assert idle[-2:] == [False, True]


def test_a_finished_loader_is_not_kept_alive(pair):
    active = pair[0]
    loader = prepare_loader(DataLoader(range(3)), width=1, index=0, device="cpu", active=active)
    list(loader)
    assert active.finished is loader
    gc.disable()
    try:
        del loader
        assert active.finished is None
    finally:
        gc.enable()


def test_on_the_cpu_nothing_is_touched():
    steps = iter([])
    assert on_device(steps, torch.device("cpu"), False) is steps


def test_devices_without_streams_get_their_batches_one_by_one():
    steps = on_device(iter([({"x": [torch.zeros(2)]}, "mark")]), torch.device("meta"), False)
    ((batch, mark),) = steps
    assert batch["x"][0].is_meta and mark == "mark"


def test_the_next_batch_is_copied_before_this_one_is_handed_out(monkeypatch):
    diary = []

    class Stream(contextlib.AbstractContextManager):
        def __init__(self, device):
            self.device = device

        def __exit__(self, *error):
            return None

        def record_event(self):
            return len(diary)

        def wait_event(self, event):
            diary.append("wait")

    def copied(batch, device, non_blocking):
        diary.append(f"copy {batch}")
        return batch

    current = Stream("cuda")
    monkeypatch.setattr(prefetch.torch, "Stream", Stream)
    monkeypatch.setattr(prefetch.torch.accelerator, "current_stream", lambda device: current)
    monkeypatch.setattr(prefetch, "to_device", copied)
    for batch, mark in on_device(iter([(0, "a"), (1, "b"), (2, "c")]), torch.device("cuda"), True):
        diary.append(f"use {batch}{mark}")
    assert diary == ["copy 0", "wait", "copy 1", "use 0a", "wait", "copy 2", "use 1b", "wait", "use 2c"]
