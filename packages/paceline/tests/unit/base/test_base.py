"""Errors, the environment and the registry."""

import pickle
import signal
from pathlib import Path

import pytest

from paceline import ConfigError, PacelineError, PlanError
from paceline.base import env, log, registry
from paceline.base.errors import Problem
from paceline.base.files import expanded
from paceline.base.lazy import lazy_names
from paceline.base.registry import Registry


def test_an_error_says_what_why_and_one_fix():
    error = PlanError("plan-size", "the plan needs 6 processes.", why=["shard=3", "tp=2"], fix="launch 6")
    assert str(error) == "the plan needs 6 processes.  [plan-size]\n  why: shard=3\n  why: tp=2\n  fix: launch 6"
    assert f"{type(error).__module__}.{type(error).__name__}" == "paceline.PlanError"
    assert isinstance(error, ValueError) and error.code == "plan-size"


def test_several_problems_make_one_error_that_survives_a_pipe():
    error = ConfigError.of([Problem("one", "first", fix="a"), Problem("two", "second")])
    assert str(error).startswith("2 problems:\n1. first  [one]")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError and str(again) == str(error) and again.problems == error.problems


def test_a_variable_that_cannot_be_read_is_named():
    with pytest.raises(PacelineError, match=r"WORLD_SIZE is 'two'.*\[env-value\]"):
        env.get("WORLD_SIZE", {"WORLD_SIZE": "two"})
    assert env.get("WORLD_SIZE", {}) is None
    assert env.get("PACELINE_DEBUG", {"PACELINE_DEBUG": "Yes"}) is True


def test_patched_puts_back_what_stood_there():
    before = env.snapshot()
    with env.patched({"RANK": "3", "PATH": None}):
        assert env.get("RANK") == 3 and "PATH" not in env.snapshot()
    assert env.snapshot() == before


def test_a_warning_is_said_once_and_by_rank_0(caplog):
    log.forget_warnings()
    with env.patched({"RANK": "1"}):
        log.warn_once("base", "all ranks see this")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    log.forget_warnings()
    with env.patched({"RANK": "0"}):
        log.warn_once("base", "all ranks see this")
        log.warn_once("base", "all ranks see this")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ["all ranks see this"]


def test_what_every_rank_finds_is_logged_once(caplog):
    for rank in ("0", "1"):
        with env.patched({"RANK": rank}), caplog.at_level("INFO"):
            log.info("base", f"rank {rank} sees this")
    assert [record.getMessage() for record in caplog.records] == ["rank 0 sees this"]


@pytest.mark.needs("hosts")
def test_an_unknown_implementation_lists_those_that_exist():
    registry = Registry("paceline.strategies", "strategy")
    assert "replicate" in registry.names()
    registry.add("toy", object())
    assert registry.get("toy") in list(registry)
    registry.remove("toy")
    from paceline.launch.launcher import LAUNCHERS

    for written, name in {"k8s": "kubernetes", "kube": "kubernetes", "Slurm": "slurm"}.items():
        with pytest.raises(ConfigError, match=f"fix: write {name}"):
            LAUNCHERS.get(written)
    with pytest.raises(ConfigError, match=r"\[unknown-name\]"):
        registry.get("toy")


def test_another_distribution_may_offer_an_implementation(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text("STRATEGY = 'theirs'\n")
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.toys]\nmine = elsewhere:STRATEGY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._all_points.cache_clear()
    toys = Registry("paceline.toys", "toy")
    assert (toys.names(), toys.get("mine"), toys.module("mine")) == (["mine"], "theirs", "elsewhere")
    registry._all_points.cache_clear()


def test_ctrl_c_during_an_import_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swallows = (
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\nname = 1\n"
    )
    (tmp_path / "swallows_interrupts.py").write_text(swallows)
    monkeypatch.syspath_prepend(tmp_path)
    load = lazy_names("paceline.base", {"name": "swallows_interrupts"})
    with pytest.raises(AttributeError, match="has no attribute"):
        load("nam")
    with pytest.raises(ImportError, match="Did you mean: 'Accelerator'"):
        from paceline import Acelerator  # noqa: F401
    assert not hasattr(__import__("paceline"), "Acelerator")
    with pytest.raises(KeyboardInterrupt):
        load("name")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_home_of_an_unknown_user_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/runs") == Path("/home/me/runs")
    assert expanded("~no-such-user/runs") == Path("~no-such-user/runs")  # `Path.expanduser` raises RuntimeError
