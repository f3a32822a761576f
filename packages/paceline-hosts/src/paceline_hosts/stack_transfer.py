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
    full = tuple(replace(_with_paths(process, portable), host=host) for process in processes)
    shortened = full
    for shorten in (_without_native, _without_children, _main_thread_only, _without_stacks):
        if _num_characters(shortened) <= LONGEST:
            break
        # Always from the full stacks, so that the note names all that was removed.
        shortened = tuple(shorten(process) for process in full)
    return shortened


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


def _num_characters(stacks: Sequence[ProcessStacks]) -> int:
    return len(json.dumps([asdict(process) for process in stacks]))


def _without_native(process: ProcessStacks) -> ProcessStacks:
    children = [replace(child, native="") for child in process.children]
    note = process.note or "stacks of compiled code were too long to be sent"
    return replace(process, native="", children=tuple(children), note=note)


def _without_children(process: ProcessStacks) -> ProcessStacks:
    note = process.note or "stacks of compiled code and of processes that it has started were too long to be sent"
    return replace(process, native="", children=(), note=note)


def _main_thread_only(process: ProcessStacks) -> ProcessStacks:
    note = process.note or "all stacks but that of its main thread were too long to be sent"
    return replace(process, native="", children=(), threads=process.threads[-1:], note=note)


def _without_stacks(process: ProcessStacks) -> ProcessStacks:
    return ProcessStacks(process.pid, note="its stacks are too long", rank=process.rank)
