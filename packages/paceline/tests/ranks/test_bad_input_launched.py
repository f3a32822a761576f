"""What a person sees who makes a mistake: one error, once, with their own line, and nobody left running."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
from warm_python import executable

from paceline import Accelerator

BEGIN = """
import os, sys, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import Accelerator

Path(os.environ.get("RANK", "alone") + ".pid").write_text(str(os.getpid()))

def parts(out=1):
    torch.manual_seed(0)
    model = nn.Linear(4, out)
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader
"""
TRAIN = """
def train(model, optimizer, loader, scale=1.0):
    for x, y in loader:
        accelerator.backward(scale * (model(x) - y).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script, through the launcher or without it."""

    def start(script, *words, procs=2, plain=False):
        path = tmp_path / "train.py"
        path.write_text(BEGIN + dedent(script))
        command = [executable()]
        if not plain:
            command += ["-m", "paceline.cli.main", "launch", "--procs", str(procs), "--cpu"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
        env = {**kept, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, path, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90
        )

    return start


def errors(done, name, code):
    """The error that was shown, after checking that it was shown once, in the house's form, without our frames."""
    shown = done.stderr
    assert done.returncode == 1, shown
    assert shown.count(f"[{code}]") == shown.count("Traceback (most recent call last)") == 1, shown
    trace, _, told = shown.partition(f"paceline.{name}: ")
    assert "\n  why: " in told
    assert "\n  fix: " in told
    assert "/paceline/" not in trace, trace
    # Before it, torch may have warned that the store of a rank which failed earlier is gone.
    assert "torch/" not in trace.partition("Traceback")[2], trace
    return trace


def nobody_runs(folder):
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    return pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def prints(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_an_error_of_all_ranks_is_shown_once_with_the_users_line(run, tmp_path):
    script = """
        accelerator = Accelerator()
        model, optimizer, loader = parts()
        model, loader = accelerator.prepare(model, loader)
        for x, y in loader:
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()  # was not prepared
        """
    begun = time.monotonic()
    done = run(script)
    assert time.monotonic() - begun < 60
    trace = errors(done, "PrepareError", "optimizer-unprepared")
    assert trace.rstrip().splitlines()[-1].strip(" ^") in ("optimizer.step()  # was not prepared", "")
    assert 'train.py", line' in trace
    report = done.stderr.partition("paceline.LaunchError: ")[2]
    assert "[rank-failed]" in report
    assert "the same error on rank" in report
    assert done.stdout == ""
    assert nobody_runs(tmp_path)
    alone = run(script, plain=True)
    assert alone.returncode == 1
    assert alone.stderr.count("[optimizer-unprepared]") == alone.stderr.count("Traceback") == 1


def test_a_loss_that_is_not_a_number_under_fp16_leaves_the_checkpoint(run, tmp_path):
    done = run(
        TRAIN
        + """
accelerator = Accelerator("fp16")
model, optimizer, loader = accelerator.prepare(*parts())
train(model, optimizer, loader)
accelerator.save_state("saved")
train(model, optimizer, loader, scale=float("nan"))
"""
    )
    errors(done, "TrainError", "fp16-loss")
    before = prints(tmp_path / "saved")
    done = run(
        """
        import resource, signal
        accelerator = Accelerator("fp16")
        model, optimizer, loader = accelerator.prepare(*parts())
        accelerator.load_state("saved")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))  # refused as on a full disk
        accelerator.save_state("saved")
        """
    )
    errors(done, "CheckpointError", "checkpoint-disk-full")
    assert prints(tmp_path / "saved") == before
    largest = max((tmp_path / "saved").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    done = run(
        """
        accelerator = Accelerator("fp16")
        accelerator.prepare(*parts())
        accelerator.load_state("saved")
        """,
        procs=1,
    )
    errors(done, "CheckpointError", "checkpoint-damaged")
    assert largest.name in done.stderr


def test_a_rank_that_raises_ends_all_and_keeps_its_own_frames(run, tmp_path):
    done = run(
        """
        accelerator = Accelerator()

        def inner():
            raise KeyError("the user's own")

        def outer():
            inner()

        if accelerator.process_index == 1:
            outer()
        accelerator.wait_for_everyone()
        """
    )
    assert done.returncode == 1
    trace, _, report = done.stderr.partition("paceline.LaunchError: ")
    assert trace.count("Traceback") == 1
    assert "in outer" in trace
    assert "in inner" in trace
    assert trace.rstrip().endswith("""KeyError: "the user's own\"""")
    assert report.startswith("rank 1 failed with exit code 1.")
    assert nobody_runs(tmp_path)


@pytest.mark.parametrize("procs", [1, 2])
def test_a_good_run_is_quiet(run, procs):
    done = run(
        TRAIN
        + """
accelerator = Accelerator(gradient_accumulation_steps=1)
model, optimizer, loader = parts()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
train(model, optimizer, loader)
accelerator.save_state("saved")
accelerator.load_state("saved")
seen = accelerator.gather_for_metrics(torch.ones(2))
accelerator.print("done")
accelerator.end_training()
""",
        procs=procs,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


COMMANDS = {
    ("--procs", "0"): (2, "config-value", "--procs"),
    ("--procs", "two"): (2, "config-value", "--procs"),
    ("--prosc", "2"): (2, "command-line", "write --procs"),
    ("--config", "keys.yaml"): (2, "config-key", "write 'mixed_precision'"),
    ("--config", "kinds.yaml"): (2, "config-value", "kinds.yaml:2"),
    ("--config", "syntax.yaml"): (2, "config-syntax", "syntax.yaml"),
    ("--config", "none.yaml"): (2, "config-file", "none.yaml"),
    ("--main-port", "PORT"): (1, "launch-port", "PORT"),
}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_wrong_command_starts_nothing(words, tmp_path):
    (tmp_path / "keys.yaml").write_text("procs: 2\nmixed_precison: bf16\n")
    (tmp_path / "kinds.yaml").write_text("procs: 2\nmax_restarts: often\n")
    (tmp_path / "syntax.yaml").write_text("procs: [1\n")
    (tmp_path / "train.py").write_text("open('started', 'w')")
    exit_code, code, named = COMMANDS[words]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [port if word == "PORT" else word for word in words]
        command = [sys.executable, "-m", "paceline.cli.main", "launch", *words, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.count(f"[{code}]") == 1, done.stderr
    assert named.replace("PORT", port) in done.stderr
    assert "\n  fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_debug_mode_shows_every_frame(monkeypatch):
    from paceline.base.errors import PrepareError
    from paceline.launch.worker.traceback_text import traceback_text

    def caught():
        try:
            Accelerator(cpu=True).prepare([1])
        except PrepareError as error:
            return error

    assert "in kind_of" not in traceback_text(caught())
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    assert "in kind_of" in traceback_text(caught())


def test_a_file_that_several_ranks_write_is_told_once(run, tmp_path):
    done = run(
        """
        from torch.utils.tensorboard import SummaryWriter
        rank = os.environ["RANK"]
        for name in ("same.pt", f"own-{rank}.pt", "same.pt", os.devnull):
            torch.save({"weight": torch.ones(2)}, name)
        for folder in ("curves", f"curves/{rank}"):
            writer = SummaryWriter(folder)
            writer.add_scalar("loss", 1.0, 1)
            writer.close()
        """,
        procs=3,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "several ranks" in line]
    assert [line.count(name) for line, name in zip(told, ("same.pt", str(tmp_path / "curves")), strict=True)] == [1, 1]
    assert not told[1].partition("curves")[2].startswith("/")
