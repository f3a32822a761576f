"""Problems of models that no plan, or no plan of some kind, can prepare; they are found before anything is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import nn

from paceline.base.errors import Problem
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import listed
from paceline.plan.plan import Plan
from paceline.plan.rules import origin
from paceline.world.collectives import Collectives


def shared_models(models: Sequence[nn.Module], remedy: str, *, frozen_too: bool) -> list[Problem]:
    """Returns the problem with a parameter that two models share, whose gradients or values each of them would divide.

    Args:
        models: of the run.
        remedy: what allows them to share it, see `Strategy.keeps_apart`.
        frozen_too: whether frozen parameters count.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            owner = owners.setdefault(parameter, model)
            if owner is model or not (parameter.requires_grad or frozen_too):
                continue
            first = type(owner).__name__
            return [
                Problem(
                    "models-shared",
                    f"{first} and {type(model).__name__} share parameters, which this plan treats once for each model.",
                    why=f"{name} of {type(model).__name__} is also a parameter of the {first}",
                    fix=f"put both into one module and prepare that; or {remedy}",
                )
            ]
    return []


def float8_gathers(model: nn.Module, facts: ModelFacts, plan: Plan) -> list[Problem]:
    """Returns the problem with weights that torchao has wrapped to be gathered in float8, where nobody gathers them.

    FSDP2 asks such a tensor for what it gathers. ZeRO 1 and 2 cut tensors themselves, and would cut the wrapper alone.
    """
    if plan.zero not in (1, 2) or plan.fully_sharded:
        return []
    wrapped = []
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "WeightWithDynamicFloat8CastTensor":
            wrapped.append(name)
    if not wrapped:
        return []
    return [
        Problem(
            "fp8-gather",
            f"weights of {facts.name} are to be gathered in float8, which zero={plan.zero} cannot do.",
            why=f"enable_fsdp_float8_all_gather=True in torchao's config has wrapped {listed(wrapped)}; "
            f"{origin(plan, 'zero')}: these weights are never gathered",
            fix="use zero=3, or leave enable_fsdp_float8_all_gather out of the config",
        )
    ]


def differing_models(models: Sequence[tuple[nn.Module, ModelFacts]], collectives: Collectives) -> list[Problem]:
    """Returns the problem with models that have other parameters on another rank. Ranks: all; each gets the same.

    DDP would end one rank with the number of a parameter. FSDP would put parts of different tensors together, without an error.
    A broadcast of rank 0's values would abort.

    Args:
        models: those that are prepared now, with the facts of each.
        collectives: of all ranks.
    """
    described: list[str] = []
    for model, facts in models:
        # Lazy parameters have no shape, and are refused.
        if facts.lazy:
            continue
        for name, parameter in model.named_parameters():
            use = "trained" if parameter.requires_grad else "frozen"
            dtype = str(parameter.dtype).removeprefix("torch.")
            described.append(
                f"{name} of {type(model).__name__} with the shape {list(parameter.shape)} ({dtype}, {use})"
            )
    digest = hashlib.blake2b("\n".join(described).encode(), digest_size=7).digest()
    if collectives.same(int.from_bytes(digest, "big")):
        return []
    of_ranks = collectives.gather_object(described)
    second = next(rank for rank, other in enumerate(of_ranks) if other != of_ranks[0])
    pairs = zip_longest(of_ranks[0], of_ranks[second], fillvalue="no more parameters")
    first_difference = next(pair for pair in pairs if pair[0] != pair[1])
    return [
        Problem(
            "model-differs",
            f"the models of ranks 0 and {second} have different parameters.",
            why=f"rank 0 has {first_difference[0]}, rank {second} has {first_difference[1]}",
            fix="build the model from the same numbers on all ranks: a size that depends on data, such as that of a "
            "vocabulary, must come from all of the data",
        )
    ]


def misplaced(facts: ModelFacts, is_moved: bool, here: torch.device) -> list[Problem]:
    """Returns the problem with the device of a model in a run of several ranks, each of which has one device.

    Args:
        facts: of the model.
        is_moved: whether it is moved to this rank's device.
        here: the device.
    """
    devices = facts.devices
    if len(devices) > 1:
        what = f"{facts.name} lies on several devices."
        fix = f"move it to one before `prepare`: `model.to({str(here)!r})`"
    elif devices and not is_moved and torch.device(devices[0]) != here:
        what = f"{facts.name} is not on this rank's device."
        fix = "leave `device_placement` out, and it is moved there"
    else:
        return []
    why = f"its tensors are on {', '.join(devices)}; this rank computes on {here}"
    return [Problem("model-device", what, why=why, fix=fix)]


def without_shapes(facts: ModelFacts) -> list[Problem]:
    """Returns the problem with parameters whose shapes are not known yet: ranks can neither share nor divide them."""
    if not facts.lazy:
        return []
    return [
        Problem(
            "model-lazy",
            f"{facts.name} has parameters that have no shape yet.",
            why=f"{', '.join(facts.lazy[:3])}: lazy modules, such as nn.LazyLinear, create them when the first batch passes",
            fix="run one batch through it before `prepare`: `with torch.no_grad(): model(batch)`",
        )
    ]
