"""The page of a real run of four ranks in a real browser, served by the launcher, from the first step to the end."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from warm_python import executable

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
WAIT_MS = 20_000

# Rank 2 is slow in its forward pass. The run ends once the test has seen enough.
TRAIN = """
import time
from pathlib import Path
import torch
from paceline import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
model.register_forward_pre_hook(lambda *_: time.sleep(0.1 if accelerator.process_index == 2 else 0.02))
seen = torch.zeros(())
while not accelerator.reduce(seen):
    loss = model(torch.ones(8, 4)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"train/loss": loss.item()})
    seen = torch.tensor(float(Path("seen").exists()))
accelerator.save_state("saved")
"""


def test_four_ranks_of_which_one_is_slow(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["-m", "paceline", "launch", "--cpu", "--procs", "4", "--watch-dir", "run", "--watch", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([executable(), *words], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))

    def says(selector: str, text: str) -> None:
        playwright.expect(page.locator(selector)).to_contain_text(text, timeout=WAIT_MS)

    try:
        assert run.stderr is not None
        url = next(match[1] for line in run.stderr if (match := re.search(r"the page of the run: (\S+)", line)))
        page.goto(url)
        says("#state", "running")
        says("#findings", "Rank 2 is slow: the forward pass takes")
        playwright.expect(page.locator(".heat tbody tr")).to_have_count(4)
        assert page.locator(".heat td.warm").first.get_attribute("title").startswith("rank 2, forward")
        says("#value-charts .chart-head", "train/loss")
        says("#plan", "replicate")
        says("#memory", "that the process had before it prepared the model")
        playwright.expect(page.locator("#memory .warm")).to_have_count(0)
        (tmp_path / "seen").touch()
        says("#state", "ended")
        says("#checkpoints", "saved")
        _, rest = run.communicate(timeout=30)
        assert run.returncode == 0, rest
        page.goto((tmp_path / "run" / "report.html").as_uri())
        says("#state", "ended")
    finally:
        page.close()
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert errors == []
