"""Problems of models that no plan, or no plan of some kind, can prepare; they are found before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.base.errors import Problem
from paceline.plan.facts import ModelFacts


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
