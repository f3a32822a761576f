"""Problems of models that no plan, or no plan of some kind, can prepare; they are found before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.base.errors import Problem
from paceline.plan.facts import ModelFacts


def shared_models(models: Sequence[nn.Module]) -> list[Problem]:
    """Returns the problem with a parameter that two models share, whose gradients or values each of them would divide."""
    owners: dict[nn.Parameter, nn.Module] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            owner = owners.setdefault(parameter, model)
            if owner is model:
                continue
            first = type(owner).__name__
            return [
                Problem(
                    "models-shared",
                    f"{first} and {type(model).__name__} share parameters, which cannot be divided for each of them.",
                    why=f"{name} of {type(model).__name__} is also a parameter of the {first}",
                    fix="put both into one module and prepare that; or use zero=0 or 1, under which parameters and gradients "
                    "are whole",
                )
            ]
    return []


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
