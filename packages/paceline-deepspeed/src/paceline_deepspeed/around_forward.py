"""Methods of a model other than `forward` compute in the engine's precision: `engine.module.encode(x)`, `engine.score(ids)`.

DeepSpeed's models have parameters of 16 bits, so it does not matter there which method a script calls. Here autocast stands
around `forward` of the model alone, and trained parameters are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from paceline.torch_internals.dispatch import is_in_backward_pass
from paceline.world.forward import original_forward, override_forward

_NAME = "entry"


def compute_alike(model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Makes the modules of a model compute under autocast also where its own forward does not call them.

    Args:
        model: the script's, yet to be prepared.
        autocast: opens the context in which the model computes.
    """
    if original_forward(model, _NAME) is not None:
        return
    openers = _PassOpeners(autocast)
    override_forward(model, _NAME, openers.pass_of_model)
    for module in _below(model):
        if original_forward(module, _NAME) is None:  # one that is shared with another model keeps what it has
            override_forward(module, _NAME, openers.pass_of_part)


class _PassOpeners:
    """The modules by which a pass through a model can begin. The first that is called opens autocast for all below it.

    Args:
        autocast: opens the context in which the model computes.
    """

    def __init__(self, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._autocast = autocast
        self._is_inside = False

    def pass_of_model(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward, around which `prepare` puts autocast."""
        if torch.compiler.is_compiling():  # the parts in the graph ask the same
            return original(*args, **kwargs)
        return self._mark(original, *args, **kwargs)

    def pass_of_part(self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a module below it."""
        # Checkpoints, which compute a part once more in the backward pass, restore autocast as it was.
        if self._is_inside or torch.compiler.is_compiling() or is_in_backward_pass():
            return original(*args, **kwargs)
        with self._autocast():
            return self._mark(original, *args, **kwargs)

    def _mark(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a forward whose parts find autocast as the model wants it, and so open none."""
        before = self._is_inside
        self._is_inside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_inside = before


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules under one, down to the entries of its lists: not the parts of repeated layers, which are many."""
    for child in module.children():
        yield child
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from _below(child)
