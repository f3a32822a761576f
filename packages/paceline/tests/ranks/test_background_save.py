"""Saves in the background: what is written is what was there at the call, and whatever goes wrong is told to all ranks."""

import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT, loss_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, TensorDataset
from warm_python import executable

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.checkpoint import verify
from paceline.checkpoint.format import native_writer
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store.local import LocalStore
from paceline.testing import ranks, run_ranks
from paceline.testing.ranks import RankFailed

PLANS = [
    {"replicate": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2},
    pytest.param({"tp": 2}, marks=pytest.mark.needs("large")),
    pytest.param({"pp": 2}, marks=pytest.mark.needs("large")),
    {"replicate": 2, "shard": 2},
]


class Counter:
    """A registered object with a tensor that it changes in place."""

    def __init__(self) -> None:
        self.seen, self.history = torch.zeros(3), []

    def count(self) -> None:
        self.seen += 1
        self.history.append(len(self.history))

    def state_dict(self):
        return {"seen": self.seen, "history": self.history}

    def load_state_dict(self, state) -> None:
        self.seen, self.history = state["seen"], state["history"]


class Run:
    """A small run of any plan."""

    def __init__(self, plan=None, **options) -> None:
        self.accelerator = Accelerator(cpu=True, plan=plan or {}, **options)
        torch.manual_seed(7)
        model = GPT(tied=True, frozen=True, layers=2)
        tokens = torch.randint(0, 24, (8, 9), generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone()), 2)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self) -> None:
        for batch in self.loader:
            self.accelerator.forward_backward(self.model, batch, loss_of)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.counter.count()
        random.random(), torch.rand(1)


class Held:
    """Keeps the writer from writing until it is let go."""

    def __init__(self, monkeypatch) -> None:
        self.gate, write = threading.Event(), native_writer.write_shard

        def held(*args):
            assert self.gate.wait(60)
            return write(*args)

        monkeypatch.setattr(native_writer, "write_shard", held)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_written_is_what_was_there(plan, tmp_path, monkeypatch) -> None:
    def work() -> None:
        held = Held(monkeypatch)
        run = Run(plan)
        run.train()
        for turn in ("first", "again"):  # the second uses memory and layout of the first
            held.gate.set()
            run.accelerator.save_state(tmp_path / f"{turn}-plain")
            held.gate.clear()
            path = run.accelerator.save_state(tmp_path / f"{turn}-beside", background=True)
            run.train()
            assert path == str(tmp_path / f"{turn}-beside") and not os.path.exists(path), (
                "it is not there before its end"
            )
            held.gate.set()
            run.accelerator.wait_for_save()
            assert os.path.exists(path)
        run.accelerator.end_training()

    run_ranks(work, 4 if len(plan) == 2 and "replicate" in plan else 2)
    for turn in ("first", "again"):
        one, two = files(tmp_path / f"{turn}-plain"), files(tmp_path / f"{turn}-beside")
        assert verify(str(tmp_path / f"{turn}-beside"), LocalStore()) == []
        assert {name: data for name, data in one.items() if name != ".metadata"} == {
            name: data for name, data in two.items() if name != ".metadata"
        }
    dcp_to_torch_save(tmp_path / "again-beside", tmp_path / "torch.pt")  # torch reads it too


def test_a_second_save_waits_or_is_skipped(tmp_path, monkeypatch) -> None:
    def work():
        held = Held(monkeypatch)
        run = Run(project_dir=str(tmp_path))
        save = run.accelerator.save_state
        found = [save(background=True)]
        if run.accelerator.is_main_process:
            held.gate.set()
            run.accelerator.states._checkpointer._background._thread.join(0.2)
        found.append(save(background=True, busy="skip"))
        held.gate.set()
        found += [save(background=True, busy="wait"), save()]
        run.accelerator.wait_for_save()
        found.append(save(background=True, busy="skip"))
        run.accelerator.end_training()
        with pytest.raises(CheckpointError, match="checkpoint-busy"):
            save(busy="hurry")
        return [path and os.path.basename(path) for path in found]

    names = ["checkpoint_0", None, "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert run_ranks(work, 2) == [names, names], "what is skipped is skipped on all ranks, and takes no number"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == sorted(name for name in names if name)


@pytest.mark.parametrize("call", ["save_state", "load_state", "wait_for_save", "end_training"])
def test_a_full_disk_is_told_by_the_next_call(tmp_path, call) -> None:
    """A limit on the size of files stands for the end of the disk: the system refuses in the same way."""

    def work():
        run = Run()
        run.accelerator.save_state(tmp_path / "c")
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limit[1]))
        run.accelerator.save_state(tmp_path / "c", background=True)
        run.train()
        with pytest.raises(CheckpointError) as caught:
            getattr(run.accelerator, call)(*([tmp_path / "c"] if "state" in call else []))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        if call != "end_training":
            run.accelerator.wait_for_save()  # said once
            run.accelerator.save_state(tmp_path / "d", background=True)
            run.accelerator.end_training()
        return caught.value.code, str(caught.value)

    one, two = run_ranks(work, 2)
    assert one == two and one[0] == "checkpoint-disk-full"
    assert verify(str(tmp_path / "c"), LocalStore()) == []
    assert {name for name in os.listdir(tmp_path) if "partial" in name} == set()


def test_permission_lost_while_writing(tmp_path, monkeypatch) -> None:
    """A file where the folder was stands for a permission that was taken away."""

    def work():
        held = Held(monkeypatch)
        run = Run()
        run.accelerator.save_state(tmp_path / "c", background=True)
        if dist.get_rank() == 0:
            (staged,) = tmp_path.glob(".c.partial-*")
            shutil.rmtree(staged)
            staged.write_text("")
        dist.barrier()
        held.gate.set()
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.wait_for_save()
        return caught.value.code, str(caught.value)

    one, two = run_ranks(work, 2)
    assert one == two and one[0] == "checkpoint-not-writable" and not (tmp_path / "c").exists()


def test_a_peer_that_dies_while_writing(tmp_path, monkeypatch) -> None:
    """The others end with an error, at once; what was saved before loads, and the next save cleans up."""
    # A rank whose peer is lost waits half a second for the word of why it left.
    monkeypatch.setattr(ranks, "_GRACE_S", 1.5)

    def save_and_die() -> None:
        run = Run(project_dir=str(tmp_path))
        run.accelerator.save_state()
        if dist.get_rank() == 1:
            native_writer.write_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        run.accelerator.save_state(background=True)
        error = run.accelerator.states._checkpointer._background.wait()
        assert error is not None
        (tmp_path / "told").write_text(type(error).__name__)
        time.sleep(60)  # rank 1 has ended, so that this one is ended too

    with pytest.raises(RankFailed):
        run_ranks(save_and_die, 2, timeout_s=30)
    assert (tmp_path / "told").exists()

    def go_on() -> list[str]:
        run = Run(project_dir=str(tmp_path))
        run.accelerator.load_state()
        run.accelerator.save_state(background=True)
        run.accelerator.end_training()
        return sorted(os.listdir(tmp_path / "checkpoints"))

    assert run_ranks(go_on, 2)[0] == ["checkpoint_0", "checkpoint_1"]


SCRIPT = """
import atexit, os, sys, time
atexit.register(print, "a function of atexit", flush=True)
import torch
from paceline import Accelerator
from paceline.checkpoint.format import native_writer

write = native_writer.write_shard
native_writer.write_shard = lambda *args: (time.sleep(0.5), {broken}write(*args))[-1]
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state("saved", background=True)
assert not os.path.exists("saved")
{ending}
"""


@pytest.mark.parametrize(("ending", "code", "broken"), [
    ("", 0, ""), ("sys.exit(3)", 3, ""), ("raise RuntimeError('of mine')", 1, ""), ("", 1, "1 / 0,"),
    ("from paceline.launch.worker import worker; worker.leave(4)", 4, ""),
], ids=["end", "exit", "exception", "failing", "function"])  # fmt: skip
def test_the_process_ends_after_its_save(tmp_path, ending, code, broken) -> None:
    """And with an exit code of its own where that save has failed: no exception can say so any more."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending, broken=broken))
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "saved/manifest.json").exists() == (not broken)
    assert ("This was the last save, in the background" in done.stderr) == bool(broken)
    assert "a function of atexit" in done.stdout or "leave" in ending
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("launcher", ["paceline", "torchrun"])
def test_a_launcher_hears_of_a_last_save_that_failed(tmp_path, launcher) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending="", broken="1 / 0,"))
    own = ["-m", "paceline", "launch"] if launcher == "paceline" else ["-m", "torch.distributed.run"]
    number = "--procs=1" if launcher == "paceline" else "--nproc-per-node=1"
    done = subprocess.run(
        [executable(), *own, number, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert "checkpoint-failed" in done.stderr and "This was the last save, in the background" in done.stderr
    assert launcher == "torchrun" or "[rank-failed]" in done.stderr


def test_what_is_kept(tmp_path) -> None:
    """The rules in one run: the newest two, each tenth step, the smallest loss."""

    def work():
        run = Run(project_dir=str(tmp_path), keep=Keep(last=2, every=10, best="loss"))
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.save_state(metrics={"accuracy": 1.0})
        assert caught.value.code == "checkpoint-metric" and "accuracy" in str(caught.value)
        assert not (tmp_path / "checkpoints").exists(), "nothing is written before the question"
        for number, loss in enumerate([5.0, float("nan"), 2.0, 3.0, torch.tensor(2.0), 4.0, 5.0]):
            run.optimizer.steps = 5 * number
            run.accelerator.save_state(background=number % 2 == 0, metrics={"loss": loss})
        run.accelerator.end_training()

    run_ranks(work, 2)
    root = tmp_path / "checkpoints"
    assert sorted(os.listdir(root)) == [f"checkpoint_{number}" for number in (0, 2, 4, 5, 6)]
    manifest = Manifest.read(LocalStore(), str(root / "checkpoint_4"))
    assert manifest.metrics == {"loss": 2.0} and manifest.step == 20


def test_two_runs_and_one_folder(tmp_path) -> None:
    """Two processes without a group are two runs. Each keeps its own checkpoints, and the second one is told of the first."""

    def work():
        mine = os.environ["RANK"] == "0"
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
        ):
            os.environ.pop(name, None)
        run = Run(project_dir=str(tmp_path), total_limit=1)
        saved = []
        for number in range(3):
            until(tmp_path / f"turn-{2 * number if mine else 2 * number + 1}")
            with Warned() as warned:
                saved.append(os.path.basename(run.accelerator.save_state()))
            saved.append(warned.count)
            (tmp_path / f"turn-{2 * number + 1 if mine else 2 * number + 2}").write_text("")
        return saved

    (tmp_path / "turn-0").write_text("")
    one, two = run_ranks(work, 2, group=False)
    assert one == ["checkpoint_0", 0, "checkpoint_2", 1, "checkpoint_4", 0]
    assert two == ["checkpoint_1", 1, "checkpoint_3", 0, "checkpoint_5", 0]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_4", "checkpoint_5"]


class Warned:
    """Counts the warnings of another run that saves in the same folder."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> object:
        self._handler = logging.Handler()
        self._handler.emit = self._emit
        logging.getLogger("paceline.checkpoint").addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("paceline.checkpoint").removeHandler(self._handler)

    def _emit(self, record: logging.LogRecord) -> None:
        self.count += "another run saves into" in record.getMessage()


def until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def most_resident(work) -> int:
    """Bytes by which this process grew, at most, while it worked."""

    def high() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = high()
    work()
    return high() - before


def memory_of_a_save(folder: str, plan: dict) -> dict:
    accelerator = Accelerator(cpu=True, plan=plan, project_dir=folder)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))
    )  # 96 MB with AdamW's states
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 1024)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state()  # what is imported and formed at the first one
    found = {"sync": most_resident(accelerator.save_state)}

    def beside() -> None:
        accelerator.save_state(background=True)
        accelerator.wait_for_save()

    found["background"] = most_resident(beside)
    found["again"] = most_resident(beside)
    found["load"] = most_resident(accelerator.load_state)
    accelerator.end_training()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the most memory that a process had")
@pytest.mark.parametrize(("plan", "states"), [({"replicate": 2}, 64 << 20), ({"shard": 2}, 32 << 20)], ids=str)
def test_a_save_takes_memory_for_one_share_and_a_synchronous_one_for_none(tmp_path, plan, states):
    share = 48 << 20  # half of the state
    for found in run_ranks(memory_of_a_save, world=2, args=(str(tmp_path), plan)):
        assert found["sync"] < 16 << 20
        assert found["background"] < share + (16 << 20)
        assert found["again"] < 16 << 20
        assert found["load"] < states + (16 << 20)  # the optimizer takes new states for its old ones
