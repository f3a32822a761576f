"""The hooks on modules by their kind, those on gradients that wait, and the modes that see operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.torch_internals.tensors import OneHook, take_over_hooks

FORWARD_PRE, FORWARD, BACKWARD_PRE, BACKWARD = (
    "forward pre-hook",
    "forward hook",
    "full backward pre-hook",
    "full backward hook",
)


def module_hooks(module: nn.Module) -> dict[str, Collection[Callable[..., Any]]]:
    """The hooks on a module itself by their kind, in order; torch offers no public list of them."""
    return {
        FORWARD_PRE: module._forward_pre_hooks.values(),
        FORWARD: module._forward_hooks.values(),
        BACKWARD_PRE: module._backward_pre_hooks.values(),
        BACKWARD: module._backward_hooks.values(),
    }


def is_seen_by_a_mode() -> bool:
    """Whether some `TorchDispatchMode` sees the operations that run, such as that of selective recomputation."""
    return _get_current_dispatch_mode() is not None


def is_transformed() -> bool:
    """Whether the code runs inside of a transform of `torch.func`, such as `vmap`, or carries forward derivatives."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def put_hooks_by(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Keeps autograd from calling what `register_post_accumulate_grad_hook` has got, for several backward passes.

    Tensors whose hooks were taken over already are left out.

    Returns:
        A function that gives the hooks back and calls those of tensors that got a gradient, once each.
    """
    reached: set[Tensor] = set()
    put_by: list[tuple[Tensor, dict[int, Callable[[Tensor], None]], Callable[[], None]]] = []
    for tensor in tensors:
        hooks = tensor._post_accumulate_grad_hooks
        if hooks and not isinstance(hooks, OneHook):
            put_by.append((tensor, *take_over_hooks(tensor, reached.add)))

    def give_back() -> None:
        for tensor, hooks, end in put_by:
            end()
            if tensor in reached:
                for hook in list(hooks.values()):
                    hook(tensor)
        put_by.clear()

    return give_back
