"""An optimizer whose step computes something over all parameters is refused where each rank would step some of them."""

import logging

import pytest
import torch
from parity_models import GPT
from shared_ranks import run_ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_sweep.own_optimizers import Prodigy, Shampoo, Soap
from torch_sweep.runs import DATA_PARALLEL, FEATURES, Case, sweep

from paceline import Accelerator
from paceline.base.errors import PacelineError
from paceline.base.log import forget_warnings
from paceline.parallel.sums import refuse_sums
from paceline.world.random_streams import capture


def with_gradients(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]


class SelfClip(torch.optim.AdamW):
    """Clips by the norm of all its gradients."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(with_gradients(self), 0.1)
        return super().step(closure)


class OfPlain(torch.optim.Optimizer):
    """The parts that the following optimizers have in common."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        stepped = with_gradients(self)
        self.look_at(stepped)
        for parameter in stepped:
            parameter.sub_(self.direction(parameter), alpha=self.param_groups[0]["lr"])

    def look_at(self, stepped):
        pass


class Normalised(OfPlain):
    """Divides by the norm of all gradients."""

    def look_at(self, stepped):
        self.factor = 1 / torch.stack([each.grad.norm() for each in stepped]).norm()

    def direction(self, parameter):
        return self.factor * parameter.grad


class Distance(OfPlain):
    """Estimates, as D-Adaptation does, how far the parameters are from a minimum."""

    def look_at(self, stepped):
        inner = sum(float((each.grad * (self.start(each) - each)).sum()) for each in stepped)
        self.factor = max(self.factor, inner / sum(float(each.grad.abs().sum()) for each in stepped))

    def start(self, parameter):
        return self.state[parameter].setdefault("start", parameter.clone())

    def direction(self, parameter):
        return self.factor * parameter.grad


class TrustRatio(OfPlain):
    """Scales each gradient by the norm of its own parameter."""

    def direction(self, parameter):
        return parameter.grad * (parameter.norm() / (parameter.grad.norm() + 1e-8))


class Noisy(OfPlain):
    """Adds noise. Its draws differ between ranks, but not between the two trials."""

    def direction(self, parameter):
        return parameter.grad + torch.randn_like(parameter)


class Stacked(OfPlain):
    """Makes matrices of one shape orthogonal in one batch, as fast forms of Muon do."""

    def look_at(self, stepped):
        self.orthogonal = {}
        matrices = [each for each in stepped if each.dim() == 2]
        for shape in {each.shape for each in matrices}:
            alike = [each for each in matrices if each.shape == shape]
            x = torch.stack([each.grad for each in alike])
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                x = 1.5 * x - 0.5 * x @ x.mT @ x
            self.orthogonal.update(zip(alike, x, strict=True))

    def direction(self, parameter):
        return self.orthogonal.get(parameter, parameter.grad)


class Needy(OfPlain):
    """Needs what only a backward pass makes."""

    def direction(self, parameter):
        return parameter.grad * parameter.seen_in_backward


class Elementwise(Noisy):
    elementwise = True


class Outer(torch.optim.Optimizer):
    """Steps through another optimizer, after it has moved the parameters along all gradients, as SAM does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        norm = torch.stack([each.grad.norm() for each in with_gradients(self)]).norm()
        for each in with_gradients(self):
            each.add_(each.grad / norm, alpha=self.param_groups[0]["rho"])
        closure()
        self.base.step()


SUMS = {"SelfClip": SelfClip, "Normalised": Normalised, "Prodigy": Prodigy, "Distance": Distance}
OTHERS = {"TrustRatio": TrustRatio, "Stacked": Stacked}
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def forward(self, x, words=None):
        return self.inner(x).sum(1)


DIVIDED = {"inner.0": "colwise", "inner.2": "rowwise"}


def cases(optimizers):
    return [Case(name, Net, optimizer, divided=DIVIDED) for name, optimizer in optimizers.items()]


def test_those_that_sum_are_refused_where_each_rank_steps_some() -> None:
    outcomes = sweep([(case, plan) for case in cases(SUMS) for plan in (*DATA_PARALLEL, "tp")], 2)
    expected = {(name, plan): "refused optimizer-sums" for name, plan in outcomes}
    expected.update({(name, "replicate"): "exact" for name in SUMS})
    assert outcomes == expected


def test_the_others_have_the_numbers_of_one_process() -> None:
    outcomes = sweep([(case, plan) for case in cases(OTHERS) for plan in DATA_PARALLEL], 2)
    assert outcomes == dict.fromkeys(outcomes, "exact")


def in_stages(kinds):
    accelerator = Accelerator(cpu=True, plan={"pp": 2}, options={"pipeline": {"microbatches": 2}})
    codes = []
    for kind in kinds:
        model = GPT()
        code = ""
        try:
            accelerator.prepare(model, kind(model.parameters()))
        except PacelineError as error:
            code = error.code
        codes.append(code)
        accelerator.free_memory()
    return codes


def test_stages_of_a_pipeline_step_their_own_parameters_only() -> None:
    kinds = [*SUMS.values(), Outer, torch.optim.LBFGS, *OTHERS.values(), torch.optim.AdamW, Elementwise]
    expected = ["optimizer-sums"] * (len(SUMS) + 2) + [""] * (len(OTHERS) + 2)
    assert run_ranks(in_stages, 2, args=(kinds,)) == [expected] * 2


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)


def refused(optimizer):
    try:
        refuse_sums(optimizer, CPU)
    except PacelineError as error:
        return error.code
    return ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_trial_tells_sums_in_every_dtype_and_at_the_start_of_a_warm_up(dtype) -> None:
    for kind in (*SUMS.values(), *OTHERS.values(), Noisy):
        optimizer = kind(net(dtype).parameters())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        assert (kind, refused(optimizer)) == (kind, "optimizer-sums" if kind in SUMS.values() else "")


@pytest.mark.parametrize("kind", [Noisy, SelfClip, Shampoo, Soap])
def test_a_trial_leaves_everything_as_it_was(kind) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped = []
    handle = register_optimizer_step_pre_hook(lambda *_: stepped.append(1))
    optimizer.register_step_post_hook(lambda *_: stepped.append(2))
    weights = [each.detach().clone() for each in model.parameters()]
    states = str(optimizer.state_dict())
    attributes = dict(vars(optimizer))
    streams = str(capture(CPU))
    refused(optimizer)
    handle.remove()
    assert all(map(torch.equal, weights, model.parameters()))
    assert (str(optimizer.state_dict()), str(capture(CPU)), stepped) == (states, streams, [])
    assert vars(optimizer) == attributes and all(each.grad is None for each in model.parameters())


class OwnRate(torch.optim.Optimizer):
    """Finds the rate of each parameter itself, as transformers' Adafactor does."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.norm() * parameter.grad)


def test_an_optimizer_without_a_rate_is_tried(caplog) -> None:
    forget_warnings()
    with caplog.at_level(logging.WARNING, "paceline"):
        assert refused(OwnRate(net().parameters())) == ""
    assert caplog.text == ""


def test_an_optimizer_that_cannot_be_tried_is_told(caplog) -> None:
    forget_warnings()
    with caplog.at_level(logging.WARNING, "paceline"):
        assert refused(Needy(net().parameters())) == ""
    assert "Needy could not be tried" in caplog.text and "seen_in_backward" in caplog.text
