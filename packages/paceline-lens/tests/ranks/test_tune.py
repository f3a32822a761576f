"""`paceline tune` as people type it: real trials on two processes, some of which fail, do not fit, hang or never step."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch  # noqa: F401  (trials are forks of this process)
import yaml

from paceline.cli import main as command_line
from paceline.config import files

SCRIPT = """
import argparse, os, sys, time
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import Accelerator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--fault", default="")
args = parser.parse_args()
accelerator = Accelerator(log_with="jsonl", project_dir="logs", cpu=True)
accelerator.init_trackers("run")
wide = nn.Linear(32, 1024)
model = nn.Sequential(Block(), Block(), wide, nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
size = max(512, 4 * args.batch_size)
data = TensorDataset(torch.randn(size, 32), torch.randint(10, (size,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=args.batch_size))
plan, rehearsed = accelerator.plan, "fake" in str(torch.distributed.get_backend())
if not rehearsed:
    if args.fault == "raise" and plan.zero == 3:
        raise RuntimeError("no third stage today")
    if args.fault == "memory" and args.batch_size == 8:
        numpy.ones(2**31, dtype=numpy.uint8)
    if args.fault == "hang":
        time.sleep(600)
    if args.fault == "none":
        sys.exit(0)
for epoch in range(4):
    for x, y in loader:
        try:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        except BaseException:
            if args.fault == "swallow":
                continue
            raise
        finally:
            if args.fault == "saves":
                accelerator.save_state("mine")
    accelerator.save_state("mine")
if not rehearsed:
    print("the end")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run(*words, code=0):
    assert command_line.main([*words]) == code


def results(folder, name="autotuning_results"):
    rows = [json.loads(line) for line in (folder / name / "results.jsonl").read_text().splitlines()]
    return {row["name"]: row["result"] for row in rows[1:]}


SEARCH = ["tune", "--procs", "2", "--first-step", "2", "--last-step", "3"]
MICRO = ["--arg", "micro=--batch-size", "--recompute", "no"]


def test_a_script_is_tuned_and_leaves_its_folders_alone(folder, capfd):
    words = [*SEARCH, *MICRO, "--micro", "4", "--early-stop", "20", "train.py", "--batch-size", "8", "--fault", "saves"]
    run(*words)
    out, err = capfd.readouterr()
    rows = results(folder)
    assert set(rows) == {f"z{zero}_gas2_tmbspg4" for zero in range(4)}
    assert {row["status"] for row in rows.values()} == {"measured"}
    assert {row["batch"] for row in rows.values()} == {16}  # accumulation has followed the micro-batch
    assert all(row["seconds"] > 0 and row["bytes"] >= 0 for row in rows.values())
    assert sorted(row.name for row in folder.iterdir()) == ["autotuning_exps", "autotuning_results", "train.py"]
    assert "trial 4 of 4" in err and "recompute stays no: it was given (--recompute)" in out
    # What was written can be used.
    place = folder / "autotuning_results"
    best = yaml.safe_load((place / "best.yaml").read_text())
    assert best["procs"] == 2 and best["accumulate"] == 2 and not files.read(str(place / "best.yaml")).problems
    optimal = place / "ds_config_optimal.json"
    assert optimal.exists() == (find_spec("paceline_deepspeed") is not None)  # it is for those who have such scripts
    if optimal.exists():
        from paceline_deepspeed.config import read

        config = read(optimal)
        assert config.batch(2).train == 16 and config["zero_optimization.stage"] == best["zero"]
    summary = (place / "summary.txt").read_text()
    assert summary.strip() in out and "best by throughput" in summary
    assert 'class="plot"' in (place / "predicted.html").read_text()
    words_of_best = (place / "cmd_optimal.txt").read_text().split()
    assert words_of_best[:4] == ["paceline", "launch", "--config", "autotuning_results/best.yaml"]
    assert words_of_best[4:7] == ["train.py", "--batch-size", "4"]
    # Again: only what is missing is measured; a line that was cut off counts as missing.
    lines = (place / "results.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["name"]  # where trials were close some ran again, and have two lines
    whole_lines = [line for line in lines if json.loads(line).get("name") != last]
    (place / "results.jsonl").write_text("".join(whole_lines) + lines[-1][:9])
    run(*words)
    out, err = capfd.readouterr()
    assert err.count("(from an earlier run)") == 3 and "3 of these results were there from an earlier run" in out
    assert results(folder).keys() == rows.keys()
    # Other results are not mixed with these.
    run(*SEARCH, "train.py", code=2)
    assert "[tune-results]" in capfd.readouterr().err


def test_a_candidate_that_raises_and_one_that_does_not_fit_are_results(folder, capfd):
    words = ["--early-stop", "20", "train.py", "--batch-size", "8", "--fault"]
    run(*SEARCH, "--recompute", "no", *words, "raise")
    out, err = capfd.readouterr()
    rows = results(folder)
    assert [row["status"] for _, row in sorted(rows.items())] == ["measured"] * 3 + ["failed"]
    assert "no third stage today" in rows["z3_gas1"]["why"]
    assert err.count('raise RuntimeError("no third stage today")') == 1  # the script's own traceback, once
    run(*SEARCH, *MICRO, "--micro", "4:8", "--results", "again", "--device", "cpu-1GB", "--zero", "0", *words, "memory")
    out, err = capfd.readouterr()
    rows = results(folder, "again")
    assert {name: row["status"] for name, row in rows.items()} == {
        "z0_gas1_tmbspg8": "does not fit",
        "z0_gas2_tmbspg4": "measured",
    }
    assert "allocate" in rows["z0_gas1_tmbspg8"]["why"]
    assert "zero stays 0: it was given (--zero)" in out


def test_what_is_predicted_not_to_fit_is_never_launched(folder, capfd):
    words = ["--zero", "0", "--micro", "2048:4096", "--device", "a100-24MB", "train.py", "--batch-size", "4096"]
    run(*SEARCH, *MICRO, *words)
    out = capfd.readouterr().out
    line = next(line for line in out.splitlines() if "not launched" in line)
    assert "a rank, 22.8 MiB of a100-24mb can be used" in line
    assert not (folder / "autotuning_exps" / line.split()[0]).exists()
    assert results(folder) and line.split()[0] not in results(folder)


@pytest.mark.parametrize(
    ("fault", "more", "code", "message"),
    [
        ("none", [], "tune-steps", "the script ended after 0 steps"),
        ("hang", ["--timeout-s", "1.5", "--trials", "1"], "tune-none", "no step within 1.5 s"),
        ("memory", ["--device", "cpu-1GB", "--trials", "1"], "tune-none", "z0_gas1"),
    ],
)
def test_nothing_measured_is_an_error(folder, capfd, fault, more, code, message):
    run(*SEARCH, "--zero", "0", "--recompute", "no", *more, "train.py", "--fault", fault, code=1)
    err = capfd.readouterr().err
    assert f"[{code}]" in err and message in err


def test_values_that_cannot_be(folder, capfd, monkeypatch):
    for words, code, message in [
        (["--micro", "few", "train.py"], "tune-value", "--micro"),
        (["--first-step", "1", "train.py"], "tune-value", "first_step"),
        (["--arg", "stage=--stage", "train.py"], "tune-value", "--arg"),
    ]:
        run("tune", *words, code=2)
        err = capfd.readouterr().err
        assert f"[{code}]" in err and message in err
    run("tune", "--nodes", "2", "--main-address", "127.0.0.1", "train.py", code=1)
    assert "[tune-launch]" in capfd.readouterr().err
    monkeypatch.setattr("paceline_lens.forecast.calibrate.of_this_host", lambda *_, **__: 1 / 0)
    run("tune", "train.py", code=1)
    assert "[tune-device]" in capfd.readouterr().err


DEEPSPEED = """
import argparse
import torch, deepspeed
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed("gloo")
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
data = TensorDataset(torch.randn(256, 16), torch.randint(4, (256,)))
config = None if args.deepspeed_config else {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
engine, _, loader, _ = deepspeed.initialize(
    args=args, config=config, model=model, optimizer=torch.optim.AdamW(model.parameters()), training_data=data
)
steps = 0
for x, y in loader:
    loss = nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    steps += 1
    engine.save_checkpoint("saved")
if engine.global_rank == 0:
    print("ran", engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage(), steps, flush=True)
"""
CONFIG = """{
  // hjson, as it stands
  "train_batch_size": 16,
  "zero_optimization": {"stage": [0, 2]},
  "csv_monitor": {"enabled": true, "output_path": "csv"},
  "autotuning": {"enabled": true, "results_dir": null, "start_profile_step": 2, "end_profile_step": 3,
                 "num_tuning_micro_batch_sizes": 1}
}
"""


@pytest.mark.needs("deepspeed")
def test_the_autotuning_key(folder, capfd):
    from paceline_deepspeed.config import read

    (folder / "ds.py").write_text(DEEPSPEED)
    (folder / "ds.json").write_text(CONFIG)
    words = ["--num_gpus", "2", "--autotuning"]
    run("deepspeed", *words, "tune", "ds.py", "--deepspeed_config", "ds.json")
    out, _ = capfd.readouterr()
    rows = results(folder)
    assert set(rows) == {"z0_gas1_tmbspg8", "z2_gas1_tmbspg8"}
    assert {row["status"] for row in rows.values()} == {"measured"}, rows
    best = json.loads((folder / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["csv_monitor"]["enabled"] is True and "autotuning" not in best
    assert read(best).batch(2).train == 16
    assert "came to no step" not in out
    assert not {"csv", "saved"} & {row.name for row in folder.iterdir()}
    assert json.loads((folder / "autotuning_exps" / "z2_gas1_tmbspg8" / "ds_config.json").read_text())[
        "zero_optimization"
    ]
    assert "paceline deepspeed --num_gpus 2 ds.py --deepspeed_config autotuning_results/ds_config_optimal.json" in out
    # A script that names its config itself cannot be given another one.
    shutil.rmtree(folder / "autotuning_results")
    run("deepspeed", *words, "run", "ds.py", code=2)
    out, err = capfd.readouterr()
    assert "[tune-run]" in err and set(results(folder)) == {"z1_gas1_tmbspg2", "z1_gas2_tmbspg1"}


PIPELINE = """
import torch, deepspeed
from torch import nn
from deepspeed.pipe import PipelineModule

model = PipelineModule([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)], num_stages=2, loss_fn=nn.CrossEntropyLoss())
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, _, _, _ = deepspeed.initialize(config=config, model=model, training_data=data)
for _ in range(6):
    engine.train_batch()
"""


@pytest.mark.needs("deepspeed")
def test_a_pipeline_s_micro_batches_are_tuned(folder):
    (folder / "pipe.py").write_text(PIPELINE)
    run(*SEARCH, "--cpu", "--compat", "deepspeed", "pipe.py")
    rows = results(folder)
    assert set(rows) == {"z0_gas1_tmbspg4", "z0_gas2_tmbspg2", "z0_gas4_tmbspg1"}
    assert {(row["status"], row["batch"]) for row in rows.values()} == {("measured", 4)}
