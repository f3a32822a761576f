"""Another `forward` on one module: signatures, copies, and the way back."""

import copy
from functools import wraps
from inspect import signature

import torch
from torch import nn

from paceline.world.forward import original_forward, override_forward, restore_forward


class Scale(nn.Module):
    """Multiplies by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x, *, bias: float = 0.0):
        return x * self.weight + bias


def plus(number: float):
    def forward(module, original, *args, **kwargs):
        return original(*args, **kwargs) + number

    return forward


def test_the_last_one_stands_outside_and_the_signature_stays() -> None:
    model = Scale()
    before = signature(model.forward)
    override_forward(model, "one", plus(1))
    override_forward(model, "ten", lambda module, original, *args, **kwargs: 10 * original(*args, **kwargs))
    assert float(model(3, bias=1.0)) == 80
    assert signature(model.forward) == before and list(dict(model.named_parameters())) == ["weight"]


def test_a_copy_computes_with_its_own_weights() -> None:
    model = Scale()
    override_forward(model, "one", plus(1))
    override_forward(model, "two", plus(2))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.fill_(5.0)
    assert float(model(1)) == 5 and float(copied(1)) == 8


def test_the_original_comes_back() -> None:
    model = Scale()
    override_forward(model, "one", plus(1))
    assert original_forward(model, "one") is not None and original_forward(model, "two") is None
    restore_forward(model, "two")
    assert float(model(1)) == 3
    restore_forward(model, "one")
    assert float(model(1)) == 2 and "forward" not in vars(model) and original_forward(model, "one") is None


def test_a_forward_that_somebody_had_put_there_comes_back() -> None:
    model = Scale()
    model.forward = lambda x: x
    override_forward(model, "one", plus(1))
    restore_forward(model, "one")
    assert model(7) == 7


def test_what_somebody_put_around_it_since_stays() -> None:
    model = Scale()
    override_forward(model, "one", plus(1))
    inner = model.forward

    @wraps(inner)
    def around(x):
        return -inner(x)

    model.forward = around
    restore_forward(model, "one")
    assert float(model(1)) == -3


def test_the_same_twice_runs_both_and_is_undone_one_by_one() -> None:
    model = Scale()
    override_forward(model, "one", plus(1))
    override_forward(model, "one", plus(10))
    assert float(model(1)) == 13
    restore_forward(model, "one")
    assert float(model(1)) == 3
    restore_forward(model, "one")
    assert float(model(1)) == 2 and original_forward(model, "one") is None
