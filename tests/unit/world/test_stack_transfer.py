"""Stacks that go to another host: paths, and how much."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from paceline.base.json_fields import read
from paceline.base.ours import our_folders
from paceline.world.stacks.groups import ProcessStacks, grouped, in_one_sentence, short_report
from paceline.world.stacks.parse import Frame, Thread
from paceline_hosts.stack_transfer import LONGEST, received, to_send

OWN = f"{our_folders()[0]}accelerator.py"
STACK = (Frame(OWN, 5, "backward"), Frame("/home/me/train.py", 3, "main"))
RANK = ProcessStacks(7, (Thread(STACK),), state="S", native="native", rank=2, collectives=("all_reduce",))


def test_stacks_arrive_with_the_paths_of_the_other_host() -> None:
    child = ProcessStacks(8, (Thread(STACK),), command="python")
    sent = to_send([replace(RANK, children=(child,))], "node2")
    assert "<paceline>/accelerator.py" in json.dumps([asdict(process) for process in sent])
    over_the_network = [read(ProcessStacks, json.loads(json.dumps(asdict(process)))) for process in sent]
    assert over_the_network == list(sent)
    (process,) = received(over_the_network)
    assert process == replace(RANK, children=(child,), host="node2")
    assert process.position is not None and process.position.operation == "backward"


def test_what_is_too_long_is_left_out_with_a_note() -> None:
    long_native = replace(RANK, native="x" * LONGEST)
    (process,) = received(to_send([long_native], "node2"))
    assert (process.native, process.threads) == ("", RANK.threads) and "compiled code" in process.note
    child = replace(long_native, rank=None, native="", command="y" * LONGEST)
    (process,) = received(to_send([replace(long_native, children=(child,))], "node2"))
    assert (process.children, process.threads) == ((), RANK.threads) and "has started" in process.note
    threads = (Thread((Frame("z" * LONGEST, 1, "f"),)), Thread(STACK))
    (process,) = to_send([replace(RANK, threads=threads)], "node2")
    assert [frame.line for frame in process.main] == [5, 3] and len(process.threads) == 1
    (process,) = to_send([replace(RANK, threads=threads[:1])], "node2")
    assert (process.threads, process.rank, process.note) == ((), 2, "its stacks are too long")


def test_hosts_are_named_where_they_tell_ranks_apart() -> None:
    elsewhere = (Thread((Frame("/home/me/data.py", 41, "read"),)),)
    ranks = [replace(RANK, rank=rank, host=f"node{1 + rank // 2}") for rank in range(3)]
    ranks.append(replace(RANK, rank=3, host="node2", threads=elsewhere))
    groups = grouped(ranks)
    assert [group.name for group in groups] == ["3 ranks (0-2)", "rank 3 on node2"]
    assert in_one_sentence(groups) == "3 ranks (0-2) in backward at train.py:3, rank 3 on node2 at data.py:41"
    stopped = [replace(rank, state="T") for rank in ranks[:3]]
    text = short_report("headline", grouped(stopped), [])
    assert "`kill -CONT 7 7` on node1 and `kill -CONT 7` on node2 lets it go on" in text
