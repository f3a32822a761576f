"""Runs `paceline` commands in copies of a process that has imported torch: an ordinary start, without the two seconds.

Each line of standard input is a request {"words", "out", "folder", "disk_bytes", "limit_s"}; the answer is a line with
the exit code, as a shell counts it. A copy ends as Python ends, so that exit handlers and threads are what they are.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401

import paceline.accelerator
import paceline.checkpoint.checkpointer  # noqa: F401
from paceline.cli.main import main

_NEW_MOUNTS = 0x00020000


def serve() -> None:
    """Answers until its input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            begin(request)
            sys.exit(main(request["words"]))
        print(ended(pid, request["limit_s"]), flush=True)


def begin(request: dict) -> None:
    """A session, streams, and where asked for a disk of its own, which goes when the last process does."""
    os.setsid()
    os.chdir(request["folder"])
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(number, target)
    if request["disk_bytes"]:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        size = f"size={request['disk_bytes']}"
        os.makedirs("disk", exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", "disk"], check=True)


def ended(pid: int, limit_s: float) -> int:
    """Waits for a process, and kills it where it takes too long."""
    until = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGABRT)
            until = float("inf")
        time.sleep(0.01)


if __name__ == "__main__":
    serve()
