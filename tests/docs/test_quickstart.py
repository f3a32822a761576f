"""The quickstart: it learns, reports, and gives the same numbers on one process and on two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import executable

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart"
EPOCHS = "5"
LAUNCH = {1: [], 2: ["-m", "paceline", "launch", "--procs", "2"]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "digits"
    subprocess.run([sys.executable, EXAMPLE / "make_digits.py", "--to", folder], check=True, stdout=subprocess.PIPE)
    return folder


@pytest.fixture(scope="module")
def runs(digits) -> dict[int, tuple[str, str, Path]]:
    """What a run printed to stdout and stderr, and its folder, by number of processes."""
    found = {}
    for width, launch in LAUNCH.items():
        out = digits.parent / f"run{width}"
        command = [executable(), *launch, EXAMPLE / "train.py", "--data", digits, "--out", out, "--epochs", EPOCHS]
        done = subprocess.run(command, capture_output=True, text=True, cwd=digits.parent)
        assert done.returncode == 0, done.stderr
        found[width] = (done.stdout, done.stderr, out)
    return found


def numbers(out: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == lines[-1] | {"event": "finish", "status": "finished"}
    return [list(line["values"].values()) for line in lines if line["event"] == "log"]


def test_images_are_named_by_label_and_each_is_in_one_list(digits):
    lists = [(digits / name).read_text().split() for name in ("train.txt", "heldout.txt")]
    assert [len(names) for names in lists] == [1438, 359]
    assert sorted(lists[0] + lists[1]) == sorted(path.name for path in digits.glob("*.png"))
    assert all(re.fullmatch(r"\d_\d{4}\.png", name) for name in lists[1])


@pytest.mark.parametrize("width", LAUNCH)
def test_it_learns_and_says_so_once(runs, width):
    said, progress, out = runs[width]
    assert numbers(out)[-1][-1] >= 0.97
    assert f"{width} process" in said
    assert said.count("precision") == 1 and said.count("seconds") == 1
    assert "(12 right)" in said or "(11 right)" in said
    assert progress.count("epoch  5/5 ████████████████████████ 23/23, loss 0.1") == 1
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1 and page.count('class="plot"') == 2 and page.count("<figure") == 20


def test_one_process_and_two_give_the_same_numbers(runs):
    one, two = (numbers(runs[width][2]) for width in LAUNCH)
    assert len(one) == int(EPOCHS)
    for first, second in zip(one, two, strict=True):  # sums in another order, so not to the last bit
        assert first == pytest.approx(second, rel=1e-4, abs=1e-6)
