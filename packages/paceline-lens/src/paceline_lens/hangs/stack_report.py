"""Makes one report of where all ranks are: ranks at the same place share one line. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.base.wording import ranks_text
from paceline.world.stacks.parse import Frame, FramePosition, RankPlace, Stack, position

_STATES = {"T": "stopped", "t": "held by a debugger", "D": "waiting for a disk or a network drive", "Z": "ended"}


@dataclass(frozen=True)
class ProcessStacks:
    """Holds the stacks of one process, on its own host.

    Attributes:
        pid: its process number.
        threads: the Python stacks of its threads, the main thread last; () if it did not write any.
        state: the letter of its state (`process_state`).
        native: the stacks with compiled code, as py-spy writes them; "" without py-spy.
        note: why something is missing; "" for nothing.
        command: its command line.
        children: the processes that it has started.
    """

    pid: int
    threads: tuple[Stack, ...] = ()
    state: str = ""
    native: str = ""
    note: str = ""
    command: str = ""
    children: tuple[ProcessStacks, ...] = ()

    @property
    def main(self) -> Stack:
        """The stack of the main thread."""
        return self.threads[-1] if self.threads else ()


@dataclass(frozen=True)
class RankGroup:
    """Holds ranks that are at the same place.

    Attributes:
        members: the ranks.
        text: where they are.
        brief: the same in a few words, without the source.
    """

    members: tuple[RankPlace, ...]
    text: str
    brief: str

    @property
    def ranks(self) -> list[int]:
        """Their numbers."""
        return [member.rank for member in self.members]

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped them."""
        return self.members[0].state == "T"

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


def place_of(rank: int, process: ProcessStacks, still_s: float, collectives: Sequence[str]) -> RankPlace:
    """Returns where a rank is, by the stacks of its processes.

    Args:
        rank: the rank.
        process: its process.
        still_s: seconds since its last sign of progress.
        collectives: the last collectives of torch's flight recorder, the newest last.
    """
    place = position(process.main)
    workers = []
    for child in process.children:
        at = position(child.main)
        # An idle worker of a loader waits in lines of torch. It has no line of the user on its stack, and is not listed.
        is_at_work = at is not None and any(frame.is_users for frame in _begun_by_torch(child.main))
        if child.state in _STATES or is_at_work:
            workers.append((child.pid, _text(child.state, at, child.note, f"`kill -CONT {child.pid}`")))
    stacks = _all_stacks(process, collectives)
    note = process.note if place is None else ""
    return RankPlace(rank, process.pid, place, process.state, still_s, note, tuple(workers), stacks)


def grouped(ranks: Iterable[RankPlace]) -> list[RankGroup]:
    """Groups ranks by their place: the largest group is first; of equal groups, the one with the lowest rank."""
    members_of: dict[tuple[object, ...], list[RankPlace]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        path = rank.place.path if rank.place is not None else ()
        members_of.setdefault((_line(rank), path), []).append(rank)
    groups_at = Counter(line for line, _ in members_of)
    groups = []
    for (line, _), members in members_of.items():
        first = members[0]
        text = _text(first.state, first.place, first.note, _continuing(members))
        # The line alone does not tell these groups apart.
        if groups_at[line] > 1 and first.place is not None:
            text += f" ({' < '.join(first.place.path)})"
        groups.append(RankGroup(tuple(members), text, _brief(first)))
    return sorted(groups, key=lambda group: -len(group.members))


def blamed(groups: Sequence[RankGroup]) -> list[int]:
    """Returns the ranks that probably hold up the others: those that are stopped, or else the smallest group."""
    group = min(groups, key=lambda group: (not group.is_stopped, len(group.members)))
    return group.ranks if len(groups) > 1 else []


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
            on_host = f" on {member.host}" if member.host else ""
            title = _title(f"rank {member.rank}, pid {member.pid}{on_host}", member.state)
            parts.append(f"{title}\n{member.stacks}")
    return "\n\n".join(parts) + "\n"


def _line(rank: RankPlace) -> tuple[object, ...]:
    """Returns what the line of a report about a rank says. A script may be in different folders on different hosts."""
    place = rank.place
    if place is None:
        return (rank.state, rank.note)
    state = rank.state if rank.state in _STATES else ""
    return (state, rank.note, place.operation, place.file.rpartition("/")[2], place.line, place.function)


def _text(state: str, place: FramePosition | None, note: str, continuing: str) -> str:
    """Returns where a process is.

    Args:
        state, place, note: those of `RankPlace`.
        continuing: the commands that let it go on, if a signal has stopped it.
    """
    parts = []
    if state == "T":
        parts.append(f"stopped by a signal (SIGSTOP or SIGTSTP; state T); {continuing} lets it go on")
    elif state in _STATES:
        parts.append(f"{_STATES[state]} (state {state})")
    if place is not None:
        parts.append(place.text)
    if note and (place is not None or not parts):
        parts.append(note)
    return "; ".join(parts) or "it did not write its stack"


def _continuing(members: Sequence[RankPlace]) -> str:
    """Returns the commands that continue stopped processes, one for each host."""
    pids_by_host: dict[str, list[str]] = {}
    for member in members:
        pids_by_host.setdefault(member.host, []).append(str(member.pid))
    commands = []
    for host, pids in pids_by_host.items():
        on_host = f" on {host}" if host else ""
        commands.append(f"`kill -CONT {' '.join(pids)}`{on_host}")
    return " and ".join(commands)


def _brief(rank: RankPlace) -> str:
    place = rank.place
    words = f"{_STATES[rank.state]} " if rank.state in _STATES else ""
    if place is None:
        return words.strip() or "without a stack"
    line = f"at {place.file.rpartition('/')[2]}:{place.line}"
    if place.operation:
        return f"{words}in {place.operation} {line}"
    return words + line


def _workers(group: RankGroup) -> list[str]:
    """Returns what the child processes of these ranks do, with one line for those that do the same."""
    pids_by_text: dict[str, list[int]] = {}
    for member in group.members:
        for pid, text in member.workers:
            pids_by_text.setdefault(text, []).append(pid)
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


def _title(name: str, state: str) -> str:
    in_state = f", {_STATES[state]}" if state in _STATES else ""
    return f"==== {name}{in_state} ===="


def _all_stacks(process: ProcessStacks, collectives: Sequence[str] = ()) -> str:
    """Returns all stacks of a process, and of the processes that it has started; what matters most comes first."""
    lines = [process.note] if process.note else []
    for number, thread in enumerate(reversed(process.threads)):
        lines.append("main thread, the innermost call first:" if number == 0 else f"thread {number}:")
        lines += [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in _of_script(thread)]
    if collectives:
        lines.append("last collectives (torch's flight recorder):")
        lines += [f"  {collective}" for collective in collectives]
    if process.native:
        lines += ["with compiled code (py-spy dump --native):", process.native]
    for child in process.children:
        name = f"pid {child.pid}, started by pid {process.pid}: {child.command[:160]}"
        lines += ["", _title(name, child.state), _all_stacks(child)]
    return "\n".join(lines)
