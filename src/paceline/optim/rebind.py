"""Rebinds an optimizer that was constructed before `prepare` to the parameters that the model has after it.

The names of parameters are recorded before strategies are applied, and the new parameters are found by their names
afterwards. So a strategy may replace every parameter, for example by a shard.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError, Problem
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.plan.fqn import listed
from paceline.plan.plan import Decision
from paceline.torch_internals.dispatch import is_plain
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import any_sharded, is_sharded, local

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def parameter_names(models: Iterable[nn.Module]) -> dict[int, tuple[int, str]]:
    """Returns the number of the model and the name of each parameter, by the parameter's id; of several names the first."""
    names: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), (number, name))
    return names


def shared_parameters(optimizers: Sequence[Optimizer], names: Mapping[int, tuple[int, str]]) -> list[Problem]:
    """Returns a problem for each pair of optimizers that hold the same parameters.

    Args:
        optimizers: the optimizers of one `prepare`, and those that were prepared before.
        names: see `parameter_names`.
    """
    problems: list[Problem] = []
    for first, second in combinations(optimizers, 2):
        shared = set(map(id, parameters_of(first))) & set(map(id, parameters_of(second)))
        if not shared:
            continue
        shown = sorted(names[key][1] for key in shared if key in names)
        names_in_words = "."
        if shown:
            names_in_words = f": {listed(shown)}."
        problems.append(
            Problem(
                "optimizer-shared",
                f"{type(first).__name__} and {type(second).__name__} hold the same {len(shared)} "
                f"parameter{'s' if len(shared) > 1 else ''}{names_in_words}",
                why="each of them corrects and unscales gradients, so these would be scaled twice; and a plan that divides "
                "states would keep them twice",
                fix="give each parameter to one optimizer (which may have several parameter groups), or forget the first one "
                "before the second one is prepared: `accelerator.clear()`",
            )
        )
    return problems


def rebind(
    optimizer: Optimizer,
    before: Mapping[int, tuple[int, str]],
    after: list[nn.Module],
    tied: Sequence[Sequence[Sequence[str]]] | None = None,
) -> dict[Tensor, str]:
    """Replaces the parameters with which the optimizer was constructed by the prepared ones.

    Args:
        optimizer: changed in place.
        before: the names of the old parameters, see `parameter_names`.
        after: the same models, unwrapped, in the same order, after strategies were applied.
        tied: for each model its groups of tied names, if this rank holds only a part of the models (a stage of a pipeline).
            Parameters of other stages are removed from the optimizer.

    Returns:
        The name of each of its parameters: "number.name" where there are several models, else the name.

    Raises:
        PrepareError: `optimizer-parameters` where it holds parameters of no prepared model, `optimizer-frozen` where none
            of them is trained, `optimizer-started` where parameters were replaced but it holds states of the old ones.
    """
    current = [dict(model.named_parameters()) for model in after]
    names: dict[Tensor, str] = {}
    replaced = 0
    foreign = 0
    # First, so that the loop below does not take parameters of other stages for foreign ones.
    if tied is not None:
        before = _without_other_stages(optimizer, before, current, tied)
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            key = before.get(id(old))
            if key is None:
                foreign += 1
                continue
            number, name = key
            new = current[number][name]
            names[new] = name
            if len(after) > 1:
                names[new] = f"{number}.{name}"
            if new is not old:
                replaced += 1
                group["params"][place] = new
                _carry(optimizer, group, old, new)
    # On one stage of a pipeline an optimizer may have no parameters: all that it holds are on other stages.
    if names or tied is None:
        _check(optimizer, names, replaced, foreign)
    return names


def _without_other_stages(
    optimizer: Optimizer,
    before: Mapping[int, tuple[int, str]],
    current: Sequence[Mapping[str, Tensor]],
    tied: Sequence[Sequence[Sequence[str]]],
) -> dict[int, tuple[int, str]]:
    """Removes the parameters of other stages from the optimizer.

    Returns:
        The names of the other parameters. A tied parameter has a name under which this rank holds it.
    """
    here: dict[int, tuple[int, str]] = {}
    for key, (number, name) in before.items():
        names: Sequence[str] = [name]
        for group_of_names in tied[number]:
            if name in group_of_names:
                names = group_of_names
                break
        names_here = [alias for alias in names if alias in current[number]]
        if names_here:
            here[key] = (number, names_here[0])
    elsewhere = before.keys() - here.keys()
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in elsewhere]
    return here


def _check(optimizer: Optimizer, names: Mapping[Tensor, str], replaced: int, foreign: int) -> None:
    kind = type(optimizer).__name__
    if foreign:
        fix = "pass the model of these parameters to `prepare`, in the same call or before"
        if names:  # a part of the model was replaced, or one of several models is missing
            fix = "pass all its models to `prepare`; if a layer was replaced after it was constructed, construct it after that"
        raise PrepareError(
            "optimizer-parameters",
            f"of the {foreign + len(names)} parameters of {kind}, {foreign} belong to no prepared model.",
            why="an optimizer steps the parameters with which it was constructed; these would never get a gradient",
            fix=fix,
        )
    if not any(parameter.requires_grad for parameter in names):
        raise PrepareError(
            "optimizer-frozen",
            f"{kind} has nothing to train: none of its {len(names)} parameters requires a gradient.",
            why="requires_grad is False for each of them",
            fix="unfreeze the layers that should learn before `prepare`",
        )
    if replaced and not _untouched(optimizer):
        raise PrepareError.of([_started(optimizer, replaced)])


def started_optimizers(optimizers: Iterable[Optimizer], replaced: Container[int]) -> list[Problem]:
    """Returns a problem for each optimizer with states of parameters (given by their ids) that the plan will replace."""
    problems = []
    for optimizer in optimizers:
        count = sum(id(parameter) in replaced for parameter in parameters_of(optimizer))
        if count and not _untouched(optimizer):
            problems.append(_started(optimizer, count))
    return problems


def _untouched(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer has not stepped yet. Adagrad creates its states in its constructor."""
    if type(optimizer) is not torch.optim.Adagrad:
        return not optimizer.state
    return all(float(state["step"]) == 0 for state in optimizer.state.values())


def _carry(optimizer: Optimizer, group: Mapping[str, Any], old: Tensor, new: Tensor) -> None:
    """Creates Adagrad's initial state for the parameter that has replaced `old`."""
    if old in optimizer.state and _untouched(optimizer):
        first = torch.full_like(new.detach(), group["initial_accumulator_value"])
        optimizer.state[new] = {**optimizer.state.pop(old), "sum": first}


def _started(optimizer: Optimizer, replaced: int) -> Problem:
    return Problem(
        "optimizer-started",
        f"{type(optimizer).__name__} already has states, but the plan replaces the parameters to which they belong.",
        why=f"{replaced} parameters are replaced by this rank's part of them",
        fix="construct a new optimizer before `prepare`, or load its states with `load_state` afterwards",
    )


def choose_fused(optimizer: Optimizer, sparse: bool) -> Decision | None:
    """Makes Adam, AdamW, SGD and Adagrad use a fused kernel on the CPU, where torch's own choice is a slow loop.

    It does so only if the user has not chosen. On accelerators torch's own choice is kept. These four optimizers step the
    local tensors of DTensors, so a kernel never gets tensors that are sharded in different ways.
    An optimizer of parameters that are not contiguous is not fused, see `suit_fused`.
    """
    name = type(optimizer).__name__
    if type(optimizer).__module__.split(".")[0] != "torch" or name not in _FUSED or sparse:
        return None
    for group in optimizer.param_groups:
        # None is torch's default: the user has chosen nothing. An optimizer that lacks the option cannot be fused.
        is_open = group.get("fused", False) is None and group.get("foreach") is None
        if not is_open or group.get("differentiable") or isinstance(group["lr"], Tensor):
            return None
    for parameter in parameters_of(optimizer):
        is_known = is_plain(parameter) or is_sharded(parameter)
        if not is_known or not parameter.is_floating_point() or parameter.device.type != "cpu":
            return None
        if not local(parameter.detach()).is_contiguous():
            return None
    if optimizer.state:
        return None
    for group in optimizer.param_groups:
        group["fused"] = True
    reason = "on the CPU one kernel is faster than torch's loop"
    return Decision(f"optimizer.{name}.fused", True, "derived", reason=reason)


def suit_fused(adapter: OptimizerAdapter) -> None:
    """Turns `fused` off before a step that torch's fused kernels cannot take, or would take in a wrong way."""
    # Only torch's optimizers have the option. A checkpoint that is loaded later may turn it on.
    if any("fused" in group for group in adapter.optimizer.param_groups):
        adapter.choose_kernels(_plain_where_strided)
        adapter.choose_kernels(_plain_where_one_begins_late)


def _plain_where_strided(optimizer: Optimizer) -> None:
    """Turns `fused` off on the CPU for groups whose parameters and gradients are not all contiguous.

    torch's fused kernels for the CPU run through the memory of parameter, gradient and states as if all had one layout without
    gaps. Where that is not so, they change other elements without an error (torch 2.13). The rows that a rank steps of a
    transposed parameter have gaps, and a gradient that is reduced or assigned by a script may have another layout than its
    parameter. On accelerators torch raises an error itself.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        # Asked of all tensors in each step. So nothing is computed, and the device, which differs seldom, is asked last.
        tensors: list[Tensor] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                tensors += (parameter, parameter.grad)
        if any_sharded(tensors):
            tensors = [local(tensor) for tensor in tensors]
        if not all(tensor.is_contiguous() or tensor.device.type != "cpu" for tensor in tensors):
            group["fused"] = False


def _plain_where_one_begins_late(optimizer: Optimizer) -> None:
    """Called before a step of fused SGD with momentum: turns `fused` off if only some parameters have a momentum buffer.

    That happens if a parameter gets its first gradient in a later step. torch's fused SGD refuses it.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") and group.get("momentum")):
            continue
        lacks_buffer: set[bool] = set()
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = optimizer.state.get(parameter, {})
                lacks_buffer.add(state.get("momentum_buffer") is None)
        if len(lacks_buffer) > 1:
            group["fused"] = False
