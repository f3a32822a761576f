"""`SaidFields`: the base class of argument classes that tell values that were given from defaults.

A plugin shows a value in each of its fields, as accelerate's does. A plan takes only the values that the script or a variable
gave, because a default must not override a flag of the launcher. `paceline_accelerate.fsdp.said_by` asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.base import env as environment
from paceline_accelerate.engine_fields import ROWS


class SaidFields:
    """Remembers which fields were given; a subclass, a dataclass, calls `remember` when its fields have their values.

    Attributes:
        from_environment: names of fields whose values come from variables.
    """

    from_environment: tuple[str, ...] = ()

    def fill_from_environment(self, owner: str, but: str = "") -> dict[str, Any]:
        """Fills fields that are None with the texts of their variables; returns what the script and the variables say.

        Args:
            owner: name of the class in the table `engine_fields`, which says the variable of each field.
            but: a field whose variable is not read.
        """
        env = environment.snapshot()
        said: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and value is not field.default:
                said[field.name] = value
        from_environment: list[str] = []
        for row in ROWS:
            name = row.attribute
            if row.owner != owner or name in ("", but):
                continue
            text = env.get(row.variable)
            if text and getattr(self, name) is None:
                said[name] = text
                setattr(self, name, text)
                from_environment.append(name)
        self.from_environment = tuple(from_environment)
        return said

    def remember(self, said: Mapping[str, Any]) -> None:
        """Notes the values that were given, and the values that the fields show for them.

        Args:
            said: the fields that the script or a variable gave, with the values as they were written.
        """
        self._said = dict(said)
        self._shown = {name: getattr(self, name) for name in self.__dataclass_fields__}  # type: ignore[attr-defined]

    def said(self, name: str) -> Any:
        """Returns the value that was given for a field; None if it shows its default."""
        value = getattr(self, name)
        # Another value than before was set on the object afterwards.
        if value is self._shown.get(name):
            return self._said.get(name)
        return value
