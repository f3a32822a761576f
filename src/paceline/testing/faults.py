"""Faults at a chosen rank and step: what a loop does when a process raises, dies, freezes or is slow."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base import env as environment

Kind = Literal["raise", "exit", "kill", "stop", "sleep"]


class InjectedFault(RuntimeError):
    """Raised by a fault of kind "raise"."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank at one step.

    Attributes:
        kind: "raise" an error, "exit" with code 3, "kill" (SIGKILL, as the kernel does when memory runs out), "stop"
            (SIGSTOP: alive, silent), or "sleep".
        rank: the rank that it strikes.
        step: the step at which it strikes, counted as the caller of `at` counts.
        seconds: how long "sleep" sleeps.
        once: a file that is made when it strikes; while it exists, the fault does not strike. So a run that is
            started again gets past it.

    Example:
        >>> fault = Fault("kill", rank=1, step=3)
        >>> for step in range(10):
        ...     fault.at(step)
    """

    kind: Kind
    rank: int
    step: int
    seconds: float = 60.0
    once: str | Path | None = None

    def at(self, step: int, rank: int | None = None) -> None:
        """Strikes if this is the step and the rank (by default the one in RANK).

        Raises:
            InjectedFault: for the kind "raise".
        """
        if step != self.step or self.rank != (environment.get("RANK") or 0 if rank is None else rank):
            return
        if self.once is not None:
            if Path(self.once).exists():
                return
            Path(self.once).touch()
        if self.kind == "raise":
            raise InjectedFault(f"rank {self.rank} fails at step {self.step}, as the test wants")
        if self.kind == "exit":
            os._exit(3)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(self.seconds)
