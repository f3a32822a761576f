"""Runs a store for launchers (`--store c10d://HOST:PORT`).

This host trains nothing.
It is torch's TCPStore: torchrun's agents can use it too. It keeps what it holds in memory, until SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
from datetime import timedelta
from typing import Any

from paceline.base.errors import LaunchError

_PORT = 29400
_OPERATION_S = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", metavar="HOST", default="", help="address of this host at which to listen; not set: all addresses"
    )
    parser.add_argument("--port", metavar="N", type=int, default=_PORT, help=f"port at which to listen [{_PORT}]")


def run(args: argparse.Namespace) -> int:
    """Listens until a signal asks to end.

    Raises:
        LaunchError: `launch-port`.
    """
    # Threads inherit blocked signals, so the signals are blocked before torch starts its threads. Otherwise one of these
    # threads could receive a signal that `sigwait` is waiting for.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    from paceline.launch import host
    from paceline_hosts.network.ports import listen_at

    try:
        listener = listen_at(args.address, args.port) if args.address else host.hold_port(args.port)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        place = f"{args.address or 'any address'}, port {args.port}"
        raise LaunchError(
            "launch-port",
            f"the store cannot listen at {place}.",
            why=str(reason).lower(),
            fix="give another --port, an --address of this host, or end the program that listens there",
        ) from None
    port = listener.getsockname()[1]
    import torch.distributed

    dist: Any = torch.distributed  # the type stubs of torch do not have the stores
    store = dist.TCPStore(
        args.address or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_OPERATION_S),
        master_listen_fd=listener.detach(),
    )
    print(f"paceline: the store listens at {args.address or host.name()}:{port}", flush=True)
    signal.sigwait(ends)
    del store
    return 0
