"""`paceline rehearse` with real processes that are really killed: what is survived, what is not, and what is never touched."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_python import executable

from paceline.cli._parser import Parser
from paceline_lens.cli import rehearse

TRAIN = """
import sys, time
import torch
from torch.utils.data import DataLoader
from paceline import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, split_batches=True, project_dir=PROJECT, log_with="jsonl")
accelerator.init_trackers("run")
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = accelerator.resume()
step = start.step
for epoch in range(start.epoch, 40):
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"loss": loss})
        time.sleep(0.02)
        if step % 4 == 0:
            accelerator.save_state()
"""


@pytest.fixture
def rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Rehearses a script that is like `TRAIN` but for some replaced words; returns exit code, JSON and standard error."""
    monkeypatch.chdir(tmp_path)
    # The launchers and their processes are forks of a Python that has imported torch.
    monkeypatch.setattr("sys.executable", executable())

    def run(
        *words: str, edits: dict[str, str] | None = None, project: str = "'run'"
    ) -> tuple[int, dict[str, Any], str]:
        text = TRAIN
        for old, new in (edits or {}).items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "train.py").write_text(text.replace("PROJECT", project))
        parser = Parser("paceline rehearse", "")
        rehearse.configure(parser)
        arguments = [
            "--cpu",
            "--threads",
            "1",
            "--timeout-s",
            "3",
            "--monitor-interval-s",
            "0.02",
            *words,
            "--json",
            "train.py",
        ]
        handler = signal.getsignal(signal.SIGTERM)
        code = rehearse.run(parser.parse_args(arguments))
        assert signal.getsignal(signal.SIGTERM) is handler  # the command is a function of a longer process here
        out, err = capsys.readouterr()
        return code, json.loads(out) if out.startswith("{") else {}, err

    return run


def test_each_failure_of_two_processes_is_survived(rehearsed, tmp_path: Path) -> None:
    # What the user's runs have left here: the script would resume from the checkpoint, and prune it.
    kept = tmp_path / "run" / "checkpoints" / "checkpoint_7" / "manifest.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("the user's own")
    code, found, err = rehearsed("--procs", "2")
    assert code == 0, (found, err)
    by_name = {each["failure"]: each for each in found["failures"]}
    assert list(by_name) == ["rank", "hang", "host", "preempt"]
    for each in by_name.values():
        assert each["survived"], each
        assert each["compared"] > 2 * each["step"]
        assert each["change"] is None
        assert each["resumed_step"] > 0
        parts = [
            value for name, value in each.items() if name.endswith("_s") and name not in ("recovery_s", "new_step_s")
        ]
        total = sum(value for value in parts if value is not None)
        assert total == pytest.approx(each["recovery_s"], abs=0.5)
        assert each["new_step_s"] >= each["recovery_s"]
        assert each["samples_twice"] == 4 * each["steps_twice"]
    # Saves come every 4 steps; the rank that was not struck cannot finish the step in which the other one stopped.
    for name in ("rank", "hang"):
        assert by_name[name]["steps_twice"] == by_name[name]["step"] % 4
    assert by_name["preempt"]["steps_twice"] == 0
    assert by_name["hang"]["detect_s"] >= 2  # the timeout, in part: the collective began a little before
    assert list(found["not_rehearsed"]) == ["link"]
    assert found["without_failure"]["save_steps"] == 4
    assert found["proposed"]["timeout_s"] == 3
    assert [size["devices"] for size in found["forecast"]] == [1024, 16384, 131072]
    assert kept.read_text() == "the user's own"
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["manifest.json"]
    assert not list(tmp_path.glob(".paceline-rehearse-*"))


def test_two_hosts_survive_the_loss_of_one(rehearsed) -> None:
    pytest.importorskip("paceline_hosts")
    code, found, err = rehearsed("--nodes", "2", "--procs", "1", "--failures", "host")
    assert code == 0, (found, err)
    (lost,) = found["failures"]
    assert lost["rank"] == 1
    assert lost["detect_s"] is not None


def test_a_script_that_does_not_resume_is_not_survived(rehearsed) -> None:
    edits = {"start = accelerator.resume()\nstep = start.step": "step = 0", "start.epoch": "0"}
    code, found, _ = rehearsed("--failures", "rank", edits=edits)
    assert code == 1
    (killed,) = found["failures"]
    assert "began again at step 0" in killed["why"]
    assert "accelerator.resume()" in killed["fix"]


def test_a_script_whose_restart_fails_is_not_survived(rehearsed) -> None:
    edits = {"step = start.step": "step = start.step\nif start.path: raise ValueError('not like that')"}
    code, found, _ = rehearsed("--failures", "rank", edits=edits)
    assert code == 1
    (killed,) = found["failures"]
    assert "not like that" in killed["why"]
    assert found["proposed"] is None


def test_state_that_is_not_saved_shows_in_the_losses(rehearsed) -> None:
    # The loop depends on a number that no checkpoint has.
    edits = {"step = start.step": "step = start.step\nown = 0", "loss = model": "own += 1\n        loss = own * model"}
    code, found, _ = rehearsed("--failures", "rank", edits=edits)
    assert code == 1
    (killed,) = found["failures"]
    assert killed["survived"]
    assert killed["change"]["step"] == killed["resumed_step"] + 1
    assert not killed["changes_before"]


@pytest.mark.parametrize(
    ("edits", "code", "error", "words"),
    [
        ({"accelerator.save_state()": "pass", "40)": "1)"}, 1, "rehearse-no-checkpoint", "saved nothing"),
        ({"step % 4": "step % 16", "40)": "1)"}, 1, "rehearse-no-checkpoint", "the end"),
        ({"step += 1": "raise ValueError('broken')"}, 2, "rehearse-script", "broken"),
        ({"range(start.epoch, 40)": "()"}, 2, "rehearse-script", "the script ran to its end, with no step"),
    ],
    ids=["saves nothing", "saves at its end", "fails by itself", "takes no step"],
)
def test_a_job_that_cannot_be_rehearsed(rehearsed, edits: dict[str, str], code: int, error: str, words: str) -> None:
    found_code, _, err = rehearsed("--failures", "rank", edits=edits)
    assert found_code == code
    assert f"[{error}]" in err
    assert words in err


def test_checkpoints_in_a_bucket_are_not_rehearsed(rehearsed) -> None:
    code, _, err = rehearsed("--failures", "rank", project="'s3://bucket/run'")
    assert code == 2
    assert "rehearse-store" in err
