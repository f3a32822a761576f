"""`GradientHooks`: calls what `register_hook` has got for a parameter with the mean gradient of a pass.

Autograd would call it with the gradient of this rank's samples, or of a part of them: a clamp of that is none of the mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.parallel.divided_parameters import part_of
from paceline.torch_internals.dispatch import accumulates
from paceline.torch_internals.tensors import is_users_hook, take_over_gradient_hooks
from paceline.world.sharded import is_sharded, local, whole
from paceline.world.written_numbers import note_written

if TYPE_CHECKING:
    from torch import nn


class GradientHooks:
    """The hooks of one parameter, which are put by until `call`.

    Args:
        parameter: with hooks of the script's.
        came: called in a backward pass when a gradient has come; `set_aside`, if None.
    """

    def __init__(self, parameter: nn.Parameter, came: Callable[[], None] | None = None) -> None:
        self._parameter = parameter
        self._earlier: Tensor | None = None
        self.is_open = False  # from the first gradient of a pass on, until `put_back`
        # Without a reference from the hook, which the parameter holds, all die with the model.
        came_of = weakref.WeakMethod(came or self.set_aside)
        own = weakref.ref(self)

        def begin(gradient: Tensor) -> Tensor:
            hooks, method = own(), came_of()
            if hooks is None or method is None:
                return gradient
            waits = accumulates(hooks._parameter)
            if waits:
                method()
            for hook in list(hooks._hooks.values()):
                changed = None if waits and is_users_hook(hook) else hook(gradient)
                gradient = gradient if changed is None else changed
            return gradient

        vars(begin)["__torch_unserializable__"] = True
        self._hooks: dict[int, Callable[..., Any]]
        self._hooks, self.release = take_over_gradient_hooks(parameter, begin)

    def set_aside(self) -> None:
        """Takes the gradient of earlier passes out of `.grad`, so that this pass has a gradient of its own."""
        if self.is_open:
            return
        self.is_open = True
        self._earlier = self._parameter.grad
        self._parameter.grad = None

    def call(self) -> None:
        """Lets the hooks change the gradient of this pass, which is in `.grad`. Ranks: all, since a hook may gather it."""
        mean = self._parameter.grad
        if mean is None:
            return
        # A hook on a whole parameter may compute with other whole tensors, such as a mask.
        gradient = mean if is_sharded(self._parameter) else whole(mean)
        for hook in filter(is_users_hook, list(self._hooks.values())):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if gradient is not mean and is_sharded(mean) and not is_sharded(gradient):
            note_written(gradient)
            local(mean).copy_(part_of(gradient, mean))
            gradient = mean
        self._parameter.grad = gradient

    def put_back(self) -> None:
        """Adds the gradient of earlier passes again."""
        self.is_open = False
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            gradient = self._parameter.grad
            self._parameter.grad = earlier if gradient is None else earlier + gradient
