"""A new strategy, launcher, tracker or store is one new file: the registry finds it, and what uses it takes it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.base import registry

STRATEGY = """
from contextlib import contextmanager

from torch import nn

from paceline.parallel.strategy import Runner, Strategy


class Twice(Runner):
    begins, first_blocks = (0,), ("",)

    def __init__(self, model):
        super().__init__(nn.Sequential(model), model)
        self.calls = []

    def bind(self, optimizer):
        self.calls.append("bind")
        return []

    @contextmanager
    def hold_gradients(self):
        self.calls.append("hold")
        yield

    def finish_reduction(self):
        self.calls.append("finish")

    def owned_elsewhere(self):
        self.calls.append("norm")
        return set()

    def gather_state(self, state):
        return {**state, "toy": 1}

    def forward_backward(self, batch, loss_fn, factor, mean):
        loss = loss_fn(self.wrapped(*batch.inputs), batch.target) + loss_fn(self.wrapped(*batch.inputs), batch.target)
        (loss * factor).backward()
        return loss.detach()

    def forward_backward_each(self, parts, loss_fn, factor, mean):
        raise NotImplementedError

    def follow(self, phase):
        pass


class Toy(Strategy):
    name, stage = "toy", 5

    def wanted(self, plan):
        return True

    def apply(self, model, context):
        return Twice(model)

STRATEGY = Toy()
"""

TRACKER = """
class Toy:
    name = "toy"
    seen = []

    def __init__(self, folder):
        self.folder = folder

    def start(self, run, config):
        self.seen.append(run)

    def log(self, values, step=None):
        self.seen.append((values, step))

    def finish(self, status="finished"):
        self.seen.append(status)

TRACKER = Toy
"""

STORE = """
class Toy:
    def serves(self, path):
        return path.startswith("toy://")

STORE = Toy()
"""

LAUNCHER = """
class Toy:
    name = "toy"

    def available(self):
        return ""

    def render(self, job):
        return ("toy", job)

    def submit(self, rendered):
        return rendered

LAUNCHER = Toy()
"""

Add = Callable[[str, str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Puts a file `toy.py` into a package for the length of a test."""

    def put(package: str, source: str) -> None:
        (tmp_path / "toy.py").write_text(source, encoding="utf-8")
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path)])
        registry._modules.cache_clear()
        added.append((module, f"{package}.toy"))

    added: list[tuple[Any, str]] = []
    yield put
    registry._modules.cache_clear()
    for module, name in added:
        sys.modules.pop(name, None)
        vars(module).pop("toy", None)


def test_a_strategy(add: Add) -> None:
    from paceline.parallel.strategy import STRATEGIES
    from paceline.plan.plan import Plan
    from paceline.plan.resolve import resolve

    assert "toy" not in resolve(Plan(), [], STRATEGIES).strategies
    add("paceline.parallel", STRATEGY)
    assert "toy" in STRATEGIES.names()
    assert "toy" in resolve(Plan(), [], STRATEGIES).strategies


def test_a_strategy_in_a_loop(add: Add) -> None:
    """What a strategy does reaches the loop, clipping and the state without a line about it anywhere else."""
    import torch
    from torch import nn

    from paceline import Accelerator, PlanError

    add("paceline.parallel", STRATEGY)
    accelerator, module = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    assert isinstance(model, nn.Sequential) and accelerator.unwrap_model(model) is module
    batch = (torch.ones(3, 2), torch.zeros(3, 1))
    loss = accelerator.forward_backward(model, batch, nn.functional.mse_loss)
    torch.testing.assert_close(loss, 2 * nn.functional.mse_loss(module(batch[0]), batch[1]).detach())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with pytest.raises(PlanError, match="backward-pipeline"):
        accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
    assert accelerator.get_state_dict(model)["toy"] == 1
    (applied,) = accelerator._prepared.models[0].chain
    assert applied.calls == ["bind", "hold", "finish", "norm"]


def test_a_tracker(add: Add, tmp_path: Path) -> None:
    from paceline.observe.trackers.group import Trackers

    add("paceline.observe.trackers", TRACKER)
    trackers = Trackers("toy", tmp_path)
    trackers.start("run")
    trackers.log({"loss": 1.0}, step=3)
    toy = trackers.get_tracker("toy")
    trackers.finish()
    assert toy.seen == ["run", ({"loss": 1.0}, 3), "finished"]


def test_a_store(add: Add) -> None:
    from paceline.base.errors import CheckpointError
    from paceline.checkpoint.store import store_for

    with pytest.raises(CheckpointError):
        store_for("toy://bucket/run")
    add("paceline.checkpoint", STORE)
    assert type(store_for("toy://bucket/run")).__name__ == "Toy"
    assert type(store_for("/tmp/run")).__name__ != "Toy"


def test_a_launcher(add: Add) -> None:
    from paceline.launch.launcher import LAUNCHERS

    assert "toy" not in LAUNCHERS.names()
    add("paceline.launch", LAUNCHER)
    assert LAUNCHERS.get("toy").render("job") == ("toy", "job")


def test_one_added_by_hand() -> None:
    from paceline.parallel.strategy import STRATEGIES

    STRATEGIES.add("mine", object())
    assert "mine" in STRATEGIES.names()
    STRATEGIES.remove("mine")
    assert "mine" not in STRATEGIES.names()
