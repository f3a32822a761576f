"""`EnvironmentNumbers` reads the variables of a launcher, and collects contradictions, so that one error lists them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from paceline.base.errors import Problem, WorldError
from paceline.world.world import World


class EnvironmentNumbers:
    """Reads numbers from an environment.

    Args:
        env: the environment.
        source: the launcher that has probably set the variables, such as "torchrun", for errors.

    Attributes:
        problems: the contradictions up to now.
    """

    def __init__(self, env: Mapping[str, str], source: str) -> None:
        self.problems: list[Problem] = []
        self._env = env
        self._source = source

    def number(self, *names: str) -> int | None:
        """Returns the value of the first of `names` that is set.

        If it is no whole number of at least 0, this adds a problem and returns None. It also returns None if no name is set.
        """
        for name in names:
            text = self._env.get(name)
            if text is None:
                continue
            if text.strip().isdecimal():
                return int(text)
            what = f"{name} is {text!r}, but must be a whole number of at least 0."
            self.add_problem(what, f"unset {name}, or correct it")
            return None
        return None

    def add_problem(self, what: str, fix: str) -> None:
        """Adds a contradiction."""
        self.problems.append(Problem("world-env", what, f"read from the environment of {self._source}", fix))

    def describe(self, *names: str) -> str:
        """Returns the variables that are set, as "A=1, B=2"."""
        return ", ".join(f"{name}={self._env[name]}" for name in names if name in self._env)

    def checked(self, world: World) -> World:
        """Checks the numbers of a world against each other, and returns it.

        Raises:
            WorldError: `world-env`, with all problems.
        """
        counts = (
            ("rank", world.rank, world.size),
            ("local rank", world.local_rank, world.local_size),
            ("node", world.node, world.nodes),
        )
        for what, number, count in counts:
            if number >= count:
                self.add_problem(
                    f"{what} {number} does not exist: there are {count}, numbered from 0.",
                    "start all processes with one launcher, such as `paceline launch`, and unset what was set by hand",
                )
        if world.local_size > world.size:
            self.add_problem(
                f"this host runs {world.local_size} processes, more than the {world.size} of all hosts.",
                "set the count of all processes to at least that of this host",
            )
        if self.problems:
            self.fail()
        return world

    def fail(self) -> NoReturn:
        """Raises all problems; there must be at least one.

        Raises:
            WorldError: `world-env`.
        """
        raise WorldError.of(self.problems)


def first_port(seed: int) -> int:
    """Returns a port from 15000 to 30999 that follows from the number of a job, so it is the same on every host.

    Linux uses the ports from 32768 on for outgoing connections, so none of those can be in the way.
    """
    return 15000 + seed % 16000
