"""Shows a run of another host through ssh: its lines, or its page through a tunnel. For `paceline watch HOST:RUN`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from paceline.base.errors import ConfigError
from paceline.launch.host import free_port


def watch_on(host: str, run: str, command: str, *, text: bool, once: bool = False, port: int | None = None) -> int:
    """Shows a run of another host until it ends there, or until Ctrl-C; returns the exit code of ssh.

    Args:
        host: the name of the host for ssh.
        run: the run, as one would type it on that host; "" for the newest run.
        command: the command that starts paceline on that host.
        text: whether the run is shown in this terminal. Otherwise that host serves the page, and the same port of this host
            leads to it.
        once: whether the lines of its present state are printed, instead of all until the run ends.
        port: the port of the page; None for a free one.

    Raises:
        ConfigError: `watch-ssh`, where ssh is missing, or cannot reach the host or paceline on it.
    """
    flags = ["--text"] * text + ["--once"] * once
    words = arguments(host, run, command, flags, port=port, is_terminal=sys.stdout.isatty())
    try:
        code = subprocess.call(words)
    except FileNotFoundError:
        raise ConfigError(
            "watch-ssh", "there is no ssh on this machine.", fix="apt-get install openssh-client"
        ) from None
    if code == 255:
        raise ConfigError(
            "watch-ssh",
            f"ssh could not show the run on {host}; it says why above.",
            why=shlex.join(words),
            fix=f"try `ssh {shlex.quote(host)}`, then this command again",
        )
    if code == 127:
        raise ConfigError(
            "watch-ssh",
            f"{command!r} was not found on {host}.",
            why=shlex.join(words),
            fix=f"name it: `paceline watch {shlex.quote(f'{host}:{run}')} --remote-command /path/to/bin/paceline`",
        )
    return code


def arguments(
    host: str, run: str, command: str, flags: Sequence[str], *, port: int | None, is_terminal: bool
) -> Sequence[str]:
    """Returns the command line of ssh.

    The page's URL that the other host prints must also be right on this one, so that the port is the same on both.

    Args:
        host, run, command, port: the arguments of `watch_on`.
        flags: the flags that show the run in a terminal; () for the page.
        is_terminal: whether this command writes to a terminal.
    """
    there = [*shlex.split(command), "watch"]
    if run:
        there.append(run)
    if flags:
        terminal = ["-t"] if is_terminal else []
        return ["ssh", *terminal, "--", host, shlex.join([*there, *flags])]
    port = port or free_port()
    there += ["--port", str(port)]
    # With a terminal the page's server ends together with the connection.
    tunnel = ["-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    return ["ssh", "-tt", *tunnel, "--", host, shlex.join(there)]
