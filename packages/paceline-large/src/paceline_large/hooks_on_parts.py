"""Tells of hooks of a script's on modules that compute a part of what they compute on one process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.base.log import warn_once
from paceline_large.torch_internals.hooks import BACKWARD, BACKWARD_PRE, FORWARD, FORWARD_PRE, module_hooks

ON_INPUTS = (FORWARD_PRE, BACKWARD)  # a full backward hook gets the gradients of inputs and of outputs
ON_OUTPUTS = (FORWARD, BACKWARD, BACKWARD_PRE)
ALL_HOOKS = (FORWARD_PRE, FORWARD, BACKWARD_PRE, BACKWARD)


class HooksOnParts:
    """Looks for hooks of a script on some modules, such as one that keeps an output for a penalty.

    A hook cannot know that the tensor is a part, and nothing shows it.

    Args:
        sees: what a hook sees there, and what the script can do.
    """

    def __init__(self, sees: str) -> None:
        self._sees = sees
        self._modules: dict[str, tuple[nn.Module, Collection[str]]] = {}

    def add(self, name: str, module: nn.Module, kinds: Collection[str] = ALL_HOOKS) -> None:
        """Looks at some kinds of hooks on a module, too."""
        self._modules[name] = module, kinds

    def found(self) -> list[str]:
        """Returns what is to be said of each module that has such hooks."""
        texts = []
        for name, (module, kinds) in self._modules.items():
            for kind, hooks in module_hooks(module).items():
                if kind in kinds and any(map(_is_users, hooks)):
                    texts.append(f"a {kind} of {name} sees {self._sees}")
        return texts

    def look(self) -> None:
        """Called in each forward pass; warns once for each module that has such hooks."""
        if not torch.compiler.is_compiling():
            for text in self.found():
                warn_once("parallel", text)


def _is_users(hook: Callable[..., Any]) -> bool:
    """Returns whether a script has registered a hook, and not torch or Paceline."""
    while isinstance(hook, partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith(("torch.", "paceline"))
