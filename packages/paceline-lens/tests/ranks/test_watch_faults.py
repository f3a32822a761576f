"""Real runs in which one rank is slow, loads slowly or is stopped: the terminal view says which rank it is, and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from warm_python import executable

from paceline_lens.watch.following import FollowedRun
from paceline_lens.watch.journal import rank_file

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from paceline import Accelerator

fault, slow_rank = sys.argv[1], int(sys.argv[2])
divided = {"plan": {"up": "colwise", "down": "rowwise"}}
accelerator = Accelerator(cpu=True, options={"tensor": divided})
is_slow = accelerator.process_index == slow_rank


class Data(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if fault == "data" and is_slow:
            time.sleep(0.02)
        return torch.ones(4)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 4)

    def forward(self, batch):
        if fault == "forward" and is_slow:
            time.sleep(0.08)
        return self.down(self.up(batch).relu())


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Data(), batch_size=4))
for step, batch in enumerate(loader):
    time.sleep(0.02)
    loss = (model(batch) - batch).pow(2).mean()
    if fault == "backward" and is_slow:
        loss.register_hook(lambda gradient: time.sleep(0.08))
    mean_loss = accelerator.reduce(loss.detach(), "mean").item()  # where the others wait for the slow rank too
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": mean_loss}, step=step)
    if accelerator.reduce(torch.tensor(float(Path("stop").exists()))).item():
        break
"""

# One loop for pipelines and divided sequences, which need blocks, and attention inside of them.
BLOCKS = """
import sys, time
from pathlib import Path
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from paceline import Accelerator

fault, slow_rank = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True)
is_slow = accelerator.process_index == slow_rank


class Data(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if fault == "data" and is_slow:
            time.sleep(0.02)
        return torch.ones(8, dtype=torch.long)


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient, None


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 8)

    def forward(self, x):
        if fault == "forward" and is_slow:
            time.sleep(0.02)
        x = Passes.apply(x, 0.012 if fault == "stage" and is_slow else 0.002)
        q = self.line(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return x + functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(17, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(8, 17)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits, tokens):
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Data(), batch_size=4))
for batch in loader:
    time.sleep(0.02)
    accelerator.forward_backward(model, (batch, batch), loss_of)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.reduce(torch.tensor(float(Path("stop").exists()))).item():
        break
"""


@contextmanager
def started(
    folder: Path, fault: str, slow_rank: int, procs: int, *plan: str, script: str = SCRIPT
) -> Iterator[FollowedRun]:
    """A run that goes on until the end of the `with`; `plan` are flags of the launcher."""
    (folder / "train.py").write_text(script)
    options = ["--cpu", "--procs", str(procs), *plan, "--watch-dir", "run"]
    words = ["launch", *options, "train.py", fault, str(slow_rank)]
    run = subprocess.Popen(
        [executable(), "-m", "paceline", *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "run" / "run.json").exists():
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        yield FollowedRun(folder / "run")
    finally:
        (folder / "stop").touch()
        try:
            assert run.wait(60) == 0
        finally:
            run.kill()
            run.wait()


def until_found(run: FollowedRun, kind: str, seconds: float = 60.0, *, stops: bool = False) -> dict:
    """The finding of this kind, once there is one, or with `stops` once the run stands still because of it."""
    deadline = time.monotonic() + seconds
    while True:
        snapshot = run.snapshot()
        for finding in snapshot["findings"]:
            if finding["kind"] == kind and finding["stops"] >= stops:
                return finding
        assert snapshot["state"] != "ended", snapshot["errors"]
        assert time.monotonic() < deadline, snapshot["findings"] or snapshot["heat"]
        time.sleep(0.25)


def once(folder: Path) -> str:
    """What `paceline watch --once` prints."""
    words = [executable(), "-m", "paceline", "watch", "run", "--once"]
    env = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.needs("large")
def test_one_loader_is_slow(tmp_path: Path) -> None:
    with started(tmp_path, "data", 1, procs=2) as run:
        finding = until_found(run, "slow-loader")
    assert finding["ranks"] == [1]
    assert finding["evidence"]["share"] > 0.5
    assert run.snapshot()["state"] == "ended"


FOUR = [("--tp", "4"), ("--shard", "4"), ("--zero", "3")]


# The others wait in the forward and backward pass too, as long as the slow rank computes.
@pytest.mark.needs("large")
@pytest.mark.parametrize(
    ("procs", "plan"),
    [(2, ("--tp", "2")), (2, ("--shard", "2")), *(pytest.param(4, plan, marks=pytest.mark.long) for plan in FOUR)],
)
def test_one_rank_is_slow_where_all_take_as_long(tmp_path: Path, procs: int, plan: tuple[str, ...]) -> None:
    with started(tmp_path, "forward", 1, procs, *plan) as run:
        finding = until_found(run, "slow-rank")
        assert (finding["ranks"], finding["evidence"]["phase"]) == ([1], "forward")
        assert "Rank 1 is slow: the forward pass takes" in once(tmp_path)


CASES = [("data", "slow-loader"), ("forward", "slow-rank"), ("stage", "long-stage")]


@pytest.mark.needs("large")
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("fault", "kind"), CASES)
@pytest.mark.parametrize("procs", [2, 4])
def test_one_stage_of_a_pipeline_is_slow_or_long(tmp_path: Path, procs: int, fault: str, kind: str) -> None:
    with started(tmp_path, fault, 1, procs, "--pp", str(procs), script=BLOCKS) as run:
        finding = until_found(run, kind, 90)
        assert finding["ranks"] == [1]
        starts = {"data": "Rank 1 waits", "forward": "Rank 1 is slow", "stage": "Rank 1 has the longest stage"}
        assert starts[fault] in once(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("fault", "kind"), CASES[:2])
@pytest.mark.parametrize("procs", [2, 4])
def test_one_rank_of_divided_sequences_is_slow(tmp_path: Path, procs: int, fault: str, kind: str) -> None:
    with started(tmp_path, fault, 1, procs, "--cp", str(procs), script=BLOCKS) as run:
        finding = until_found(run, kind, 90)
        assert (finding["ranks"], finding["evidence"]["phase"]) == ([1], fault)
        assert ("Rank 1 waits" if fault == "data" else "Rank 1 is slow") in once(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "kind"), [("data", "slow-loader"), ("forward", "slow-rank"), ("backward", "slow-rank")]
)
def test_one_of_four_ranks_is_slow(tmp_path: Path, fault: str, kind: str) -> None:
    with started(tmp_path, fault, 2, procs=4) as run:
        finding = until_found(run, kind, 90)
        assert finding["ranks"] == [2]
        assert finding["evidence"]["phase"] == fault
        text = once(tmp_path)
        assert "Rank 2 waits" in text if fault == "data" else "Rank 2 is slow" in text
        assert "   2" in text and ">" in text


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is stopped")
@pytest.mark.parametrize("plan", [(), ("--pp", "4"), ("--cp", "4")], ids=["ddp", "pp", "cp"])
def test_one_of_four_ranks_is_stopped(tmp_path: Path, plan: tuple[str, ...]) -> None:
    with started(tmp_path, "none", -1, 4, *plan, script=BLOCKS if plan else SCRIPT) as run:
        deadline = time.monotonic() + 60
        while run.snapshot()["progress"]["step"] < 20:
            assert time.monotonic() < deadline
            time.sleep(0.25)
        assert not any(finding["stops"] for finding in run.snapshot()["findings"])
        hello = json.loads((tmp_path / "run" / rank_file(3)).read_text().splitlines()[0])
        os.kill(hello["pid"], signal.SIGSTOP)
        began = time.monotonic()
        try:
            finding = until_found(run, "silent-rank", 30, stops=True)
            waited = time.monotonic() - began
            text = once(tmp_path)
        finally:
            os.kill(hello["pid"], signal.SIGCONT)
        assert waited < 15
        assert finding["ranks"] == [3]
        assert f"its process ({hello['pid']}) is stopped by a signal (SIGSTOP). 3 ranks wait for it" in finding["text"]
        assert "process stopped" in text and "Rank 3 has given no sign of life" in text
        deadline = time.monotonic() + 30
        while run.snapshot()["findings"]:
            assert time.monotonic() < deadline
            time.sleep(0.25)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nothing_is_said_of_an_even_run(tmp_path: Path) -> None:
    with started(tmp_path, "none", -1, procs=4) as run:
        deadline = time.monotonic() + 90
        while run.snapshot()["progress"]["step"] < 300:
            assert run.snapshot()["findings"] == []
            assert time.monotonic() < deadline
            time.sleep(0.5)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("draws", [False, True])
def test_the_launcher_speaks_for_a_silent_script_alone(tmp_path: Path, draws: bool) -> None:
    import pexpect

    (tmp_path / "train.py").write_text(
        SCRIPT.replace(
            "    time.sleep(0.02)\n    loss", f"    time.sleep(0.02)\n    {draws} and print(step, end='\\r')\n    loss"
        )
    )
    words = ["-m", "paceline", "launch", "--cpu", "--procs", "1", "--watch-dir", "run", "train.py", "none", "-1"]
    child = pexpect.spawn(sys.executable, words, cwd=str(tmp_path), encoding="utf-8", timeout=75)
    try:
        expected = ["paceline: step [0-9,]+, loss", pexpect.TIMEOUT]
        assert child.expect(expected, timeout=75) == int(draws)
    finally:
        (tmp_path / "stop").touch()
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0
