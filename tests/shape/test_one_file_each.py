"""A strategy, launcher, tracker, store, format, dialect or precision is one new file, which an entry point names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
    def hold_gradients(self, alone=False):
        self.calls.append("hold")
        yield

    def finish_reduction(self):
        self.calls.append("finish")

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

# Ranks along the axis `halves` each hold half of every parameter, or so the planner believes.
AXIS_STRATEGY = """
import torch
import torch.distributed as dist

from paceline.parallel.strategy import AppliedStrategy, Strategy
from paceline.plan.cost import Bytes


class Halved(AppliedStrategy):
    def __init__(self, model, group):
        super().__init__(model)
        model.register_forward_hook(lambda module, args, output: self.summed(output))
        self.group = group

    def summed(self, output):
        total = output.detach().clone()
        dist.all_reduce(total, group=self.group)
        return output - output.detach() + total


class Toy(Strategy):
    name, stage, axes = "toy", 5, ("halves",)

    def wanted(self, plan):
        return plan.layout.halves > 1

    def cost(self, plan, facts, before):
        parts = plan.layout.halves
        return Bytes(before.parameters // parts, before.gradients // parts, before.optimizer // parts, before.activations)

    def apply(self, model, context):
        return Halved(model, context.mesh.group("halves"))

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

CHECKPOINT_FORMAT = """
from paceline.checkpoint.format.checkpoint_format import CheckpointFormat, Summary

class Toy(CheckpointFormat):
    name = "toy"

    def recognises(self, store, folder):
        return store.exists(store.join(folder, "toy.pt"))

    def summary(self, store, folder):
        return Summary(step=7)

    def read(self, store, folder, state, names):
        from paceline_doors.state_translation import StateTranslation

        translation = StateTranslation(state, {"models"}, names)
        translation.add_model("model", self.weights(store, folder, ""))
        translation.set("run", {**state.run.state_dict(), "step": 7})
        return translation.opened()

    def weights(self, store, folder, model):
        from paceline.checkpoint.weights.sources import torch_weights

        return torch_weights([store.join(folder, "toy.pt")]) if self.recognises(store, folder) else None

CHECKPOINT_FORMAT = Toy()
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
    """Installs a distribution for the length of a test: a file `toy.py`, and an entry point that names what it defines."""
    folder = tmp_path / "packages"
    metadata = folder / "toy-1.0.dist-info"
    metadata.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)

    def put(group: str, source: str) -> None:
        (folder / "toy.py").write_text(source, encoding="utf-8")
        (attribute,) = re.findall(r"^([A-Z_]+) = ", source, re.MULTILINE)[-1:]
        (metadata / "entry_points.txt").write_text(f"[{group}]\ntoy = toy:{attribute}\n", encoding="utf-8")
        registry._all_points.cache_clear()

    yield put
    registry._all_points.cache_clear()
    sys.modules.pop("toy", None)


def test_a_strategy(add: Add) -> None:
    from paceline.parallel.strategy import STRATEGIES
    from paceline.plan.plan import Plan
    from paceline.plan.resolve import resolve

    assert "toy" not in resolve(Plan(), [], STRATEGIES).strategies
    add("paceline.strategies", STRATEGY)
    assert "toy" in STRATEGIES.names()
    assert "toy" in resolve(Plan(), [], STRATEGIES).strategies


def test_a_strategy_in_a_loop(add: Add) -> None:
    """What a strategy does reaches the loop, clipping and the state without a line about it anywhere else."""
    import torch
    from torch import nn

    from paceline import Accelerator, PlanError

    add("paceline.strategies", STRATEGY)
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
    (applied,) = accelerator.run.prepared.models[0].chain.strategies
    assert applied.calls == ["bind", "hold", "finish"]


def test_an_axis(add: Add, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One entry of the table and one strategy: setting, flag, variable, help, checks, mesh, planner and a real run."""
    import torch
    from torch import nn

    from paceline import Accelerator, PlanError
    from paceline.cli.main import main
    from paceline.plan.facts import model_facts
    from paceline.planner.estimate import Need, choose
    from paceline.testing import RankFailed, run_ranks
    from paceline.world.layout import AXES, Axis

    axis = Axis("halves", "Ranks that hold halves.", divides="everything", divides_parameters=True, searched="all")
    monkeypatch.setitem(AXES, "halves", axis)
    monkeypatch.setenv("PACELINE_HALVES", "4")
    assert main(["explain", "--halves", "2", "--json"]) == 0
    rows = {row["field"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert rows["halves"]["value"] == 2 and rows["halves"]["reason"] == "instead of 4 (PACELINE_HALVES)"
    monkeypatch.delenv("PACELINE_HALVES")
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert "Ranks that hold halves. [1]" in capsys.readouterr().out
    with pytest.raises(PlanError, match="the plan needs 3 processes, but there is 1"):
        Accelerator(cpu=True, plan={"halves": 3})

    def run() -> tuple[str, float, list[str], float]:
        accelerator = Accelerator(cpu=True, plan={"halves": 2})
        linear = nn.Linear(2, 1, bias=False)
        nn.init.ones_(linear.weight)
        model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=1.0))
        output = model(torch.ones(1, 2))
        accelerator.backward(output.sum())
        optimizer.step()
        plan = accelerator.plan
        return str(plan.layout), output.item(), list(plan.strategies), linear.weight.sum().item()

    with pytest.raises(RankFailed, match="no strategy serves the axis `halves`"):
        run_ranks(run, 2)
    add("paceline.strategies", AXIS_STRATEGY)
    assert run_ranks(run, 2) == [("halves 2", 4.0, ["toy"], 0.0)] * 2

    facts = model_facts(nn.Linear(1000, 1000))
    alone = choose(Need((facts,)), 2, 2, 10**9)
    assert alone.settings is not None and alone.settings["halves"] == 1
    divided = choose(
        Need((facts,)), 2, 2, 9_000_000, fixed={"shard": 1, "tp": 1, "pp": 1}, opened=["replicate", "halves"]
    )
    assert divided.settings == {"replicate": 1, "halves": 2}


def test_a_tracker(add: Add, tmp_path: Path) -> None:
    """Named as users name one of ours: `log_with="toy"`."""
    from paceline import Accelerator

    add("paceline.trackers", TRACKER)
    accelerator = Accelerator(cpu=True, log_with="toy", project_dir=str(tmp_path / "logs"))
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3)
    toy = accelerator.get_tracker("toy", unwrap=True)
    accelerator.end_training()
    assert toy.folder == str(tmp_path / "logs")
    assert toy.seen == ["run", ({"loss": 1.0}, 3), "finished"]


def test_a_store(add: Add) -> None:
    from paceline.base.errors import CheckpointError
    from paceline.checkpoint.store import store_for

    with pytest.raises(CheckpointError):
        store_for("toy://bucket/run")
    add("paceline.stores", STORE)
    assert type(store_for("toy://bucket/run")).__name__ == "Toy"
    assert type(store_for("/tmp/run")).__name__ != "Toy"


def test_a_checkpoint_format(
    add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through what users call: `load_state`, `--resume` (PACELINE_RESUME) and the commands."""
    import torch

    from paceline import Accelerator
    from paceline.base.errors import CheckpointError
    from paceline.cli.main import main

    folder = tmp_path / "runs" / "seventh"
    folder.mkdir(parents=True)
    torch.save({"weight": torch.full((1, 2), 3.0), "bias": torch.full((1,), 4.0)}, folder / "toy.pt")

    def loaded(load: Callable[[Accelerator], object]) -> list[float]:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 1)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        load(accelerator)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    with pytest.raises(CheckpointError, match="checkpoint-none"):
        loaded(lambda accelerator: accelerator.load_state(folder))
    add("paceline.checkpoint_formats", CHECKPOINT_FORMAT)
    assert loaded(lambda accelerator: accelerator.load_state(folder)) == [3.0, 3.0, 4.0]
    monkeypatch.setenv("PACELINE_RESUME", str(folder))
    steps = []
    assert loaded(lambda accelerator: steps.append(accelerator.resume().step)) == [3.0, 3.0, 4.0]
    assert steps == [7]
    for command, told in (
        (["ls", str(folder.parent)], "toy format, unchecked"),
        (["show", "--tensors", str(folder)], "models/model/weight"),
        (["verify", str(folder)], "the toy format has no checksums"),
        (["export", str(folder), str(tmp_path / "out")], "model.safetensors"),
    ):
        assert main(["checkpoint", *command]) == 0
        assert told in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(folder), str(tmp_path / "out")]) == 0


def test_a_launcher(add: Add) -> None:
    from paceline.launch.launcher import LAUNCHERS

    assert "toy" not in LAUNCHERS.names()
    add("paceline.launchers", LAUNCHER)
    assert LAUNCHERS.get("toy").render("job") == ("toy", "job")


def test_a_config_dialect(add: Add, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from paceline.cli.main import main

    add("paceline.config_dialects", DIALECT)
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


def test_a_precision(add: Add) -> None:
    import torch

    from paceline import Accelerator, ConfigError
    from paceline.config import resolve_run
    from paceline.config.settings import PRECISIONS, settings_of

    kind = settings_of()["mixed_precision"].kind
    assert kind.metavar == "no|fp8|fp16|bf16"
    with pytest.raises(ConfigError, match="no, fp8, fp16 or bf16"):
        Accelerator(mixed_precision="toy", cpu=True)
    add("paceline.precisions", PRECISION)
    assert (kind.metavar, kind.expected) == ("toy|no|fp8|fp16|bf16", "toy, no, fp8, fp16 or bf16")
    assert resolve_run(env={"PACELINE_MIXED_PRECISION": "Toy"}).settings.mixed_precision == "toy"

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
