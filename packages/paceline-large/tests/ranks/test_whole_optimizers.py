"""Optimizers that look at whole matrices, or at blocks of memory, step as on one process under every plan."""

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch_sweep.own_optimizers import BlockWise, Prodigy, Shampoo, Soap
from torch_sweep.runs import DATA_PARALLEL, FEATURES, PLANS, Case, sweep

from paceline import Accelerator
from paceline.base.errors import PacelineError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, words=None):
        return self.inner(x).squeeze(1) * self.scale


OPTIMIZERS = {
    "Shampoo": Shampoo,
    "Soap": Soap,
    "BlockWise": BlockWise,
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}
DIVIDED = {"inner.0": "colwise", "inner.2": "rowwise"}
CASES = [Case(name, Net, optimizer, divided=DIVIDED) for name, optimizer in OPTIMIZERS.items()]


@pytest.mark.parametrize("plan", [*DATA_PARALLEL, "tp"])
def test_they_have_the_numbers_of_one_process(plan) -> None:
    outcomes = sweep([(case, plan) for case in CASES], 2 if plan == "tp" else 3)
    assert outcomes == {(case.name, plan): "exact" for case in CASES}


def test_sums_over_all_parameters_are_refused_where_each_rank_steps_some() -> None:
    case = Case("Prodigy", Net, Prodigy)
    outcomes = sweep([(case, plan) for plan in DATA_PARALLEL], 2)
    assert outcomes.pop(("Prodigy", "replicate")) == "exact"
    assert set(outcomes.values()) == {"refused optimizer-sums"}


def resumed(plan, folder):
    """Weights of six steps, and of three steps before and three after a load into new objects."""

    def build():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, plan=PLANS[plan].settings(2))
        model = Net().double()
        objects = accelerator.prepare(model, *(OPTIMIZERS[name](model.parameters()) for name in ["Soap"]))
        return accelerator, *objects

    def steps(accelerator, model, optimizer, numbers):
        for number in numbers:
            x = torch.linspace(-1, 1, 4 * FEATURES, dtype=torch.float64).view(4, FEATURES) * (number + 1)
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, optimizer = build()
    steps(accelerator, model, optimizer, range(3))
    accelerator.save_state(folder)
    steps(accelerator, model, optimizer, range(3, 6))
    want = accelerator.get_state_dict(model)
    accelerator, model, optimizer = build()
    accelerator.load_state(folder)
    steps(accelerator, model, optimizer, range(3, 6))
    got = accelerator.get_state_dict(model)
    return max((got[name] - want[name]).abs().max().item() for name in want)


def test_states_of_owners_are_saved_and_loaded(tmp_path) -> None:
    assert run_ranks(resumed, 2, args=("shard", tmp_path / "state")) == [0.0, 0.0]


def moved(folder):
    """Loads under `replicate` what three ranks have saved under `shard`."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    model = Net().double()
    model, optimizer = accelerator.prepare(model, Soap(model.parameters()))
    accelerator.load_state(folder)
    return {
        key: {k: torch.as_tensor(v).clone() for k, v in s.items()} for key, s in enumerate(optimizer.state.values())
    }


def saved(folder):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plan={"shard": 3})
    model = Net().double()
    model, optimizer = accelerator.prepare(model, Soap(model.parameters()))
    accelerator.backward(model(torch.ones(2, FEATURES, dtype=torch.float64)).square().mean())
    optimizer.step()
    accelerator.save_state(folder)
    return len(optimizer.state)


def test_states_of_owners_go_to_another_plan(tmp_path) -> None:
    kept = run_ranks(saved, 3, args=(tmp_path / "state",))
    assert sum(kept) == 5  # each rank keeps those of the parameters that it steps
    (first, second) = run_ranks(moved, 2, args=(tmp_path / "state",))
    assert len(first) == len(second) == 5 and first[0]["statistics"].shape[0] == first[0]["statistics"].shape[1]


class Refusing(torch.optim.SGD):
    """Takes parameters without a gradient for stepped ones."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter - parameter.grad.clone()


def careless():
    accelerator = Accelerator(cpu=True, plan={"shard": 2})
    model = Net()
    model, optimizer = accelerator.prepare(model, Refusing(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, FEATURES)).mean())
    with pytest.raises(PacelineError) as caught:
        optimizer.step()
    return caught.value.code


def test_an_optimizer_that_needs_all_gradients_is_told() -> None:
    assert run_ranks(careless, 2) == ["zero-no-gradient"] * 2


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: `eval` and `train` write the parameters by the states of steps."""

    def __init__(self, parameters, lr=0.1, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "number": 0})

    def _move(self, weight_of):
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight_of(group["beta"]))

    @torch.no_grad()
    def eval(self):
        self._move(lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self):
        self._move(lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["number"] += 1
            weight = 1 / group["number"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                parameter.lerp_(state["z"], weight)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                state["z"].sub_(parameter.grad, alpha=group["lr"])

    @torch.no_grad()
    def exchange(self):
        """Puts the states in the place of the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["z"])


class ScheduleFreeByRows(ScheduleFree):
    elementwise = True


def outputs_and_weights(model, optimizer, backward, halfway=lambda: None):
    """Trains three epochs of three steps; returns what the averaged weights say after each, and the weights of the last."""
    x = torch.linspace(-1, 1, 6 * FEATURES, dtype=torch.float64).view(6, FEATURES)
    outputs = []
    for epoch in range(3):
        if epoch:
            optimizer.train()
        for number in range(3):
            backward(model((number + 1) * x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            outputs.append(model(x))
        if epoch == 1:
            halfway()
    return torch.cat(outputs)


def switched(plan, kind, folder):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plan=PLANS[plan].settings(2))
    model = Net().double()
    model, optimizer = accelerator.prepare(model, kind(model.parameters()))

    def save_and_load():
        accelerator.save_state(folder)
        accelerator.load_state(folder)

    return outputs_and_weights(model, optimizer, accelerator.backward, save_and_load)


@pytest.mark.parametrize("kind", [ScheduleFree, ScheduleFreeByRows])
@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_a_schedule_free_optimizer_switches_all_parts(plan, kind, tmp_path) -> None:
    torch.manual_seed(0)
    model = Net().double()
    expected = outputs_and_weights(model, kind(model.parameters()), torch.Tensor.backward)
    for outputs in run_ranks(switched, 2, args=(plan, kind, tmp_path / "state")):
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)


def exchanged(plan):
    accelerator = Accelerator(cpu=True, plan=plan)
    model = Net()
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters()))
    accelerator.backward(model(torch.ones(2, FEATURES)).square().mean())
    optimizer.step()
    with pytest.raises(PacelineError) as caught:
        optimizer.exchange()
    return caught.value.code


@pytest.mark.parametrize("stage", [1, 2])
def test_another_method_that_needs_states_of_other_ranks_is_refused(stage) -> None:
    # Ranks would go on with other weights, without a word.
    assert run_ranks(exchanged, 2, args=({"shard": 2, "zero": stage},)) == ["optimizer-states"] * 2
