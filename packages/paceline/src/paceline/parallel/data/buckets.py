"""What a `Reducer` reduces: parameters (`Slot`), those that are sent together (`Bucket`), and how (`ReductionForm`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.parallel.gradient_hooks import GradientHooks
from paceline.torch_internals.tensors import has_users_gradient_hooks, take_over_hooks


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
        hooks: the user's hooks on the gradient of a pass, which are called with its mean; None without any.
        watch: the handle of the form's hook on the parameter, if it has one.
    """

    __slots__ = (
        "__weakref__", "_give_back", "bucket", "fresh", "hooks", "is_sparse", "later", "parameter", "result", "taken", "watch",
    )  # fmt: skip

    def __init__(self, parameter: nn.Parameter, is_sparse: bool, came: Callable[[Slot], None]) -> None:
        self.parameter = parameter
        self.is_sparse = is_sparse
        self.bucket: Bucket | None = None
        self.fresh = False
        self.taken = False
        self.result: Tensor | None = None
        self.watch: RemovableHandle | None = None
        # Without a reference from the hook to the reducer, both die with the model.
        came_of = weakref.WeakMethod(came)
        slot = weakref.ref(self)

        def hook(_: Tensor) -> None:
            method, own = came_of(), slot()
            if method is not None and own is not None:
                method(own)

        self.later, self._give_back = take_over_hooks(parameter, hook)
        self.hooks: GradientHooks | None = None

    @property
    def has_hooks(self) -> bool:
        """Whether the user has hooks that are to be called with the mean."""
        return bool(self.later) or self.hooks is not None

    def take_gradient_hooks(self) -> None:
        """Takes over what `register_hook` has got."""
        if self.hooks is None and has_users_gradient_hooks(self.parameter):
            self.hooks = GradientHooks(self.parameter, self.set_aside)

    def set_aside(self) -> None:
        """Takes the mean of earlier passes out of `.grad` for the user's hooks, unless this pass has a gradient already."""
        if self.hooks is not None and not self.fresh:
            self.hooks.set_aside()

    def release(self) -> None:
        """Gives the user's hooks back to autograd."""
        self._give_back()
        if self.hooks is not None:
            self.hooks.release()
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


class ReductionForm:
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
        return self.group

    def carries_votes(self, bucket: Bucket) -> bool:
        """Returns whether a bucket can carry the votes of all ranks beside its gradients."""
        return False

    def travels_alone(self, parameter: Tensor) -> bool:
        """Returns whether a gradient is a bucket of its own."""
        raise NotImplementedError

    def is_single(self, slot: Slot) -> bool:
        """Returns whether a gradient belongs to no bucket, and is reduced at the end."""
        raise NotImplementedError

    def watch(self, slot: Slot) -> RemovableHandle | None:
        """Registers a further hook on a parameter, and returns its handle; None without one."""
        return None

    def is_fresh(self, gradient: Tensor | None) -> bool:
        """Returns whether a gradient that was found in `.grad` is one that is not reduced."""
        raise NotImplementedError

    def take(self, slot: Slot) -> Tensor | None:
        """Takes this rank's whole gradient out of `.grad`; None if there is none."""
        raise NotImplementedError

    def launch(
        self, bucket: Bucket, gradients: list[Tensor], number: int, is_last: bool, votes: Tensor | None = None
    ) -> None:
        """Sends a bucket and sets its `wait`. `gradients` has one for each slot; `votes` become one more result."""
        raise NotImplementedError

    def complete(self) -> None:
        """Finishes the results of slots that are in buckets, after all have arrived."""

    def put(self, slot: Slot) -> None:
        """Makes the result of a slot the parameter's `.grad`."""
        raise NotImplementedError

    def leave(self, slot: Slot) -> None:
        """Called for a parameter that no rank has used."""

    def reset(self) -> None:
        """Drops what belongs to the window."""
        raise NotImplementedError
