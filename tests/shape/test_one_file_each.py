"""A new strategy, launcher, tracker, store or precision is one new file: the registry finds it, and what uses it takes it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.base import registry

STRATEGY = """
from paceline.parallel.strategy import Strategy

class Toy(Strategy):
    name, stage = "toy", 5

    def wanted(self, plan):
        return True

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

PRECISION = """
from contextlib import contextmanager

from paceline.precision.policy import Precision

class Toy(Precision):
    entered = []

    def autocast(self, device, **options):
        return self.noted(super().autocast(device, **options))

    @contextmanager
    def noted(self, context):
        self.entered.append(self.name)
        with context:
            yield

import torch

PRECISION = Toy("toy", torch.bfloat16)
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


def test_a_precision(add: Add) -> None:
    import torch

    from paceline import Accelerator, ConfigError
    from paceline.config import resolve_run
    from paceline.config.schema import json_schema
    from paceline.config.settings import PRECISIONS, settings_of

    kind = settings_of()["mixed_precision"].kind
    assert kind.metavar == "no|fp16|bf16"
    with pytest.raises(ConfigError, match="no, fp16 or bf16"):
        Accelerator(mixed_precision="toy", cpu=True)
    add("paceline.precision", PRECISION)
    assert (kind.metavar, kind.expected) == ("toy|no|fp16|bf16", "toy, no, fp16 or bf16")
    assert "toy" in json_schema()["properties"]["mixed_precision"]["enum"]
    assert resolve_run({}, {"PACELINE_MIXED_PRECISION": "Toy"}).settings.mixed_precision == "toy"

    accelerator = Accelerator(mixed_precision="toy", cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert accelerator.mixed_precision == "toy" and PRECISIONS.get("toy").entered == ["toy"]


def test_one_added_by_hand() -> None:
    from paceline.parallel.strategy import STRATEGIES

    STRATEGIES.add("mine", object())
    assert "mine" in STRATEGIES.names()
    STRATEGIES.remove("mine")
    assert "mine" not in STRATEGIES.names()
