"""Tells of hooks between divided layers: what they see is this rank's share of the features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.base.log import warn_once
from paceline.torch_internals.modules import forward_hooks
from paceline_large.tensor.styles import Region


class InnerHooks:
    """Looks for forward hooks of a script on the modules inside of one attention or MLP.

    A hook may keep an output for a penalty, or for features. Between divided layers it has a part of the numbers of one
    process, and nothing shows it.

    Args:
        name: FQN of the attention or MLP.
        module: it.
        last: FQN of its rowwise layer, whose output is whole.
        region: says whether what lies between the layers is divided.
    """

    def __init__(self, name: str, module: nn.Module, last: str, region: Region) -> None:
        self._region = region
        self._last = last
        self._inner: dict[str, nn.Module] = {}
        for inner_name, inner in module.named_modules(prefix=name):
            if inner is not module and inner_name != last:
                self._inner[inner_name] = inner

    def look(self) -> None:
        """Called in each forward pass; warns once for each module that has hooks."""
        if torch.compiler.is_compiling() or not self._region.split:
            return
        for name, inner in self._inner.items():
            if _has_users(forward_hooks(inner)):
                warn_once(
                    "parallel",
                    f"a forward hook of {name} sees this process's share of the features, because `tp` divides the layers "
                    "around it: a loss that is computed from them is not that of one process. Take the output of "
                    f"{self._last}, which is whole, or that of a module around it.",
                )


def _has_users(hooks: Iterable[Callable[..., Any]]) -> bool:
    """Returns whether a script has registered some of the hooks, and not torch or Paceline."""
    for hook in hooks:
        module = getattr(hook, "__module__", "")
        if module.partition(".")[0] not in ("torch", "paceline", "paceline_large", "paceline_lens"):
            return True
    return False
