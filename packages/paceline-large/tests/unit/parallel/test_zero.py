"""ZeRO stages 1 and 2, and offload, without processes: choices, costs, and what stands in for parameters."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.base.errors import PlanError, TrainError
from paceline.parallel.data import division
from paceline.parallel.data.division import (
    ByParameters,
    ByRows,
    batches,
    pack,
    packed_parts,
    packed_width,
    rows,
    unpack,
)
from paceline.parallel.data.zero import STRATEGY as ZERO
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.recompute import STRATEGY as RECOMPUTE
from paceline.parallel.stand_ins import stand_in, stand_ins
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.plan import Plan
from paceline.plan.resolve import resolve
from paceline.planner.estimate import Need, estimate
from paceline.world.events import Events
from paceline.world.layout import Layout
from paceline.world.runtime import Runtime
from paceline_large.offload.offload import STRATEGY as OFFLOAD


def plan(zero: int = 1, **axes: int) -> Plan:
    return Plan(layout=Layout(**axes), zero=zero)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (plan(1, shard=2), True),
        (plan(2, shard=2, replicate=2), True),
        (plan(2, shard=2, cp=2), True),
        (plan(3, shard=2), False),
        (plan(1, shard=2, tp=2), False),
        (plan(0, replicate=2), False),
    ],
)
def test_where_it_is_wanted(case, wanted) -> None:
    assert ZERO.wanted(case) is wanted


def test_sparse_gradients_are_refused_at_stage_2_alone() -> None:
    facts = model_facts(nn.Embedding(4, 2, sparse=True))
    assert ZERO.check(plan(1, shard=2), facts) == []
    with pytest.raises(PlanError) as caught:
        resolve(plan(2, shard=2), [facts], STRATEGIES)
    assert "zero-sparse" in str(caught.value)


def test_the_chain_and_what_it_says() -> None:
    facts = model_facts(nn.Linear(4, 4))
    one, two = (resolve(plan(zero, shard=2), [facts], STRATEGIES) for zero in (1, 2))
    assert one.strategies == ("zero", "replicate") and two.strategies == ("zero",)
    said = {zero: {d.field: d for d in p.decisions}["zero.divides"] for zero, p in ((1, one), (2, two))}
    assert "gradients" not in said[1].value and "gradients" in said[2].value and "shard=2" in said[2].reason


@pytest.mark.parametrize("width", [2, 4])
def test_costs_are_the_formulas(width) -> None:
    a = 1 << 20
    held = Bytes(parameters=4 * a, gradients=4 * a, optimizer=8 * a)
    facts = model_facts(nn.Linear(2, 2))
    one, two = (ZERO.cost(plan(zero, shard=width), facts, held) for zero in (1, 2))
    assert one.parameters + one.gradients + one.optimizer == 8 * a + 8 * a // width
    assert two.parameters + two.gradients + two.optimizer == 4 * a + 12 * a // width
    share = 4 * a * (width - 1) // width
    assert one.sent == share and two.sent == 2 * share
    both = ZERO.cost(plan(2, shard=width, replicate=2), facts, held)
    assert both.sent == 2 * share + 4 * a // width


def test_offload_says_that_nothing_was_moved_on_the_host() -> None:
    case = Plan(offload="all")
    assert OFFLOAD.wanted(case) and not OFFLOAD.wanted(Plan(offload="all", layout=Layout(shard=2), zero=3))
    assert (
        OFFLOAD.decide(case, None)[0].value == "optimizer states"
        and OFFLOAD.decide(Plan(offload="optimizer"), None) == []
    )
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    context = SimpleNamespace(
        device=torch.device("cpu"), options=OFFLOAD.options(case), plan=case, runtime=Runtime(), events=Events()
    )
    (said,) = OFFLOAD.apply(net, context).bind(OptimizerAdapter(optimizer))
    assert said.value == "no" and "nothing was moved" in said.reason
    assert "step" not in vars(optimizer) and OFFLOAD.cost(case, model_facts(net), Bytes(optimizer=8)).optimizer == 0


def test_the_bytes_on_disk_and_those_that_stay() -> None:
    facts = model_facts(nn.Linear(256, 1023))  # of 256 x 1024 parameters
    for offload, zero, on_disk, left in (
        ("optimizer=disk:/d", 3, "1.0 MiB", 2**19),
        ("activations+all=disk:/d", 3, "1.5 MiB", 0),
        ("all=disk:/d", 2, "1.0 MiB", 2**20),  # parameters are whole there
        ("all", 3, None, 0),
        ("all+activations", 3, None, 0),
        ("optimizer", 3, None, 0),  # FSDP2 moves all or nothing
        ("optimizer", 2, None, 2**20),
    ):
        strategies = ("shard" if zero == 3 else "zero", "offload")
        case = Plan(offload=offload, layout=Layout(shard=2), zero=zero, strategies=strategies)
        decisions = {decision.field: decision.value for decision in OFFLOAD.decide(case, facts)}
        assert decisions.get("offload.disk") == on_disk
        assert decisions.get("offload.moves") == ("optimizer states" if zero == 2 and "all" in offload else None)
        on_device = estimate(case, Need((facts,)))
        # With a few for the bias.
        assert on_device.parameters == pytest.approx(left, rel=0.01), offload
        assert on_device.gradients == pytest.approx(2**19 if left else 0, rel=0.01), offload
        assert on_device.optimizer == 0
        # Two values of float32 for each of a rank's half of the parameters, and these themselves.
        assert on_device.disk == pytest.approx(2**20 * (1.5 if on_disk == "1.5 MiB" else bool(on_disk)), rel=0.01)
        states_in_memory = 0 if on_disk else 2**20
        assert on_device.host >= states_in_memory and (on_device.host > 0) == (
            "=" not in offload or left > 0 or zero == 3
        )
        # The memory of a CPU is the host's: nothing leaves it but to a disk, and gradients do not.
        on_host = estimate(case, Need((facts,), on_host=True))
        in_memory = estimate(replace(case, offload="no", strategies=case.strategies[:1]), Need((facts,)))
        assert on_host.gradients == in_memory.gradients
        if "disk" not in offload:
            assert on_host == in_memory
        else:
            assert (on_host.parameters, on_host.optimizer) == (on_device.parameters, 0)


def nets() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        net.unused = nn.Parameter(torch.ones(2))
        found.append((net, torch.optim.AdamW(net.parameters(), lr=0.1)))
    return found


def test_offloaded_steps_are_the_same_steps() -> None:
    (net, optimizer), (plain_net, plain) = nets()
    case = Plan(offload="optimizer", options={"offload": {"always": True}})
    context = SimpleNamespace(
        device=torch.device("cpu"), options=OFFLOAD.options(case), plan=case, runtime=Runtime(), events=Events()
    )
    OFFLOAD.apply(net, context).bind(OptimizerAdapter(optimizer))
    parameters = list(net.parameters())
    for step in range(3):
        for each, steps in ((net, optimizer), (plain_net, plain)):
            each(torch.full((2, 3), float(step))).square().sum().backward()
            steps.step()
            steps.zero_grad()
    for mine, theirs in zip(net.parameters(), plain_net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert set(optimizer.state) == set(parameters) - {net.unused}


def test_stand_ins_leave_again_and_hooks_of_others_do_not_see_them() -> None:
    (net, optimizer), _ = nets()
    parameters, seen = list(net.parameters()), []

    def look(*_) -> None:
        seen.append(all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True)))

    optimizer.register_step_post_hook(look)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    OptimizerAdapter(optimizer).swap(lambda o: stand_ins(o, lambda p: stand_in(p, p.detach(), p.grad)))
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()  # does not warn that no step was taken
    assert seen == [True, True, True] and set(optimizer.state) == set(parameters) - {net.unused}

    def broken() -> None:
        raise ValueError("half way")

    optimizer._optimizer_step_code = broken
    with pytest.raises(ValueError, match="half way"):
        optimizer.step()
    look()
    assert seen[-1] and set(optimizer.state) == set(parameters) - {net.unused}


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_are_cut_as_dtensor_cuts_them(length, ranks) -> None:
    from torch.distributed.tensor import Shard

    tensor = torch.arange(length * 2).view(length, 2)
    parts = rows(tensor, ranks)
    theirs = Shard(0)._split_tensor(tensor, ranks, with_padding=False)[0]
    assert [p.tolist() for p in parts] == [p.tolist() for p in theirs] and len(parts) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packing_leaves_no_element_out(ranks) -> None:
    tensors = [torch.randn(5, 3), torch.randn(1), torch.randn(6), torch.randn(6, 2).t(), torch.randn(2, 6).t()]
    flat = torch.full((ranks, packed_width(tensors, ranks)), -1.0)
    pack(flat, tensors)
    back = [torch.zeros_like(t) for t in tensors]
    unpack(flat, back)
    assert all(torch.equal(b, t) for b, t in zip(back, tensors, strict=True))
    for rank in range(ranks):
        own = torch.full_like(flat, -1.0)
        pack(own, tensors, rank)
        parts = packed_parts(own[rank], tensors, rank, ranks)
        assert all(torch.equal(part, rows(t, ranks)[rank]) for part, t in zip(parts, tensors, strict=True))
        assert (own[[other for other in range(ranks) if other != rank]] == -1).all()


def test_batches_hold_one_dtype_and_no_more_than_their_limit() -> None:
    kinds = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(9)]
    assert [[t.numel() for t in batch] for batch in batches(kinds, 32)] == [[4, 4], [4], [9]]


class _Group:
    """Stands for ranks that are not there."""


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(division.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(division.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(division, "transport_of", lambda group, device: None)
    return SimpleNamespace(get_group=_Group, device_type="cpu")


def test_whole_parameters_are_dealt_out_by_size(mesh) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 10, 4, 3)]
    dealt = ByParameters(mesh, parameters, 1 << 20)
    assert [dealt.keeps(p) for p in parameters] == [True, False, True, True]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert dealt.part(parameters[0]) is parameters[0]
    foreign = dealt.part(parameters[1])
    assert foreign.grad is None and foreign.data_ptr() == parameters[1].data_ptr()


class Careless(torch.optim.Optimizer):
    """Takes for granted that each parameter has a gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter - parameter.grad.clone()


def test_an_optimizer_that_steps_parameters_without_gradients_is_told(mesh) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Careless(parameters)
    OptimizerAdapter(optimizer).swap(ByParameters(mesh, parameters, 1 << 20).stepping)
    with pytest.raises(TrainError, match=r"\[zero-no-gradient\]") as caught:
        optimizer.step()
    assert "has no attribute 'clone'" in str(caught.value)


def test_data_that_an_optimizer_assigns_reaches_the_rows(mesh, monkeypatch) -> None:
    monkeypatch.setattr(ByRows, "share", lambda *_: None)
    parameter = nn.Parameter(torch.full((4,), 3.0))
    parameter.grad = torch.ones(4)
    optimizer = Careless([parameter])
    OptimizerAdapter(optimizer).swap(ByRows(mesh, [parameter], 1 << 20).stepping)
    optimizer.step()
    assert parameter.tolist() == [3, 3, 2, 2]


def test_a_part_is_this_ranks_rows_in_place(mesh) -> None:
    parameter, scalar = nn.Parameter(torch.arange(10.0).view(5, 2)), nn.Parameter(torch.tensor(1.0))
    parameter.grad, scalar.grad, parameter.mark = torch.ones(5, 2), torch.tensor(1.0), "mine"
    by_rows = ByRows(mesh, [parameter, scalar], 1 << 20)
    part = by_rows.part(parameter)
    assert part.tolist() == [[6.0, 7.0], [8.0, 9.0]] and part.grad.shape == (2, 2) and part.mark == "mine"
    with torch.no_grad():
        part.zero_()
    assert parameter[3:].sum() == 0 and parameter.grad.shape == (5, 2)
    assert by_rows.part(scalar) is scalar
    assert by_rows.split(parameter, torch.ones(5, 2)).shape == (2, 2)
    step = torch.tensor(3.0)
    assert by_rows.split(parameter, step) is step and by_rows.join(parameter, step) is step


def test_the_forecast_of_activations_on_the_host() -> None:
    def activations(offload: str, recompute: str = "no") -> int:
        case = Plan(offload=offload, recompute=recompute)
        facts = SimpleNamespace(blocks=tuple(str(number) for number in range(8)), trainable_bytes=0)
        before = Bytes(activations=34 * 8 * 1000, optimizer=1)
        if recompute != "no":
            before = RECOMPUTE.cost(case, facts, before)
        if offload != "no":
            before = OFFLOAD.cost(case, facts, before)
        return before.activations

    assert activations("activations") == activations("no") // 4
    assert activations("optimizer") == activations("no")
    # The inputs of two of eight blocks, and one block in full.
    assert activations("activations", "blocks") == pytest.approx(2 * 2000 + 32_000, abs=1)
    assert activations("no", "blocks") == pytest.approx(8 * 2000 + 32_000, abs=1)
