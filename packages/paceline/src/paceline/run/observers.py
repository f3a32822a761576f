"""What looks at a run where a setting asks for it: profiles, values of the system, anomalies, the journal.

Each is an entry point of `paceline.observers`, so that a run loads none that it does not ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.base.registry import Registry
from paceline.config import Overrides
from paceline.config.settings import RunSettings
from paceline.run.run import Run
from paceline.run.states import States

OBSERVERS = Registry("paceline.observers", "observer")

# Name of an observer -> whether the settings ask for it. They join a run in this order.
_ASKED: dict[str, Callable[[RunSettings], bool]] = {
    "profile": lambda settings: settings.profile != "no",
    "system_values": lambda settings: settings.log_system,
    "anomalies": lambda settings: "anomalies" in settings.options,
    "journal": lambda settings: settings.watch_dir is not None,
}


class Observer(Protocol):
    """Looks at runs: a module with this function.

    One that has an argument of `Accelerator` also has `Options`, a dataclass with a field for each option (`--option
    NAME.field=value`); `overrides(argument, overrides)`, which returns the settings of a script with what its argument asks
    for; and `flattened(block)`, which returns a block of options by the names of the fields of `Options`.
    """

    def join(self, run: Run, states: States, joined: Mapping[str, Any]) -> Any:
        """Begins to look at a run. Ranks: all.

        Args:
            run: what is looked at.
            states: its checkpoints.
            joined: what others that were asked have returned, by name.

        Returns:
            What measures; None where it measures nothing after all.
        """
        ...


def said(overrides: Overrides, arguments: Mapping[str, Any]) -> Overrides:
    """Adds what arguments of `Accelerator` ask of observers to the settings of a script.

    Args:
        overrides: the other settings.
        arguments: name of an observer -> the argument; None where it was not given.

    Raises:
        ConfigError: `part-missing`; what an observer says about its argument.
    """
    for name, argument in arguments.items():
        if argument is not None:
            overrides = OBSERVERS.get(name).overrides(argument, overrides)
    return overrides


def join_observers(run: Run, states: States) -> dict[str, Any]:
    """Lets those observers look at a run that its settings ask for, and returns what they have made, by name. Ranks: all.

    Raises:
        ConfigError: `part-missing`; what an observer says about its options.
    """
    joined: dict[str, Any] = {}
    for name, is_asked in _ASKED.items():
        if is_asked(run.settings):
            joined[name] = OBSERVERS.get(name).join(run, states, joined)
    return joined
