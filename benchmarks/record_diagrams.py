"""Records the numbers that the pictures of the documentation are drawn from (`docs/draw_diagrams.py`).

    python benchmarks/record_diagrams.py plans     what the planner predicts for each plan of the GPT, as rank 0 of 2
    python benchmarks/record_diagrams.py step      the phases of a step of the same GPT, measured on 2 ranks
    python benchmarks/record_diagrams.py recovery  a rank of examples/survive is killed; the journal of that run is read

Each part replaces its own key of `docs/diagrams/recorded.json`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from parallel.model import loss_of
from parallel.ways import Task, Way, paceline

from paceline import Accelerator
from paceline.testing import run_ranks
from paceline_lens.watch.journal import JournalLine, JournalReader
from paceline_lens.watch.records import CheckpointSaved, Hello, Tick

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "diagrams" / "recorded.json"
RANKS = 2
TASK = Task("24M", rows=8, length=64)
# Without what belongs to one plan alone: each divides the same model, and the same global batch of 16 rows.
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": RANKS},
    "--zero 1": {"shard": RANKS, "zero": 1},
    "--zero 2": {"shard": RANKS, "zero": 2},
    "--zero 3": {"shard": RANKS, "zero": 3},
    "--tp 2": {"tp": RANKS},
    "--pp 2": {"pp": RANKS},
}
STEPS = 12
WARM_UP = 2
# What is kept of each record of a journal: nothing that names a machine.
KEPT = {
    "Hello": ("rank",),
    "Tick": ("step", "steps"),
    "CheckpointSaved": ("step", "bytes", "stall_s", "save_s"),
    "Round": ("number",),
    "ErrorShown": ("code",),
}


def pipeline_way(task: Task) -> Any:
    """The loop for a pipeline: `forward_backward` takes a batch, and cuts it into 4 micro-batches."""
    accelerator = Accelerator(plan=PLANS["--pp 2"], options={"pipeline": {"microbatches": 4}}, cpu=True)
    model = task.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = task.batch()

    def step() -> None:
        optimizer.zero_grad()
        accelerator.forward_backward(model, batch, loss_of)
        optimizer.step()

    return step


def plans() -> dict[str, Any]:
    """What one rank holds under each plan, in bytes, as the planner predicts it."""
    from paceline_lens.forecast.rehearsal import SimulatedWorld, rehearse

    parameters = sum(parameter.numel() for parameter in TASK.model().parameters())
    predicted: dict[str, Any] = {}
    for name, plan in PLANS.items():
        # Ranks of `tp` and `pp` compute the same samples together: the two of them take the 16 rows of the others.
        model_parallel = "tp" in plan or "pp" in plan
        rows = TASK.rows * RANKS if model_parallel else TASK.rows
        way: Way = pipeline_way if "pp" in plan else paceline(**plan)
        task = Task(TASK.size, rows, TASK.length)

        def train(way: Way = way, task: Task = task) -> None:
            step = way(task)
            for _ in range(5):
                step()

        rehearsal = rehearse(train, SimulatedWorld(RANKS, RANKS))
        if rehearsal.memory is None:
            raise RuntimeError(f"{name}: the rehearsal failed: {rehearsal.problem}")
        predicted[name] = {
            "peak": rehearsal.memory.total,
            "largest": rehearsal.memory.largest,
            "at_peak": rehearsal.memory.at_peak,
            "sent": sum(rehearsal.work.sent.values()),
        }
        print(name, rehearsal.memory, flush=True)
    return {"model": "GPT", "parameters": parameters, "ranks": RANKS, "rows": TASK.rows * RANKS, "length": TASK.length,
            "plans": predicted}  # fmt: skip


def profiled_rank() -> list[dict[str, float]]:
    """Phases of each step of a usual loop on this rank, in milliseconds."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, profile={"wall-clock": {"every": 0}})
    model = TASK.model()
    rows = torch.randint(1024, (TASK.rows * RANKS * (STEPS + WARM_UP), TASK.length + 1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=TASK.rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        accelerator.backward(loss_of(model(batch[:, :-1]), batch[:, 1:]))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    steps = list(accelerator.profiles.wall_clock.recent)[WARM_UP:]
    return [{**step.phases, "total": step.total_ms} for step in steps]


def step() -> dict[str, Any]:
    """The median step of rank 0, phase by phase."""
    steps = run_ranks(profiled_rank, world=RANKS, timeout_s=300, output=[])[0]
    total = statistics.median(times["total"] for times in steps)
    nearest = min(steps, key=lambda times: abs(times["total"] - total))
    return {"model": "GPT", "ranks": RANKS, "rows": TASK.rows, "length": TASK.length, "steps": len(steps),
            "ms": {name: round(value, 1) for name, value in nearest.items()}}  # fmt: skip


def recovery() -> dict[str, Any]:
    """When each thing happened, in seconds after a rank was killed, and the saves of the same run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "paceline",
            "launch",
            "--cpu",
            "--procs",
            "2",
            "--max-restarts",
            "1",
            "--watch-dir",
            "watched",
        ]
        script = [
            str(ROOT / "examples" / "survive" / "train.py"),
            "--epochs",
            "1",
            "--width",
            "128",
            "--save-every",
            "10",
            "--out",
            "out",
        ]
        launcher = subprocess.Popen([*words, *script], cwd=folder)
        try:
            return _recovery(Path(folder) / "watched", launcher)
        finally:
            launcher.terminate()
            launcher.wait()


def _recovery(folder: Path, launcher: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Follows the journal: kills rank 1 after the second save, and waits for steps of the next round."""
    lines: list[JournalLine] = []
    reader: JournalReader | None = None
    killed = 0.0
    while launcher.poll() is None:
        time.sleep(0.1)
        if reader is None:
            found = list(folder.rglob("run.json"))
            if not found:
                continue
            reader = JournalReader(found[0].parent)
        lines += reader.read()
        saves = [line for line in lines if isinstance(line.record, CheckpointSaved)]
        if not killed and len(saves) >= 2:
            pids = [line.record.pid for line in lines if isinstance(line.record, Hello) and line.record.rank == 1]
            killed = time.time()
            os.kill(pids[-1], signal.SIGKILL)
        ticks_after = [
            line for line in lines if isinstance(line.record, Tick) and line.t > killed + 1 and line.record.steps
        ]
        if killed and len(ticks_after) > 3:
            break
    events = []
    for line in lines:
        kind = type(line.record).__name__
        if killed and kind in KEPT:
            kept = {name: getattr(line.record, name) for name in KEPT[kind]}
            events.append({"s": round(line.t - killed, 2), "kind": kind, **kept})
    return {"events": sorted(events, key=lambda event: event["s"])}


def main() -> int:
    parts = {"plans": plans, "step": step, "recovery": recovery}
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in sys.argv[1:] or parts:
        measured = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "torch": torch.__version__, **parts[name]()}
        recorded[name] = measured
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
