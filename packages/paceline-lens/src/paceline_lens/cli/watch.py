"""Shows a run live: as a page in the browser, or with --text in the terminal.

RUN is a folder, a name or a process number of `paceline ps`, or HOST:RUN for one on a host that ssh reaches. Without it, the
newest run of this machine is shown.
"""

from __future__ import annotations

import argparse
import sys
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
    parser.add_argument("--text", action="store_true", help="show it in the terminal")
    parser.add_argument("--once", action="store_true", help="with --text: show the current state, and exit")
    parser.add_argument(
        "--interval-s",
        type=float,
        metavar="S",
        help="seconds between two updates [1; if the output is not a terminal, 10]",
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
    from importlib.util import find_spec

    has_rich = find_spec("rich") is not None
    is_terminal = sys.stdout.isatty()
    if is_terminal and not has_rich:
        print("paceline: `pip install rich` draws the run; without it there are lines", file=sys.stderr)
    if once and has_rich:
        from rich.console import Console

        from paceline_lens.watch.text import frame

        console = Console()
        console.print(frame(followed.snapshot(), console.width, 100))
        return 0
    if once:
        from paceline_lens.watch.plain import PlainLog

        print(*PlainLog().lines(followed.snapshot()), sep="\n")
        return 0
    if is_terminal and has_rich:
        return _draw(followed, interval_s or 1.0)
    return _print_lines(followed, interval_s or 10.0)


def _draw(followed: FollowedRun, interval_s: float) -> int:
    """Draws the run on the whole terminal; its last state stays there when it has ended."""
    from rich.console import Console
    from rich.live import Live

    from paceline_lens.watch.text import frame

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            snapshot = followed.snapshot()
            live.update(frame(snapshot, console.width, console.height), refresh=True)
            if snapshot["state"] == "ended":
                break
            time.sleep(interval_s)
    console.print(frame(snapshot, console.width, 100))
    return 0


def _print_lines(followed: FollowedRun, interval_s: float) -> int:
    """Says what is new, each second; how far the run is, every few seconds."""
    from paceline_lens.watch.plain import PlainLog

    log = PlainLog(interval_s)
    while True:
        snapshot = followed.snapshot()
        for line in log.lines(snapshot):
            print(line, flush=True)
        if snapshot["state"] == "ended":
            return 0
        time.sleep(min(1.0, interval_s))
