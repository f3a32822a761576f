"""`LocalSGD`: when it averages, and when it must not."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from paceline.base.errors import ConfigError, PlanError
from paceline_large.optim.local_sgd import LocalSGD


class Two:
    """Stands in for an Accelerator on two ranks, the other one's parameters being zero."""

    num_processes = 2
    sync_gradients = True

    def __init__(self):
        self.said = []
        self.gradients = SimpleNamespace(mark_replicas=self.mark_replicas, replicas_equal=True)
        nothing = SimpleNamespace(subscribe=lambda callback: None)
        events = SimpleNamespace(saved=nothing, backward=nothing)
        prepared = SimpleNamespace(hold_gradients=self.hold_gradients)
        self.run = SimpleNamespace(note=lambda decision: None, events=events, prepared=prepared)

    def mark_replicas(self, *, equal):
        self.gradients.replicas_equal = equal

    @contextmanager
    def hold_gradients(self, models, alone):
        assert alone
        self.said.append("off")
        yield
        self.said.append("on")

    def reduce(self, tree, reduction):
        assert reduction == "mean" and isinstance(tree, list)
        self.said.append(f"average {len(tree)}")
        return [leaf / 2 for leaf in tree]


def model():
    net = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(net.weight)
    return net


def test_it_averages_every_n_steps_and_at_the_end():
    two, net = Two(), model()
    with LocalSGD(two, net, local_sgd_steps=2) as local:
        for _ in range(5):
            local.step()
    assert two.said == ["off", "average 2", "average 2", "on", "average 2"]
    assert net.weight[0, 0].item() == 0.5**3


def test_no_second_average_where_the_last_step_had_one():
    two = Two()
    with LocalSGD(two, model(), local_sgd_steps=2) as local:
        for _ in range(4):
            local.step()
    assert two.said.count("average 2") == 2


def test_calls_within_an_accumulation_window_do_not_count():
    two = Two()
    with LocalSGD(two, model(), local_sgd_steps=1) as local:
        for two.sync_gradients in (False, True, False, True):
            local.step()
    assert local.steps == 2 and two.said.count("average 2") == 2


def test_frozen_parameters_are_not_sent():
    two, net = Two(), model()
    net.bias.requires_grad_(False)
    with LocalSGD(two, net, local_sgd_steps=1) as local:
        local.step()
    assert two.said == ["off", "average 1", "on"]


def test_after_an_error_nothing_is_communicated():
    two = Two()
    with pytest.raises(ValueError, match="boom"), LocalSGD(two, model(), local_sgd_steps=2) as local:
        local.step()
        raise ValueError("boom")
    assert two.said[0] == "off" and "average 2" not in two.said


@pytest.mark.parametrize("width", [1, 2])
def test_disabled_or_alone_it_does_nothing(width):
    two = Two()
    two.num_processes = width
    with LocalSGD(two, model(), local_sgd_steps=1, enabled=width == 1) as local:
        local.step()
    assert two.said == []


@pytest.mark.parametrize("steps", [0, 1.5, True])
def test_steps_that_are_no_count(steps):
    with pytest.raises(ConfigError) as caught:
        LocalSGD(Two(), model(), local_sgd_steps=steps)
    assert caught.value.code == "local-sgd-steps"


def test_divided_parameters_are_refused(monkeypatch):
    monkeypatch.setattr("paceline_large.optim.local_sgd.is_sharded", lambda tensor: True)
    with pytest.raises(PlanError, match="the first being weight") as caught:
        LocalSGD(Two(), model(), local_sgd_steps=1)
    assert caught.value.code == "local-sgd-plan"
