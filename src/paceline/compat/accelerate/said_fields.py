"""Argument classes that show accelerate's defaults, and remember what somebody has said.

A plugin shows a value in each of its fields, as accelerate's does. A plan counts what was said alone: a default that nobody
asked for must not win over a flag of the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SaidFields:
    """Base of such classes; a subclass calls `remember` when its fields have their values.

    Attributes:
        from_environment: names of fields whose values come from variables.
    """

    from_environment: tuple[str, ...] = ()

    def remember(self, said: Mapping[str, Any]) -> None:
        """Notes what was said, and what each field shows for it.

        Args:
            said: the fields that code or a variable has given, as they were written.
        """
        self._said = dict(said)
        self._shown = {name: getattr(self, name) for name in self.__dataclass_fields__}  # type: ignore[attr-defined]

    def said(self, name: str) -> Any:
        """What was said about a field, also by setting it later; None where it shows its default."""
        value = getattr(self, name)
        if value is self._shown.get(name):
            return self._said.get(name)
        return value
