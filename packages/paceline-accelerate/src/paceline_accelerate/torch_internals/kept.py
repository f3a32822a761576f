"""What torch's own objects were told, and do not say in public."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.torch_internals.modules import ORIGINAL


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers of a module itself that its state dict leaves out; `register_buffer` alone is told of it."""
    return set(module._non_persistent_buffers_set)


def times_stepped(scheduler: LRScheduler) -> int:
    """How often a scheduler was stepped, its first step counted, which it takes when it is made.

    The public `last_epoch` may be set by the caller of `step`.
    """
    return scheduler._step_count


def wrapped_classes(policy: Any) -> Iterable[type[nn.Module]] | None:
    """Returns the classes of a `ModuleWrapPolicy` of the first FSDP; None of any other policy."""
    return getattr(policy, "_module_classes", None)


def with_compiled_original(compiled: nn.Module, original: nn.Module) -> nn.Module:
    """Returns a copy of a wrapper of `torch.compile` around another module; the wrapper itself stays as it is."""
    wrapper = copy.copy(compiled)
    # The dictionary is written, because the wrapper passes attributes that are set on it to the module inside.
    vars(wrapper)["_modules"] = {**compiled._modules, ORIGINAL: original}
    return wrapper
