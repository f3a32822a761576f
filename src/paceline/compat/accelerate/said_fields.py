"""`SaidFields`: the base class of argument classes that tell values that were given from defaults.

A plugin shows a value in each of its fields, as accelerate's does. A plan takes only the values that the script or a variable
gave, because a default must not override a flag of the launcher. `paceline.compat.fsdp.said_by` asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SaidFields:
    """Remembers which fields were given; a subclass, a dataclass, calls `remember` when its fields have their values.

    Attributes:
        from_environment: names of fields whose values come from variables.
    """

    from_environment: tuple[str, ...] = ()

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
