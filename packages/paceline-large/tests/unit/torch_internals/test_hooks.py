"""What we rely on of the hooks on modules, and of the modes that see operations."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline_large.torch_internals import hooks


def test_hooks_are_known_by_their_kind_in_their_order() -> None:
    module = nn.Linear(2, 2)
    assert not any(hooks.module_hooks(module).values())
    module.register_forward_hook(first := lambda *_: None)
    module.register_forward_hook(second := lambda *_: None)
    module.register_forward_pre_hook(before := lambda *_: None)
    module.register_full_backward_hook(after := lambda *_: None)
    module.register_full_backward_pre_hook(earlier := lambda *_: None)
    found = {kind: list(each) for kind, each in hooks.module_hooks(module).items()}
    assert found == {
        hooks.FORWARD_PRE: [before],
        hooks.FORWARD: [first, second],
        hooks.BACKWARD_PRE: [earlier],
        hooks.BACKWARD: [after],
    }


def test_operations_know_whether_a_mode_sees_them() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert not hooks.is_seen_by_a_mode()  # inside of it, the mode is off
            return func(*args, **(kwargs or {}))

    assert not hooks.is_seen_by_a_mode()
    with Mode():
        assert hooks.is_seen_by_a_mode()
        torch.ones(2).add_(1)
