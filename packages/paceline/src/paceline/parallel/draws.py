"""Finds the modules that draw random numbers in the first training pass, also those that are no dropout layers, and the
modules that change their buffers in it.

    before a module      if the generators have changed since the module around it continued, that module has drawn numbers
    after a module       if they have changed since its last child returned, this module has drawn numbers;
                         if a buffer of its own is another one, or was written to, since it was entered, it changes buffers

Only hooks are used, and they are removed after one pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.tensors import times_written
from paceline.world.generators import generator_states


def watch_first_pass(model: nn.Module, device: torch.device, report: Callable[[list[str], list[str]], None]) -> None:
    """Calls `report` after the first forward pass in training.

    It gets the names of the modules that drew numbers, and of those that changed buffers of their own.

    Args:
        model: as the user wrote it; its root is called once a pass.
        device: where it computes.
    """
    watch = _FirstPass()
    watch.states = partial(generator_states, device)
    watch.report = report
    watch.root = weakref.ref(model)
    watch.handles = [model.register_forward_pre_hook(watch.begin, prepend=True)]


_Versions = list[tuple[int, int]]  # of each buffer of a module: which tensor it is, and how often it was written to


def _versions(module: nn.Module) -> _Versions:
    return [
        (id(buffer), times_written(buffer)) for buffer in module.buffers(recurse=False) if not buffer.is_inference()
    ]


class _FirstPass:
    """The hooks of one forward pass of the root. If the model is copied, the copy of this object does nothing."""

    states: Callable[[], list[Tensor]]
    report: Callable[[list[str], list[str]], None]

    def __init__(self) -> None:
        self.root: Callable[[], nn.Module | None] = lambda: None
        self.handles: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self._drew: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        # The modules that are running, each with the states of the generators when it last ran code of its own, and with its
        # buffers as they were when it was entered.
        self._open: list[tuple[nn.Module, list[Tensor], _Versions]] = []

    def __reduce__(self) -> Any:
        return _FirstPass, ()

    def begin(self, root: nn.Module, args: object) -> None:
        """A hook before the root: registers the hooks of all modules, if this is a training pass."""
        if torch.compiler.is_compiling() or root is not self.root() or not (root.training and torch.is_grad_enabled()):
            return
        self._remove()
        self._names = {module: name for name, module in root.named_modules()}
        for module in self._names:
            if module is not root:  # the root's pre-hooks are being called right now
                self.handles.append(module.register_forward_pre_hook(self.enter))
            self.handles.append(module.register_forward_hook(self.leave, always_call=True))
        self.enter(root, args)

    def enter(self, module: nn.Module, args: object) -> None:
        """A hook before each module."""
        if module in self._names:
            self._look()
            self._open.append((module, self.states(), _versions(module)))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """A hook after each module; after the root it reports the modules."""
        if not any(module is entered for entered, _, _ in self._open):
            return
        self._look()
        entered, _, versions = self._open.pop()
        while entered is not module:  # an error has left the modules inside open
            entered, _, versions = self._open.pop()
        if _versions(module) != versions:
            self._changed[self._names[module]] = None
        if self._open:
            # The module around it continues: from here on, drawn numbers are its own.
            around, _, versions = self._open[-1]
            self._open[-1] = (around, self.states(), versions)
            return
        self._remove()
        self._names = {}
        self.report(list(self._drew), list(self._changed))

    def _look(self) -> None:
        """Records the innermost running module, if the generators have changed since it was entered or continued."""
        if self._open:
            module, before, _ = self._open[-1]
            if not all(map(torch.equal, before, self.states())):
                self._drew[self._names[module]] = None

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
