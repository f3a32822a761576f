"""What ends as a process leaves its group."""

import os

import pytest
import torch.distributed as dist

from paceline.world import lifetime


class Thread:
    def __init__(self, name: str, ended: list[str]) -> None:
        self.name = name
        self.ended = ended

    def close(self, why: str) -> None:
        self.ended.append(f"{self.name}: {why}")


def test_the_run_ends_before_what_watches_its_group() -> None:
    ended: list[str] = []
    lifetime.keep(Thread("links", ended))
    lifetime.at_end_of_group(lambda why: ended.append(f"store: {why}"))
    lifetime.at_end_of_run(lambda why: ended.append(f"save: {why}"))
    forget = lifetime.at_end_of_run(lambda _: ended.append("forgotten"))
    forget()
    forget()  # twice is as good as once
    kept = lifetime.kept(Thread)
    assert kept is not None and kept.name == "links"
    lifetime.end("has left")
    lifetime.end("again")
    assert ended == ["save: has left", "links: has left", "store: has left"]
    assert lifetime.kept(Thread) is None


def test_what_is_registered_at_the_end_ends_too() -> None:
    ended: list[str] = []
    lifetime.at_end_of_run(lambda _: lifetime.at_end_of_run(ended.append))
    lifetime.end("late")
    assert ended == ["late"]


def test_a_store_that_has_ended_stops_nothing() -> None:
    ended: list[str] = []

    def write(_: str) -> None:
        raise dist.DistNetworkError("closed")

    lifetime.at_end_of_group(write)
    lifetime.at_end_of_group(ended.append)
    lifetime.end("over")
    assert ended == ["over"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_ends_nothing_of_its_parent() -> None:
    ended: list[str] = []
    lifetime.keep(Thread("parent's", ended))
    child = os.fork()
    if child == 0:
        nothing_kept = lifetime.kept(Thread) is None
        lifetime.end("child")
        os._exit(0 if nothing_kept and not ended else 1)
    assert os.waitpid(child, 0)[1] == 0
    lifetime.end("parent")
    assert ended == ["parent's: parent"]
