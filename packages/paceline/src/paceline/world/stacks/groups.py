"""Makes one report of the stacks of all ranks: ranks at the same place share one line. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.world.stacks.parse import Frame, FramePosition, Thread, position

_STATES = {"T": "stopped", "t": "held by a debugger", "D": "waiting for a disk or a network drive", "Z": "ended"}
_SHOWN_COLLECTIVES = 5


@dataclass(frozen=True)
class ProcessStacks:
    """Holds what is known about one process.

    Attributes:
        pid: its process number.
        threads: the Python stacks of its threads, the main thread last; () if it did not write any.
        state: the letter of its state (`procfs.state`).
        still_s: seconds since its last sign of progress; 0 if it reports none.
        native: the stacks with compiled code, as py-spy writes them; "" without py-spy.
        note: why something is missing; "" for nothing.
        collectives: the last collectives of torch's flight recorder, the newest last.
        rank: its rank; None for a process that a rank has started.
        command: its command line.
        children: the processes that it has started.
        host: its host; "" in a report about a single host.
    """

    pid: int
    threads: tuple[Thread, ...] = ()
    state: str = ""
    still_s: float = 0.0
    native: str = ""
    note: str = ""
    collectives: tuple[str, ...] = ()
    rank: int | None = None
    command: str = ""
    children: tuple[ProcessStacks, ...] = ()
    host: str = ""

    @property
    def main(self) -> tuple[Frame, ...]:
        """The stack of the main thread."""
        return self.threads[-1].frames if self.threads else ()

    @property
    def position(self) -> FramePosition | None:
        """Where the main thread is."""
        return position(self.main)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.state == "T"


@dataclass(frozen=True)
class RankGroup:
    """Holds ranks that are at the same place.

    Attributes:
        members: their processes.
        text: where they are.
        brief: the same in a few words, without the source.
    """

    members: tuple[ProcessStacks, ...]
    text: str
    brief: str

    @property
    def ranks(self) -> list[int]:
        """Their ranks."""
        return [member.rank for member in self.members if member.rank is not None]

    @property
    def still_s(self) -> float:
        """The longest time without progress among them, in seconds."""
        return max(member.still_s for member in self.members)

    @property
    def name(self) -> str:
        """The ranks, and their host if all are on the same one of several hosts."""
        hosts = {member.host for member in self.members}
        on_host = f" on {self.members[0].host}" if len(hosts) == 1 and hosts != {""} else ""
        return f"{ranks_text(self.ranks)}{on_host}"


def grouped(processes: Iterable[ProcessStacks]) -> list[RankGroup]:
    """Groups processes by their place: the largest group is first; of equal groups, the one with the lowest rank."""
    members_of: dict[tuple[object, ...], list[ProcessStacks]] = {}
    for process in sorted(processes, key=lambda process: process.rank or 0):
        members_of.setdefault(_key(process), []).append(process)
    groups = [RankGroup(tuple(members), _text(members), _brief(members[0])) for members in members_of.values()]
    return sorted(groups, key=lambda group: -len(group.members))


def in_one_sentence(groups: Sequence[RankGroup]) -> str:
    """Returns a sentence for the journal and for errors: "3 ranks (0-2) in all_reduce at train.py:88, rank 3 ..."."""
    parts = [f"{group.name} {group.brief}" for group in groups]
    still_s = max((group.still_s for group in groups), default=0.0)
    duration = f" for {still_s:.0f} s" if still_s >= 1 else ""
    return f"{', '.join(parts)}{duration}"


def short_report(headline: str, groups: Sequence[RankGroup], footer: Sequence[str]) -> str:
    """Returns the text for the terminal: a line for each group, and what the workers of data loaders do.

    Args:
        headline: the first line.
        groups: the groups of ranks.
        footer: the last lines.
    """
    lines = [headline]
    for group in groups:
        duration = f", for {group.still_s:.0f} s" if group.still_s >= 1 else ""
        lines.append(f"  {group.name}: {group.text}{duration}")
        lines += [f"      {line}" for line in _workers(group)]
    lines += [f"  {line}" for line in footer]
    return "\n".join(lines)


def full_report(headline: str, groups: Sequence[RankGroup], footer: Sequence[str]) -> str:
    """Returns the text for the file: the short report, then the stacks of each process. The arguments are the same."""
    parts = [short_report(headline, groups, footer)]
    for group in groups:
        for member in group.members:
            parts.append(_process_text(member, _title(member)))
    return "\n\n".join(parts) + "\n"


def _title(process: ProcessStacks) -> str:
    on_host = f" on {process.host}" if process.host else ""
    return f"rank {process.rank}, pid {process.pid}{on_host}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns "rank 3", or "4 ranks (0-2, 5)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = []
    for first, last in spans:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return f"{len(ranks)} ranks ({', '.join(texts)})"


def _key(process: ProcessStacks) -> tuple[object, ...]:
    """Returns a key that is equal for processes at the same place. A script may be in different folders on different hosts."""
    place = process.position
    if place is None:
        return (process.state, process.note)
    state = process.state if process.state in _STATES else ""
    return (state, place.operation, place.file.rpartition("/")[2], place.line, place.function)


def _text(members: Sequence[ProcessStacks]) -> str:
    """Returns where the members of a group are."""
    first = members[0]
    place = first.position
    parts = []
    if first.is_stopped:
        parts.append(f"stopped by a signal (SIGSTOP or SIGTSTP; state T); {_continuing(members)} lets it go on")
    elif first.state in _STATES:
        parts.append(f"{_STATES[first.state]} (state {first.state})")
    if place is not None:
        parts.append(place.text)
    elif not parts:
        parts.append(first.note or "it did not write its stack")
    return "; ".join(parts)


def _continuing(members: Sequence[ProcessStacks]) -> str:
    """Returns the commands that continue stopped processes, one for each host."""
    pids_by_host: dict[str, list[str]] = {}
    for member in members:
        pids_by_host.setdefault(member.host, []).append(str(member.pid))
    commands = []
    for host, pids in pids_by_host.items():
        on_host = f" on {host}" if host else ""
        commands.append(f"`kill -CONT {' '.join(pids)}`{on_host}")
    return " and ".join(commands)


def _brief(process: ProcessStacks) -> str:
    place = process.position
    words = f"{_STATES[process.state]} " if process.state in _STATES else ""
    if place is None:
        return words.strip() or "without a stack"
    line = f"at {place.file.rpartition('/')[2]}:{place.line}"
    if place.operation:
        return f"{words}in {place.operation} {line}"
    return words + line


def _workers(group: RankGroup) -> list[str]:
    """Returns what the child processes of these ranks do, with one line for those that do the same.

    An idle worker of a loader waits in lines of torch. It has no line of the user on its stack, and is not listed.
    """
    pids_by_text: dict[str, list[int]] = {}
    for member in group.members:
        for child in member.children:
            place = child.position
            is_at_work = place is not None and any(frame.is_users for frame in _begun_by_torch(child.main))
            if child.state in _STATES or is_at_work:
                pids_by_text.setdefault(_text([child]), []).append(child.pid)
    lines = []
    for text, pids in pids_by_text.items():
        processes = "process" if len(pids) == 1 else "processes"
        lines.append(f"its worker {processes} {', '.join(map(str, pids))}: {text}")
    return lines


def _begun_by_torch(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Returns the frames inside a loader's worker loop. Those around it belong to the process from which it was forked."""
    for index, frame in enumerate(frames):
        if frame.function == "_worker_loop":
            return frames[:index]
    return frames


def _of_script(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Returns the frames without those of the launcher, which has called the script."""
    for index, frame in enumerate(frames):
        if frame.is_launcher:
            return frames[:index] or frames
    return frames


def _process_text(process: ProcessStacks, title: str) -> str:
    """Returns all stacks of a process, and of the processes that it has started."""
    state = f", {_STATES[process.state]}" if process.state in _STATES else ""
    lines = [f"==== {title}{state} ===="]
    if process.note:
        lines.append(process.note)
    for number, thread in enumerate(reversed(process.threads)):
        lines.append("main thread, the innermost call first:" if number == 0 else f"thread {number}:")
        lines += [
            f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in _of_script(thread.frames)
        ]
    if process.collectives:
        lines.append("last collectives (torch's flight recorder):")
        lines += [f"  {collective}" for collective in process.collectives[-_SHOWN_COLLECTIVES:]]
    if process.native:
        lines += ["with compiled code (py-spy dump --native):", process.native]
    for child in process.children:
        lines += ["", _process_text(child, f"pid {child.pid}, started by pid {process.pid}: {child.command[:160]}")]
    return "\n".join(lines)
