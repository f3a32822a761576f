"""`paceline explain`: each setting, its value and where it came from."""

import json

import pytest

from paceline.cli.main import main


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("PACELINE_SETTINGS", raising=False)


@pytest.mark.needs("large")
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
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mixed_precision", "no", "default"] in lines


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("shard.reshrad=no", "shard has no option called 'reshrad'"),
        ("shrad.reshard=no", "options are given for 'shrad', which is no strategy"),
        ("shard.reshard=perhaps", "shard.reshard cannot be 'perhaps'"),
        pytest.param(
            "profile.flops_stop=3", "profile has no option called 'flops_stop'", marks=pytest.mark.needs("lens")
        ),
    ],
)
def test_a_wrong_option_is_refused_as_a_run_would_refuse_it(option, message, capsys):
    assert main(["explain", "--option", option]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.needs("large")
def test_right_options_are_shown(capsys):
    assert main(["explain", "--changed", "--option", "shard.reshard=no", "--option", "profile.flops_step=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[3:]] == [
        ["options.shard.reshard", "no"],
        ["options.profile.flops_step", "3"],
    ]


def test_json(capsys):
    assert main(["explain", "--json", "--num_processes", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    [row] = [each for each in report["settings"] if each["field"] == "procs"]
    assert row == {"field": "procs", "value": 2, "source": "command line", "where": "--num_processes", "reason": ""}
    assert report["file"] is None


DEEPSPEED = """{
  "train_batch_size": 32,
  "gradient_accumulation_steps": 2,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "overlap_comm": true},
  "flops_profiler": {"enabled": true},  # one step
  "wall_clock_breakdown": true,
}"""


@pytest.mark.needs("deepspeed")
def test_what_a_deepspeed_config_means(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    assert main(["explain", "--deepspeed", "ds.json", "--changed"]) == 0
    out = capsys.readouterr().out
    assert "batch: 32 = micro-batch open x accumulation 2 x processes (say how many: --procs N)" in out
    assert main(["explain", "--deepspeed", "ds.json", "--changed", "-n", "4"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["zero", "2", "ds.json:5"] in lines and ["accumulate", "2", "ds.json:3"] in lines
    assert ["profile", "wall-clock,flops", "ds.json:7,", "ds.json:6"] in lines
    assert "batch: 32 = micro-batch 4 x accumulation 2 x 4 processes" in map(" ".join, lines)
    assert ["train_batch_size", "32", "ds.json:2"] in lines
    [unused] = [line for line in lines if line[:1] == ["zero_optimization.overlap_comm"]]
    assert unused[1:3] == ["yes", "ds.json:5"] and "backward" in unused


@pytest.mark.needs("large")
def test_what_it_means_as_json(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(DEEPSPEED)
    assert main(["explain", "--deepspeed", str(path), "--json", "-n", "4", "--tp", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["batch"] == {"train": 32, "micro": 8, "accumulate": 2, "width": 2} and told["processes"] == 4
    [zero] = [row for row in told["settings"] if row["field"] == "zero"]
    assert (zero["value"], zero["where"]) == (2, f"{path}:5")
    assert {row["field"] for row in told["kept"]} == {"train_batch_size", "gradient_accumulation_steps"}
    assert [row["field"] for row in told["unused"]] == ["zero_optimization.overlap_comm"] and len(told["notices"]) == 1


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize(("procs", "words"), [("3", "32 is not 5 x 2 x 3"), ("0", "config-value")])
def test_a_deepspeed_config_that_cannot_run(tmp_path, capsys, procs, words):
    path = tmp_path / "ds.json"
    path.write_text(DEEPSPEED)
    assert main(["explain", "--deepspeed", str(path), "-n", procs]) == 2
    assert words in capsys.readouterr().err
