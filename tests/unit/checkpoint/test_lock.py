"""The lock of a folder: one run at a time, freed by the kernel, in nobody's way."""

import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from threading import Timer

import pytest

from paceline.base.errors import CheckpointError
from paceline.checkpoint.store import lock
from paceline.checkpoint.store.local import LocalStore

STORE = LocalStore()
OTHER = """
import sys, time
from paceline.checkpoint.store.local import LocalStore
from paceline.checkpoint.store.lock import this_run
release = LocalStore().hold(sys.argv[1], this_run())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run():
    """Starts a process that holds a folder, and ends it."""
    started = []

    def start(folder):
        run = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(run)
        assert run.stdout.readline() == "held\n"
        return run

    yield start
    for run in started:
        run.kill()
        run.communicate()


def test_another_run_is_named_and_its_death_frees_the_folder(tmp_path, other_run):
    run = other_run(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=f"pid {run.pid}, since .*\n.*its command: -c {tmp_path}") as told:
        STORE.hold(str(tmp_path / "checkpoints"), lock.this_run())
    assert told.value.code == "checkpoint-locked"
    STORE.hold(str(tmp_path / "another"), lock.this_run())()
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    STORE.hold(str(tmp_path / "checkpoints"), lock.this_run())()
    assert os.listdir(tmp_path) == []


def test_a_lost_process_of_the_same_run_is_waited_for(tmp_path, other_run, monkeypatch, caplog):
    monkeypatch.setenv("PACELINE_RUN", "this@1.5")
    lost = other_run(tmp_path / "checkpoints")
    monkeypatch.setattr(lock, "LOST_S", 0.1)
    with pytest.raises(CheckpointError, match="checkpoint-locked"):
        STORE.hold(str(tmp_path / "checkpoints"), lock.this_run())
    monkeypatch.setattr(lock, "LOST_S", 60.0)
    ends = Timer(0.3, lost.kill)
    ends.start()
    STORE.hold(str(tmp_path / "checkpoints"), lock.this_run())()
    ends.join()
    assert f"locked by pid {lost.pid} on" in caplog.text


def test_a_process_may_ask_twice_and_a_link_is_the_same_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first = STORE.hold(str(tmp_path / "run"), lock.this_run())
    second = STORE.hold(str(tmp_path / "link"), lock.this_run())
    assert _refused(tmp_path / "run")
    first()
    first()
    assert _refused(tmp_path / "run")
    second()
    assert not _refused(tmp_path / "run")
    assert STORE.files(str(tmp_path / "run")) == {}


def test_a_forked_child_neither_holds_nor_frees(tmp_path):
    folder = str(tmp_path / "run")
    release = STORE.hold(folder, lock.this_run())

    def child():
        release()
        with pytest.raises(CheckpointError, match=f"pid {os.getppid()}"):
            STORE.hold(folder, lock.this_run())

    process = get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert _refused(tmp_path / "run")
    release()


def test_a_holder_that_has_not_said_who_it_is(tmp_path):
    (tmp_path / ".run.lock").write_text("no JSON")
    release = STORE.hold(str(tmp_path / "run"), {})
    with pytest.raises(CheckpointError, match="it has not said which"):
        raise lock.locked("run", {})
    release()


def test_a_file_system_that_never_finds_the_lock_file_again_is_an_error(tmp_path, monkeypatch):
    """Some file systems in user space give a file another inode number at each look."""
    monkeypatch.setattr(lock, "_has_name", lambda file, path: False)
    monkeypatch.setattr(lock, "LOST_S", 0.3)
    with pytest.raises(CheckpointError) as caught:
        STORE.hold(str(tmp_path / "run"), lock.this_run())
    assert caught.value.code == "checkpoint-not-writable"


def _refused(folder):
    """Whether another process is kept out."""
    code = f"""
from paceline.checkpoint.store.local import LocalStore
from paceline.base.errors import CheckpointError
try:
    LocalStore().hold({str(folder)!r}, {{}})()
except CheckpointError:
    raise SystemExit(3)
"""
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
