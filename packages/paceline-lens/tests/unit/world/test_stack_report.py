"""Stacks of ranks, read, grouped, and sent to another host: pure functions."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import paceline
from paceline.base.json_fields import read
from paceline.base.wording import ranks_text
from paceline.world.stacks.parse import Frame, RankPlace, Stack, position
from paceline_lens.hangs.stack_report import (
    ProcessStacks,
    full_report,
    grouped,
    in_one_sentence,
    place_of,
    short_report,
)
from paceline_lens.hangs.stack_text import threads_of, threads_of_py_spy

TORCH = "/venv/lib/python3.12/site-packages/torch"
OURS = str(Path(paceline.__file__).parent)
STDLIB = sysconfig.get_paths()["stdlib"]

SCRIPT = Frame("/home/me/train.py", 88, "main")
MODULE = Frame("/home/me/train.py", 99, "<module>")
LAUNCHER = Frame(f"{OURS}/launch/worker.py", 210, "become")


def stack(*frames: Frame) -> tuple[Stack, ...]:
    other = (Frame(f"{STDLIB}/threading.py", 331, "wait"),)
    return (other, (*frames, SCRIPT, MODULE, LAUNCHER))


ALL_REDUCE = stack(
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
)
LOADER = stack(
    Frame(f"{STDLIB}/selectors.py", 415, "select"),
    Frame(f"{STDLIB}/multiprocessing/queues.py", 113, "get"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 1291, "_try_get_data"),
    Frame(f"{TORCH}/utils/data/dataloader.py", 725, "__next__"),
    Frame("/home/me/data.py", 41, "batches"),
)


def test_faulthandler_is_read() -> None:
    text = (
        "Thread 0x00007ff1265ff6c0 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n'
        "\n"
        "Current thread 0x00007ff144c3cb80 [python] (most recent call first):\n"
        '  File "/home/me/my scripts/train.py", line 41 in <lambda>\n'
        '  File "/home/me/my scripts/train.py", line ??? in main\n'
        "  ...\n"
    )
    waits, main = threads_of(text)
    assert waits == (Frame("/usr/lib/python3.11/threading.py", 327, "wait"),)
    assert main[0] == Frame("/home/me/my scripts/train.py", 41, "<lambda>")
    assert main[1].line == 0


@pytest.mark.parametrize("text", ["", "nonsense\n", '  File "a.py", line 1 in f\n'])
def test_text_that_holds_no_thread(text: str) -> None:
    assert threads_of(text) == () and threads_of_py_spy(text) == ()


def test_py_spy_is_read_with_the_main_thread_last() -> None:
    text = (
        "Process 7: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
        'Thread 7 (idle): "MainThread"\n    main (/home/me/train.py:12)\n    <module> (/home/me/train.py:13)\n'
        'Thread 9 (idle): "paceline-watcher"\n    wait (/usr/lib/python3.11/threading.py:331)\n'
    )
    other, main = threads_of_py_spy(text)
    assert main[0] == Frame("/home/me/train.py", 12, "main") and other[0].function == "wait"


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (ALL_REDUCE, ("all_reduce", "train.py", 88)),
        (LOADER, ("DataLoader.__next__", "data.py", 41)),
        (stack(), ("", "train.py", 88)),
        # A backward pass calls hooks of torch's, and these call Paceline.
        (
            stack(
                Frame(f"{OURS}/parallel/data/zero2.py", 7, "_reduce"),
                Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
                Frame(f"{TORCH}/_tensor.py", 623, "backward"),
                Frame(f"{OURS}/steps.py", 104, "_back"),
                Frame(f"{OURS}/accelerator.py", 308, "backward"),
            ),
            ("backward", "train.py", 88),
        ),
        # The user's module inside of torch's call is nearer than the line that called the model.
        (
            stack(
                Frame("/home/me/model.py", 5, "forward"),
                Frame(f"{TORCH}/nn/modules/module.py", 1700, "_call_impl"),
            ),
            ("", "model.py", 5),
        ),
        # The standard library, called by the user's line, is no operation of ours.
        (stack(Frame(f"{STDLIB}/subprocess.py", 1264, "wait")), ("", "train.py", 88)),
        (
            stack(Frame(f"{OURS}/data/loader.py", 50, "__iter__")),
            ("DataLoader.__next__", "train.py", 88),
        ),
    ],
)
def test_where_the_script_is(frames: tuple[Stack, ...], expected: tuple[str, str, int]) -> None:
    place = position(frames[-1])
    assert place is not None
    assert (place.operation, Path(place.file).name, place.line) == expected


def test_a_trainer_that_was_installed_is_named_where_the_user_has_no_line() -> None:
    trainer = Frame("/venv/lib/python3.12/site-packages/transformers/trainer.py", 500, "train")
    place = position((*ALL_REDUCE[-1][:2], trainer, Frame("<frozen runpy>", 1, "run")))
    assert place is not None and (place.operation, place.line) == ("all_reduce", 500)


def rank(
    number: int, threads: tuple[Stack, ...], still_s: float = 0.0, collectives: tuple[str, ...] = (), **more: object
) -> RankPlace:
    process = ProcessStacks(1000 + number, threads, **more)  # type: ignore[arg-type]
    return place_of(number, process, still_s, collectives)


def test_seven_ranks_and_one() -> None:
    processes = [rank(number, LOADER if number == 3 else ALL_REDUCE, still_s=312.0) for number in range(8)]
    groups = grouped(processes)
    assert [group.ranks for group in groups] == [[0, 1, 2, 4, 5, 6, 7], [3]]
    assert in_one_sentence(groups) == (
        "7 ranks (0-2, 4-7) in all_reduce at train.py:88, rank 3 in DataLoader.__next__ at data.py:41 for 312 s"
    )
    text = short_report("headline", groups, ["footer"])
    assert text.splitlines() == [
        "headline",
        "  7 ranks (0-2, 4-7): in all_reduce at /home/me/train.py:88 in main, for 312 s",
        "  rank 3: in DataLoader.__next__ at /home/me/data.py:41 in batches, for 312 s",
        "  footer",
    ]


def test_hosts_may_keep_the_script_in_different_folders() -> None:
    elsewhere = Frame("/srv/job/train.py", 88, "main")
    there = ((*ALL_REDUCE[-1][:2], elsewhere, MODULE),)
    assert len(grouped([rank(0, ALL_REDUCE), rank(1, there)])) == 1


def test_the_same_line_in_another_operation_or_called_from_another_line_is_another_group() -> None:
    assert len(grouped([rank(0, ALL_REDUCE), rank(1, stack())])) == 2
    from_elsewhere = ((*ALL_REDUCE[-1][:2], SCRIPT, replace(MODULE, line=95), LAUNCHER),)
    groups = grouped([rank(0, ALL_REDUCE), rank(1, from_elsewhere)])
    assert [group.text.partition(" (")[2] for group in groups] == [
        "train.py:88 < train.py:99)",
        "train.py:88 < train.py:95)",
    ]


def test_a_place_is_read_on_another_host() -> None:
    # Where Paceline and Python are installed does not matter there: the place was found on the rank's own host.
    sent = replace(rank(2, LOADER, 60.0, state="S", children=(ProcessStacks(51, (), state="T"),)), host="node2")
    assert read(RankPlace, json.loads(json.dumps(asdict(sent)))) == sent
    assert sent.workers[0][0] == 51 and "_try_get_data" in sent.stacks


def test_hosts_are_named_where_they_tell_ranks_apart() -> None:
    ranks = [replace(rank(number, ALL_REDUCE), host=f"node{1 + number // 2}") for number in range(3)]
    ranks.append(replace(rank(3, LOADER), host="node2"))
    groups = grouped(ranks)
    assert [group.name for group in groups] == ["3 ranks (0-2)", "rank 3 on node2"]
    assert in_one_sentence(groups) == (
        "3 ranks (0-2) in all_reduce at train.py:88, rank 3 on node2 in DataLoader.__next__ at data.py:41"
    )
    text = short_report("headline", grouped([replace(stopped, state="T") for stopped in ranks[:3]]), [])
    assert "`kill -CONT 1000 1001` on node1 and `kill -CONT 1002` on node2 lets it go on" in text


def test_a_stopped_rank_is_told_with_what_lets_it_go_on() -> None:
    groups = grouped([rank(0, ALL_REDUCE), rank(1, ALL_REDUCE, state="T"), rank(2, (), state="T", note="no stack")])
    texts = {tuple(group.ranks): group.text for group in groups}
    assert "stopped by a signal" in texts[1,] and "kill -CONT 1001" in texts[1,] and "all_reduce" in texts[1,]
    assert "kill -CONT 1002" in texts[2,]
    assert "rank 1 stopped in all_reduce at train.py:88" in in_one_sentence(groups)


def test_other_states_and_a_rank_that_wrote_nothing() -> None:
    groups = grouped([rank(0, ALL_REDUCE, state="D"), rank(1, (), note="it did not write its stack within 2 s")])
    assert "waiting for a disk or a network drive" in groups[0].text
    assert groups[1].text == "it did not write its stack within 2 s"


def test_the_worker_that_hangs_is_shown_and_those_that_wait_for_work_are_not() -> None:
    loop = Frame(f"{TORCH}/utils/data/_utils/worker.py", 349, "_worker_loop")
    waits = ((Frame(f"{STDLIB}/multiprocessing/queues.py", 113, "get"), loop, SCRIPT),)
    hangs = ((Frame("/home/me/data.py", 17, "__getitem__"), loop, SCRIPT),)
    children = (
        ProcessStacks(50, waits, command="python"),
        ProcessStacks(51, hangs, command="python"),
        ProcessStacks(52, hangs, command="python"),
        ProcessStacks(53, (), state="T", command="python"),
    )
    groups = grouped([rank(0, LOADER, children=children)])
    text = short_report("headline", groups, [])
    assert "its worker processes 51, 52: at /home/me/data.py:17 in __getitem__" in text
    assert "50" not in text and "its worker process 53: stopped by a signal" in text
    whole = full_report("headline", groups, [])
    assert "pid 50, started by pid 1000" in whole and "_worker_loop" in whole


def test_the_whole_report_ends_each_stack_where_the_script_begins() -> None:
    groups = grouped([rank(0, ALL_REDUCE, collectives=("all_reduce number 4: scheduled",), native="libgloo")])
    whole = full_report("headline", groups, [])
    assert "become" not in whole and 'File "/home/me/train.py", line 99, in <module>' in whole
    assert "all_reduce number 4: scheduled" in whole and "libgloo" in whole


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "rank 3"),
        ([0, 1], "2 ranks (0-1)"),
        ([5, 0, 2], "3 ranks (0, 2, 5)"),
        ([0, 1, 2, 4, 5, 9], "6 ranks (0-2, 4-5, 9)"),
    ],
)
def test_ranks_in_words(ranks: list[int], expected: str) -> None:
    assert ranks_text(ranks) == expected
