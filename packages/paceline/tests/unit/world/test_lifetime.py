"""What ends as a process leaves its group."""

import os

import pytest
import torch.distributed as dist

from paceline.world import lifetime
from paceline.world.lifetime import Leaving, Lifetime


class Thread:
    def __init__(self, name: str, ended: list[str]) -> None:
        self.name = name
        self.ended = ended

    def close(self, leaving: Leaving) -> None:
        self.ended.append(f"{self.name} {leaving.why}")


def test_work_ends_before_what_watches_the_group_and_the_group_last() -> None:
    ended: list[str] = []
    process = lifetime.of_process()
    process.group.subscribe(lambda leaving: ended.append(f"group {leaving.why}"))
    process.keep(Thread("links", ended))
    process.companions.subscribe(lambda leaving: ended.append(f"store {leaving.why}"))
    process.work.subscribe(lambda leaving: ended.append(f"save {leaving.why}"))
    forget = process.work.subscribe(lambda _: ended.append("forgotten"))
    forget()
    forget()  # twice is as good as once
    kept = process.kept(Thread)
    assert kept is not None and kept.name == "links"
    process.end(Leaving())
    process.end(Leaving(ValueError("again")))
    assert ended == [f"{name} has ended, or left" for name in ("save", "links", "store", "group")]
    assert process.kept(Thread) is None
    assert Leaving(ValueError("bad")).why == "has ended: ValueError: bad"


def test_what_is_registered_at_the_end_ends_too() -> None:
    ended: list[str] = []
    run: Lifetime[[]] = Lifetime()
    run.subscribe(lambda: run.subscribe(lambda: ended.append("late")))
    run.end()
    assert ended == ["late"]


def test_one_that_raises_stops_no_other() -> None:
    ended: list[str] = []
    process = lifetime.of_process()
    for place in (process.work, process.companions):
        place.subscribe(lambda _: 1 / 0)
        place.subscribe(lambda _: ended.append("after it"))
    process.group.subscribe(lambda _: ended.append("group"))
    with pytest.raises(ZeroDivisionError):
        process.end(Leaving())
    assert ended == ["after it", "after it", "group"]


def test_a_store_that_has_ended_stops_nothing() -> None:
    ended: list[str] = []

    def write(_: Leaving) -> None:
        raise dist.DistNetworkError("closed")

    process = lifetime.of_process()
    process.companions.subscribe(write)
    process.companions.subscribe(lambda _: ended.append("over"))
    process.end(Leaving())
    assert ended == ["over"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_ends_nothing_of_its_parent() -> None:
    ended: list[str] = []
    lifetime.of_process().keep(Thread("parent's", ended))
    child = os.fork()
    if child == 0:
        nothing_kept = lifetime.of_process().kept(Thread) is None
        lifetime.of_process().end(Leaving())
        os._exit(0 if nothing_kept and not ended else 1)
    assert os.waitpid(child, 0)[1] == 0
    lifetime.of_process().end(Leaving())
    assert ended == ["parent's has ended, or left"]
