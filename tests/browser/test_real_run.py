"""The page of a real run of four ranks in a real browser, served by the launcher, from the first step to the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_python import executable

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
WAIT_MS = 30_000

# Something is wrong with rank 2. The run ends once the test has seen enough.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from paceline import Accelerator

fault = sys.argv[1]


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if fault == "data" and accelerator.process_index == 2:
            time.sleep(0.02)
        return torch.ones(4)


accelerator = Accelerator(cpu=True)
if accelerator.process_index == 2:
    Path("pid").write_text(str(os.getpid()))
model = torch.nn.Linear(4, 4)
loader = torch.utils.data.DataLoader(Data(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
is_slow = fault == "forward" and accelerator.process_index == 2
model.register_forward_pre_hook(lambda *_: time.sleep(0.1 if is_slow else 0.02))
for batch in loader:
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"train/loss": loss.item()})
    if accelerator.reduce(torch.tensor(float(Path("seen").exists()))):
        break
accelerator.save_state("saved")
"""


class ShownRun:
    """A run and its page."""

    def __init__(self, folder: Path, page: Any, fault: str) -> None:
        (folder / "train.py").write_text(TRAIN)
        words = [
            "-m",
            "paceline",
            "launch",
            "--cpu",
            "--procs",
            "4",
            "--watch-dir",
            "run",
            "--watch",
            "train.py",
            fault,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.folder = folder
        self.page = page
        self.process = subprocess.Popen([executable(), *words], cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        page.goto(
            next(found[1] for line in self.process.stderr if (found := re.search(r"the page of the run: (\S+)", line)))
        )

    def says(self, selector: str, text: str) -> None:
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=WAIT_MS)

    def marks(self, cell: str) -> None:
        """The heat map marks this cell. On a busy machine it marks others too: their ranks do wait for a core."""
        marked = self.page.locator(f'.heat td.warm[title^="{cell}:"]')
        playwright.expect(marked).to_have_count(1, timeout=WAIT_MS)

    def end(self) -> None:
        """Lets the run end, and waits for that."""
        (self.folder / "seen").touch()
        self.says("#state", "ended")
        _, rest = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, rest


@pytest.fixture
def shown_run(browser: Any, tmp_path: Path) -> Iterator[Callable[[str], ShownRun]]:
    """Starts a run with a fault. At the end no process is left, and the page has had no error."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    runs: list[ShownRun] = []

    def start(fault: str) -> ShownRun:
        runs.append(ShownRun(tmp_path, page, fault))
        return runs[-1]

    yield start
    page.close()
    for run in runs:
        run.process.kill()
        run.process.communicate()
    assert errors == []


def test_four_ranks_of_which_one_is_slow(shown_run: Callable[[str], ShownRun]) -> None:
    run = shown_run("forward")
    run.says("#state", "running")
    run.says("#findings", "Rank 2 is slow: the forward pass takes")
    playwright.expect(run.page.locator(".heat tbody tr")).to_have_count(4)
    run.marks("rank 2, forward")
    run.says("#value-charts .chart-head", "train/loss")
    run.says("#plan", "replicate")
    run.says("#memory", "that the process had before it prepared the model")
    playwright.expect(run.page.locator("#memory .warm")).to_have_count(0)
    run.end()
    run.says("#checkpoints", "saved")
    run.page.goto((run.folder / "run" / "report.html").as_uri())
    run.says("#state", "ended")


@pytest.mark.long
def test_one_loader_is_slow(shown_run: Callable[[str], ShownRun]) -> None:
    run = shown_run("data")
    run.says("#findings", "Rank 2 waits")
    run.says("#findings", "of its time for its data")
    run.marks("rank 2, data")
    run.end()


@pytest.mark.long
def test_one_rank_is_stopped(shown_run: Callable[[str], ShownRun]) -> None:
    run = shown_run("stop")
    run.says("#value-charts .chart-head", "train/loss")
    pid = int((run.folder / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    run.says("#state", "stuck")
    run.says("#findings", "Rank 2 has given no sign of life for")
    run.says("#findings", f"its process ({pid}) is stopped by a signal (SIGSTOP). 3 ranks wait for it")
    os.kill(pid, signal.SIGCONT)
    run.says("#state", "running")
    run.end()
