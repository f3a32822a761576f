"""Serves the numbers of a watched run to Prometheus, at /metrics.

`paceline metrics runs/2026-11-23-014502-train` serves them on this machine alone, at port 9400, also while the run goes on.
With `--once` they are printed instead, for `promtool check metrics` or a file that node_exporter reads.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from paceline.base.terminal import say

PORT = 9400


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a watched run")
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"port to listen on; 0 for a free one [{PORT}]"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; 0.0.0.0 for all [127.0.0.1]"
    )
    parser.add_argument("--once", action="store_true", help="print the numbers once, and do not serve them")


def run(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C.

    Raises:
        ConfigError: `watch-folder`, `watch-version`.
        LaunchError: `metrics-port`.
    """
    from paceline_lens.watch.journal import JournalReader
    from paceline_lens.watch.metrics import MetricsServer, text_of

    reader = JournalReader(args.run_folder)
    if args.once:
        sys.stdout.write(text_of(reader))
        return 0
    server = MetricsServer(reader, args.port, args.host)
    say(f"metrics at {server.url}")
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    return 0
