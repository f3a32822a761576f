"""`Shell`: stands in the place of a module during a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Shell(nn.Module):
    """Wraps a module of the current stage during a pass: replaces its input, or records its output."""

    def __init__(self, name: str, held: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.held = held
        self.__dict__["_site"] = (name, call)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Calls the module's own forward."""
        name, call = self.__dict__["_site"]
        return call(name, self.held, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("held"), name)
