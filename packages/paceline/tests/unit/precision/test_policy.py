"""Mixed precision wraps the forward of the module itself, reversibly."""

import copy
import inspect

import pytest
import torch
from torch import nn

from paceline import TrainError
from paceline.config.settings import PRECISIONS
from paceline.precision.policy import to_float32, unwrap_forward
from paceline.precision.scaler import LossScaler

CPU = torch.device("cpu")


class Alone:
    def any(self, flag):
        return flag


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        self.dtype = self.layer(x).dtype
        return {"y": self.layer(x)}


@pytest.mark.parametrize(("name", "inner"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_computes_low_and_hands_out_float32(name, inner):
    model = Seen()
    PRECISIONS.get(name).wrap_forward(model, CPU)
    assert model(torch.ones(1, 2))["y"].dtype == torch.float32
    assert model.dtype == inner
    assert list(dict(model.named_parameters())) == ["layer.weight", "layer.bias"]


def test_a_copy_computes_with_its_own_weights():
    model = Seen()
    PRECISIONS.get("bf16").wrap_forward(model, CPU)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.zero_()
    assert twin(torch.ones(1, 2))["y"].abs().sum() == 0
    assert model(torch.ones(1, 2))["y"].abs().sum() > 0


def test_unwrapping_gives_back_the_forward():
    model = Seen()
    PRECISIONS.get("bf16").wrap_forward(model, CPU)
    PRECISIONS.get("bf16").wrap_forward(model, CPU)
    unwrap_forward(model)
    assert "forward" not in model.__dict__
    assert model(torch.ones(1, 2))["y"].dtype == torch.float32 and model.dtype == torch.float32
    model.forward = lambda x: x
    own = model.forward
    PRECISIONS.get("bf16").wrap_forward(model, CPU)
    unwrap_forward(model)
    assert model.forward is own


def test_only_halves_are_cast():
    tree = {"a": torch.ones(1, dtype=torch.bfloat16), "b": [torch.ones(1, dtype=torch.int64), "x"]}
    cast = to_float32(tree)
    assert cast["a"].dtype == torch.float32 and cast["b"][0].dtype == torch.int64 and cast["b"][1] == "x"


def test_no_precision_means_no_context():
    with PRECISIONS.get("no").autocast(CPU):
        assert not torch.is_autocast_enabled("cpu")


def step(scaler, optimizer, loss):
    scaler.begin_pass()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    return scaler.step(optimizer)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LossScaler(CPU, Alone(), init_scale=4.0)
    before = model.weight.clone()
    model.weight.register_hook(lambda g: g * float("inf"))
    assert step(scaler, optimizer, model(torch.ones(1, 1)).sum())
    assert torch.equal(model.weight, before)
    assert scaler.state_dict()["scale"] == 2.0


def test_the_wrapped_forward_shows_the_parameters_of_the_original():
    model = nn.Linear(2, 1)
    PRECISIONS.get("bf16").wrap_forward(model, CPU)
    assert list(inspect.signature(model.forward).parameters) == ["input"]


def test_two_optimizers_of_one_backward_see_one_scale():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    scaler = LossScaler(CPU, Alone(), init_scale=4.0, growth_interval=1)
    scaler.scale((a + b).sum()).backward()
    assert not scaler.step(first)
    assert not scaler.step(second)
    assert a.item() == b.item() == 0.0
    assert scaler.state_dict()["scale"] == 8.0


def test_copies_of_older_gradients_follow_the_scale():
    weight = nn.Parameter(torch.ones(1))
    older = torch.full((1,), 3.0)
    scaler = LossScaler(CPU, Alone(), init_scale=4.0, growth_interval=1, older=lambda: [older])
    step(scaler, torch.optim.SGD([weight], lr=1.0), weight.sum())
    scaler.begin_pass()
    assert scaler.loss_scale == 8.0 and older.item() == 6.0


def test_an_optimizer_without_gradients_is_not_unscaled_for_the_next_pass():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    scaler = LossScaler(CPU, Alone(), init_scale=4.0)
    scaler.scale(b.sum()).backward()
    scaler.unscale([b], [first, second])
    scaler.step(second)
    second.zero_grad()
    scaler.forget([b])
    step(scaler, first, a.sum())
    assert a.item() == 0.0


def test_a_loss_that_is_not_finite_is_an_error_on_the_spot():
    weight = nn.Parameter(torch.ones(1))
    scaler = LossScaler(CPU, Alone(), init_scale=4.0)
    with pytest.raises(TrainError, match=r"\[fp16-loss\]"):
        step(scaler, torch.optim.SGD([weight], lr=1.0), (weight * float("nan")).sum())
    assert weight.item() == 1.0
