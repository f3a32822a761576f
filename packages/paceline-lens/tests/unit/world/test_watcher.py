"""What a rank looks at to know whether it makes progress: its stack, and over the store the ranks of other hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import paceline
from paceline.world.stacks.parse import Frame
from paceline_lens.hangs.progress_file import OtherRanks
from paceline_lens.hangs.watcher import busy_with

TORCH = "/venv/lib/python3.12/site-packages/torch"
OURS = str(Path(paceline.__file__).parent)
SCRIPT = Frame("/home/me/train.py", 8, "main")


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (Frame(f"{OURS}/checkpoint/checkpointer.py", 1, "save"), "saving or loading a checkpoint"),
        (Frame(f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 1, "save"), "saving or loading a checkpoint"),
        (Frame(f"{TORCH}/serialization.py", 1, "save"), "saving or loading a file"),
        (Frame(f"{TORCH}/_dynamo/convert_frame.py", 1, "compile_inner"), "compiling"),
        (Frame(f"{TORCH}/_inductor/compile_fx.py", 1, "compile_fx"), "compiling"),
        (Frame("/usr/lib/python3.12/pdb.py", 1, "interaction"), "a debugger"),
        (
            Frame(f"{OURS}/world/participant.py", 1, "main_process_first"),
            "waiting for the one process that works first",
        ),
        # A compiled model that runs is not being compiled, and its collectives can hang like any others.
        (Frame(f"{TORCH}/_dynamo/eval_frame.py", 1, "compile_wrapper"), ""),
        (Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, "all_reduce"), ""),
        (Frame("/home/me/checkpoint/tools.py", 1, "save"), ""),
    ],
)
def test_what_may_take_long(frame: Frame, expected: str) -> None:
    assert busy_with([frame, SCRIPT]) == expected


def test_a_host_waits_while_a_rank_of_another_is_alive() -> None:
    store = dist.HashStore()
    still, alive = OtherRanks(), OtherRanks()
    for now in range(0, 60, 5):  # nobody asks: nothing is written
        assert alive.are_alive(store, False, now)
    assert store.add("progress/alive", 0) == 0
    for now in range(100, 200, 5):
        assert still.are_alive(store, True, now), "the other one answers"
        assert alive.are_alive(store, False, now)
    for now in range(200, 300, 5):  # now nobody answers
        answers = still.are_alive(store, True, now)
    assert not answers
    assert still.are_alive(store, False, 300), "it goes on itself"


def test_all_hosts_find_out_that_nobody_is_alive() -> None:
    store = dist.HashStore()
    ranks = [OtherRanks() for _ in range(3)]
    for now in range(0, 20, 5):
        answers = [rank.are_alive(store, True, now) for rank in ranks]
    assert answers == [False] * 3


def test_the_processes_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.world.stacks import dump
    from paceline_lens.hangs import folders

    monkeypatch.setenv(dump.FOLDER, str(tmp_path / "gone"))
    assert folders.folder_of_launcher() is None, "the launcher has removed its folder"
    monkeypatch.setenv(dump.FOLDER, str(tmp_path))
    assert folders.folder_of_launcher() == tmp_path
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert folders.folder_under_torchrun() is None
    files = dump.DumpFiles(tmp_path / "shared", os.getpid())
    files.folder.mkdir()
    files.stacks.write_text("stack")
    dump.leave(files)
    assert not files.folder.exists()
