"""Finds optimizers whose step computes something over all parameters, such as a norm for clipping, by a trial.

Where each rank steps some of the parameters, ranks would compute different numbers. No attribute of an optimizer tells it. So
copies of the optimizer step a few small parameters, with gradients that are made up. In the second trial, some of them have
other gradients. If this changes how the others are stepped, the optimizer is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PrepareError
from paceline.base.log import warn_once
from paceline.parallel.stand_ins import stand_in
from paceline.torch_internals.optimizers import complete_hooks, global_hooks_left_out
from paceline.world.param_groups import inner_optimizers, is_elementwise, parameters_of
from paceline.world.random_streams import capture, restore

# Factors of the gradients that differ between the trials, for each step. Some optimizers compare a norm with those of earlier
# steps, and in some sums signs count, so the second trial changes both from step to step.
_FACTORS = ((1.0, 1.0, 1.0), (10.0, 100.0, -1000.0))
_LEARNING_RATE = 0.1  # a warm-up may begin with 0, and a small rate changes nothing in bfloat16
_TOLERANCE = 1e-3  # a sum makes a difference of about 1, and of a copy on a GPU rounding may make one
_MOST_ELEMENTS = 1 << 24  # of a parameter that is stepped


def refuse_sums(optimizer: Optimizer, device: torch.device) -> None:
    """Refuses an optimizer that computes something over all parameters, where each rank would step some of them.

    Raises:
        PrepareError: `optimizer-sums`.
    """
    kind = type(optimizer)
    differing = "the step"
    if not isinstance(optimizer, torch.optim.LBFGS):
        # The others of torch, and ours, look at one parameter at a time.
        if is_elementwise(optimizer) or kind.__module__.startswith(("torch.", "paceline")):
            return
        try:
            differing = _differing(optimizer, device)
        except Exception as error:  # a step may need what only a run has, and raise anything
            warn_once(
                "parallel",
                f"{kind.__name__} could not be tried: {error!r}. Under this plan each rank steps some of its parameters. If "
                "its step computes something over all of them, such as a norm, use plan={'replicate': 'auto'}. If it treats "
                "each element by itself, write `elementwise = True` into the class",
            )
            return
    if differing:
        raise PrepareError(
            "optimizer-sums",
            f"{kind.__name__} computes something over all parameters, of which each rank would step some.",
            why=f"in a trial with made-up gradients, {differing} of some parameters changed with the gradients of others",
            fix="use plan={'replicate': 'auto'}, under which every rank steps all parameters; or an optimizer that looks at "
            "one parameter at a time, after `accelerator.clip_grad_norm_` if it is to clip",
        )


def _differing(optimizer: Optimizer, device: torch.device) -> str:
    """Returns what of some parameters changes with the gradients of others; "" if nothing does."""
    trials: list[dict[str, Tensor]] = []
    streams = capture(device)
    for factors in _FACTORS:
        try:
            with global_hooks_left_out():
                trials.append(_tried(optimizer, device, factors))
        finally:
            restore(streams, device)  # both trials draw the same numbers, and so will the run
    first, second = trials
    for name in first | second:
        if name not in first or name not in second or first[name].shape != second[name].shape:
            return name.partition(":")[2]
        difference = (first[name] - second[name]).norm()
        if difference > _TOLERANCE * max(first[name].norm(), second[name].norm()):
            return name.partition(":")[2]
    return ""


def _tried(optimizer: Optimizer, device: torch.device, factors: Sequence[float]) -> dict[str, Tensor]:
    """Steps a copy of an optimizer, and returns what it makes of parameters whose gradients do not have the factors."""
    same, other = _small_parameters(optimizer)
    draws = torch.Generator().manual_seed(0)
    stands: dict[Tensor, nn.Parameter] = {}
    gradients: dict[Tensor, Tensor] = {}
    optimizers = [optimizer, *inner_optimizers(optimizer)]
    for parameter in dict.fromkeys(each for holder in optimizers for each in parameters_of(holder)):
        data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)  # has no memory
        if parameter in same or parameter in other:
            value, gradient = torch.randn((2, *parameter.shape), generator=draws, dtype=torch.float64)
            data = value.to(device, parameter.dtype)
            gradients[parameter] = gradient.to(device, parameter.dtype)
        stands[parameter] = stand_in(parameter, data, None)
    starts: dict[Tensor, Tensor] = {stands[each]: stands[each].detach().clone() for each in same}
    copies = _copies(optimizers, stands, gradients.keys())
    # Some refuse to step without a closure. This one leaves the gradients, which may be clipped already, as they are.
    arguments: dict[str, Any] = {}
    if "closure" in inspect.signature(type(optimizer).step).parameters:
        arguments["closure"] = partial(torch.ones, (), device=device)
    for factor in factors:
        for stepped, gradient in gradients.items():
            stands[stepped].grad = gradient * (factor if stepped in other else 1.0)
        copies[0].step(**arguments)
    numbers: dict[str, object] = {}
    for place, (stand, start) in enumerate(starts.items()):
        numbers[f"{place}:the step"] = stand.detach() - start
        for holder in copies:
            numbers.update({f"{place}:{name!r}": value for name, value in holder.state.get(stand, {}).items()})
    for place, group in enumerate(copies[0].param_groups):
        if not starts.keys().isdisjoint(group["params"]):
            numbers.update({f"group {place}:{name!r}": value for name, value in group.items()})
    vectors: dict[str, Tensor] = {}
    for name, value in numbers.items():
        if type(value) in (Tensor, float, int):
            vectors[name] = torch.as_tensor(value).cpu().to(torch.float64).nan_to_num(0, 0, 0).flatten()
    return vectors


def _small_parameters(optimizer: Optimizer) -> tuple[set[Tensor], set[Tensor]]:
    """Chooses the two smallest parameters of each group and number of dimensions, one for each of the sets."""
    kinds: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in sorted(group["params"], key=Tensor.numel):
            if 0 < parameter.numel() <= _MOST_ELEMENTS and parameter.is_floating_point():
                kinds[number, parameter.dim()].append(parameter)
    same: set[Tensor] = set()
    other: set[Tensor] = set()
    for parameters in kinds.values():
        # Of some kinds there is one only, so the smaller set gets it.
        for parameter in parameters[:2]:
            (same if len(same) <= len(other) else other).add(parameter)
    return same, other


def _copies(optimizers: Sequence[Optimizer], stands: Mapping[Tensor, nn.Parameter], stepped: Set[Tensor]) -> list[Any]:
    """Copies optimizers, with other tensors in the place of parameters, and with the states of those that are stepped."""
    copies: list[Any] = [object.__new__(type(each)) for each in optimizers]
    memo: dict[int, Any] = {id(parameter): stand for parameter, stand in stands.items()}
    memo.update(zip(map(id, optimizers), copies, strict=True))
    for original, new in zip(optimizers, copies, strict=True):
        state = copy.copy(original.state)
        for parameter in stands.keys() - stepped:
            state.pop(parameter, None)
        memo.setdefault(id(original.state), copy.deepcopy(state, memo))  # another one may use it, too
        for name, value in vars(original).items():
            # A method in the place of the class's, such as a scheduler's, would step the original; and so would hooks.
            is_replaced_method = callable(value) and hasattr(type(original), name)
            if isinstance(value, nn.Module):
                memo[id(value)] = value
            if not is_replaced_method and not name.startswith("_optimizer_"):
                vars(new)[name] = copy.deepcopy(value, memo)
    for new in copies:
        complete_hooks(new)
        for group in new.param_groups:
            if group.get("lr") is not None:  # Adafactor may find its own
                group["lr"] = group["lr"] * 0 + _LEARNING_RATE  # a number or a tensor
        if hasattr(new, "train"):  # of an optimizer without a schedule
            new.train()
    return copies
