"""Binds an optimizer that was built before `prepare` to the parameters that the model holds after it.

Names are taken before the chain runs, parameters are looked up by name after it: so a strategy may replace every
parameter (by a shard, say) and no optimizer needs to know.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError, Problem
from paceline.plan.fqn import listed
from paceline.plan.plan import Decision
from paceline.torch_internals.dispatch import is_plain
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def parameter_names(models: Iterable[nn.Module]) -> dict[int, tuple[int, str]]:
    """id(parameter) -> (number of its model, name); a shared parameter goes by its first name."""
    names: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), (number, name))
    return names


def shared_parameters(optimizers: Sequence[Optimizer], names: Mapping[int, tuple[int, str]]) -> list[Problem]:
    """A problem for each pair of optimizers that hold the same parameters.

    Args:
        optimizers: those that are prepared together, and those that were before.
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
                why="each would correct and unscale their gradients for itself, so they would be scaled twice, and a "
                "plan that divides states would keep them twice",
                fix="give each parameter to one optimizer (one may hold several parameter groups), or end with the "
                "first before the second is prepared: `accelerator.clear()`",
            )
        )
    return problems


def rebind(
    optimizer: Optimizer,
    before: Mapping[int, tuple[int, str]],
    after: list[nn.Module],
    tied: Sequence[Sequence[Sequence[str]]] | None = None,
) -> dict[Tensor, str]:
    """Puts the prepared parameters in the place of those that the optimizer was built with.

    Args:
        optimizer: changed in place.
        before: names from before the chain, see `parameter_names`.
        after: the same models, unwrapped, in the same order, after the chain.
        tied: where this rank holds a part of the models (a stage of a pipeline): for each model its groups of tied names.
            Parameters that are not here leave the optimizer.

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
            names[new] = name if len(after) == 1 else f"{number}.{name}"
            if new is not old:
                replaced += 1
                group["params"][place] = new
                _carry(optimizer, group, old, new)
    if names or tied is None:
        _check(optimizer, names, replaced, foreign)
    return names


def _without_other_stages(
    optimizer: Optimizer,
    before: Mapping[int, tuple[int, str]],
    current: Sequence[Mapping[str, Tensor]],
    tied: Sequence[Sequence[Sequence[str]]],
) -> dict[int, tuple[int, str]]:
    """Takes parameters that this rank does not hold out of the optimizer; a tied one goes by a name that is here."""
    here: dict[int, tuple[int, str]] = {}
    for key, (number, name) in before.items():
        names = next((group for group in tied[number] if name in group), [name])
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
        raise PrepareError(
            "optimizer-parameters",
            f"{kind} holds {foreign} parameter{'s' if foreign > 1 else ''} of no model that was prepared.",
            why="an optimizer steps the parameters that it was built with; these would never get a gradient of this run",
            fix="pass the model whose parameters it was built with to `prepare`, in the same call or before",
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
    """A problem for each optimizer that holds states of parameters (ids) which the plan will replace."""
    problems = []
    for optimizer in optimizers:
        count = sum(id(parameter) in replaced for parameter in parameters_of(optimizer))
        if count and not _untouched(optimizer):
            problems.append(_started(optimizer, count))
    return problems


def _untouched(optimizer: Optimizer) -> bool:
    """Whether it has not stepped yet; Adagrad makes its states when it is built."""
    if type(optimizer) is not torch.optim.Adagrad:
        return not optimizer.state
    return all(float(state["step"]) == 0 for state in optimizer.state.values())


def _carry(optimizer: Optimizer, group: Mapping[str, Any], old: Tensor, new: Tensor) -> None:
    """Makes Adagrad's first state anew for the parameter that took the place of `old`."""
    if old in optimizer.state and _untouched(optimizer):
        first = torch.full_like(new.detach(), group["initial_accumulator_value"])
        optimizer.state[new] = {**optimizer.state.pop(old), "sum": first}


def _started(optimizer: Optimizer, replaced: int) -> Problem:
    return Problem(
        "optimizer-started",
        f"{type(optimizer).__name__} already holds states, but the plan replaces the parameters that they belong to.",
        why=f"{replaced} parameters are replaced by this rank's part of them",
        fix="build the optimizer anew before `prepare`, or load its states with `load_state` afterwards",
    )


def choose_fused(optimizer: Optimizer, sparse: bool) -> Decision | None:
    """Lets Adam, AdamW, SGD and Adagrad step in one fused kernel on the CPU, where torch's own choice is a slow loop.

    Only where the user left the choice open. On accelerators torch chooses well by itself. Of DTensors these four step
    the local parts, so a kernel never sees tensors that are divided in different ways.
    """
    name = type(optimizer).__name__
    if type(optimizer).__module__.split(".")[0] != "torch" or name not in _FUSED or sparse:
        return None
    for group in optimizer.param_groups:
        is_open = group.get("fused", False) is None and group.get("foreach") is None
        if not is_open or group.get("differentiable") or isinstance(group["lr"], Tensor):
            return None
    for parameter in parameters_of(optimizer):
        is_known = is_plain(parameter) or is_sharded(parameter)
        if not is_known or not parameter.is_floating_point() or parameter.device.type != "cpu":
            return None
    if optimizer.state:
        return None
    for group in optimizer.param_groups:
        group["fused"] = True
    if name == "SGD":
        optimizer.register_step_pre_hook(_plain_where_one_begins_late)
    reason = "on the CPU one kernel is faster than torch's loop"
    return Decision(f"optimizer.{name}.fused", True, "derived", reason=reason)


def _plain_where_one_begins_late(optimizer: Optimizer, *_: object) -> None:
    """torch's fused SGD refuses a parameter without momentum beside others with one: its first gradient came later."""
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            states = [optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None]
            if len({state.get("momentum_buffer") is None for state in states}) > 1:
                group["fused"] = False
