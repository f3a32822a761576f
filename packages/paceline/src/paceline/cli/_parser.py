"""`Parser`: the options of one command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NoReturn

from paceline.base.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Parses the options of one command; its errors have the same form as all other errors of Paceline."""

    def __init__(self, prog: str, description: str, **options: object) -> None:
        usage = f"{prog} [options]"
        super().__init__(prog=prog, description=description, usage=usage, allow_abbrev=False, **options)  # type: ignore[arg-type]

    @property
    def options(self) -> Mapping[str, argparse.Action]:
        """Spelling of an option -> its argparse action; spellings that `--help` does not list are included."""
        return self._option_string_actions

    @property
    def takes_script(self) -> bool:
        """Whether a script and its arguments follow the options."""
        return any(action.dest == "script_args" for action in self._actions)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError `command-line`, where argparse would print a message and exit."""
        fix = f"`{self.prog} --help` lists what it takes"
        # argparse takes a word that begins with a dash for a flag, so it may report a missing value although one was given.
        if message.endswith("expected one argument"):
            flag = message.split()[1].rstrip(":").rpartition("/")[2]
            fix = f"give it a value; one that begins with a dash follows `=`: {flag}=--word"
        elif "ignored explicit argument" in message:
            flag = message.split()[1].rstrip(":").rpartition("/")[2]
            value = message.rpartition("argument ")[2]
            message = f"{flag} takes no value, but was given {value}"
            fix = f"write {flag}"
            if f"{flag}-dir" in self.options:  # --watch
                fix = f"write {flag}-dir {value}"
        raise ConfigError("command-line", f"{self.prog}: {message}", fix=fix)
