"""`paceline.optim.Muon` steps as on one process under every plan, and so do Muon and AdamW in one loop."""

from functools import cache

import pytest
import torch
from parity_models import GPT, loss_of
from shared_ranks import run_ranks

from paceline import Accelerator
from paceline.base.errors import PrepareError
from paceline.optim import Muon
from paceline.world.sharded import whole

PLANS = {
    "replicate": {"replicate": 2},
    "zero1": {"shard": 2, "zero": 1},
    "zero2": {"shard": 2, "zero": 2},
    "shard": {"shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
}
STEPS = 4


def model() -> GPT:
    torch.manual_seed(0)
    # In float64 the rounding of sums stays far below that of bfloat16, so that the orthogonal matrices are the same.
    return GPT(layers=2).double()


def optimizers(kind: str, net: GPT) -> list[torch.optim.Optimizer]:
    if kind == "ours":
        return [Muon(net, weight_decay=0.1)]
    of_both = Muon(net)
    matrices, others = (group["params"] for group in of_both.param_groups)
    both: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02)]
    return [*both, torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95))]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(24, (4, 8), generator=generator), torch.randint(24, (4, 8), generator=generator)


class Run:
    def __init__(self, plan: dict[str, int], kind: str) -> None:
        self.accelerator = Accelerator(cpu=True, plan=plan)
        net = model()
        self.model, *self.optimizers = self.accelerator.prepare(net, *optimizers(kind, net))

    def train(self, *numbers: int) -> "Run":
        layout = self.accelerator.plan.layout
        for number in numbers:
            rank = self.accelerator.process_index
            x, y = (half.chunk(layout.width)[layout.data_index(rank)] for half in batch(number))
            self.accelerator.forward_backward(self.model, (x, y), loss_of)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.accelerator.get_state_dict(self.model)
        return {name: torch.as_tensor(whole(value)).clone() for name, value in state.items()}


@cache
def alone(kind: str) -> dict[str, torch.Tensor]:
    return Run({}, kind).train(*range(STEPS)).weights()


@pytest.mark.parametrize("plan", PLANS)
def test_the_steps_of_one_process(plan: str) -> None:
    def work() -> dict[str, tuple[dict[str, torch.Tensor], list[str], int]]:
        outcome = {}
        for kind in ("ours", "two"):
            run = Run(PLANS[plan], kind).train(*range(STEPS))
            fields = [decision.field for decision in run.accelerator.plan.decisions]
            states = run.optimizers[0].state
            momenta = [id(state) for state in states.values() if "momentum_buffer" in state]
            outcome[kind] = run.weights(), fields, len(momenta)
        return outcome

    ranks = run_ranks(work, 2)
    for kind in ("ours", "two"):
        for outcome in ranks:
            weights, fields, _ = outcome[kind]
            torch.testing.assert_close(weights, alone(kind), rtol=0, atol=1e-7)
            assert "optimizer.Muon.numbers" in fields
        # Each matrix is orthogonalised by one rank, which keeps its momentum, unless every rank steps the whole model.
        num_matrices = 12
        num_momenta = sum(outcome[kind][2] for outcome in ranks)
        assert num_momenta == (2 * num_matrices if plan in ("replicate", "cp") else num_matrices)


def test_two_optimizers_are_one() -> None:
    net, twin = model(), model()
    ours, both = Muon(net), optimizers("two", twin)
    both[0].param_groups[0]["weight_decay"] = both[1].param_groups[0]["weight_decay"] = 0.0
    for number in range(3):
        for each in (net, twin):
            loss_of(each(batch(number)[0]), batch(number)[1]).backward()
        for optimizer in (ours, *both):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shard", ("shard", 2)),
        ("zero2", ("tp", 2)),
        ("tp", ("alone", 1)),
        ("pp", ("shard", 2)),
        ("shard", ("zero1", 2)),
    ],
)
def test_a_resume_at_another_width_and_plan(tmp_path, before, after) -> None:
    folder = str(tmp_path / "state")
    plan, width = after

    def save() -> None:
        run = Run(PLANS[before], "ours").train(0, 1)
        run.accelerator.save_state(folder)

    def load() -> dict[str, torch.Tensor]:
        run = Run(PLANS.get(plan, {}), "ours")
        run.accelerator.load_state(folder)
        return run.train(2, 3).weights()

    run_ranks(save, 2)
    for weights in run_ranks(load, width):
        torch.testing.assert_close(weights, alone("ours"), rtol=0, atol=1e-7)


def test_which_parameters_are_matrices() -> None:
    net = GPT(layers=2, tied=True)
    names = {parameter: name for name, parameter in net.named_parameters()}

    def stepped_by_muon(**patterns: list[str]) -> set[str]:
        (matrices, _) = Muon(net, **patterns).param_groups
        return {names[parameter] for parameter in matrices["params"]}

    hidden = {name for name, parameter in net.named_parameters() if name.startswith("blocks") and parameter.dim() == 2}
    assert stepped_by_muon() == hidden
    assert stepped_by_muon(adam=["*.up_proj.*"]) == {name for name in hidden if "up_proj" not in name}
    assert stepped_by_muon(muon=["positions.weight"]) == {*hidden, "positions.weight"}
    for patterns in ({"adam": ["nothing.*"]}, {"muon": ["norm.weight"]}):
        with pytest.raises(PrepareError) as caught:
            Muon(net, **patterns)
        assert caught.value.code == "muon-names"


def test_filters_and_experts_are_matrices() -> None:
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Conv2d(3, 4, 3, bias=False)])
    net.experts = torch.nn.Parameter(torch.randn(2, 4, 6))
    optimizer = Muon(net)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    (net[0].weight.square().sum() + net.experts.square().sum()).backward()
    optimizer.step()
    for parameter, old in zip(net.parameters(), before, strict=True):
        moved = (old - parameter.detach()) / 0.02
        parts = moved if moved.dim() == 3 else moved.flatten(1)[None]
        for part in parts:
            # Newton-Schulz leaves singular values between about 0.6 and 1.3.
            values = torch.linalg.svdvals(part)
            assert values.min() > 0.5 and values.max() < 1.4
