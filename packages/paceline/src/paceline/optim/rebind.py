"""Rebinds an optimizer that was constructed before `prepare` to the parameters that the model has after it.

The names of parameters are recorded before strategies are applied, and the new parameters are found by their names
afterwards. So a strategy may replace every parameter, for example by a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError, Problem
from paceline.base.log import warn_once
from paceline.plan.fqn import listed
from paceline.world.param_groups import parameters_of


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

    # By name where there is one: an optimizer may hold the parameters from before a `prepare`, and another one those after it.
    def held(optimizer: Optimizer) -> set[int | tuple[int, str]]:
        return {names.get(id(parameter), id(parameter)) for parameter in parameters_of(optimizer)}

    for first, second in combinations(optimizers, 2):
        shared = held(first) & held(second)
        if not shared:
            continue
        shown = sorted(key[1] for key in shared if isinstance(key, tuple))
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
                "before the second one: `accelerator.clear()`, then `prepare` the model, the new optimizer and the loader",
            )
        )
    return problems


def rebind(
    optimizer: Optimizer,
    before: Mapping[int, tuple[int, str]],
    after: list[nn.Module],
    tied: Sequence[Sequence[Sequence[str]]] | None = None,
    sharing: Sequence[Optimizer] = (),
) -> None:
    """Replaces the parameters with which the optimizer was constructed by the prepared ones.

    Args:
        optimizer: changed in place.
        before: the names of the old parameters, see `parameter_names`.
        after: the same models, unwrapped, in the same order, after strategies were applied.
        tied: for each model its groups of tied names, if this rank holds only a part of the models (a stage of a pipeline).
            Parameters of other stages are removed from the optimizer.
        sharing: optimizers inside of it that have the same groups, and states of their own.

    Raises:
        PrepareError: `optimizer-parameters` where it holds parameters of no prepared model.
    """
    current = [dict(model.named_parameters()) for model in after]
    held: list[Tensor] = []
    foreign = 0
    # First, so that the loop below does not take parameters of other stages for foreign ones.
    if tied is not None:
        from paceline.optim.other_stages import without_other_stages  # few plans have stages

        before = without_other_stages(optimizer, before, current, tied, sharing)
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            key = before.get(id(old))
            if key is None:
                foreign += 1
                continue
            number, name = key
            new = current[number][name]
            held.append(new)
            if new is not old:
                group["params"][place] = new
                for holder in (optimizer, *sharing):
                    if old in holder.state:
                        holder.state[new] = _carried(holder.state.pop(old), group, new)
    # On one stage of a pipeline an optimizer may have no parameters: all that it holds are on other stages.
    if held or tied is None:
        _check(optimizer, held, foreign)


def _check(optimizer: Optimizer, held: Sequence[Tensor], foreign: int) -> None:
    kind = type(optimizer).__name__
    if foreign:
        fix = (
            "pass the model of these parameters to `prepare`, in the same call or before; parameters that are in no model "
            "are passed themselves: `prepare(optimizer, log_alpha)`"
        )
        if held:  # a part of the model was replaced, or one of several models is missing
            fix = (
                "pass all its models to `prepare`, and parameters that are in no model: `prepare(model, optimizer, log_alpha)`"
                "; if a layer was replaced after it was constructed, construct it after that"
            )
        raise PrepareError(
            "optimizer-parameters",
            f"of the {foreign + len(held)} parameters of {kind}, {foreign} belong to no prepared model.",
            why="an optimizer steps the parameters with which it was constructed; these would never get a gradient",
            fix=fix,
        )
    if not any(parameter.requires_grad for parameter in held):
        warn_once(
            "optim",
            f"{kind} has nothing to train yet: requires_grad is False for each of its {len(held)} parameters. It trains those "
            "that are unfrozen later.",
        )


def _carried(state: dict[str, Any], group: Mapping[str, Any], new: Tensor) -> dict[str, Any]:
    """Returns the state of a parameter that `new` has replaced. It is that of the whole parameter, where `new` is divided."""
    if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
        # Of those that create states in their constructor, which has had no values yet, only Adagrad's are not zero.
        return {**state, "sum": torch.full_like(new.detach(), group["initial_accumulator_value"])}
    return state
