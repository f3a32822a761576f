"""A new strategy, launcher, tracker, store or config dialect is one new file: a registry finds it, and users of it take it."""

from __future__ import annotations

import importlib
import json
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

DIALECT = """
from paceline.config.dialects import ConfigDialect, Translation
from paceline.config.given import Choice, Given

class Toy(ConfigDialect):
    name = "toy"
    aliases = {"toy_hosts": "nodes"}
    variables = {"TOY_PRECISION": "mixed_precision"}
    flags = {"toy_stage": True, "toy_colour": True}

    def names(self):
        return ["toy_stage", "toy_colour"]

    def knows(self, given):
        return given.name == "toy_stage"

    def translate(self, given, nodes):
        found = Translation()
        for each in given:
            name = "zero" if each.name == "toy_stage" else each.name
            found.given.append(Given(name, each.value, each.source, each.where))
        return found

    def judge(self, given):
        if given.name == "toy_colour":
            return Choice(given.name, given.value, given.source, given.where, "no effect here: toys are grey")

DIALECT = Toy()
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


def test_a_config_dialect(add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from paceline.cli.main import main

    add("paceline.config", DIALECT)
    monkeypatch.setenv("TOY_PRECISION", "bf16")
    file = tmp_path / "toy.yaml"
    file.write_text("toy_stage: 2\n")
    words = ["--toy_hosts", "2", "--toy-colour", "red", "--config", str(file), "--shard", "auto", "--json"]
    assert main(["explain", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    settings = {row["field"]: (row["value"], row["where"]) for row in told["settings"]}
    assert settings["nodes"] == (2, "--toy_hosts")
    assert settings["zero"] == (2, f"{file}:1")
    assert settings["mixed_precision"] == ("bf16", "TOY_PRECISION")
    assert told["notices"] == ["toy_colour (--toy-colour) has no effect: toys are grey."]


def test_one_added_by_hand() -> None:
    from paceline.parallel.strategy import STRATEGIES

    STRATEGIES.add("mine", object())
    assert "mine" in STRATEGIES.names()
    STRATEGIES.remove("mine")
    assert "mine" not in STRATEGIES.names()
