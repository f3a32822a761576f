"""Batch norms give the numbers of one process: every kind, uneven batches, copies, and who does not communicate."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PlanError

SAMPLES, BATCH, ACCUMULATE = 13, 6, 2  # the last batch has one sample: two of three ranks have none


class NormAndReLU(nn.BatchNorm2d):
    """A subclass with a forward of its own, as timm has them."""

    def forward(self, input):
        return super().forward(input).relu()


class Norms(nn.Module):
    """Every kind of batch norm, each after a layer that is trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        kinds = [
            nn.BatchNorm2d(4, momentum=None),
            NormAndReLU(4),
            nn.BatchNorm2d(4, affine=False),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.LazyBatchNorm2d(),
        ]
        kinds[-1](torch.ones(2, 4, 2, 2))
        kinds[-1].reset_running_stats()
        self.images = nn.ModuleList(kinds)
        self.rows, self.volumes, self.frozen = nn.BatchNorm1d(4, momentum=0.3), nn.BatchNorm3d(4), nn.BatchNorm2d(4)
        self.between = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in kinds)
        self.out = nn.Linear(4, 3)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        x = self.first(x)
        for norm, layer in zip(self.images, self.between, strict=True):
            x = layer(norm(x + 0.1 * x.square()))
        x = self.rows(x.flatten(2)).unflatten(2, (4, 4))
        x = self.volumes(x.unsqueeze(2)).squeeze(2)
        return self.out(self.frozen(x).mean((2, 3)))


def data():
    generator = torch.Generator().manual_seed(5)
    images = 100 + 3 * torch.randn(SAMPLES, 1, 4, 4, generator=generator)  # far from 0: no place for cancellation
    return TensorDataset(images, torch.randn(SAMPLES, 3, generator=generator))


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


def made():
    torch.manual_seed(3)
    model = Norms()
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def plain():
    """One process, without Paceline."""
    model, optimizer = made()
    batches = [data()[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]
    for start in range(0, len(batches), ACCUMULATE):
        window = batches[start : start + ACCUMULATE]
        for x, y in window:
            (loss_of(model(x), y) * len(x) / sum(len(each) for each, _ in window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train():
    model, optimizer = made()
    keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, split_batches=True, cpu=True)
    net = model
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), BATCH))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    assert list(state) == keys and [type(module) for module in net.modules()] == kinds
    if dist.get_rank() == 0:  # alone, so that whoever communicated would wait for ever
        net.eval()(torch.ones(2, 1, 4, 4))
        deepcopy(net).train()(torch.randn(2, 1, 4, 4))
    dist.barrier()
    return state, accelerator.plan.explain()


def test_every_kind_has_the_numbers_of_one_process() -> None:
    want = plain()
    for state, explained in run_ranks(train, world=3):
        for name, value in want.items():
            torch.testing.assert_close(state[name], value, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert "batch_norm.statistics = synced" in explained and "images.0" in explained


def local(option):
    model, optimizer = made()
    accelerator = Accelerator(options={"batch_norm": option}, cpu=True)
    net = model
    net.out.register_forward_hook(lambda *_: print(end="" if torch.rand(()) else " "))  # random, and nothing says so
    model, optimizer = accelerator.prepare(model, optimizer)
    ones = torch.full((2, 1, 4, 4), 1.0 + dist.get_rank())
    with accelerator.join_uneven_inputs([model]):
        for _ in range(1 + dist.get_rank()):  # another number of steps on each rank
            model(ones).sum().backward()
    x = torch.randn(2, 1, 4, 4, requires_grad=True)
    try:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    except PlanError as error:
        return error.code
    slope.square().sum().backward()
    return accelerator.plan.explain()


@pytest.mark.parametrize("statistics", ["local", "synced"])
def test_each_rank_for_itself_where_it_is_asked_for_and_where_ranks_take_other_numbers_of_steps(statistics) -> None:
    for answer in run_ranks(local, world=2, args=({"statistics": statistics},)):
        if statistics == "synced":
            assert answer == "batch-norm-double-backward"
        else:
            assert "random_layers(Norms) = out (Linear)  <- derived (seen in the first pass)" in answer
            assert "batch_norm.statistics = local" in answer and "other numbers than on one process" in answer


class Counted(nn.Linear):
    """Counts in a buffer, faster on later ranks."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, input):
        self.count += 1 + dist.get_rank()
        return super().forward(input)


def counts() -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Counted()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    seen = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(net.count.item())
    return seen


def test_every_window_begins_with_the_buffers_of_rank_0() -> None:
    assert run_ranks(counts, world=2) == [[1, 2, 3, 4, 5, 6], [2, 2, 4, 4, 6, 6]]


def update_averages(made_when: str) -> dict[str, torch.Tensor]:
    """torch's `update_bn` over a prepared loader, for an average that was never prepared."""
    model, optimizer = made()
    accelerator = Accelerator(split_batches=True, cpu=True)
    average = AveragedModel(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), BATCH))
    if made_when == "of what prepare returned":
        average = AveragedModel(model)
    elif made_when == "of the module inside":
        average = AveragedModel(accelerator.unwrap_model(model))
    for x, y in loader:
        accelerator.backward(loss_of(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    update_bn(iter(loader) if made_when == "before" else loader, average)
    state = {name.removeprefix("module."): value.clone() for name, value in average.state_dict().items()}
    if accelerator.is_main_process:  # alone, so that whoever communicated would wait for ever
        average.train()(torch.randn(2, 1, 4, 4))
    accelerator.wait_for_everyone()
    return {name: value for name, value in state.items() if "running" in name}


@pytest.mark.parametrize("made_when", ["before", "of what prepare returned", "of the module inside"])
def test_update_bn_of_an_average_has_the_statistics_of_one_process(made_when: str) -> None:
    (want,) = run_ranks(update_averages, world=1, args=(made_when,))
    assert want
    for got in run_ranks(update_averages, world=3, args=(made_when,)):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def window_ends_with_another_model() -> list[float]:
    """The gradients of the first micro-batch are averaged by the first pass of the last one, before the second model's pass."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    other, normed = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    other, normed = accelerator.prepare(other, normed)
    accelerator.unwrap_model(normed)[1].eval()
    x = torch.arange(16.0).reshape(4, 4)
    for _ in range(2):
        with accelerator.accumulate(other, normed):
            losses = [other(x).mean(), normed(x).square().mean()]
            for loss in losses:
                accelerator.backward(loss)
    return accelerator.unwrap_model(normed)[0].weight.grad.flatten().tolist()


def test_buffers_in_a_graph_may_be_sent_before_its_pass() -> None:
    (expected,) = run_ranks(window_ends_with_another_model, 1)
    assert run_ranks(window_ends_with_another_model, 2) == [pytest.approx(expected)] * 2
