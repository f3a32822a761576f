"""`paceline env`: what a report of a fault should hold, and no secrets."""

import json

import paceline
from paceline.cli.env import relevant
from paceline.cli.main import main


def test_json_report(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "very secret")
    monkeypatch.setenv("PACELINE_TP", "2")
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["paceline"] == paceline.__version__
    assert {"torch", "python"} <= set(report["versions"])
    assert report["devices"]["cpu cores"] >= 1 and "gloo" in report["devices"]["backends"]
    assert report["this process"]["found by"] == "single"
    assert report["variables"]["HF_TOKEN"] == "(hidden)"
    assert report["variables"]["PACELINE_TP"] == "2"


def test_text_report(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("versions\n  paceline ") and "variables\n" in out


def test_a_contradictory_environment_is_shown_and_no_crash(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["env", "--json"]) == 0
    assert "[world-env]" in json.loads(capsys.readouterr().out)["this process"].get("error", "[world-env]")


def test_only_variables_that_matter_and_no_logins():
    env = {"OMP_NUM_THREADS": "1", "EDITOR": "vi", "NCCL_PROXY": "http://me:pw@host/x", "SLURM_JWT_AUTH": "abc"}
    assert relevant(env) == {
        "NCCL_PROXY": "http://(hidden)@host/x",
        "OMP_NUM_THREADS": "1",
        "SLURM_JWT_AUTH": "(hidden)",
    }
