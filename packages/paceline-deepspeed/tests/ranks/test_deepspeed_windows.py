"""Windows of DeepSpeed's engine that a script bends: cleared, resized, ended late; and two engines whose losses meet."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import ConfigError
from paceline.testing import run_ranks
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.pipe import PipelineModule

ROWS, STAGES = 12, (0, 1, 2, 3)
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def judge() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, 8, generator=draw), torch.randint(0, 4, (ROWS,), generator=draw)) for _ in range(steps)]


def start(stage: int, window: int = 1, net: nn.Module | None = None, **keys):
    keys = {"train_batch_size": ROWS, "optimizer": ADAM, "gradient_clipping": 0.0, **keys}
    keys |= {"gradient_accumulation_steps": window, "zero_optimization": {"stage": stage}}
    return initialize(model=net or model(), config=keys)[0]


def own(engine, rows: torch.Tensor, number: int = 0) -> torch.Tensor:
    """This rank's rows of a micro-batch."""
    size = engine.train_micro_batch_size_per_gpu()
    at = (number * engine.dp_world_size + engine.get_data_parallel_rank()) * size
    return rows[at : at + size]


def loss(engine, x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
    return cross_entropy(engine(own(engine, x, number)), own(engine, y, number))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)


def plain(steps: int = 3) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = adamw(net)
    for x, y in batches(steps):
        cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_gradients_that_are_cleared_inside_a_window_leave_nothing() -> None:
    def work() -> list[float]:
        found = []
        for stage in STAGES:
            engine = start(stage, 2)
            for x, y in batches(3):
                engine.backward(7 * loss(engine, x, y, 0))
                engine.zero_grad()
                for number in range(2):
                    engine.backward(loss(engine, x, y, number))
                    engine.step()
            found.append(apart(engine.module_state_dict(), plain()))
        return found

    assert max(run_ranks(work, 2)[0]) < 2e-6


def test_a_window_that_turns_out_to_end_is_averaged() -> None:
    def told_late(engine, x, y) -> None:
        for number in range(2):
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(loss(engine, x, y, number))
            engine.set_gradient_accumulation_boundary(number == 1)
            engine.step()

    def all_held(engine, x, y) -> None:
        engine.set_gradient_accumulation_boundary(True)
        for number in range(2):
            with engine.no_sync():
                engine.backward(loss(engine, x, y, number))
        engine.step()

    def work() -> list[float]:
        found = []
        for stage in STAGES:
            for way in (told_late, all_held):
                engine = start(stage, 2)
                for x, y in batches(3):
                    way(engine, x, y)
                found.append(apart(engine.module_state_dict(), plain()))
        return found

    assert max(max(each) for each in run_ranks(work, 2)) < 2e-6


def test_another_batch_begins_a_window_of_its_own(tmp_path) -> None:
    def lengths(engine, sizes: list[int | None]) -> list[int]:
        """How many micro-batches each window takes."""
        found = []
        for size in sizes:
            if size is not None:
                engine.set_train_batch_size(size)
            found.append(0)
            while not found[-1] or not engine.was_step_applied():
                engine.backward(loss(engine, *batches(1)[0], 0))
                engine.step()
                found[-1] += 1
        return found

    def work() -> None:
        engine = start(2, 2)
        assert lengths(engine, [None, 18, None, 12, 24]) == [2, 3, 3, 2, 4]
        assert engine.global_samples == 12 + 18 + 18 + 12 + 24
        engine.backward(loss(engine, *batches(1)[0], 0))
        engine.step()
        with pytest.raises(ConfigError, match=r"deepspeed-batch-size[\s\S]*1 of its micro-batches was divided by 4"):
            engine.set_train_batch_size(6)
        engine.set_train_batch_size(24)  # the same as before
        engine.save_checkpoint(tmp_path)
        other = start(1, 4, train_batch_size=24)
        other.load_checkpoint(tmp_path)
        assert lengths(other, [None, None]) == [3, 4]

    run_ranks(work, 2)


def test_a_pipeline_steps_with_each_batch_whatever_its_size() -> None:
    def work() -> list[tuple[bool, int]]:
        keys = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "optimizer": ADAM}
        net = PipelineModule(list(model()), num_stages=2, loss_fn=cross_entropy)
        engine = initialize(model=net, config=keys)[0]
        data, found = ((x[:3], y[:3]) for x, y in batches(20)), []
        for size in (6, 9, 3, 6, 12):
            engine.set_train_batch_size(size)
            engine.train_batch(data)
            found.append((engine.was_step_applied(), engine.micro_steps))
        return found

    assert run_ranks(work, 2)[0] == [(True, 2), (True, 5), (True, 6), (True, 8), (True, 12)]


def test_two_engines_whose_losses_meet() -> None:
    def work() -> list[tuple[float, float]]:
        found = []
        for stage in STAGES:
            maker, critic = start(stage), start(stage, net=judge())
            net, other = model(), judge()
            steps, others = adamw(net), adamw(other)
            for x, _ in batches(3):
                made = maker(own(maker, x))
                critic.backward(critic(made.detach()).square().mean())
                critic.step()
                maker.backward(critic(made).mean() - 0.1 * made.square().mean())
                maker.step()
                critic.zero_grad()  # the maker's loss has gone through it
                made = net(x)
                other(made.detach()).square().mean().backward()
                others.step()
                others.zero_grad()
                (other(made).mean() - 0.1 * made.square().mean()).backward()
                steps.step()
                steps.zero_grad()
                others.zero_grad()
            pairs = ((maker, net), (critic, other))
            found.append(tuple(apart(a.module_state_dict(), b.state_dict()) for a, b in pairs))
        return found

    for stage, differences in zip(STAGES, run_ranks(work, 2)[0], strict=True):
        assert max(differences) < 2e-6, stage


def test_a_rank_that_comes_late_to_a_save_is_waited_for(tmp_path) -> None:
    def work(loads: bool) -> None:
        engine = start(0)
        for number, (x, y) in enumerate(batches(4)):
            engine.backward(loss(engine, x, y, 0))
            engine.step()
            if number == 0:
                engine.save_checkpoint(tmp_path, "first")
        if loads:
            engine.load_checkpoint(tmp_path, "first")
        else:
            engine.backward(loss(engine, *batches(1)[0], 0))
        time.sleep(1.5 * engine.global_rank)
        assert engine.save_checkpoint(tmp_path, "second")

    for loads in (True, False):
        run_ranks(work, 2, args=(loads,))
