"""Shows a run live: a page in the browser, or with --text lines in the terminal.

RUN is a folder, a name or a process number of `paceline ps`, or HOST:RUN for one on a host that ssh reaches. Without it, the
newest run of this machine is shown.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from paceline.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline_lens.watch.following import FollowedRun


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline watch [options] [RUN]"
    parser.add_argument(
        "watched_run",
        metavar="RUN",
        nargs="?",
        help="a folder, a name or process number of `paceline ps`, or HOST:RUN [the newest run]",
    )
    parser.add_argument("--text", action="store_true", help="write lines about it to the terminal")
    parser.add_argument("--once", action="store_true", help="with --text: show the current state, and exit")
    parser.add_argument(
        "--interval-s",
        type=float,
        metavar="S",
        help="with --text: seconds between two lines of its status [10]",
    )
    parser.add_argument(
        "--freeze", metavar="FILE", help="write the page in its current state to an HTML file, and exit"
    )
    parser.add_argument("--port", type=int, metavar="N", help="port of the page [the first free port from 8470 on]")
    parser.add_argument(
        "--remote-command",
        metavar="COMMAND",
        default="paceline",
        help="command that starts paceline on HOST [paceline]",
    )


def run(args: argparse.Namespace) -> int:
    """Shows the run until it has ended, or until Ctrl-C."""
    _check(args)
    host, colon, there = (args.watched_run or "").partition(":")
    if colon and _is_remote(host, args.watched_run):
        from paceline_lens.watch.remote import watch_on

        if args.freeze:
            raise ConfigError(
                "command-line",
                f"--freeze writes the page of a run of this machine, and the run is on {host}.",
                fix=f"ssh {host} {args.remote_command} watch {there} --freeze report.html".replace("  ", " "),
            )
        return watch_on(host, there, args.remote_command, text=args.text, once=args.once, port=args.port)
    from paceline_lens.watch.following import FollowedRun
    from paceline_lens.watch.runs import folder_of

    if args.freeze:
        return _freeze(folder_of(args.watched_run), args.freeze)
    followed = FollowedRun(folder_of(args.watched_run))
    if args.text or args.once:
        return _show_text(followed, args.interval_s, args.once)
    return _serve(followed, args.port)


def _check(args: argparse.Namespace) -> None:
    if args.interval_s is not None and not 0.1 <= args.interval_s <= 86_400:
        raise ConfigError(
            "command-line",
            f"--interval-s {args.interval_s:g} is not between 0.1 and 86400 seconds.",
            fix="--interval-s 5",
        )
    if args.port is not None and not 0 <= args.port <= 65_535:
        raise ConfigError("command-line", f"--port {args.port} is no port.", fix="a number from 1024 to 65535, or none")


def _is_remote(host: str, word: str) -> bool:
    """Returns whether a word with a colon names a host; a folder may have a colon in its name."""
    from pathlib import Path

    return bool(host) and "/" not in host and not Path(word).exists()


def _freeze(folder: Path, path: str) -> int:
    from paceline_lens.watch.frozen import freeze_run

    try:
        written = freeze_run(folder, path)
    except OSError as error:
        raise ConfigError(
            "watch-write", f"the page cannot be written to {path}.", why=error.strerror or "", fix="name another file"
        ) from None
    print(f"paceline: written to {written}")
    return 0


def _serve(followed: FollowedRun, port: int | None) -> int:
    """Serves the page until Ctrl-C: that of a run which has ended too."""
    from paceline_lens.watch.server import PageServer

    with PageServer(followed.snapshot, port=port) as server:
        print(f"paceline: the run is shown at {server.url}\n  (Ctrl-C ends this page, not the run)", flush=True)
        while True:
            time.sleep(3600)


def _show_text(followed: FollowedRun, interval_s: float | None, once: bool) -> int:
    """Says what is new, each second; how far the run is, every few seconds. With `once`, says all of it now."""
    from paceline_lens.watch.plain import PlainLog

    interval_s = interval_s or 10.0
    log = PlainLog(interval_s)
    while True:
        snapshot = followed.snapshot()
        for line in log.lines(snapshot):
            print(line, flush=True)
        if once or snapshot["state"] == "ended":
            return 0
        time.sleep(min(1.0, interval_s))
