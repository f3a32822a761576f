"""What `replicate` does to a model: its gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from paceline.parallel.data.averages import broadcast_tensors, values_of
from paceline.parallel.data.means import Means, Send
from paceline.parallel.data.reducer import Reducer, reducers
from paceline.parallel.data.replicate import GRADIENT_HOOKS, ReplicateOptions
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.plan import Decision
from paceline.world.layout import GRADIENT_AXES


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Registers the hooks, and broadcasts rank 0's parameters and buffers. Ranks: all."""
    return AveragedGradients(model, context)


class AveragedGradients(Reducer):
    """One model whose gradients are averaged."""

    joinable: _Joinable

    def __init__(self, model: nn.Module, context: Context) -> None:
        options: ReplicateOptions = context.options
        # The buckets of two models may be sent in another order on each rank, where ranks use different parts of them.
        earlier = reducers(context.siblings())
        number = 0
        if any(sibling.trains for sibling in earlier):
            number = len(earlier)
        group: dist.ProcessGroup = context.mesh.gradient_group_of(number)

        def group_of(parameter: torch.Tensor) -> dist.ProcessGroup:
            axes = context.mesh.same_part_axes(parameter)
            return group if axes == GRADIENT_AXES else context.mesh.gradient_group_of(number, axes)

        hook = None
        bucket_cap_mb = options.bucket_cap_mb
        if options.comm_hook != "none":
            hook = GRADIENT_HOOKS.get(options.comm_hook)(options.comm_wrapper, group, options.comm_state)
            if options.comm_hook == "power_sgd" and context.device.type == "cpu":
                # PowerSGD waits for communication inside its callbacks. With more than one bucket it deadlocks on gloo's two
                # threads, so the cap is larger than any model.
                bucket_cap_mb = 1 << 14
        form = Means(group, bucket_cap_mb, context.device, hook, group_of)
        super().__init__(model, context, form, fills_unused=options.unused == "zeros")
        self._divides_steps = context.plan.layout.shard > 1
        self.joinable = _Joinable(self, context.device)

    def compress(self, hook: Send) -> None:
        """Lets a communication hook average the gradients from now on. Ranks: all."""
        assert isinstance(self.form, Means)
        self.form.send_by(hook)
        self.plan_anew()

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets steps on gradients that were not averaged be refused (`step-held`), if optimizer states are divided.

        Each rank would step its part of the parameters by its own gradients, and parameters would no longer fit together.
        """
        if self._divides_steps:
            adapter.refuse(self.refuse_unreduced)
        return []

    @contextmanager
    def uneven_steps(self) -> Iterator[None]:
        """While it is open, ranks that have run out of batches take part in the reductions of the others."""
        self.before_reducing = self.joinable.announce
        try:
            with self.without_buffers():
                yield
        finally:
            self.before_reducing = None


class _Joinable(Joinable):
    """What torch's `Join` needs to know of a model: a rank without batches reduces with the others, and gives zeros."""

    def __init__(self, reducer: Reducer, device: torch.device) -> None:
        super().__init__()
        self.reducer = reducer
        self._device = device

    def announce(self) -> None:
        """Tells ranks that have run out of batches that a reduction begins here."""
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns what a rank without batches does."""
        return _RankWithoutBatches(self.reducer)

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks whose gradients are averaged."""
        return self.reducer.form.group


class _RankWithoutBatches(JoinHook):
    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def main_hook(self) -> None:
        """Takes part in the reduction of one step."""
        self._reducer.take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of one that has taken every step."""
        group = self._reducer.form.group
        rank = torch.tensor([dist.get_rank(group) if is_last_joiner else -1])
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self._reducer.hosts)
        broadcast_tensors(values_of(self._reducer.module), group, int(rank))
