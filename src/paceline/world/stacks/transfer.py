"""Prepares stacks for a message to another host: paths that are valid there, and a limited length. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from paceline.world.stacks.groups import ProcessStacks
from paceline.world.stacks.parse import Frame, Thread, at_home, portable

# The largest number of characters for all stacks of a host. Launchers accept no longer text.
LONGEST = 1 << 20


def to_send(processes: Sequence[ProcessStacks], host: str) -> tuple[ProcessStacks, ...]:
    """Returns the stacks of a host as they are sent. If they are too long, the least important ones are removed, with a note.

    Args:
        processes: the ranks of this host.
        host: its name.
    """
    named = [replace(_with_paths(process, portable), host=host) for process in processes]
    for shorten in (_whole, _without_native, _ranks_alone, _main_threads):
        shortened = tuple(shorten(process) for process in named)
        text = json.dumps([asdict(process) for process in shortened])
        if len(text) <= LONGEST:
            return shortened
    return tuple(ProcessStacks(process.pid, note="its stacks are too long", rank=process.rank) for process in named)


def received(processes: Sequence[ProcessStacks]) -> list[ProcessStacks]:
    """Returns the stacks that another host has sent. The paths of Python's and Paceline's files become those of this host."""
    return [_with_paths(process, at_home) for process in processes]


def _with_paths(process: ProcessStacks, change: Callable[[str], str]) -> ProcessStacks:
    threads = []
    for thread in process.threads:
        frames = [Frame(change(frame.file), frame.line, frame.function) for frame in thread.frames]
        threads.append(Thread(tuple(frames)))
    children = [_with_paths(child, change) for child in process.children]
    return replace(process, threads=tuple(threads), children=tuple(children))


def _whole(process: ProcessStacks) -> ProcessStacks:
    return process


def _without_native(process: ProcessStacks) -> ProcessStacks:
    children = [replace(child, native="") for child in process.children]
    note = process.note or "stacks of compiled code were too long to be sent"
    return replace(process, native="", children=tuple(children), note=note)


def _ranks_alone(process: ProcessStacks) -> ProcessStacks:
    note = process.note or "stacks of compiled code and of processes that it has started were too long to be sent"
    return replace(process, native="", children=(), note=note)


def _main_threads(process: ProcessStacks) -> ProcessStacks:
    note = process.note or "all stacks but that of its main thread were too long to be sent"
    return replace(process, native="", children=(), threads=process.threads[-1:], note=note)
