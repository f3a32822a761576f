"""Reads numbers out of a launcher's environment and collects what contradicts, so that all of it is said at once."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.base.errors import Problem, WorldError
from paceline.world.world import World


class Reading:
    """One look at an environment.

    Args:
        env: the environment.
        source: who is thought to have made it, such as "torchrun".
    """

    def __init__(self, env: Mapping[str, str], source: str) -> None:
        self.env = env
        self.source = source
        self.problems: list[Problem] = []

    def number(self, *names: str) -> int | None:
        """Value of the first of `names` that is set; None where none is, or where it is no number from 0 on."""
        for name in names:
            text = self.env.get(name)
            if text is None:
                continue
            if text.strip().isdecimal():
                return int(text)
            self.wrong(f"{name} is {text!r}, and should be a number from 0 on.", f"unset {name}, or mend it")
            return None
        return None

    def wrong(self, what: str, fix: str) -> None:
        """Notes a contradiction."""
        self.problems.append(Problem("world-env", what, f"read from the environment of {self.source}", fix))

    def shown(self, *names: str) -> str:
        """`A=1, B=2` of those that are set."""
        return ", ".join(f"{name}={self.env[name]}" for name in names if name in self.env)

    def world(self, world: World) -> World:
        """Checks the numbers against each other.

        Raises:
            WorldError: `world-env`, holding everything that was noted.
        """
        pairs = (("rank", world.rank, world.size), ("local rank", world.local_rank, world.local_size))
        for what, number, count in (*pairs, ("node", world.node, world.nodes)):
            if number >= count:
                self.wrong(
                    f"{what} {number} does not exist: there are {count}, numbered from 0.",
                    "start all processes with one launcher, such as `paceline launch`, and unset what was set by hand",
                )
        if world.local_size > world.size:
            self.wrong(
                f"this host runs {world.local_size} processes, more than the {world.size} of all hosts.",
                "set the count of all processes to at least that of this host",
            )
        self.check()
        return world

    def check(self) -> None:
        """Raises what was noted, if anything.

        Raises:
            WorldError: `world-env`.
        """
        if self.problems:
            raise WorldError.of(self.problems)


def first_port(seed: int) -> int:
    """A port that follows from a job's number, the same on every host: 15000 to 30999, below what systems lend out."""
    return 15000 + seed % 16000
