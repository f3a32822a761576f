"""Several runs that save into one folder, and are killed at any moment: nothing that was published is lost or damaged."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from warm_python import executable

from paceline.checkpoint import Checkpointer, RunState, TrainState, verify
from paceline.checkpoint.format.manifest import NAME, Manifest
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store import claim, local, store_for

KILLS = 25
WRITER = """
import sys
from pathlib import Path
import torch
from torch import nn
from paceline.checkpoint import Checkpointer, RunState, TrainState
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store import local

root, number, exchanges = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "exchange"
if not exchanges:
    local._exchange = lambda one, other: False  # as on NFS
saver = Checkpointer(keep=Keep(last=2))
model = nn.Linear(64, 64)
step = 0
print("ready", flush=True)
while True:
    step += 1
    nn.init.constant_(model.weight, 1000.0 * number + step)
    state = TrainState(models={"m": model}, run=RunState(1000 * number + step))
    print(saver.save(saver.next_path(f"{root}/checkpoints"), state, fresh=True), 1000 * number + step, flush=True)
    saver.save(f"{root}/best", state)
"""


def start(script: Path, root: str, number: int, renames: str) -> subprocess.Popen[str]:
    command = [executable(), str(script), root, str(number), renames]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def published(output: str) -> dict[str, int]:
    """The checkpoints that a writer says it has saved, and their steps, oldest first."""
    lines = re.findall(r"^(\S+checkpoint_\d+) (\d+)$", output, re.MULTILINE)
    return {path: int(step) for path, step in lines}


def loaded_step(path: str) -> int:
    """The step of a checkpoint, whose files are whole and are those of one save."""
    assert verify(path, store_for(path)) == []
    model = nn.Linear(64, 64)
    run = RunState()
    Checkpointer().load(path, TrainState(models={"m": model}, run=run))
    assert torch.equal(model.weight, torch.full_like(model.weight, float(run.step)))
    return run.step


@pytest.mark.parametrize("renames", ["exchange", "two renames"])
def test_two_writers_are_killed_again_and_again(tmp_path, renames, monkeypatch) -> None:
    """Each keeps the two that it has published last; `best` is always one whole save of one of them."""
    draw = random.Random(0)
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    root = str(tmp_path / "run")
    for number in range(1, KILLS // 2 + 2):
        writers = [start(script, root, 2 * number + which, renames) for which in range(2)]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.05, 0.4))
        outputs = []
        for writer in draw.sample(writers, 2):
            writer.send_signal(signal.SIGKILL)
            outputs.append(writer.communicate()[0])
        taken: list[str] = []
        for output in outputs:
            assert "Traceback" not in output, output
            steps = published(output)
            for path in list(steps)[-2:]:
                # It was removed if the next one was published, although the kill came before that was printed.
                if path == list(steps)[-2:][0] and len(steps) > 1 and not os.path.exists(path):
                    continue
                assert loaded_step(path) == steps[path]
            taken += steps
        assert len(set(taken)) == len(taken), "no name was used twice"
    if os.path.exists(f"{root}/best/{NAME}"):
        loaded_step(f"{root}/best")
    monkeypatch.setattr(local, "_GAP_S", 0.0)
    saver = Checkpointer()
    saver.save(f"{root}/best", TrainState(models={"m": nn.Linear(2, 2)}))
    saver.save(saver.next_path(f"{root}/checkpoints"), TrainState(models={"m": nn.Linear(2, 2)}), fresh=True)
    assert sorted(os.listdir(root)) == ["best", "checkpoints"]
    left = {path.name: os.listdir(path) for path in Path(root, "checkpoints").iterdir() if path.name.startswith(".")}
    assert left == {}


def state(step: int) -> TrainState:
    return TrainState(models={"m": nn.Linear(2, 2)}, run=RunState(step))


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def test_a_run_removes_its_own_and_those_that_it_goes_on_from(tmp_path) -> None:
    def save(saver: Checkpointer, step: int) -> str:
        return saver.save(saver.next_path(tmp_path), state(step), fresh=True)

    stranger = save(Checkpointer(), 1)
    first = Checkpointer(keep=Keep(last=2))
    for step in range(3):
        save(first, step)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_2", "checkpoint_3"]
    second = Checkpointer(keep=Keep(last=2))
    second.load(str(tmp_path / "checkpoint_3"), state(0))
    save(second, 4)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_3", "checkpoint_4"]
    third = Checkpointer(keep=Keep(last=1))
    third.load(str(tmp_path / "checkpoint_4"), state(0))
    # The first run lives after all: what it saves now is its own.
    save(first, 5)
    save(third, 6)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_5", "checkpoint_6"]
    assert loaded_names(tmp_path / "checkpoint_6") == 3 and os.path.exists(stranger)


def loaded_names(path: Path) -> int:
    return len(Manifest.read(store_for(path), str(path)).runs)


def test_what_a_living_process_has_saved_is_not_taken_over(tmp_path, monkeypatch) -> None:
    first = Checkpointer()
    for step in range(2):
        first.save(first.next_path(tmp_path), state(step), fresh=True)
    second = Checkpointer(keep=Keep(last=1))
    monkeypatch.setattr(claim, "is_mine", lambda who: False)
    second.load(str(tmp_path / "checkpoint_1"), state(0))
    second.save(second.next_path(tmp_path), state(2), fresh=True)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_a_checkpoint_of_an_older_version_is_taken_over(tmp_path) -> None:
    for number in range(2):
        folder = Checkpointer().save(tmp_path / f"checkpoint_{number}", state(number))
        manifest = Manifest.read(store_for(folder), folder)
        older = {name: value for name, value in vars(manifest).items() if name not in ("runs", "writer")}
        Manifest(**older).write(store_for(folder), folder)
    saver = Checkpointer(keep=Keep(last=1))
    saver.load(str(tmp_path / "checkpoint_1"), state(0))
    saver.save(saver.next_path(tmp_path), state(2), fresh=True)
    assert names(tmp_path) == ["checkpoint_2"]


def test_a_suspended_save_that_was_cleaned_away_publishes_nothing(tmp_path) -> None:
    """Its folder does not come back with a part of its files; the name that it had is not used again."""
    store = store_for(tmp_path)
    staged = store.stage(str(tmp_path / "checkpoint_0"), fresh=True)
    claim.end(staged)
    saver = Checkpointer()
    assert saver.save(saver.next_path(tmp_path), state(1), fresh=True) == str(tmp_path / "checkpoint_1")
    assert not os.path.exists(staged)
    with pytest.raises(FileNotFoundError), store.open(f"{staged}/{NAME}", "wb"):
        pass
    with pytest.raises(FileNotFoundError):
        store.publish(staged, str(tmp_path / "checkpoint_0"), last=NAME, owned=lambda folder: None)
    assert names(tmp_path) == ["checkpoint_1"]


@pytest.mark.needs("hosts")
def test_two_writers_on_an_object_store(s3, tmp_path) -> None:
    """As above: each keeps what it has published last, also after one of them was killed."""
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    url = f"{s3}/run"
    writers = [start(script, url, which, "exchange") for which in (1, 2)]
    outputs = []
    for writer in writers:
        output = ""
        while len(published(output)) < 2:
            assert writer.stdout is not None and writer.poll() is None, output
            output += writer.stdout.readline()
        outputs.append(output)
    for number, writer in enumerate(writers):
        writer.send_signal(signal.SIGKILL)
        outputs[number] += writer.communicate()[0]
    taken: list[str] = []
    store = store_for(url)
    for output in outputs:
        assert "Traceback" not in output, output
        steps = published(output)
        for path in list(steps)[-2:]:
            # The older one was removed if the next one was published, although the kill came before that was printed.
            if path == list(steps)[-2:][0] and len(steps) > 1 and not store.exists(f"{path}/{NAME}"):
                continue
            assert loaded_step(path) == steps[path]
        taken += steps
    assert len(taken) > 2 and len(set(taken)) == len(taken)
    if store.exists(f"{url}/best/{NAME}"):
        loaded_step(f"{url}/best")
    saver = Checkpointer()
    saver.save(f"{url}/best", state(1))
    saver.save(saver.next_path(f"{url}/checkpoints"), state(1), fresh=True)
    assert store.list(f"{url}/.saving") == [] and store.list(f"{url}/checkpoints/.saving") == []


def test_a_number_that_another_run_has_published_and_pruned_is_not_taken_again(tmp_path) -> None:
    slow, quick = Checkpointer(), Checkpointer(keep=Keep(last=1))
    chosen = slow.next_path(tmp_path)
    for step in range(3):
        quick.save(quick.next_path(tmp_path), state(step), fresh=True)
    assert names(tmp_path) == ["checkpoint_2"] and chosen == str(tmp_path / "checkpoint_0")
    assert slow.save(chosen, state(9), fresh=True) == str(tmp_path / "checkpoint_3")
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"] == sorted(os.listdir(tmp_path))
