"""Can checkpoints be written to the folder, and do all hosts see there what one has written?"""

from __future__ import annotations

from paceline_hosts.doctor.facts import Examination, FolderUse
from paceline_hosts.doctor.finding import Check, Finding, Level, listed, where_all
from paceline_hosts.doctor.units import num_bytes, seconds

_LATE_S = 1.0
_SLOW_SYNC_S = 0.5
_SLOW_BYTES_PER_S = 10e6  # 1 GB takes more than a minute and a half


def judge(examination: Examination) -> list[Finding]:
    """Finds hosts where writing, renaming or linking fails, and hosts that do not see the files of the others."""
    uses = examination.folder_uses
    folder = examination.folder
    findings = []
    for host, use in uses.items():
        if use.error:
            what = f"{folder}: {use.error}"
            fix = f"name a folder that {host} can write to: `paceline doctor --folder PATH`"
            findings.append(Finding("problem", "folder-fails", host, what, fix))
    unseen = [host for host, use in uses.items() if use.seen_after_s is None and not use.error]
    if unseen:
        first = next(iter(uses))
        what = f"{folder} is not shared: what {first} writes there is not seen within 5 s"
        # If the user named no folder, this is the working directory. Checkpoints may go to another place, such as an object
        # store, so a working directory that is not shared is only a warning.
        level: Level = "problem" if examination.folder_was_named else "warning"
        fix = "write checkpoints to a folder that all hosts mount, and try it: `paceline doctor --folder PATH`"
        findings.append(Finding(level, "folder-not-shared", listed(unseen), what, fix))
    sharing = {host: use for host, use in uses.items() if use.seen_after_s is not None and not use.error}
    findings += _faults(examination, sharing)
    if not findings and sharing:
        findings.append(Finding("ok", "shared-folder", where_all(examination), _described(examination, sharing)))
    return findings


def _faults(examination: Examination, sharing: dict[str, FolderUse]) -> list[Finding]:
    """Finds operations that work in a local folder, and fail or are slow in this one."""
    folder = examination.folder
    findings = []
    elsewhere = "keep checkpoints on another file system, and try it: `paceline doctor --folder PATH`"
    winners = [host for host, use in sharing.items() if use.won_race]
    if len(winners) > 1 or (sharing and not winners):
        what = f"{folder}: {len(winners)} hosts have made one new folder; two runs could take the same name"
        findings.append(Finding("problem", "folder-claim", listed(sharing), what, elsewhere))
    for host, use in sharing.items():
        if not use.renames:
            what = (
                f"{folder}: a renamed file does not take the place of another, as the end of each checkpoint needs it"
            )
            findings.append(Finding("problem", "folder-rename", host, what, elsewhere))
        if use.seen_after_s is not None and use.seen_after_s > _LATE_S:
            what = f"{folder}: files of other hosts are seen {seconds(use.seen_after_s)} late"
            findings.append(Finding("warning", "folder-late", host, what, elsewhere))
        rates = [rate for rate in (use.write_bytes_per_s, use.read_bytes_per_s) if rate]
        is_slow = min(rates, default=_SLOW_BYTES_PER_S) < _SLOW_BYTES_PER_S
        if is_slow or (use.fsync_s or 0.0) > _SLOW_SYNC_S:
            findings.append(Finding("warning", "folder-slow", host, f"{folder}: {_speed(use)}", elsewhere))
    return findings


def _speed(use: FolderUse) -> str:
    parts = []
    if use.write_bytes_per_s:
        parts.append(f"writes {num_bytes(use.write_bytes_per_s)}/s")
    if use.read_bytes_per_s:
        parts.append(f"reads {num_bytes(use.read_bytes_per_s)}/s")
    if use.fsync_s is not None:
        parts.append(f"syncs a small file in {seconds(use.fsync_s)}")
    return ", ".join(parts)


def _described(examination: Examination, sharing: dict[str, FolderUse]) -> str:
    slowest = min(sharing.values(), key=lambda use: use.write_bytes_per_s or 0.0)
    kind = f" ({slowest.file_system})" if slowest.file_system else ""
    shared = ""
    if len(sharing) > 1:
        latest = max(use.seen_after_s or 0.0 for use in sharing.values())
        shared = f" is shared, files are seen within {seconds(latest)};"
    return f"{examination.folder}{kind}{shared} {_speed(slowest)}"


CHECK = Check("shared folder", judge)
