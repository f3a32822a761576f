"""Configs that scripts hand to another library's engine, as a tuning reads and changes them.

A library whose scripts bring such a config has a file in `compat/LIBRARY/` with a last line `SCRIPT_CONFIGS = ...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.base.registry import Registry
from paceline.planner.search import Candidate, Tuning

_REGISTRY = Registry("paceline.planner", "SCRIPT_CONFIGS", "paceline.script_configs", libraries="paceline.compat")


class ScriptConfig(Protocol):
    """What one script's config says of a search."""

    def tuning(self, said: Mapping[str, Any]) -> Tuning:
        """How to search: what the config asks for, under what the command line said."""

    def stages(self) -> tuple[int, ...]:
        """Stages of ZeRO to try."""

    def fixed_batch(self) -> int | None:
        """The batch of all ranks together, where the config fixes it."""

    def options(self, stage: int) -> tuple[tuple[tuple[str, Any], ...], ...]:
        """Sets of options that are worth a trial at a stage."""


class ScriptConfigs(Protocol):
    """One library's form of configs.

    Attributes:
        called: what users call one, such as "a Toy config".
        trial_file: name of the file that shows a trial's config.
        best_file: name of the file that the best one is written to.
    """

    called: str
    trial_file: str
    best_file: str

    def with_file(self, words: Sequence[str], file: str) -> list[str]:
        """The words of a script's command line, with this file in the place of the config that they name, if they do."""

    def launch_command(self, procs: int) -> list[str]:
        """The words after `paceline` that start scripts as the library's own launcher does."""

    def contents(self, config: Any) -> dict[str, Any]:
        """A config as a dict, however the script gave it."""

    def read(self, content: Mapping[str, Any]) -> ScriptConfig:
        """Reads a config for a search."""

    def plain(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The config as one run takes it: nothing is left to choose, and nothing in it writes."""

    def with_candidate(
        self, content: Mapping[str, Any], candidate: Candidate, arguments: Mapping[str, str]
    ) -> dict[str, Any]:
        """The config of a candidate.

        Args:
            content: the user's.
            arguments: what the script's own arguments say.
        """

    def quiet_candidate(
        self, content: Mapping[str, Any], candidate: Candidate, arguments: Mapping[str, str]
    ) -> dict[str, Any]:
        """The config of a candidate's trial, in which nothing writes."""

    def of_candidate(self, candidate: Candidate, micro: int | None, precision: str) -> dict[str, Any]:
        """A config that says what a candidate says, for a script that has none.

        Args:
            micro: samples of one micro-batch on one rank; None where nobody knows.
            precision: as the setting `mixed_precision`.
        """


def script_configs() -> ScriptConfigs:
    """The form of configs that a tuning reads and writes."""
    configs: ScriptConfigs = next(iter(_REGISTRY))
    return configs
