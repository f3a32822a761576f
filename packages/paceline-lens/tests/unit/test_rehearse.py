"""Formulas of `paceline rehearse` beside published values, its command line, and the store that keeps checkpoints apart."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

import pytest

from paceline.base.errors import CheckpointError, LaunchError
from paceline.cli._parser import Parser
from paceline.cli.main import main
from paceline.config import schema
from paceline.config.sources import resolve_launch
from paceline_lens.cli import rehearse
from paceline_lens.rehearse import cable, report
from paceline_lens.rehearse.apart import StoreApart
from paceline_lens.rehearse.drill import KINDS, DrillRecord, RehearsedJob, Strike
from paceline_lens.rehearse.intervals import JobCosts, daly_interval, forecast, useful_share, young_interval
from paceline_lens.rehearse.lines import DrillLine
from paceline_lens.rehearse.measure import Undisturbed, recovery
from paceline_lens.rehearse.rehearsal import ProposedSettings, RehearsalResult, has_gone_on

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_daly_interval_is_that_of_the_paper(mtbf_s: float, minutes: float) -> None:
    # The captions of figures 3, 4 and 5: a save of 5 minutes.
    assert daly_interval(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, rel=0.01)


def test_daly_interval_has_its_limits() -> None:
    assert daly_interval(1.0, 1e6) == pytest.approx(young_interval(1.0, 1e6), rel=1e-3)
    assert daly_interval(100.0, 50.0) == 50.0


@pytest.mark.parametrize("mtbf_s", [HOUR, 24 * HOUR])
def test_no_other_interval_leaves_more_useful_time(mtbf_s: float) -> None:
    best = daly_interval(30.0, mtbf_s)
    shares = [useful_share(best * factor, 30.0, 120.0, mtbf_s) for factor in (0.8, 0.9, 1.0, 1.1, 1.2)]
    assert max(shares) == shares[2]
    # To the first order: half of an interval, the recovery, and the saves.
    lost = 30.0 / best + (best / 2 + 120.0) / mtbf_s
    assert shares[2] == pytest.approx(1 - lost, abs=0.02)


def test_useful_share_of_a_job_that_fails_all_the_time() -> None:
    assert useful_share(1.0, 1.0, 1.0, 1e-6) == 0.0


def test_forecast_falls_with_the_number_of_devices() -> None:
    costs = JobCosts(step_s=5.0, save_s=2.0, late_s=20.0, recovery_s=300.0)
    sizes = forecast(costs, [1024, 16_384, 131_072], report.LLAMA_3_DEVICE_HOURS * HOUR)
    assert sizes[1].failures_per_day == pytest.approx(419 / 54)
    assert sizes[0].useful > sizes[1].useful > sizes[2].useful > sizes[2].useful_slower
    assert all(size.useful > size.useful_slower for size in sizes)
    # No save begins before the one before is complete.
    (crowded,) = forecast(JobCosts(0.1, 0.01, 60.0, 1.0), [131_072], report.LLAMA_3_DEVICE_HOURS * HOUR)
    assert crowded.daly_s == 60.0
    assert crowded.steps == 600


def test_store_apart_writes_nowhere_else(tmp_path: Path) -> None:
    real = tmp_path / "run"
    real.mkdir()
    (real / "weights").write_bytes(b"real")
    store = StoreApart(tmp_path / "drill")
    assert store.list(store.resolve(str(real))) == []  # `resume()` finds none of the user's checkpoints
    path = store.join(store.resolve(str(real)), "weights")
    with store.open(path, "rb") as file:  # weights to start from
        assert file.read() == b"real"
    with store.open(path, "wb") as file:
        file.write(b"drill")
    with store.open(store.resolve(str(real / "weights")), "rb") as file:
        assert file.read() == b"drill"
    store.remove(path)
    assert (real / "weights").read_bytes() == b"real"
    assert math.isclose(len(list(real.iterdir())), 1)
    with pytest.raises(CheckpointError) as error:
        store.resolve("s3://bucket/run")
    assert error.value.code == "rehearse-store"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--failures", "rank,earthquake"], "rehearse-value"),
        (["--devices", "1024,0"], "rehearse-value"),
        (["--mtbf-hours", "0"], "rehearse-value"),
        (["--failures-per-day", "-1"], "rehearse-value"),
        (["--failures-per-day", "nan"], "rehearse-value"),
        (["--failures-per-day", "1", "--mtbf-hours", "1"], "rehearse-value"),
        (["--minutes", "0"], "rehearse-value"),
        (["--nodes", "1:2"], "rehearse-value"),
        (["--folder", "."], "rehearse-value"),
        (["absent.py"], "launch-script"),
        pytest.param(["--compat", "accelerate"], "rehearse-folder", marks=pytest.mark.needs("accelerate")),
    ],
)
def test_a_command_that_rehearses_nothing_ends_with_two(
    words: list[str], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert main(["rehearse", *words, "train.py"]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_failures_per_day_are_those_of_the_first_number_of_devices() -> None:
    parser = Parser("paceline rehearse", "")
    rehearse.configure(parser)
    args = parser.parse_args(["--failures-per-day", "2", "--devices", "100,1000", "train.py"])
    device_mtbf_s = rehearse._device_mtbf_s(args, [100, 1000])
    first, second = forecast(JobCosts(1.0, 1.0, 0.0, 1.0), [100, 1000], device_mtbf_s)
    assert (first.failures_per_day, second.failures_per_day) == (2.0, 20.0)


def test_hosts_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.CompletedProcess(["ip"], 1, stdout="", stderr="Operation not permitted")
    monkeypatch.setattr(cable, "_ip", lambda *words: refused)
    with pytest.raises(LaunchError) as error:
        cable.HostsWithCable(2)
    assert error.value.code == "rehearse-link"


def test_a_job_keeps_the_options_of_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    parser = Parser("paceline rehearse", "")
    rehearse.configure(parser)
    words = ["--procs", "2", "--max-restarts", "7", "--timeout-s", "9", "--zero", "2", "train.py", "--lr", "1"]
    args = parser.parse_args(words)
    job = rehearse._job(args, resolve_launch(schema.given(args)))
    assert job.options == ("--procs", "2", "--timeout-s", "9", "--zero", "2")
    assert (job.script, job.args, job.timeout_s) == ("train.py", ("--lr", "1"), 9.0)


def test_proposed_settings_work_when_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    job = RehearsedJob(
        ("--procs", "2", "--cpu", "--timeout-s", "900"), "script", "train.py", ("--name", "a b"), timeout_s=12.0
    )
    costs = JobCosts(step_s=0.5, save_s=1.0, late_s=0.0, recovery_s=20.0)
    sizes = forecast(costs, [1024], report.LLAMA_3_DEVICE_HOURS * HOUR)
    alone = Undisturbed(20, 2, 0.5, 4, 2, 4, 1.0, 1.0, 10, 3.9, 9.0, {}, {})
    proposed = ProposedSettings(12.0, 9, 30, 1024, sizes[0].steps, sizes[0].daly_s)
    shown = report.text(RehearsalResult(job, alone, [], {}, costs, proposed, sizes))
    (command,) = [line.strip() for line in shown.splitlines() if line.strip().startswith("paceline launch")]
    program, *words = shlex.split(command)
    assert program == "paceline"
    assert words.count("--timeout-s") == 1
    assert main([words[0], "--dry-run", *words[1:]]) == 0
    told = capsys.readouterr().out
    assert "'a b'" in told
    assert "12" in told


def steps_from(t: float, steps: range, pid: int) -> list[DrillLine]:
    """One step a second, of four samples."""
    values = [{"step": step, "samples": 4 * step, "loss": float(step).hex()} for step in steps]
    return [DrillLine(t + number, "step", 0, pid, each) for number, each in enumerate(values)]


def cut_link() -> DrillRecord:
    """A link that was to be cut after step 3 and was cut after step 8, where the undisturbed run has 6 steps."""
    ready = [DrillLine(t, "ready", 0, pid, {"born": t}) for t, pid in ((0.0, 1), (30.0, 2))]
    loops = [DrillLine(0.5, "loop", 0, 1, {"step": 0}), DrillLine(30.5, "loop", 0, 2, {"step": 5})]
    saved = DrillLine(5.5, "saved", 0, 1, {"step": 5, "ok": True})
    lines = [*ready, *loops, saved, *steps_from(1.0, range(1, 9), 1), *steps_from(31.0, range(6, 10), 2)]
    return DrillRecord(sorted(lines, key=lambda line: line.t), end="reached", struck=9.0, ended={1: 15.0})


def test_a_link_that_is_cut_later_than_was_drawn() -> None:
    losses = {(0, step): float(step).hex() for step in range(1, 7)}
    alone = Undisturbed(6, 1, 1.0, 2, 2, 3, 0.1, 0.1, 10, 1.0, 6.0, losses, {step: 4 * step for step in range(1, 7)})
    found = recovery(Strike(KINDS["link"], 3), cut_link(), alone)
    assert (found.survived, found.step, found.resumed_step) == (True, 8, 5)
    assert (found.steps_twice, found.samples_twice) == (3, 12)
    # Six steps, one of them twice; the two that the undisturbed run does not have are compared with their first time.
    assert (found.compared, found.change) == (6 + 1 + 2, None)


def test_a_drill_goes_on_until_a_step_is_new() -> None:
    lines = cut_link().lines
    assert not has_gone_on([line for line in lines if line.t < 33.5], 17.0, 6, starts_again=False)  # step 8 again
    assert has_gone_on(lines, 17.0, 6, starts_again=False)
    assert not has_gone_on([line for line in lines if line.t < 30], 9.0, 6, starts_again=True)
