"""What scripts written for another library expect of the launcher that starts them.

A library whose scripts expect something has a file in `compat/LIBRARY/` with a last line `SCRIPT_LIBRARY = ...`.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.registry import Registry

_REGISTRY = Registry("paceline.launch", "SCRIPT_LIBRARY", "paceline.script_libraries", libraries="paceline.compat")


class ScriptLibrary:
    """One library; a subclass says what its scripts expect.

    Attributes:
        imports: modules that its scripts are sure to need, and that take long to import.
        forkable: packages that its scripts often begin with, and that may be imported before processes are forked: they
            read no variable of a rank, and start no thread that they need.
    """

    imports: tuple[str, ...] = ()
    forkable: tuple[str, ...] = ()

    def variables(self, local_size: int, node: int, nodes: int) -> dict[str, str]:
        """Variables that its scripts read besides torchrun's.

        Args:
            local_size: processes on this node.
            node: this node's number.
            nodes: how many nodes there are.
        """
        return {}


def script_libraries(names: Iterable[str]) -> list[ScriptLibrary]:
    """Those of the named libraries whose scripts expect something."""
    libraries = _REGISTRY.own_names()
    return [_REGISTRY.get(name) for name in names if name in libraries]
