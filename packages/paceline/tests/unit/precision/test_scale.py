"""Where a loss scale goes, without a tensor; and what the scaler says where it can go no further."""

import random

import pytest
import torch
from torch import nn

from paceline import Accelerator, ConfigError, TrainError
from paceline.base.log import forget_warnings
from paceline.precision.scale import Growth
from paceline.precision.scaler import LossScaler

CPU = torch.device("cpu")


class Alone:
    """Collectives of one rank."""

    class world:
        rank = 0

    def any(self, flag):
        return flag

    def gather_object(self, obj):
        return [obj]


@pytest.mark.parametrize("options", [{}, {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}])
def test_the_defaults_are_the_path_of_torch(options):
    options = {"growth_interval": 5, **options, "init_scale": 1024.0}
    theirs, ours = torch.amp.GradScaler("cpu", **options), Growth.of(options)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    draw = random.Random(3)
    for step in range(200):
        assert ours.scale == theirs.get_scale(), step
        overflow = draw.random() < 0.15
        theirs.scale(weight.sum() * (float("inf") if overflow else 1.0)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflow)
    saved = theirs.state_dict()
    assert saved.items() <= ours.state_dict().items()


def test_a_path_goes_on_where_its_state_was_saved():
    options = {"hysteresis": 3, "growth_interval": 4, "growth_delay": 1, "min_scale": 1.0, "init_scale": 64.0}
    draw = random.Random(5)
    steps = [draw.random() < 0.3 for _ in range(100)]
    whole = Growth.of(options)
    path = []
    for overflow in steps:
        path.append(whole.scale)
        whole.update(overflow)
    again, second = Growth.of(options), Growth.of(options)
    for overflow in steps[:41]:
        again.update(overflow)
    second.load_state_dict(again.state_dict())
    for step, overflow in enumerate(steps[41:], 41):
        assert second.scale == path[step]
        second.update(overflow)
    assert len(set(path)) > 3


def test_a_scale_that_stands_still():
    growth = Growth.of({"init_scale": 128.0, "growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1})
    for step in range(9):
        growth.update(step % 2 == 0)
        assert growth.scale == 128.0 and not growth.exhausted


def test_it_grows_no_further_than_float32():
    growth = Growth.of({"init_scale": 2.0**127, "growth_interval": 1})
    growth.update(False)
    assert growth.scale == 2.0**127


def test_options_that_cannot_work_are_named_together():
    with pytest.raises(ConfigError, match=r"\[scaler-option\]") as caught:
        LossScaler(CPU, Alone(), init_scale=0.0, growth_rate=2, hysteresis=0)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="bad_loss='ignore'"):
        LossScaler(CPU, Alone(), bad_loss="ignore")
    with pytest.raises(ConfigError, match="at_minimum='warn'"):
        LossScaler(CPU, Alone(), at_minimum="warn")


def overflow(scaler, model, optimizer, by=1e38):
    scaler.begin_pass()
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 1), by)).sum()).backward()
    return scaler.step(optimizer)


def test_at_the_minimum_an_error_names_the_parameter_and_the_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LossScaler(
        CPU, Alone(), named_parameters=model.named_parameters, init_scale=64.0, min_scale=16.0, hysteresis=2
    )
    model[0].weight.register_hook(lambda gradient: gradient * (float("inf") if broken else 1.0))
    broken = False
    for _ in range(2):
        assert not overflow(scaler, model, optimizer, by=1.0)
    broken = True
    seen = []
    with pytest.raises(TrainError, match=r"\[fp16-minimum\]") as caught:
        for _ in range(9):
            seen.append(scaler.loss_scale)
            overflow(scaler, model, optimizer, by=1.0)
    assert seen == [64.0, 64.0, 32.0, 16.0]
    assert "since number 3" in str(caught.value) and "number 6" in str(caught.value)
    assert "0.weight (rank 0)" in str(caught.value) and "bf16" in str(caught.value)


def test_a_bad_loss_can_be_skipped_like_an_overflow():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(CPU, Alone(), init_scale=4.0, min_scale=2.0, bad_loss="skip")
    for expected in (4.0, 2.0):
        assert scaler.loss_scale == scaler.cur_scale == expected
        scaler.scale((weight * float("nan")).sum()).backward()
        if expected == 4.0:
            assert scaler.step(optimizer) and weight.item() == 1.0
            assert scaler.loss_scale == 2.0
            scaler.begin_pass()
            optimizer.zero_grad()
    with pytest.raises(TrainError, match="the loss itself is not finite"):
        scaler.step(optimizer)


def test_an_overflow_at_the_minimum_can_be_skipped_with_one_warning(caplog):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(CPU, Alone(), init_scale=2.0, min_scale=2.0, bad_loss="skip", at_minimum="skip")
    for _ in range(3):
        scaler.begin_pass()
        optimizer.zero_grad()
        scaler.scale((weight * float("inf")).sum()).backward()
        assert scaler.step(optimizer)
    assert weight.item() == 1.0 and scaler.loss_scale == 2.0
    assert caplog.text.count("smallest loss scale") == 1


@pytest.mark.parametrize("is_unscaled", [False, True])
@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (lambda parameters: None, False),
        (lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0), True),
        (lambda parameters: setattr(parameters[0], "grad", parameters[0].grad + 0.1), True),
    ],
    ids=["nothing", "torch's clipping", "another tensor"],
)
def test_gradients_that_are_changed_while_they_are_scaled_are_told_of(caplog, change, is_told, is_unscaled):
    forget_warnings()
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(4, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        if is_unscaled:
            accelerator.unscale_gradients()
        change(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    told = [record for record in caplog.records if "loss scale" in record.getMessage()]
    assert len(told) == (is_told and not is_unscaled)
