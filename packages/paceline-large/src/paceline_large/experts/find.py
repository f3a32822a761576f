"""Finds the experts of a Mixture of Experts by their structure.

stacked    one module has weights [experts, ...], at least one of three dimensions, and a forward of tokens, the experts that
           the router has chosen for each token, and their weights: so are all of transformers
list       a `ModuleList` of modules that are alike. The module around it calls them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from paceline.plan.experts import Experts

if TYPE_CHECKING:
    import torch

_CHOICES = ("ind", "idx", "expert", "top_k")
_WEIGHTS = ("weight", "score", "prob")


def find_experts(model: torch.nn.Module, patterns: Sequence[str] = ()) -> tuple[Experts, ...]:
    """Returns the experts of a model, in the order of its modules.

    Args:
        model: whose modules are looked at.
        patterns: of names. Only experts that one of them matches are returned. A pattern that matches none of those whose
            structure or name says that they are experts declares lists of modules. Empty for all that say so.
    """
    rows = []
    for name, module in model.named_modules():
        found = _stacked(name, module) or _listed(name, module, model)
        if found is not None:
            rows.append(found)
    named = [row.name for row in rows if row.says_so]
    declared = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in named)]
    experts = []
    for found in rows:
        matching = (patterns or ["*"]) if found.says_so else declared
        if not any(fnmatchcase(found.name, pattern) for pattern in matching):
            continue
        module = model.get_submodule(found.name)
        around = model.get_submodule(found.name.rpartition(".")[0])
        problem = found.problem or _foreign_code(model, module, found)
        experts.append(replace(found, problem=problem, capacity=_capacity(around) or _capacity(module)))
    return tuple(experts)


def _stacked(name: str, module: torch.nn.Module) -> Experts | None:
    """Returns the row of a module whose own weights are stacked; None for any other."""
    own = {key: parameter for key, parameter in module.named_parameters(recurse=False) if hasattr(parameter, "shape")}
    deep = [parameter for parameter in own.values() if parameter.dim() == 3]
    says_so = "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    if not deep or not (says_so or _takes_choices(module)):
        return None
    number = int(deep[0].shape[0])
    if number < 2:
        return None
    problem = ""
    if not _takes_choices(module):
        problem = "its forward does not take tokens, the experts chosen for each of them, and their weights"
    elif any(parameter.dim() == 0 or parameter.shape[0] != number for parameter in own.values()):
        problem = "some of its weights are not stacked along the experts"
    elif any(buffer.dim() and buffer.shape[0] == number for buffer in module.buffers()):
        problem = "it has a buffer with a row for each expert, which its forward reads by the number of the expert"
    elif any(True for child in module.children() for _ in child.parameters()):
        problem = "modules inside of it have weights of their own"
    return Experts(name, number, tuple(own), problem=problem)


def _takes_choices(module: torch.nn.Module) -> bool:
    """Returns whether the forward takes tokens, the chosen experts and their weights, by the names of its arguments."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, argument in signature(module.forward).parameters.items() if argument.kind in kinds]
    if len(names) < 3:
        return False
    choices = any(word in names[1].lower() for word in _CHOICES)
    return choices and any(word in names[2].lower() for word in _WEIGHTS)


def _listed(name: str, module: torch.nn.Module, model: torch.nn.Module) -> Experts | None:
    """Returns the row of a list of experts; None for any other module."""
    children = dict(module.named_children())
    classes = {base.__name__ for base in type(module).__mro__}
    kinds = {type(child) for child in children.values()}
    if not classes & {"ModuleList", "ModuleDict"} or len(children) < 2 or len(kinds) != 1:
        return None
    says_so = "expert" in f"{name.rpartition('.')[2]} {kinds.pop().__name__}".lower()
    first, *others = ([(key, weight.shape) for key, weight in _weights(child)] for child in children.values())
    if not first or any(shapes != first for shapes in others):
        return None
    caller = _caller(name, model)
    inner = name[len(caller) :].lstrip(".")
    parameters = tuple(key for key, _ in _weights(module))
    modules = tuple(f"{inner}.{child}".lstrip(".") for child in children)
    return Experts(name, len(children), parameters, modules, caller, _problem_of_list(module), says_so=says_so)


def _weights(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_parameters(remove_duplicate=False))


def _problem_of_list(module: torch.nn.Module) -> str:
    """Returns why the experts of a list cannot be divided over ranks; "" where they can."""
    weights = [weight for _, weight in _weights(module)]
    if len(set(map(id, weights))) < len(weights):
        return "some of them share weights"
    if any(weight.dim() == 0 for weight in weights):
        return "they have weights without dimensions, which have no rows"
    if len({weight.dtype for weight in weights}) > 1:
        return "they have weights in several dtypes"
    if any(True for _ in module.buffers()):
        return "they have buffers, which would change on one rank alone"
    return ""


def _caller(name: str, model: torch.nn.Module) -> str:
    """Returns the name of the innermost module around a list, or of the list itself, that has a forward."""
    while name and getattr(type(model.get_submodule(name)).forward, "__name__", "") == "_forward_unimplemented":
        name = name.rpartition(".")[0]
    return name


def _foreign_code(model: torch.nn.Module, module: torch.nn.Module, experts: Experts) -> str:
    """Returns why a module cannot be divided because another one shares its weights; "" where none does."""
    inside = {id(parameter) for parameter in module.parameters()}
    for other_name, other in model.named_modules():
        if other is module or other_name.startswith(f"{experts.name}."):
            continue
        if any(id(parameter) in inside for parameter in other.parameters(recurse=False)):
            return f"{other_name or 'the model itself'} shares its weights"
    return ""


def _capacity(module: torch.nn.Module) -> str:
    """Returns the attribute by which a layer, or its router, limits the tokens of an expert; "" without one."""
    for part in (module, *module.children()):
        for name, value in vars(part).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "capacity" in name.lower() and is_number and value > 0:
                return f"{type(part).__name__}.{name}={value}"
    return ""
