"""`ScriptLibrary` says what scripts for another library expect from the launcher that starts them.

A library whose scripts expect something has a file in `compat/LIBRARY/` with a last line `SCRIPT_LIBRARY = ...`.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.registry import Registry

_REGISTRY = Registry("paceline.launch", "SCRIPT_LIBRARY", "paceline.script_libraries", libraries="paceline.compat")


class ScriptLibrary:
    """One library. A subclass says what its scripts expect.

    Attributes:
        imports: modules that all of its scripts need, and that take long to import.
        device: how its scripts ask for the device of their process.
    """

    imports: tuple[str, ...] = ()
    device: str = "accelerator.device"

    def variables(self, local_size: int, node: int, nodes: int) -> dict[str, str]:
        """Returns variables that its scripts read besides torchrun's.

        Args:
            local_size: the number of processes on this node.
            node: the number of this node.
            nodes: the number of nodes.
        """
        return {}


def script_libraries(names: Iterable[str]) -> list[ScriptLibrary]:
    """Returns those of the named libraries whose scripts expect something."""
    libraries = _REGISTRY.own_names()
    return [_REGISTRY.get(name) for name in names if name in libraries]
