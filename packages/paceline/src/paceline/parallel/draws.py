"""Finds the modules that draw random numbers in the first training pass, also those that are no dropout layers, and the
modules that change tensors of their own in it.

    before a module      if the generators have changed since the module around it continued, that module has drawn numbers
    after a module       if they have changed since its last child returned, this module has drawn numbers;
                         if a buffer of its own is another one, or was written to, since it was entered, it changes buffers;
                         the same of a tensor that is an attribute and no buffer

Only hooks are used, and they are removed after one pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.tensors import times_written
from paceline.world.generators import generator_states


@dataclass(frozen=True)
class PassFindings:
    """Names of modules and of attributes, in the order in which they were seen.

    Attributes:
        drew: modules that drew random numbers.
        changed_buffers: modules that changed buffers of their own.
        changed_tensors: attributes with tensors that are no buffers and were changed, as "head.center".
    """

    drew: list[str]
    changed_buffers: list[str]
    changed_tensors: list[str]


def watch_first_pass(model: nn.Module, device: torch.device, report: Callable[[PassFindings], None]) -> None:
    """Calls `report` with what was found after the first forward pass in training.

    Args:
        model: as the user wrote it; its root is called once a pass.
        device: where it computes.
    """
    watch = _FirstPass()
    watch.states = partial(generator_states, device)
    watch.report = report
    watch.root = weakref.ref(model)
    watch.handles = [model.register_forward_pre_hook(watch.begin, prepend=True)]


# Of each tensor of a module by its name: which tensor it is, and how often it was written to.
_Versions = dict[str, tuple[Tensor, int]]


def _versions(tensors: Mapping[str, object]) -> _Versions:
    """Returns the version of each tensor among a module's buffers or attributes."""
    versions: _Versions = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            versions[name] = (tensor, times_written(tensor))
    return versions


def _changed(before: _Versions, now: _Versions) -> list[str]:
    """Returns the names of the tensors that are other ones now, or were written to."""
    names = []
    for name, (tensor, times) in before.items():
        tensor_now, times_now = now.get(name, (None, 0))
        if tensor_now is not tensor or times_now != times:
            names.append(name)
    return names


@dataclass
class _EnteredModule:
    """A module that is running.

    Attributes:
        generators: the states of the generators when it last ran code of its own.
        buffers: its own, as they were when it was entered.
        attributes: its tensors that are no buffers, as they were then.
    """

    module: nn.Module
    generators: list[Tensor]
    buffers: _Versions
    attributes: _Versions


class _FirstPass:
    """The hooks of one forward pass of the root. If the model is copied, the copy of this object does nothing."""

    states: Callable[[], list[Tensor]]
    report: Callable[[PassFindings], None]

    def __init__(self) -> None:
        self.root: Callable[[], nn.Module | None] = lambda: None
        self.handles: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self._drew: dict[str, None] = {}
        self._changed_buffers: dict[str, None] = {}
        self._changed_tensors: dict[str, None] = {}
        self._open: list[_EnteredModule] = []

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
            buffers = _versions(module._buffers)
            attributes = _versions(vars(module))
            self._open.append(_EnteredModule(module, self.states(), buffers, attributes))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """A hook after each module; after the root it reports what was found."""
        if not any(entered.module is module for entered in self._open):
            return
        self._look()
        entered = self._open.pop()
        while entered.module is not module:  # an error has left the modules inside open
            entered = self._open.pop()
        self._compare(entered)
        if self._open:
            # The module around it continues: from here on, drawn numbers are its own.
            self._open[-1].generators = self.states()
            return
        self._remove()
        self._names = {}
        self.report(PassFindings(list(self._drew), list(self._changed_buffers), list(self._changed_tensors)))

    def _compare(self, entered: _EnteredModule) -> None:
        """Records what a module has changed since it was entered."""
        module = entered.module
        name = self._names[module]
        if _changed(entered.buffers, _versions(module._buffers)):
            self._changed_buffers[name] = None
        attributes = _versions(vars(module))
        for attribute in _changed(entered.attributes, attributes):
            before, _ = entered.attributes[attribute]
            now, _ = attributes.get(attribute, (None, 0))
            # An average over batches stays what it is. Tensors with a gradient are outputs that are kept to be read, such as
            # the loss of a router, and those of another shape or kind are caches.
            if now is not None and not now.requires_grad and (now.shape, now.dtype) == (before.shape, before.dtype):
                self._changed_tensors[f"{name}.{attribute}".lstrip(".")] = None

    def _look(self) -> None:
        """Records the innermost running module, if the generators have changed since it was entered or continued."""
        if self._open:
            innermost = self._open[-1]
            if not all(map(torch.equal, innermost.generators, self.states())):
                self._drew[self._names[innermost.module]] = None

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
