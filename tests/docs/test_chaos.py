"""The example that is killed at random: a small dose of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "examples" / "survive" / "chaos.py"
SMALL = ["--epochs", "1", "--save-every", "10", "--width", "16", "--batch-size", "192", "--length", "32"]


@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes under /proc")
def test_three_kills_change_nothing(tmp_path: Path) -> None:
    words = ["--kills", "3", "--seed", "1", "--apart-s", "0.3", "--limit-s", "240", *SMALL]
    done = subprocess.run([sys.executable, str(CHAOS), *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kill ") == 3 and "final weights equal, bit for bit" in done.stdout
