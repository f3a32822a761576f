"""`paceline verify` tells broken scripts from correct ones, and names what is broken (the scripts: tests/verify_scripts.py)."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
from verify_scripts import (
    BROKEN,
    BROKEN_ACCELERATE,
    BROKEN_ALONE,
    BROKEN_DEEPSPEED,
    BROKEN_PLAIN,
    DRAWING,
    GOOD,
    PLAIN,
    accelerate_script,
    deepspeed_script,
    edited,
    script,
)

from paceline.base import env as environment
from paceline.cli import main as command_line
from paceline.launch.job import Target
from paceline.testing import RankFailed, run_ranks
from paceline_lens.cli.verify import _take_own_options_after_script
from paceline_lens.verify.case import RunFailed, VerifyCase
from paceline_lens.verify.causes import CAUSES
from paceline_lens.verify.plain import PlainRecorder
from paceline_lens.verify.recorder import Recorder
from paceline_lens.verify.recording import read_all
from paceline_lens.verify.result import Verification
from paceline_lens.verify.verifier import Verifier

# Those that `make test-all` runs: one of each way of telling; the others take minutes together.
SHORT = {
    "dropout",
    "another order",
    "no clipping",
    "batch norm",
    "the loader is not prepared",
    "a sum",
    "a metric over padding",
    "evaluation in train mode",
    "an optimizer of copies",
    "noise with seeds of the ranks",
}
TWO = (VerifyCase(2),)
PLANS = [
    VerifyCase(2, {"zero": 2}),
    VerifyCase(2, {"shard": 2}),
    VerifyCase(4, {"zero": 3}),
    VerifyCase(4, {"shard": 2, "replicate": 2}),
]


def names(scripts):
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in scripts]


class ForkedRuns:
    """Runs a script by `run_ranks`."""

    def __init__(self, folder: Path, text: str, compat: str = "", steps: int = 20, plain: str = "") -> None:
        self.folder = folder
        self.compat = compat
        self.steps = steps
        self.count = 0
        self.target = Target("script", str(folder / "train.py"))
        (folder / "train.py").write_text(text)
        self.plain = None
        if plain:
            self.plain = Target("script", str(folder / "before.py"))
            (folder / "before.py").write_text(plain)

    def __call__(self, case, *, double=False, nudge=0.0, again=False, as_written=False):
        folder = self._folder()
        recorder = Recorder(folder, self.steps, double=double, nudge=nudge, as_written=as_written)
        return self._run(folder, recorder, self.target, case)

    def run_plain(self):
        folder = self._folder()
        return self._run(folder, PlainRecorder(folder, self.steps, environment.snapshot()), self.plain, VerifyCase(1))

    def _folder(self):
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        return folder

    def _run(self, folder, recorder, target, case):
        handed = {name: [value, "command line", "--plans"] for name, value in case.settings.items()}
        settings = {"PACELINE_SETTINGS": json.dumps(handed)}
        try:
            run_ranks(lambda: recorder.run(target, self.compat), case.procs, env=settings, group=False, output=[])
        except RankFailed as error:
            raise RunFailed(str(error.__cause__ or error)) from error
        return read_all(folder)


def verified(folder, text, cases=TWO, compat="") -> Verification:
    return Verifier(ForkedRuns(folder, text, compat)).verify(cases)


def beside_plain(folder, text, plain):
    """Returns the result of the comparison with the script from before."""
    verification = Verifier(ForkedRuns(folder, text, plain=plain)).verify(())
    return verification.results[1]


def causes(verification) -> list[str]:
    return [cause for result in verification.results for cause in result.causes]


def check_cause(verification: Verification, cause: str) -> None:
    why = [result.why for result in verification.results]
    assert causes(verification)[:1] == [cause], why
    assert verification.exit_code == 1, why


@pytest.mark.parametrize("name", names(GOOD))
def test_no_false_alarm(tmp_path, name):
    verification = verified(tmp_path, script(GOOD[name]))
    assert [(result.status, result.first, result.causes) for result in verification.results] == [("same", None, [])] * 2
    assert verification.exit_code == 0


@pytest.mark.parametrize("name", names(BROKEN))
def test_what_breaks_on_several_ranks(tmp_path, name):
    cause, edits = BROKEN[name]
    verification = verified(tmp_path, script(edits))
    check_cause(verification, cause)


@pytest.mark.parametrize("name", names(DRAWING))
def test_draws_in_the_forward_pass_are_not_called_a_mistake(tmp_path, name):
    verification = verified(tmp_path, script(DRAWING[name]))
    result = verification.results[1]
    assert [finding.cause.name for finding in result.findings] == ["draws-in-forward"]
    assert (result.status, result.causes, verification.exit_code) == ("failed", [], 2)


@pytest.mark.parametrize("name", names(BROKEN_ALONE))
def test_what_is_broken_on_one_process(tmp_path, name):
    cause, edits = BROKEN_ALONE[name]
    if "hash" in name:
        pytest.skip("forks of one process have one hash seed: the command's own test has it")
    verification = verified(tmp_path, script(edits), ())
    assert causes(verification) == [cause] and verification.exit_code == 1


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("name", names(BROKEN_ACCELERATE))
def test_what_is_broken_under_accelerates_names(tmp_path, name):
    cause, edits = BROKEN_ACCELERATE[name]
    verification = verified(tmp_path, accelerate_script(edits), compat="accelerate")
    check_cause(verification, cause)


@pytest.mark.long
def test_a_correct_script_under_accelerates_names(tmp_path):
    verification = verified(tmp_path, accelerate_script(()), compat="accelerate")
    assert verification.exit_code == 0
    assert [finding.cause.name for finding in verification.results[1].findings] == ["filler-in-training"]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_correct_script_for_deepspeed_whose_engine_makes_the_loader(tmp_path, stage):
    text = deepspeed_script([('"stage": 1', f'"stage": {stage}')])
    verification = verified(tmp_path, text, compat="deepspeed")
    assert [(result.status, result.findings) for result in verification.results] == [("same", [])] * 2


@pytest.mark.long
@pytest.mark.parametrize("name", BROKEN_DEEPSPEED)
def test_what_is_broken_in_a_script_for_deepspeed(tmp_path, name):
    cause, edits = BROKEN_DEEPSPEED[name]
    check_cause(verified(tmp_path, deepspeed_script(edits), compat="deepspeed"), cause)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "dropout", "batch norm", "accumulation", "bf16", "items"])
def test_no_false_alarm_under_plans(tmp_path, name):
    verification = verified(tmp_path, script(GOOD[name]), PLANS)
    assert [(result.case.name, result.status, result.why) for result in verification.results[1:]] == [
        (case.name, "same", "") for case in PLANS
    ]


DROPOUT = ("nn.Tanh(), nn.Linear(8, 1))", "nn.Tanh(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))")


def test_the_script_from_before_computes_the_same_bits(tmp_path):
    edits = [DROPOUT]
    # A script may branch by what a launcher sets.
    before = edited(PLAIN, edits) + "\nimport os\nassert not {'RANK', 'WORLD_SIZE', 'MASTER_ADDR'} & set(os.environ)\n"
    result = beside_plain(tmp_path, script(edits), before)
    assert (result.status, result.largest, result.causes, result.steps) == ("same", {}, [], 6)


@pytest.mark.parametrize("name", names(BROKEN_PLAIN))
def test_what_differs_from_the_script_from_before(tmp_path, name):
    cause, edits = BROKEN_PLAIN[name]
    result = beside_plain(tmp_path, script(()), edited(PLAIN, edits))
    assert (result.status, result.causes) == ("different", [cause])


def test_a_script_from_before_with_which_nothing_can_be_compared(tmp_path):
    outcomes = {}
    for name, plain in {
        "fewer steps": PLAIN.replace("    loss = nn", "    if schedule.last_epoch == 3:\n        break\n    loss = nn"),
        "another model": PLAIN.replace("nn.Linear(8, 1))", "nn.Linear(8, 1, bias=False))"),
        "no step": PLAIN.replace("    optimizer.step()\n", ""),
        "an error": PLAIN + "\nraise ValueError(1)",
        "Paceline": script(()),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        result = beside_plain(folder, script(()), plain)
        outcomes[name] = result.status, bool(result.why), result.causes
        if name == "Paceline":
            assert "[verify-plain]" in result.why
    different, failed = ("different", True, []), ("failed", True, [])
    assert outcomes == {
        "fewer steps": different, "another model": different, "no step": failed, "an error": failed, "Paceline": failed,
    }  # fmt: skip


def test_every_cause_that_is_an_error_has_a_script_or_a_reason():
    scripted = {
        cause for scripts in (BROKEN, BROKEN_ALONE, BROKEN_PLAIN, BROKEN_ACCELERATE) for cause, _ in scripts.values()
    }
    # What is left when nothing fits.
    without = {"rows-differ", "unknown"}
    assert {cause.name for cause in CAUSES if cause.is_error} == scripted | without
    assert len(scripted) >= 15


def test_the_page_lists_the_causes(request):
    listing = request.config.rootpath / "docs" / "list_causes.py"
    spec = importlib.util.spec_from_file_location("list_causes", listing)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.written(page) == page, "run `python docs/list_causes.py`"
    assert all(f"`{cause.name}`" in page for cause in CAUSES)


@pytest.mark.long
def test_the_command(tmp_path, monkeypatch, capfd):
    (tmp_path / "good.py").write_text(script(()))
    (tmp_path / "sum.py").write_text(script(BROKEN["a sum"][1]))
    (tmp_path / "hash.py").write_text(script(BROKEN_ALONE["an order by hashes"][1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["verify", "--cpu", "--steps", "3"]
    assert command_line.main([*words, "--plans", "zero=2,shard=2", "good.py"]) == 0
    out, err = capfd.readouterr()
    assert "4 the same, 0 different" in out and "running zero=2, 2 processes" in err
    assert command_line.main([*words, "--json", "sum.py"]) == 1
    results = json.loads(capfd.readouterr().out)["results"]
    assert results[1]["findings"][0]["cause"] == "sum-of-rows" and results[1]["first"]["field"] == "loss"
    assert command_line.main([*words, "hash.py"]) == 1
    assert "[unseeded-order]" in capfd.readouterr().out
    # What cannot be compared has a code of its own.
    assert command_line.main([*words, "missing.py"]) == 2
    (tmp_path / "good.py").write_text("raise SystemExit(3)")
    assert command_line.main([*words, "good.py"]) == 2
    assert "not compared" in capfd.readouterr().out


def test_own_options_may_follow_a_script_that_does_not_mention_them(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("parser.add_argument('--steps')")
    words = ["--lr", "1", "--plans", "zero=2", "file", "--procs=1,2", "--steps", "3"]
    args = argparse.Namespace(script=str(path), script_args=words, plans="", procs="2", steps=20, json=False)
    _take_own_options_after_script(args)
    assert (args.plans, args.procs, args.steps, args.json) == ("zero=2", "1,2", 20, False)
    assert args.script_args == ["--lr", "1", "file", "--steps", "3"]
    assert "are taken by `paceline verify`: `--plans`, `--procs`" in capsys.readouterr().err


def test_values_that_cannot_be(capsys):
    for words in (["--procs", "0"], ["--plans", "zzero=2"], ["--steps", "0"], ["--plain", "'"]):
        assert command_line.main(["verify", *words, "train.py"]) == 2
        assert "[verify-value]" in capsys.readouterr().err
    assert command_line.main(["verify"]) == 2
