"""Which releases of torch are refused, warned of and run."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest

from paceline import Accelerator, WorldError
from paceline.base import log
from paceline.base.version import TORCH_NEWEST
from paceline.cli.main import main
from paceline.world import torch_version

ROOT = Path(__file__).parents[5]
NEWER = f"{TORCH_NEWEST[0]}.{TORCH_NEWEST[1] + 1}"


@pytest.fixture
def as_if(monkeypatch):
    """Has torch say that it is another release."""
    log.forget_warnings()
    yield lambda version: monkeypatch.setattr("torch.__version__", version)
    log.forget_warnings()


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("2.10.0", "older"),
        ("2.10.1+cpu", "older"),
        ("1.13.1", "older"),
        ("2.9.0a0+git1234", "older"),
        ("2.11.0rc1", "tested"),
        ("2.11.0", "tested"),
        ("2.13.0+cpu", "tested"),
        ("2.15.3+cu132", "tested"),
        ("2.15.0.dev20260901+cpu", "tested"),
        ("2.16.0.dev20261101", "newer"),
        ("2.16.0", "newer"),
        ("3.0.0", "newer"),
        ("unknown", "unknown"),
    ],
)
def test_where_a_release_stands(version: str, standing: str) -> None:
    assert torch_version.compare(version) == standing


def test_an_older_torch_is_refused_with_the_command_that_helps(as_if) -> None:
    as_if("2.10.0+cpu")
    with pytest.raises(WorldError, match=r"does not run on torch 2\.10\.0") as caught:
        Accelerator(cpu=True)
    assert caught.value.code == "torch-version"
    assert f'-m pip install "torch>=2.11,<{NEWER}"' in str(caught.value)
    assert "has torch 2.10.0+cpu" in str(caught.value)


def test_a_newer_torch_is_warned_of_once_on_the_first_rank(as_if, caplog, monkeypatch) -> None:
    as_if(f"{NEWER}.0+cu140")
    for _ in range(2):
        torch_version.check(f"{NEWER}.0+cu140")
    assert caplog.text.count("not a release that Paceline") == 1
    assert f"torch {NEWER}.0+cu140" in caplog.text and "install a tested torch: " in caplog.text
    caplog.clear()
    log.forget_warnings()
    monkeypatch.setenv("RANK", "1")
    torch_version.check(f"{NEWER}.0")
    torch_version.check(f"{NEWER}.1", warn=False)
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == []


def test_the_command_shows_where_torch_stands(as_if, capsys) -> None:
    as_if(f"{NEWER}.0")
    assert main(["env"]) == 0
    assert f"2.11 to 2.15 (this one is newer: {NEWER}.0)" in capsys.readouterr().out


def test_pyproject_states_the_same_range() -> None:
    project = tomllib.loads((ROOT / "packages" / "paceline" / "pyproject.toml").read_text())["project"]
    assert f"torch>=2.11,<{NEWER}" in project["dependencies"]
    assert torch_version.range_text() == "2.11 to 2.15"
