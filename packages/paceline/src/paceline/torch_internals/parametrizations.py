"""Where torch's tools put other tensors in the place of a parameter: pruning, parametrizations, `weight_norm`, `spectral_norm`.

There is no hook for that, and several tools compute with the parameter before they change the module. So these methods, to
which all of the tools come first, are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn


@cache
def before_replacing(check: Callable[[object], None]) -> None:
    """Calls `check` with each parameter that a tool is about to replace, from now on; None where there is no such parameter."""
    from torch.nn.utils import parametrizations, parametrize, prune
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    _check_first(prune.BasePruningMethod, "apply", check, _named)
    # `global_unstructured` computes one mask for several parameters, and applies it afterwards.
    _check_first(prune.PruningContainer, "compute_mask", check, _first)
    _check_first(SpectralNorm, "apply", check, _named)
    _check_first(WeightNorm, "apply", check, _named)
    _check_first(parametrizations._SpectralNorm, "__init__", check, _first)
    _check_first(parametrize.ParametrizationList, "__init__", check, _second)


def _check_first(owner: type, name: str, check: Callable[[object], None], replaced: Callable[..., object]) -> None:
    """Lets a method begin with `check`; `replaced` returns the parameter for its arguments, without `self` or `cls`."""
    plain = vars(owner)[name]
    is_static = isinstance(plain, staticmethod)
    function: Callable[..., Any] = getattr(plain, "__func__", plain)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        own = args if is_static else args[1:]
        check(replaced(*own, **kwargs))
        return function(*args, **kwargs)

    method: Any = checked
    if isinstance(plain, (staticmethod, classmethod)):
        method = type(plain)(checked)
    setattr(owner, name, method)


def _named(module: nn.Module, name: str, *_: object, **__: object) -> object:
    return module._parameters.get(name)


def _first(parameter: object, *_: object, **__: object) -> object:
    return parameter


def _second(_: object, parameter: object, *__: object, **___: object) -> object:
    return parameter
