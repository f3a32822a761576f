"""Watches the main thread of each rank, in one thread: who waits where for whom, and whether a run makes no progress.

    watcher         the thread: one look a second, and then its duties
    progress        pure: from looks to how long a rank has waited, or has shown no sign of life
    progress_file   a duty: tells whoever watches the ranks of this host
    waits           a duty: reports over the store which rank waits where
    debug           a duty, and the check before each operation: debug mode
    host            the other side of `progress_file`, in the launcher or in the first rank under torchrun: reads and reports

A report is the same wherever it is made (`stack_report.py`): a `RankPlace` for each rank, grouped by place.
"""
