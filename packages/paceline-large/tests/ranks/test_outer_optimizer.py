"""`LocalSGD` with an outer optimizer (DiLoCo) against loops that simulate the ranks on one process, in float64."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, ConfigError, LocalSGD, PlanError

ROWS = torch.randn(48, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
MEAN = partial(torch.optim.SGD, lr=1.0)
BATCH, EVERY = (
    4,
    3,
)  # of each rank; at a width of two 6 batches an epoch, so that averages lie within epochs and at their ends


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def inner_of(name, model):
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_hand(width, inner="adamw", every=EVERY, outer=OUTER, epochs=2):
    """The algorithm as its paper has it, with the ranks one after the other."""
    workers = [net() for _ in range(width)]
    optimizers = [inner_of(inner, worker) for worker in workers]
    shared = net()
    outer_optimizer = outer(shared.parameters())

    def outer_step():
        for place, parameter in enumerate(shared.parameters()):
            ends = torch.stack([list(worker.parameters())[place].detach() for worker in workers])
            parameter.grad = (parameter.detach() - ends).mean(0)
        outer_optimizer.step()
        for worker in workers:
            worker.load_state_dict(copy.deepcopy(shared.state_dict()))

    steps = 0
    for _ in range(epochs):
        for rows in ROWS.split(BATCH * width):
            for worker, optimizer, own in zip(workers, optimizers, rows.chunk(width), strict=True):
                worker(own).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if steps % every == 0:
                outer_step()
        if steps % every:
            outer_step()
    return flat(shared)


def train(inner="adamw", every=EVERY, outer=OUTER, save_at=None, resumed=None):
    """Trains two epochs; with `save_at` it ends after this step, whose state is saved in a folder: (step, folder)."""
    accelerator = Accelerator(cpu=True)
    model = net()
    loader = DataLoader(TensorDataset(ROWS), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, inner_of(inner, model), loader)
    local = LocalSGD(accelerator, model, every, outer=outer)
    assert "local_sgd = " in accelerator.plan.explain()
    if resumed is not None:
        accelerator.load_state(resumed)
    while loader.position.epoch < 2:
        with local:
            for (rows,) in loader:
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                if save_at is not None and local.steps == save_at[0]:
                    accelerator.save_state(save_at[1])
                    return None
    return flat(accelerator.unwrap_model(model))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_the_algorithm_of_the_paper(world):
    for weights in run_ranks(train, world=world):
        torch.testing.assert_close(weights, by_hand(world), rtol=0, atol=1e-13)


@pytest.mark.parametrize("world", [2, 3])
def test_an_outer_step_of_one_after_each_step_is_plain_training(world):
    def plain():
        model = net()
        optimizer = inner_of("sgd", model)
        for _ in range(2):
            for rows in ROWS.split(BATCH * world):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    for weights in run_ranks(lambda: train("sgd", 1, MEAN), world=world):
        torch.testing.assert_close(weights, plain(), rtol=0, atol=1e-13)
    # And averages of parameters are outer steps of one.
    averaged = run_ranks(lambda: train("adamw", EVERY, None), world=world)[0]
    torch.testing.assert_close(averaged, by_hand(world, outer=MEAN), rtol=0, atol=1e-13)


@pytest.mark.parametrize("step", [3, 4, 8])
def test_a_run_goes_on_exactly_between_two_averages_too(tmp_path, step):
    folder = str(tmp_path / "state")
    run_ranks(lambda: train(save_at=(step, folder)), world=2)
    whole = run_ranks(train, world=2)
    rest = run_ranks(lambda: train(resumed=folder), world=2)
    for ours, other in zip(rest, whole, strict=True):
        assert torch.equal(ours, other)


def test_a_run_goes_on_at_another_width(tmp_path):
    folder = str(tmp_path / "state")
    run_ranks(lambda: train("sgd", save_at=(3, folder)), world=2)
    assert all(torch.isfinite(weights).all() for weights in run_ranks(lambda: train("sgd", resumed=folder), world=3))


def test_after_an_average_the_saved_optimizer_is_that_of_one_rank(tmp_path):
    """Each rank has moments of its own, of which a checkpoint must not be a mixture; the save says so."""
    folder = str(tmp_path / "state")

    def moments():
        messages = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("paceline.optim").addHandler(handler)
        accelerator = Accelerator(cpu=True)
        model = net()
        loader = DataLoader(TensorDataset(ROWS), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, inner_of("adamw", model), loader)

        def of_all():
            return torch.cat([state["exp_avg"].flatten() for state in optimizer.optimizer.state.values()])

        with LocalSGD(accelerator, model, 2) as local:
            for (rows,) in loader:
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        before = of_all().clone()
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        return before, of_all(), [message for message in messages if "outer=" in message]

    (first, loaded, told), (second, loaded_by_second, _) = run_ranks(moments, world=2)
    assert len(told) == 1
    assert not torch.equal(first, second)
    assert torch.equal(loaded, first) and torch.equal(loaded_by_second, first)


def after_a_pass_without_a_step():
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, inner_of("sgd", model))
    with LocalSGD(accelerator, model, 1, outer=OUTER) as local:
        accelerator.backward(model(ROWS[:8]).square().mean())
        optimizer.step()
        local.step()
        after_step = flat(model).clone()
        accelerator.backward(model(ROWS[:8]).square().mean())
    return after_step.tolist(), flat(model).tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_the_end_takes_no_outer_step_where_no_rank_took_an_inner_one(world):
    """A backward pass alone moves nothing, and the momentum of the outer optimizer should not either."""
    for after_step, at_end in run_ranks(after_a_pass_without_a_step, world):
        assert after_step == at_end


def test_what_is_no_outer_optimizer_is_refused():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    for outer in (OUTER(net().parameters()), lambda parameters: None):
        with pytest.raises(ConfigError) as caught:
            LocalSGD(accelerator, model, 2, outer=outer)
        assert caught.value.code == "local-sgd-outer"


@pytest.mark.parametrize("plan", [{"shard": 2}, {"shard": 2, "zero": 2}, {"shard": 2, "zero": 1}], ids=str)
def test_parameters_that_are_divided_have_no_local_steps(plan):
    def refused():
        accelerator = Accelerator(cpu=True, plan=plan)
        model = nn.Linear(5, 5)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(PlanError, match="local-sgd-plan"):
            LocalSGD(accelerator, model, 2)

    run_ranks(refused, world=2)


def register(model, kind):
    """Registers a hook that depends on the size of the gradient, which is another one in the mean of all ranks."""

    def clamp(parameter):
        parameter.grad.clamp_(-0.05, 0.05)

    for parameter in model.parameters():
        if kind == "register_hook":
            parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        elif kind == "a step in the hook":
            parameter.register_post_accumulate_grad_hook(step_at_once)
        else:
            parameter.register_post_accumulate_grad_hook(clamp)


def step_at_once(parameter):
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook", "a step in the hook"])
@pytest.mark.parametrize("inside", [False, True], ids=["before the block", "inside of it"])
def test_hooks_on_parameters_get_the_gradients_of_the_rank(kind, inside):
    def train():
        accelerator = Accelerator(cpu=True)
        model = net()
        loader = DataLoader(TensorDataset(ROWS), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, inner_of("sgd", model), loader)
        if not inside:
            register(model, kind)
        with LocalSGD(accelerator, model, EVERY) as local:
            if inside:
                register(model, kind)
            for (rows,) in loader:
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        # Afterwards hooks get the mean gradient of all ranks again.
        accelerator.backward(10 * model(ROWS[: 2 * BATCH].chunk(2)[accelerator.process_index]).square().mean())
        return flat(model), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    workers = [net(), net()]
    optimizers = [inner_of("sgd", worker) for worker in workers]
    for worker in workers:
        register(worker, kind)
    for step, rows in enumerate(ROWS.split(2 * BATCH), 1):
        for worker, optimizer, own in zip(workers, optimizers, rows.chunk(2), strict=True):
            worker(own).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % EVERY == 0 or step == 6:
            mean = {name: sum(worker.state_dict()[name] for worker in workers) / 2 for name in workers[0].state_dict()}
            for worker in workers:
                worker.load_state_dict(mean)
    (10 * workers[0](ROWS[: 2 * BATCH]).square().mean()).backward()
    want = torch.cat([parameter.grad.flatten() for parameter in workers[0].parameters()])
    for weights, gradients in run_ranks(train, world=2):
        torch.testing.assert_close(weights, flat(workers[0]), rtol=0, atol=1e-13)
        torch.testing.assert_close(gradients, want, rtol=0, atol=1e-13)
