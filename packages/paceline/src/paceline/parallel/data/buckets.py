"""What a `Reducer` reduces: parameters (`Slot`), those that are sent together (`Bucket`), and how (`ReductionForm`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.divided_parameters import part_of
from paceline.torch_internals.tensors import has_users_gradient_hooks, take_over_gradient_hooks, take_over_hooks
from paceline.world.sharded import is_sharded, local, whole


class Slot:
    """What a reducer knows of one parameter.

    Attributes:
        parameter: the parameter.
        bucket: the bucket of its gradient; None if it is reduced by itself at the end.
        is_sparse: whether its gradient is a list of rows.
        fresh: whether a gradient of this rank was computed since the last reduction.
        taken: whether this rank had a gradient when the bucket was sent.
        result: the mean, once the reduction has ended.
        later: the user's hooks on the accumulated gradient, which are called with the mean.
        earlier: the mean of earlier passes, which is set aside while the user has hooks on the gradient of a pass.
        watch: the handle of the form's hook on the parameter, if it has one.
    """

    __slots__ = (
        "__weakref__",
        "_give_back",
        "_give_gradient_hooks_back",
        "_gradient_hooks",
        "bucket",
        "earlier",
        "fresh",
        "is_sparse",
        "later",
        "parameter",
        "result",
        "taken",
        "watch",
    )

    def __init__(self, parameter: nn.Parameter, is_sparse: bool, came: Callable[[Slot], None]) -> None:
        self.parameter = parameter
        self.is_sparse = is_sparse
        self.bucket: Bucket | None = None
        self.fresh = False
        self.taken = False
        self.result: Tensor | None = None
        self.watch: Any = None
        # Without a reference from the hook to the reducer, both die with the model.
        came_of = weakref.WeakMethod(came)
        slot = weakref.ref(self)

        def hook(_: Tensor) -> None:
            method, own = came_of(), slot()
            if method is not None and own is not None:
                method(own)

        self.later, self._give_back = take_over_hooks(parameter, hook)
        self.earlier: Tensor | None = None
        self._gradient_hooks: dict[int, Callable[..., Any]] = {}
        self._give_gradient_hooks_back: Callable[[], None] | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether the user has hooks that are to be called with the mean."""
        return bool(self.later) or self._give_gradient_hooks_back is not None

    def take_gradient_hooks(self) -> None:
        """Takes over what `register_hook` has got: a function of a part of the samples' gradient is none of the mean."""
        if self._give_gradient_hooks_back is not None or not has_users_gradient_hooks(self.parameter):
            return
        slot = weakref.ref(self)

        def begin(gradient: Tensor) -> None:
            own = slot()
            if own is None:
                return
            own.set_aside()
            if own.watch is not None:
                own._gradient_hooks[own.watch.id](gradient)

        self._gradient_hooks, self._give_gradient_hooks_back = take_over_gradient_hooks(self.parameter, begin)

    def set_aside(self) -> None:
        """Takes the mean of earlier passes out of `.grad`, so that this pass has a gradient of its own."""
        if self._give_gradient_hooks_back is None or self.fresh:
            return
        self.earlier = self.parameter.grad
        self.parameter.grad = None

    def call_gradient_hooks(self) -> None:
        """Lets the user's hooks change the mean of this pass, which is in `.grad`. Ranks: all, which may gather it."""
        if self._give_gradient_hooks_back is None:
            return
        mean = self.parameter.grad
        # A hook on a whole parameter may compute with other whole tensors, such as a mask.
        gradient = mean if is_sharded(self.parameter) else whole(mean)
        own = None if self.watch is None else self.watch.id
        for number, hook in list(self._gradient_hooks.items()):
            changed = None if number == own else hook(gradient)
            gradient = gradient if changed is None else changed
        if gradient is not mean and is_sharded(mean) and not is_sharded(gradient):
            assert gradient is not None
            local(mean).copy_(part_of(gradient, mean))
            gradient = mean
        self.parameter.grad = gradient

    def put_back(self) -> None:
        """Adds the mean of earlier passes again."""
        if self.earlier is None:
            return
        gradient = self.parameter.grad
        self.parameter.grad = self.earlier if gradient is None else self.earlier + gradient
        self.earlier = None

    def release(self) -> None:
        """Gives the user's hooks back to autograd."""
        self._give_back()
        if self._give_gradient_hooks_back is not None:
            self._give_gradient_hooks_back()
        if self.watch is not None:
            self.watch.remove()


class Bucket:
    """Parameters whose gradients are sent together.

    Attributes:
        slots: one large parameter, or several small ones.
        bytes: of all its gradients.
        alone: whether it is one large parameter, whose gradient is sent without a copy.
        missing: how many gradients of the current backward pass have not been computed yet.
        launched: whether it was sent in this window.
        wait: waits for the reduction under way, and returns the result for each slot.
        memory: what the form keeps for the next window.
    """

    def __init__(self, slots: list[Slot], alone: bool) -> None:
        self.slots = slots
        self.alone = alone
        self.bytes = sum(slot.parameter.nbytes for slot in slots)
        self.memory: Any = None
        self.wait: Callable[[], list[Tensor]] | None = None
        self.reset()
        for slot in slots:
            slot.bucket = self

    def reset(self) -> None:
        """Prepares the bucket for the next window."""
        self.missing = len(self.slots)
        self.launched = False


class ReductionForm(Protocol):
    """How a bucket is reduced.

    Attributes:
        group: the ranks whose gradients are averaged.
        cap: small gradients are packed up to this many bytes.
        bounds_memory: whether at most `cap` bytes are being reduced at a time; then a launch may wait.
    """

    group: dist.ProcessGroup
    cap: int
    bounds_memory: bool

    def group_of(self, parameter: Tensor) -> dist.ProcessGroup:
        """Returns the ranks that hold the same part of a parameter: those of `group`, or some of them."""
        ...

    def carries_votes(self, bucket: Bucket) -> bool:
        """Returns whether a bucket can carry the votes of all ranks beside its gradients."""
        ...

    def travels_alone(self, parameter: Tensor) -> bool:
        """Returns whether a gradient is a bucket of its own."""
        ...

    def is_single(self, slot: Slot) -> bool:
        """Returns whether a gradient belongs to no bucket, and is reduced at the end."""
        ...

    def watch(self, slot: Slot) -> Any:
        """Registers a further hook on a parameter, and returns its handle; None without one."""
        ...

    def is_fresh(self, gradient: Tensor | None) -> bool:
        """Returns whether a gradient that was found in `.grad` is one that is not reduced."""
        ...

    def take(self, slot: Slot) -> Tensor | None:
        """Takes this rank's whole gradient out of `.grad`; None if there is none."""
        ...

    def launch(
        self, bucket: Bucket, gradients: list[Tensor], number: int, is_last: bool, votes: Tensor | None = None
    ) -> None:
        """Sends a bucket and sets its `wait`. `gradients` has one for each slot; `votes` become one more result."""
        ...

    def complete(self, slots: list[Slot]) -> None:
        """Finishes the results of slots that are in buckets, after all have arrived; `slots` are the same on all ranks."""
        ...

    def put(self, slot: Slot) -> None:
        """Makes the result of a slot the parameter's `.grad`."""
        ...

    def leave(self, slot: Slot) -> None:
        """Called for a parameter that no rank has used."""
        ...

    def reset(self) -> None:
        """Drops what belongs to the window."""
        ...
