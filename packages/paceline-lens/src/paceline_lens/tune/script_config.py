"""Interfaces by which a tuning reads and changes the configs that scripts pass to the engine of another library.

A library whose scripts bring such a config has a file in `compat/LIBRARY/` with a last line `SCRIPT_CONFIGS = ...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.base.registry import Registry
from paceline_lens.tune.search import Candidate, Tuning

_REGISTRY = Registry("paceline.script_configs", "script config")


class ScriptConfig(Protocol):
    """The config of one script, as a search reads it."""

    def tuning(self, said: Mapping[str, Any]) -> Tuning:
        """Returns how to search. The config says it, and `said` from the command line overrides it."""

    def stages(self) -> tuple[int, ...]:
        """Returns the stages of ZeRO to try."""

    def fixed_batch(self) -> int | None:
        """Returns the batch size of all ranks together, if the config fixes it."""

    def options(self, stage: int) -> tuple[tuple[tuple[str, Any], ...], ...]:
        """Returns the sets of options to try at a stage."""


class ScriptConfigs(Protocol):
    """The configs of one library.

    Attributes:
        called: the name of such a config in messages, such as "a Toy config".
        trial_file: the name of the file that shows the config of a trial.
        best_file: the name of the file for the best config.
    """

    called: str
    trial_file: str
    best_file: str

    def with_file(self, words: Sequence[str], file: str) -> list[str]:
        """Returns the words of a script's command line. If they name a config, `file` replaces it."""

    def launch_command(self, procs: int) -> list[str]:
        """Returns the arguments of `paceline` that start scripts as the library's own launcher does."""

    def contents(self, config: Any) -> dict[str, Any]:
        """Returns a config as a dict, whatever the script has passed: a dict, a path or another form."""

    def read(self, content: Mapping[str, Any]) -> ScriptConfig:
        """Reads a config for a search."""

    def plain(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config for a single run: without settings of a search, and without parts that write files."""

    def with_candidate(
        self, content: Mapping[str, Any], candidate: Candidate, arguments: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns the config of a candidate.

        Args:
            content: the user's config.
            arguments: values that the script's own arguments give.
        """

    def of_candidate(self, candidate: Candidate, micro: int | None, precision: str) -> dict[str, Any]:
        """Returns a config with the settings of a candidate, for a script that has no config.

        Args:
            micro: samples of one micro-batch on one rank; None if it is not known.
            precision: as the setting `mixed_precision`.
        """


def has_script_configs() -> bool:
    """Whether a part is installed whose library has such configs."""
    return bool(_REGISTRY.names())


def script_configs() -> ScriptConfigs:
    """Returns the library whose configs a tuning reads and writes; there must be one (`has_script_configs`)."""
    configs: ScriptConfigs = next(iter(_REGISTRY))
    return configs
