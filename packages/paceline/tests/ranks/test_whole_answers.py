"""Numbers that a script reads of gradients and parameters, what it draws into them, and its hooks on gradients: the values of
one process under every plan that divides them."""

import io
import logging
import math

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, CheckpointError

DIVIDED = [(2, {"zero": 2}), (2, {"shard": 2}), (3, {"shard": 3})]
WHOLE = [(2, {"replicate": 2}), (2, {"zero": 1}), (2, {"zero": 2}), (3, {"replicate": 3})]


class Plain:
    """The same script in plain PyTorch."""

    def prepare(self, *objects):
        return objects

    def backward(self, loss):
        loss.backward()

    def unwrap_model(self, model):
        return model

    def get_state_dict(self, model):
        return model.state_dict()


def started(plan, change=None, rows=36, window=1, kind=torch.optim.SGD):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    if change is not None:
        change(model)
    x = torch.randn(rows, 4, dtype=torch.float64)
    batches = DataLoader(TensorDataset(x, torch.arange(rows) % 3), 12)
    accelerator = Plain()
    if plan is not None:
        accelerator = Accelerator("no", window, cpu=True, split_batches=True, plan=plan)
    optimizer = kind(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, batches)


def weights(accelerator, model):
    return [value for entry in accelerator.get_state_dict(model).values() for value in entry.flatten().tolist()]


def numbers_read(plan):
    accelerator, model, optimizer, batches = started(plan)
    numbers = []
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        gradients = [parameter.grad for parameter in model.parameters()]
        numbers.append(math.sqrt(sum(gradient.norm().item() ** 2 for gradient in gradients)))
        numbers.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
        numbers += [float(gradient.abs().max()) for gradient in gradients]
        numbers.append(float(any(gradient.sum() > 0.01 for gradient in gradients)))
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            numbers += [parameter.detach().mean().item(), parameter.data.std().item(), parameter.min().item()]
    return numbers


def numbers_drawn(plan):
    accelerator, model, optimizer, batches = started(plan)
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.rand_like(parameter), alpha=0.01)
    inner = accelerator.unwrap_model(model)
    nn.init.trunc_normal_(inner[0].weight)
    inner[0].bias.data.uniform_(-1, 1, generator=generator)
    inner[2].reset_parameters()
    return [*weights(accelerator, model), float(torch.rand(()))]


@pytest.mark.parametrize("script", [numbers_read, numbers_drawn])
def test_divided_tensors_give_the_numbers_of_whole_ones(script):
    expected = script(None)
    for width, plan in DIVIDED:
        for numbers in run_ranks(script, width, args=(plan,)):
            assert numbers == pytest.approx(expected, rel=1e-9), plan


def clamped(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def masked(model):
    mask = torch.tensor([1.0, 0, 1, 0, 1], dtype=torch.float64)[:, None]
    model[0].weight.register_hook(lambda gradient: gradient * mask)


def scaled_by_norm(model):
    """Both kinds of hooks on one parameter, in the order in which autograd calls them."""
    model[2].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm().item()))

    def clamp(parameter):
        parameter.grad.clamp_(-0.02, 0.02)

    model[2].weight.register_post_accumulate_grad_hook(clamp)


def hooked(plan, change, before=False, **options):
    """Hooks that come before `prepare`, or after it."""
    accelerator, model, optimizer, batches = started(plan, change if before else None, **options)
    if not before:
        change(accelerator.unwrap_model(model))
    return accelerator, model, optimizer, batches


def one_pass_each(plan, change, before):
    accelerator, model, optimizer, batches = hooked(plan, change, before, rows=35)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return weights(accelerator, model)


def two_passes_each(plan, change, before):
    """Passes that add up; hooks that come after `prepare`, between forward and backward, and go."""
    accelerator, model, optimizer, batches = hooked(plan, change, before)
    norms = []
    inner = accelerator.unwrap_model(model)
    for number, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        if number == 0:
            handle = inner[0].bias.register_hook(lambda gradient: norms.append(gradient.norm().item()))
        accelerator.backward(loss)
        accelerator.backward(F.cross_entropy(model(-x), y) + (inner[0].weight ** 2).sum())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            handle.remove()
    assert len(norms) == 4
    return [*weights(accelerator, model), *norms]


def in_windows(plan, change, before):
    accelerator, model, optimizer, batches = hooked(plan, change, before, window=2)
    for number, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        if plan is None:
            (loss / (2 if number < 2 else 1)).backward()
            if number == 0:
                continue
        else:
            with accelerator.accumulate(model):
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights(accelerator, model)


@pytest.mark.parametrize("script", [one_pass_each, two_passes_each, in_windows])
@pytest.mark.parametrize("change", [clamped, masked, scaled_by_norm])
def test_hooks_on_gradients_get_the_mean_of_all_ranks(script, change):
    expected = script(None, change, True)
    for before, plans in ((True, WHOLE), (False, DIVIDED)):
        for width, plan in plans:
            for numbers in run_ranks(script, width, args=(plan, change, before)):
                assert numbers == pytest.approx(expected, rel=1e-9), plan


def told_when_saved(how):
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("paceline.parallel").addHandler(handler)
    accelerator, model, *_ = started({"shard": 2})
    state = how(accelerator, model)
    if torch.distributed.get_rank() == 0:
        torch.save(state, io.BytesIO())
    return len(messages)


@pytest.mark.parametrize(
    ("how", "count"),
    [
        (lambda _, model: model.state_dict(), 1),
        (lambda accelerator, model: accelerator.get_state_dict(model), 0),
    ],
)
def test_a_file_of_one_ranks_parts_is_told_once(how, count):
    assert run_ranks(told_when_saved, 2, args=(how,)) == [count, 0]


def read_from_one_rank(folder):
    """Each rank reads its own file; then that of rank 0."""
    accelerator, model, _, batches = started({"shard": 2})
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
    gradient = accelerator.unwrap_model(model)[0].weight.grad
    torch.save(gradient, f"{folder}/{accelerator.process_index}")
    accelerator.wait_for_everyone()
    codes = []
    for name in (accelerator.process_index, 0):
        try:
            read = torch.load(f"{folder}/{name}", weights_only=True)
            codes.append(torch.equal(read.to_local(), gradient.to_local()))
        except CheckpointError as error:
            codes.append(error.code)
    return codes


def test_the_part_of_another_rank_is_not_read(tmp_path):
    assert run_ranks(read_from_one_rank, 2, args=(str(tmp_path),)) == [[True, True], [True, "checkpoint-part"]]


def read_states_of_one_rank(plan, kind, folder):
    """Each rank reads its own file of optimizer states and goes on; then it reads that of rank 0."""
    accelerator, model, optimizer, batches = started(plan, kind=kind)
    for x, y in batches:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    torch.save(optimizer.state_dict(), f"{folder}/{accelerator.process_index}")
    accelerator.wait_for_everyone()
    codes = []
    for name in (accelerator.process_index, 0):
        try:
            optimizer.load_state_dict(torch.load(f"{folder}/{name}", weights_only=True))
            codes.append("loaded")
        except CheckpointError as error:
            codes.append(error.code)
    return codes


@pytest.mark.parametrize(
    "plan", [{"shard": 2}, {"zero": 1, "shard": 2}, {"zero": 2, "shard": 2}], ids=["shard", "zero 1", "zero 2"]
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor], ids=["rows", "parameters"])
def test_states_of_another_rank_are_not_read(plan, kind, tmp_path):
    ended = run_ranks(read_states_of_one_rank, 2, args=(plan, kind, str(tmp_path)))
    assert ended == [["loaded", "loaded"], ["loaded", "checkpoint-part"]]
