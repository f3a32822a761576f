"""`empty_weights` builds a model without weights; `place` puts one where a placement says, with its own weights or others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paceline.base.errors import PlanError, Problem
from paceline_large.inference.execution import PlacedModel
from paceline_large.inference.memory import missing_devices
from paceline_large.inference.placement import PlacedBlock, Placement
from paceline_large.inference.workload import readable


@contextmanager
def built_on(device: torch.device) -> Iterator[None]:
    """Puts the parameters of models that are built inside it on a device. Buffers stay where the model makes them."""
    thread = threading.get_ident()

    def on_device(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        # torch calls the hook for the modules of all threads, and another thread may build an ordinary model meanwhile.
        if parameter is None or parameter.device == device or threading.get_ident() != thread:
            return parameter
        moved = type(parameter)(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        # Marks that a library has set on the parameter, for example how it is divided or initialized.
        moved.__dict__.update(parameter.__dict__)
        return moved

    hook = register_module_parameter_registration_hook(on_device)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def empty_weights() -> Iterator[None]:
    """Makes models that are built inside it have parameters without values, on the meta device.

    Buffers are real, since files do not contain all of them.
    """
    with built_on(torch.device("meta")):
        yield


class ParameterSlots:
    """Where the parameters of a model are registered: a tied one in several modules.

    Args:
        model: whose parameters will be replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        first_names: dict[int, str] = {}
        self._slots: dict[str, list[tuple[nn.Module, str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            module, _, key = name.rpartition(".")
            self._slots.setdefault(first, []).append((model.get_submodule(module), key))

    def get(self, name: str) -> nn.Parameter:
        """Returns the parameter with this first name."""
        module, key = self._slots[name][0]
        parameter = getattr(module, key)
        assert isinstance(parameter, nn.Parameter), name
        return parameter

    def put(self, name: str, value: Tensor, *, frozen: bool) -> None:
        """Gives the model a new parameter, under all its names.

        Args:
            name: its first name.
            value: the values, which are not copied.
            frozen: whether it never requires a gradient; otherwise it does if the old parameter does.
        """
        requires_grad = not frozen and value.is_floating_point() and self.get(name).requires_grad
        parameter = nn.Parameter(value, requires_grad)
        for module, key in self._slots[name]:
            setattr(module, key, parameter)


def place(model: nn.Module, placement: Placement, weights: Mapping[str, Tensor] | None = None) -> PlacedModel:
    """Places a model that is built already; its parameters may have values, or lie on the meta device.

    Args:
        model: is changed. A model on several devices, or with offloaded weights, no longer requires gradients.
        placement: of this model.
        weights: values on the CPU, by the first name of each parameter; a parameter that it lacks keeps the model's value.
            Values for the disk are not copied, so that memory-mapped tensors, such as those of `safetensors` and
            `numpy.memmap`, stay on the disk. Each value is read once.

    Raises:
        PlanError: `placement-device`, `placement-name`, `placement-values`: with all weights that have no value.
    """
    weights = weights or {}
    slots = ParameterSlots(model)
    check_placement(model, placement)
    problems = []
    for placed in placement.blocks:
        problems += _missing_values(placed, slots, weights)
    if problems:
        raise PlanError.of(problems)

    def values(placed: PlacedBlock) -> dict[str, Tensor]:
        parameters = {}
        for name in placed.block.parameters:
            value = weights[name] if name in weights else slots.get(name).detach()
            parameters[name] = value if placed.home == "disk" else value.to(placed.home)
        return parameters

    return put_blocks(model, placement, slots, values)


def put_blocks(
    model: nn.Module,
    placement: Placement,
    slots: ParameterSlots,
    values: Callable[[PlacedBlock], Mapping[str, Tensor]],
) -> PlacedModel:
    """Gives a model its parameters and buffers, block by block, and the hooks that run it.

    Args:
        model: is changed.
        placement: of this model.
        slots: of this model.
        values: returns the parameters of a block, where they wait, and those of its buffers that do not keep their values.
            It is called when the blocks before have their values: no more than one block is on its way to its device.
    """
    for placed in placement.blocks:
        new = values(placed)
        for name in placed.block.parameters:
            slots.put(name, new[name], frozen=not placement.ordinary)
        # A buffer that several modules share has its first name, and stays one.
        moved: dict[str, Tensor] = {}
        for name, module, key in block_buffers(model, placed):
            if name not in moved:
                moved[name] = new.get(name, getattr(module, key)).to(placed.device)
            setattr(module, key, moved[name])
    return PlacedModel(model, placement)


def check_placement(model: nn.Module, placement: Placement) -> None:
    """Checks that a placement belongs to this model, and that its devices exist.

    Raises:
        PlanError: `placement-device`, `placement-name`.
    """
    homes = [placed.home for placed in placement.blocks]
    problems = missing_devices((*placement.devices, *homes))
    own = {name for name, _ in model.named_parameters()}
    of_placement: set[str] = set()
    for placed in placement.blocks:
        of_placement.update(placed.block.parameters)
    if own != of_placement:
        different = sorted(own ^ of_placement)
        problem = Problem(
            "placement-name",
            f"the placement is one of another {placement.facts.model}.",
            why=f"{len(different)} parameters are only in one of the two, such as {', '.join(different[:4])}",
            fix="plan again, for the model that is loaded",
        )
        problems.append(problem)
    if problems:
        raise PlanError.of(problems)


def block_buffers(model: nn.Module, placed: PlacedBlock) -> list[tuple[str, nn.Module, str]]:
    """Returns the buffers of a block: for each one its first name in the model, its module, and its name there."""
    first_names = {id(buffer): name for name, buffer in model.named_buffers()}
    buffers = []
    for name in placed.block.modules:
        top = model.get_submodule(name)
        # If `own` is true, the modules below `top` are blocks of their own.
        modules = [top] if placed.block.own else top.modules()
        for module in modules:
            for key, buffer in module.named_buffers(recurse=False):
                buffers.append((first_names[id(buffer)], module, key))
    return buffers


def _missing_values(placed: PlacedBlock, slots: ParameterSlots, weights: Mapping[str, Tensor]) -> list[Problem]:
    """Returns the parameters of a block that would have no value where the placement puts them."""
    problems = []
    for name in placed.block.parameters:
        parameter = slots.get(name)
        if name in weights:
            continue
        if parameter.is_meta:
            why = "it lies on the meta device, and the weights do not hold it"
        elif placed.home == "disk" and parameter.device != torch.device("cpu"):
            # `place` writes no files: a block on the disk has to be mapped by the caller, and mapped tensors are on the CPU.
            why = f"it shall wait on the disk, lies on {parameter.device}, and the weights do not hold it"
        else:
            continue
        problem = Problem(
            "placement-values",
            f"{name} ({readable(parameter.nbytes)}) has no value.",
            why=why,
            fix="give its value in weights=, or load the model with paceline_large.inference.load",
        )
        problems.append(problem)
    return problems
