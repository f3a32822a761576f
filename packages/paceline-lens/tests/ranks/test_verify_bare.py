"""`paceline verify` tells broken scripts without Paceline from correct ones (the scripts: tests/bare_scripts.py).

All scripts of a kind run one after the other in the same few processes: on one process, nudged, on two, and on two with batch
sizes divided.
"""

from __future__ import annotations

import json
import traceback
from functools import cache
from pathlib import Path

import pytest
from bare_scripts import BROKEN_BARE, CORRECT_BARE, broken_bare

from paceline.cli import main as command_line
from paceline.testing import run_ranks
from paceline_lens.verify.bare.recorder import BareRecorder
from paceline_lens.verify.bare.verifier import BareVerifier
from paceline_lens.verify.case import RunFailed, VerifyCase
from paceline_lens.verify.compare import EPS
from paceline_lens.verify.recording import read_all

SHORT = {
    "ddp", "by hand", "fsdp2", "experts", "a batch of each rank", "a head that some ranks use",
    "a sum without a division", "a parameter is forgotten", "reduced before the last micro-batch", "summed after each micro-batch",  # noqa: E501
    "micro-batches are divided twice", "a mean over the tokens of a rank", "clipped before the reduction", "no DistributedSampler",  # noqa: E501
    "each rank shuffles by itself", "set_epoch is forgotten", "a seed of the rank", "an average of rank 0",
    "FSDP2 clipped by the norm of a rank's shards", "tensor parallel without the all-reduce backward",
    "sequence parallel without the sum", "experts times ranks", "batch norm",
}  # fmt: skip
_STEPS = 5
_SHARED = {"a batch of each rank", "each rank shuffles by itself"}


def names(scripts):
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in scripts]


class WarmRuns:
    """The recordings of one script, made beforehand."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    def run_bare(self, case, *, parts=(), share=1, nudge=0.0, again=False):
        kind = "two" if case.procs == 2 else "one"
        if nudge:
            kind = "nudged"
        elif share > 1:
            kind = "shared"
        folder = self.folder / kind / self.name
        failures = [path.read_text() for path in folder.glob("failed*")]
        if failures:
            raise RunFailed(failures[0])
        return read_all(folder)


@cache
def recorded(folder: Path, is_correct: bool, long: bool) -> Path:
    """Runs all scripts of a kind; returns the folder of their recordings."""
    texts = dict(CORRECT_BARE) if is_correct else {name: broken_bare(name)[1] for name in BROKEN_BARE}
    texts = {name: text for name, text in texts.items() if (name in SHORT) != long}
    place = folder / f"{is_correct}-{long}"

    def run(kind, **options):
        for name, text in texts.items():
            own = place / kind / name
            own.mkdir(parents=True, exist_ok=True)
            if kind == "shared" and name not in _SHARED:
                continue
            script = compile(text, str(place / "train.py"), "exec")
            try:
                BareRecorder(own, _STEPS, **options).record(
                    lambda script=script: exec(script, {"__name__": "__main__"})
                )
            except Exception:
                (own / f"failed{options}").write_text(traceback.format_exc())

    def alone():
        run("one", parts=(2,))
        run("nudged", nudge=EPS["float32"])

    def together():
        run("two")
        run("shared", share=2)

    run_ranks(alone, 1, timeout_s=300, output=[])
    run_ranks(together, 2, timeout_s=300, output=[])
    return place


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bare")


def results(folder, name, is_correct):
    place = recorded(folder, is_correct, name not in SHORT)
    return BareVerifier(WarmRuns(place, name)).verify([VerifyCase(2)])


@pytest.mark.parametrize("name", names(CORRECT_BARE))
def test_no_false_alarm(folder, name):
    found = results(folder, name, True)
    assert [(result.status, result.why, result.causes) for result in found] == [("same", "", [])] * 2
    notes = [finding.cause.name for finding in found[1].findings]
    assert notes == (["batch-divided"] if name == "a batch of each rank" else [])


@pytest.mark.parametrize("name", names(BROKEN_BARE))
def test_what_is_broken(folder, name):
    found = results(folder, name, False)
    causes = [cause for result in found for cause in result.causes]
    assert causes[:1] == [BROKEN_BARE[name][0]], [(result.why, result.findings) for result in found]
    # The line of the script, for what happens in a line.
    evidence = next(finding.evidence for result in found for finding in result.findings if finding.cause.is_error)
    assert "train.py:" in evidence or causes[0].startswith(
        ("data", "model", "epoch", "copy", "weights", "batch", "rate")
    )


@pytest.mark.long
def test_the_command_on_a_script_for_torchrun(tmp_path, monkeypatch, capfd):
    (tmp_path / "good.py").write_text(CORRECT_BARE["ddp"])
    (tmp_path / "bad.py").write_text(broken_bare("a parameter is forgotten")[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["verify", "--cpu", "--steps", "3"]
    assert command_line.main([*words, "good.py"]) == 0
    assert "2 the same, 0 different" in capfd.readouterr().out
    assert command_line.main([*words, "--json", "bad.py"]) == 1
    finding = json.loads(capfd.readouterr().out)["results"][1]["findings"][0]
    assert (
        finding["cause"] == "reduction-missing"
        and "0.weight" in finding["evidence"]
        and "bad.py:" in finding["evidence"]
    )
    # No plan can be applied to it.
    assert command_line.main([*words, "--plans", "zero=2", "good.py"]) == 2


def test_causes_of_bare_scripts_have_a_script_or_a_reason():
    from paceline_lens.verify.bare import causes

    tables = (causes.CAUSES_OF_RUN, causes.CAUSES_OF_GRADIENTS, causes.CAUSES_OF_ONE)
    errors = {cause.name for table in tables for cause in table if cause.is_error}
    # What is left when nothing fits, and a parameter that no rank has a gradient for.
    assert errors == {cause for cause, _, _ in BROKEN_BARE.values()} | {"gradient-missing", "gradient-differs"}
