"""`paceline explain`: each setting, its value and where it came from."""

import json

import pytest

from paceline.cli.main import main


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("PACELINE_SETTINGS", raising=False)


def test_the_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("tp: 2\naccumulate: 4\nsame_network: true\n")
    monkeypatch.setenv("PACELINE_TP", "4")
    assert main(["explain", "--config", str(path), "--cpu", "--changed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file: {path}"
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[2:]}
    assert rows["tp"] == f"tp 4 environment (PACELINE_TP) instead of 2 ({path}:1)"
    assert rows["accumulate"] == f"accumulate 4 file ({path}:2)"
    assert rows["cpu"] == "cpu yes command line (--cpu)"
    assert "no effect here" in rows["same_network"]
    assert "nodes" not in rows


def test_the_table_shows_defaults(capsys):
    assert main(["explain"]) == 0
    assert "mixed_precision     no      default" in capsys.readouterr().out


def test_json(capsys):
    assert main(["explain", "--json", "--num_processes", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    [row] = [each for each in report["settings"] if each["field"] == "procs"]
    assert row == {"field": "procs", "value": 2, "source": "command line", "where": "--num_processes", "reason": ""}
    assert report["file"] is None
