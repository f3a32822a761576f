"""Prepared optimizers and schedulers; rebinding by name; clipping."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline import PrepareError, TrainError
from paceline.base import log
from paceline.optim.accumulate import Accumulation
from paceline.optim.clip import clip_grad_norm
from paceline.optim.optimizer import PreparedOptimizer
from paceline.optim.rebind import parameter_names, rebind
from paceline.optim.schedule import PreparedScheduler, compare_lengths, is_scheduler, warn_of_other_optimizer
from paceline.parallel.assigned_data import copy_assigned_data
from paceline.parallel.fused_kernels import suit_fused
from paceline.parallel.optimizer_adapter import OptimizerAdapter


def accumulation(sync=True):
    owner = Accumulation(1, 1, SimpleNamespace(top=None, leading=None, ends_window=lambda before: False), None)
    owner.sync = sync
    return owner


def test_steps_and_clears_only_where_a_window_ends():
    model = nn.Linear(2, 1)
    owner = accumulation(sync=False)
    optimizer = PreparedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), owner)
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, before) and model.weight.grad is not None
    owner.sync = True
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, before - 1) and model.weight.grad is None


class TwoSteps(torch.optim.Optimizer):
    """Steps through another optimizer, as SAM does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.others = [torch.optim.SGD(self.param_groups, lr=1.0)]

    def step(self, closure=None):
        self.others[0].step()


def test_a_step_through_an_inner_optimizer_counts_and_is_refused_where_only_step_knows():
    model = nn.Linear(1, 1)
    owner = accumulation()
    optimizer = PreparedOptimizer(TwoSteps(model.parameters()), owner)
    (inner,) = optimizer.stepped_through
    inner.register_step_pre_hook(lambda stepped, *_: optimizer.step_through(stepped))
    model(torch.ones(1, 1)).sum().backward()
    owner.passes += 1
    before = model.bias.item()
    inner.step()
    assert optimizer.steps == 1 and optimizer.stale and model.bias.item() == before - 1.0
    optimizer.step()
    assert optimizer.steps == 2
    scaler = SimpleNamespace(unscale=None)
    for sync, options in ((False, {}), (True, {"scaler": scaler}), (True, {"admits": lambda _: True})):
        owner.sync = sync
        refusing = PreparedOptimizer(optimizer.optimizer, owner, **options)
        with pytest.raises(TrainError, match=r"\[optimizer-inner\]"):
            refusing.step_through(inner)


class AssignsData(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter - parameter.grad


def test_an_optimizer_assigns_data_of_a_dtensor():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = nn.Parameter(distribute_tensor(torch.full((2,), 3.0), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        optimizer = AssignsData([parameter])
        copy_assigned_data(OptimizerAdapter(optimizer))
        optimizer.step()
        assert parameter.full_tensor().tolist() == [2.0, 2.0]
    finally:
        dist.destroy_process_group()


def test_is_an_optimizer_for_schedulers_and_shares_state():
    raw = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.9)
    optimizer = PreparedOptimizer(raw, accumulation())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert is_scheduler(schedule) and not is_scheduler(optimizer)
    raw.param_groups[0]["params"][0].grad = torch.ones(1, 1)
    optimizer.step()
    schedule.step()
    assert raw.param_groups[0]["lr"] == 0.5
    assert optimizer.state is raw.state and optimizer.state_dict().keys() == raw.state_dict().keys()
    assert optimizer.defaults["momentum"] == 0.9


def test_a_scheduler_steps_with_the_optimizer():
    raw = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    owner = accumulation(sync=False)
    optimizer = PreparedOptimizer(raw, owner)
    schedule = PreparedScheduler(torch.optim.lr_scheduler.StepLR(raw, 1, gamma=0.5), [optimizer], owner)
    schedule.step()
    assert schedule.get_last_lr() == [1.0]
    owner.sync, optimizer.step_was_skipped = True, True
    schedule.step()
    assert schedule.get_last_lr() == [1.0]
    optimizer.step_was_skipped = False
    raw.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5] and schedule.state_dict()["last_epoch"] == 1


def test_a_schedule_counted_in_other_batches_is_said_once(caplog):
    log.forget_warnings()
    raw = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(raw, max_lr=1.0, epochs=5, steps_per_epoch=100)
    for _ in range(2):
        compare_lengths(schedule, [(100, 50)], steps=1, width=2)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "500 steps long (5 x 100 batches)" in said[0] and "250 optimizer steps" in said[0]
    compare_lengths(schedule, [(100, 100)], steps=1, width=1)
    assert len(caplog.records) == 1


def test_a_schedule_of_another_optimizer_is_said_once(caplog):
    log.forget_warnings()
    scheduled = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    prepared = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 1)
    wrapper = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    wrapper.base_optimizer = scheduled  # as SAM and Lookahead have it
    for optimizers in ([], [scheduled, prepared], [wrapper]):
        warn_of_other_optimizer(schedule, optimizers)
    assert not caplog.records
    for _ in range(2):
        warn_of_other_optimizer(schedule, [prepared])
    (record,) = caplog.records
    assert "StepLR changes the learning rate of an optimizer that was not prepared" in record.getMessage()


def test_rebinding_follows_names_when_a_strategy_replaces_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = parameter_names([model])
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    rebind(optimizer, before, [model])
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, model.parameters()))


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(PrepareError, match=r"\[optimizer-parameters\]"):
        rebind(optimizer, parameter_names([nn.Linear(1, 1)]), [nn.Linear(1, 1)])


def test_states_follow_replaced_parameters():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    before = parameter_names([model])
    model.weight = nn.Parameter(model.weight.detach().clone())
    rebind(optimizer, before, [model])
    assert optimizer.state.keys() == {model.weight, model.bias}
    assert optimizer.state[model.weight] is state


@pytest.mark.parametrize(("value_is_strided", "gradient_is_strided"), [(True, False), (False, True)])
def test_a_fused_step_never_sees_a_layout_that_is_not_contiguous(value_is_strided, gradient_is_strided):
    """torch's fused kernels on the CPU would change other elements than they should."""

    def tensor(is_strided):
        values = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
        return values.t().contiguous().t() if is_strided else values

    results = []
    for fused in (False, True):
        parameter = nn.Parameter(tensor(value_is_strided))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
        suit_fused(OptimizerAdapter(optimizer))
        parameter.grad = tensor(gradient_is_strided)
        optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)
    strided = torch.optim.AdamW([nn.Parameter(tensor(True))])
    suit_fused(OptimizerAdapter(strided))
    # A checkpoint of a run whose parameter was contiguous has the option on.
    state = strided.state_dict()
    state["param_groups"][0]["fused"] = True
    strided.load_state_dict(state)
    strided.param_groups[0]["params"][0].grad = tensor(True)
    strided.step()
    assert strided.param_groups[0]["fused"] is False


def test_clipping_equals_torch():
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        (model(torch.ones(2, 3)) * 9).sum().backward()
    norm = clip_grad_norm(ours.parameters(), 1.0)
    assert norm == torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


def test_a_norm_that_is_not_finite_can_be_an_error():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = torch.tensor(27.0).sqrt()
    assert clip_grad_norm(parameters, 1.0, error_if_nonfinite=True) == norm
    parameters[1].grad.fill_(torch.inf)
    with pytest.raises(TrainError, match=r"\[clip-nonfinite\](?s:.)*1 of 2 gradients"):
        clip_grad_norm(parameters, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(parameters[0].grad, torch.full((2,), 3.0) / norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_sharded_gradients_has_the_dtype_of_torch(dtype):
    """The norm of the second gradient is infinite in float16."""
    gradients = [torch.full((4, 3), 1.23, dtype=dtype), torch.full((4, 3), 1e5)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, sharded = [], []
        for gradient in gradients:
            whole.append(nn.Parameter(torch.zeros_like(gradient)))
            whole[-1].grad = gradient.clone()
            sharded.append(nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)])))
            sharded[-1].grad = distribute_tensor(gradient, mesh, [Shard(0)])
        norm = clip_grad_norm(sharded, 1.0)
        want = torch.nn.utils.clip_grad_norm_(whole, 1.0)
        assert norm == want and norm.dtype == want.dtype == torch.float32
        for ours, theirs in zip(sharded, whole, strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad)
    finally:
        dist.destroy_process_group()


def test_a_parameter_whose_first_gradient_comes_late_is_stepped():
    """torch's fused SGD would stop at the momentum that it lacks."""
    found = []
    for fuse in (False, True):
        torch.manual_seed(0)
        net = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fuse)
        suit_fused(OptimizerAdapter(optimizer))
        for used in (1, 2, 2):
            sum(layer(torch.ones(1, 2)).sum() for layer in net[:used]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach() for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
