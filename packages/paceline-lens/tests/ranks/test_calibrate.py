"""`paceline plan --measure`: real ranks measure, the file is found again, and forecasts and journals go by it."""

import json
import os
import sys

import pytest
import torch
from torch import nn

from paceline import Accelerator
from paceline.base.errors import PlanError
from paceline.cli import main as command_line
from paceline.config.sources import resolve_launch
from paceline.testing import run_ranks
from paceline_lens.forecast import calibrate as calibrating
from paceline_lens.forecast import calibration as files
from paceline_lens.forecast import measure
from paceline_lens.forecast.rehearsal import SimulatedWorld, rehearse

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import Accelerator

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = TensorDataset(torch.randn(32, 64), torch.randint(10, (32,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Small probes, once each, and a folder of one's own for what they find."""
    monkeypatch.setattr(measure, "_MATRIX_ROWS", (16, 512))
    monkeypatch.setattr(measure, "_WIDTH", 16)
    monkeypatch.setattr(measure, "_ELEMENTS", (1000, 10_000))
    monkeypatch.setattr(measure, "_UNCACHED_ELEMENTS", 10_000)
    monkeypatch.setattr(measure, "_TURNS", 1)
    monkeypatch.setattr(measure, "_LARGE_ELEMENTS", 10_000)
    monkeypatch.setattr(measure, "_OPTIMIZED", 1000)
    monkeypatch.setattr(measure, "_PROBE_S", 1e-4)
    monkeypatch.setattr(calibrating, "_ROUNDS", 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def watched():
    sys.argv = ["train.py"]
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})


def plan(*words):
    return command_line.main(["plan", "--cpu", *words])


def test_two_ranks_measure_and_later_plans_use_what_they_found(quick, capfd):
    assert plan("--measure", "--procs", "2") == 0
    text = capfd.readouterr().out
    (path,) = (quick / "state" / "paceline" / "calibration").iterdir()
    assert path.name.endswith("-cpu-2x1.json") and f"kept in {path}" in text
    assert "allreduce: " in text and "send: " in text and "not measured" not in text
    calibration = files.read(path)
    assert set(calibration.links) == {"allreduce", "allgather", "reducescatter", "broadcast", "alltoall", "send"}
    assert plan("--procs", "2", "--zero", "2", "--shard", "2", "--json", "train.py") == 0
    report = json.loads(capfd.readouterr().out)
    terms = report["step_terms"]
    parts = [terms[f"{name}_s"] for name in ("compute", "communication", "optimizer", "bubble", "overhead")]
    assert report["step_seconds"] == pytest.approx(sum(parts)) and min(parts[0], *parts[2:3], parts[4]) > 0
    assert report["calibration"].startswith(f"{path} of ")
    # The forecast stands in the plan of a watched run of this script under this plan.
    run_ranks(watched, world=2, env={"PACELINE_ZERO": "2", "PACELINE_SHARD": "2", "PACELINE_WATCH_DIR": "watched"})
    lines = (quick / "watched" / "rank-00000.jsonl").read_text().splitlines()
    (made,) = [line for line in map(json.loads, lines) if line["kind"] == "plan"]
    assert made["step_ms"] == pytest.approx(1e3 * report["step_seconds"]) and made["flops"] == report["flops"]


def test_auto_takes_the_fastest_that_fits_and_one_rank_says_what_it_lacks(quick, capfd):
    assert plan("--measure", "--procs", "1", "--shard", "auto", "train.py") == 0
    printed = capfd.readouterr()
    assert "not measured: links and overlap: there is one rank; `--procs 2` starts two" in printed.err
    assert "forecast for this machine:" in printed.out and "by the schedule of a pipeline" in printed.out


def test_several_nodes_are_not_measured(capfd):
    assert plan("--measure", "--nodes", "2", "--procs", "2") == 2
    assert "[plan-measure]" in capfd.readouterr().err


def test_a_rank_that_fails_is_said(quick, monkeypatch):
    def fail(*_):
        raise RuntimeError("no clock today")

    monkeypatch.setattr(measure.Probes, "round", fail)
    this = calibrating.this_machine(resolve_launch([]), dict(os.environ))
    with pytest.raises(PlanError, match="calibration-failed") as caught:
        calibrating.calibrate(this)
    assert "no clock today" in str(caught.value)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rehearsal_on_the_cpu_sends_as_gloo_does_and_holds_what_it_receives(zero):
    def train():
        accelerator = Accelerator(plan={"shard": 2, "zero": zero}, cpu=True)
        model = nn.Sequential(nn.Linear(512, 512, bias=False))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
        for _ in range(3):
            accelerator.backward(model(torch.randn(2, 512)).sum())
            optimizer.step()
            optimizer.zero_grad()

    rehearsal = rehearse(train, SimulatedWorld(2, 2))
    whole = 4 * 512 * 512
    assert not rehearsal.problem
    assert {operation for operation, _, _ in rehearsal.work.sent} <= {"send", "allreduce"}
    assert rehearsal.memory is not None and rehearsal.memory.largest["communication"] >= whole // 2


@pytest.mark.needs("large")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "breadth-first", "zbv"])
def test_pipelines_with_several_stages_on_a_rank_are_rehearsed(schedule):
    def train():
        options = {"pipeline": {"schedule": schedule, "microbatches": 4}}
        accelerator = Accelerator(plan={"pp": 2}, cpu=True, options=options)
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
        for _ in range(3):
            accelerator.forward_backward(model, (torch.randn(8, 32), torch.randn(8, 32)), nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()

    rehearsal = rehearse(train, SimulatedWorld(2, 2))
    assert not rehearsal.problem
    # Half of the layers, forward and twice that backward; the first layer of the model needs no gradient of its inputs.
    assert rehearsal.work.flops == 2 * 8 * 32 * 32 * (4 * 3 - 1)
