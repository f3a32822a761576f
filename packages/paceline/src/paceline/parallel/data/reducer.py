"""`Reducer`: averages the gradients of one model's parameters over ranks, while the backward pass still runs.

What `replicate` and stage 2 of `zero` do to a model are its two subclasses.

    backward     when the last gradient of a bucket is computed, the bucket is sent
    holding      gradients accumulate in `.grad`, without communication
    end          the ranks vote: which parameters has any of them used? The remaining buckets are sent, with zeros for
                 gradients that a rank lacks, and `.grad` of each used parameter becomes the mean

A reduction has one of two forms, which send a bucket and make the new `.grad` of its parameters:

    Means   `means.py`   all-reduce: every rank has whole gradients       (replicate, ZeRO 1)
    Rows    `rows.py`    reduce-scatter: each rank has its rows of them   (ZeRO 2)

The mean is linear. A mean that was not cleared and new gradients on top of it can be averaged once more, so a second backward
pass, or a gradient that is computed after its bucket was sent (a second use in a reentrant checkpoint), needs nothing but
another reduction.

A large gradient is a bucket of its own and is sent without a copy; small ones are packed into one tensor. If all are one small
bucket, the votes travel with it. Buckets are the same from the first step on, as they follow from the parameters that are
trained. So a resumed run adds in the same order, and all ranks send the same buckets in the same order. Parameters that are
added, frozen or unfrozen later are noticed before the next forward pass, or at the end of the backward pass.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.parallel.data.averages import begin_average, broadcast_tensors, broadcast_values, by_group, tensors_of
from paceline.parallel.data.buckets import Bucket, ReductionForm, Slot
from paceline.parallel.data.division import DIRECT, batches
from paceline.parallel.data.votes import voted
from paceline.parallel.optimizer_adapter import step_held
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.torch_internals.dispatch import after_backward_pass, backward_pass, is_in_function_backward
from paceline.world.mesh import cpu_group, register_unit
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import local
from paceline.world.transport import PairwiseTransport
from paceline.world.tree import tensors


class Reducer(AppliedStrategy):
    """Reduces the gradients of one model.

    Args:
        model: its parameters and buffers get rank 0's values.
        context: of the strategy, whose option `broadcast_buffers` says whether rank 0's buffers are broadcast at the end of
            each window in training. A parameter that a model has which was prepared before is left to that one's reducer.
        form: how buckets are reduced.
        fills_unused: whether a parameter that no rank has used gets zeros, too.

    Attributes:
        form: how buckets are reduced.
        hosts: a group of the same ranks that takes CPU tensors.
        before_reducing: called before the first collective of each reduction.

    Ranks: all of the gradient group construct one for the same model.
    """

    def __init__(self, model: nn.Module, context: Context, form: ReductionForm, *, fills_unused: bool = False) -> None:
        super().__init__(model)
        self.form = form
        self._before_waiting: Callable[[], None] | None = None
        self._with_others: Callable[[], None] | None = None
        self.before_reducing: Callable[[], None] | None = None
        self._broadcasts = context.options.broadcast_buffers
        self._fills_unused = fills_unused
        self._siblings = context.siblings
        # Votes are small and are read on the host at once, so they travel over the CPU.
        self.hosts = cpu_group(form.group)
        self._votes = PairwiseTransport(self.hosts)
        self._tag = register_unit(self.hosts)
        self._others_answer = context.runtime.others_answer
        # A pipeline holds gradients in the middle of a batch, where no hook is to see them.
        self._is_stage = context.runner is not None
        self._holding = 0
        self._is_alone = False  # see `hold_gradients`
        self._failed = False
        self._ended = False  # the last backward pass has ended with a reduction: `finish_reduction` has nothing to do
        self._pass = -1  # the number of the backward pass at whose end the window is reduced
        self._nested_pass = -1
        self._is_queued = False
        self._is_left_to_finish = False  # whether `finish_reduction` follows the backward pass that runs
        self._touched_pass: int | None = None  # the last one that has computed a gradient, if none was reduced since
        self._has_begun = False  # whether `before_reducing` was called for the current reduction
        self._next_bucket = 0  # the first bucket that was not launched
        self._under_way: deque[Bucket] = deque()
        self._slots: dict[int, Slot] = {}  # of all parameters, by id
        # Those of which any rank may have a gradient to reduce, also if they are frozen by now: the same on all ranks.
        self._waiting: set[Slot] = set()
        self._planned: list[Slot] = []  # those that are reduced, in the order of their buckets
        self._buckets: list[Bucket] = []
        self._singles: list[Slot] = []
        self._is_small = False  # whether all gradients are one small bucket, which is sent together with the votes
        self._all_used = torch.zeros(0, dtype=torch.uint8)
        self._tables: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._modules: list[nn.Module] = []
        self._kinds: list[tuple[bool, torch.dtype]] = []
        self._search(broadcasts=False)
        broadcast_values(tensors_of(model), form.group_of)
        self._hooks = [
            model.register_forward_pre_hook(ReducerHook(model, self._before_forward)),
            model.register_forward_hook(ReducerHook(model, self._after_forward)),
        ]

    def call_with_others(self, callback: Callable[[], None]) -> None:
        self._with_others = callback

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """Registers the callback at the end of a pass, before this rank waits for votes and gradients."""
        self._before_waiting = callback

    def release(self) -> None:
        """Takes all hooks back: another reducer may have the parameters from here on."""
        for handle in self._hooks:
            handle.remove()
        for slot in self._slots.values():
            slot.release()

    @property
    def slots(self) -> Iterable[Slot]:
        """All parameters of the model that this reducer reduces, frozen ones too."""
        return self._slots.values()

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained at present."""
        return any(slot.parameter.requires_grad for slot in self.slots)

    # -- the parameters of the model -----------------------------------------------------------------------------

    def _follow(self) -> None:
        """Plans the buckets anew if parameters were added, replaced, converted, frozen or unfrozen. Ranks: all, if any were."""
        is_changed = False
        for table, entries in self._tables:
            if len(table) != len(entries) or tuple(map(id, table.values())) != entries:
                is_changed = True
        if is_changed and not self._is_called_with_others():
            self._search(broadcasts=True)
            return
        if is_changed and self._with_others is not None:
            self._with_others()
            self._with_others = None
        if self._kinds_of_now() != self._kinds:
            self.plan_anew()

    def _is_called_with_others(self) -> bool:
        """Whether `torch.func.functional_call` has put tensors that are no parameters into the model, for one call.

        Gradients go through them to the parameters of which they were computed, and these are still the model's own.
        """
        return any(
            tensor is not None and not isinstance(tensor, nn.Parameter)
            for module in self._modules
            for tensor in module._parameters.values()
        )

    def _kinds_of_now(self) -> list[tuple[bool, torch.dtype]]:
        """Returns what decides in which bucket each parameter is: whether it is reduced, and its dtype."""
        return [
            (slot.parameter.requires_grad or slot in self._waiting, slot.parameter.dtype)
            for slot in self._slots.values()
        ]

    def _search(self, broadcasts: bool) -> None:
        """Finds the parameters of the model. New ones get rank 0's values, if `broadcasts`."""
        self._modules = list(self.module.modules())  # they live as long as their ids are compared
        self._tables = []
        sparse: set[int] = set()
        for module in self._modules:
            for table in (module._parameters, module._modules):
                self._tables.append((table, tuple(map(id, table.values()))))
            if getattr(module, "sparse", False) is True:
                sparse.update(map(id, module.parameters(recurse=False)))
        taken = {id(slot.parameter) for other in reducers(self._siblings()) for slot in other.slots}
        before = self._slots
        self._slots = {}
        new: list[Slot] = []
        for parameter in self.module.parameters():
            number = id(parameter)
            if number in before:
                self._slots[number] = before.pop(number)
            elif (
                number not in taken and parameter.numel() and (parameter.is_floating_point() or parameter.is_complex())
            ):
                slot = Slot(parameter, number in sparse, self._gradient_came)
                slot.fresh = broadcasts and self.form.is_fresh(parameter.grad)
                slot.watch = self.form.watch(slot)
                slot.take_gradient_hooks()
                self._slots[number] = slot
                new.append(slot)
        for slot in before.values():
            slot.release()
        if broadcasts and new:
            broadcast_values([slot.parameter for slot in new], self.form.group_of)
        self.plan_anew()

    def plan_anew(self) -> None:
        """Assigns parameters to buckets, in the order in which the backward pass completes them: the last parameter first."""
        self._finish_launched()
        self._kinds = self._kinds_of_now()
        order: list[Slot] = []
        for slot in reversed(self._slots.values()):
            slot.bucket = None
            if slot.parameter.requires_grad:
                self._waiting.add(slot)
            if slot in self._waiting:
                order.append(slot)
        self._singles = [slot for slot in order if self.form.is_single(slot)]
        self._buckets = self._buckets_of([slot for slot in order if not self.form.is_single(slot)])
        self._next_bucket = 0
        self._planned = []
        for bucket in self._buckets:
            self._planned += bucket.slots
        self._planned += self._singles
        # What `_vote` sends where every parameter was used, and nothing was computed late.
        self._all_used = torch.zeros(len(self._planned) + len(self._buckets) + 1, dtype=torch.uint8)
        self._all_used[: len(self._planned)] = 1
        is_one_bucket = len(self._buckets) == 1 and not self._singles
        carries_votes = is_one_bucket and self.form.carries_votes(self._buckets[0])
        self._is_small = carries_votes and self._buckets[0].bytes < DIRECT

    def _buckets_of(self, order: list[Slot]) -> list[Bucket]:
        """Packs parameters into buckets, which are in the order in which the backward pass completes them.

        Experts that are divided over ranks have buckets of their own: fewer ranks average them.
        """
        buckets: list[Bucket] = []
        small: list[Tensor] = []
        for slot in order:
            if self.form.travels_alone(slot.parameter):
                buckets.append(Bucket([slot], True))
            else:
                small.append(slot.parameter)
        for parameters in by_group(small, self.form.group_of).values():
            for batch in batches(parameters, self.form.cap):
                buckets.append(Bucket([self._slots[id(parameter)] for parameter in batch], False))
        place = {id(slot): number for number, slot in enumerate(order)}
        # A bucket is complete when the last of its gradients is computed.
        buckets.sort(key=lambda bucket: max(place[id(slot)] for slot in bucket.slots))
        return buckets

    # -- forward -------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, *_: object) -> None:
        # Evaluation communicates nothing: it may run on one rank alone.
        if module.training and torch.is_grad_enabled():
            self._recover()
            self._follow()

    def _after_forward(self, _: nn.Module, __: object, outputs: object) -> None:
        """Lets a backward pass from these outputs end with a reduction.

        The outputs and not the parameters tell that the pass begins: recomputation runs a pass inside of the pass, which
        computes the gradients, and at whose end it would be too early.
        """
        if not torch.is_grad_enabled():
            return
        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(self._pass_began)

    # -- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def hold_gradients(self, alone: bool = False) -> Iterator[None]:
        """While it is open, nothing is reduced, unless hooks of the user's wait for the mean gradients.

        Args:
            alone: whether this rank takes steps of its own, so that hooks get its own gradients.
        """
        self._take_hooks()
        self._holding += 1
        self._ended = False
        before, self._is_alone = self._is_alone, self._is_alone or alone
        try:
            yield
        finally:
            self._holding -= 1
            # A schedule holds gradients inside of a window, too, and has ended.
            if self._is_stage and self._holding and self._has_hooks():
                self._end_held()
            self._is_alone = before

    def _end_held(self) -> None:
        """Ends a pass whose gradients are held, for the hooks of the user's."""
        if not self._is_alone:
            self._reduce()
            return
        used = [slot for slot in self._planned if slot.fresh and slot.has_hooks]
        for slot in used:
            slot.fresh = False  # the next pass has a gradient of its own
            if slot.hooks is not None:
                slot.hooks.call()
                slot.hooks.put_back()
        _call_later_hooks(used)

    def leave_to_finish(self, is_left: bool) -> None:
        """Says whether `finish_reduction` follows the backward passes from now on.

        Then all ranks finish their models in one order, also where each of them has used other models first.
        """
        self._is_left_to_finish = is_left
        # An earlier pass may have ended with a reduction that nothing followed: the script's own, or one of another engine.
        if is_left:
            self._ended = False

    def _pass_began(self, _: object = None) -> None:
        number = backward_pass()
        if number == self._pass or number == self._nested_pass:
            return
        # The end of the pass around this one reduces its gradients, too.
        if self._is_queued and is_in_function_backward():
            self._nested_pass = number
            return
        self._pass = number
        self._is_queued = True
        self._take_hooks()  # some may have been registered since the forward pass
        after_backward_pass(partial(self._pass_ended, number))

    def _take_hooks(self) -> None:
        for slot in self._slots.values():
            slot.take_gradient_hooks()

    def _has_hooks(self) -> bool:
        return any(slot.has_hooks for slot in self._planned)

    def _gradient_came(self, slot: Slot) -> None:
        if self._failed:
            self._recover()
        self._pass_began()
        self._touched_pass = self._pass
        slot.fresh = True
        if self._holding:
            return
        bucket = slot.bucket
        if bucket is None or bucket.launched or self._is_small:
            return
        bucket.missing -= 1
        # Buckets are launched in one fixed order, even if a later one is complete first: all ranks must start the same
        # collectives in the same order.
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].missing <= 0:
            self._begin()
            self._launch(self._next_bucket)

    def _begin(self) -> None:
        if self.before_reducing is not None and not self._has_begun:
            self.before_reducing()
        self._has_begun = True

    def _pass_ended(self, number: int) -> None:
        """Called by autograd at the end of a backward pass. Ranks: all that have computed any gradient."""
        self._is_queued = False
        # A pass that computes gradients of other tensors (`torch.autograd.grad`) may run on one rank alone.
        if self._failed or self._touched_pass != number:
            return
        is_left_to_finish = self._is_left_to_finish
        if self._holding:
            is_left_to_finish = self._is_stage or not self._has_hooks()
        if is_left_to_finish:
            return
        if self._before_waiting is not None:
            self._before_waiting()
        self._end_held() if self._holding else self._reduce()
        self._ended = True

    def backward_failed(self) -> None:
        """Marks the current backward pass as failed: its results are dropped when the next one begins."""
        self._failed = True
        self._is_queued = False

    def _recover(self) -> None:
        """Drops what a failed pass has left."""
        if not self._failed:
            return
        self._failed = False
        # The reductions of a failed pass are waited for although their results are dropped: other ranks take part in them.
        self._finish_launched()
        self._reset()
        self._mark_fresh()

    def _mark_fresh(self) -> None:
        """Takes all gradients that are there for gradients that were not reduced, as after a load."""
        self._ended = False
        for slot in self._slots.values():
            slot.fresh = self.form.is_fresh(slot.parameter.grad)

    @torch.no_grad()
    def _launch(self, number: int) -> None:
        bucket = self._buckets[number]
        if self.form.bounds_memory:
            # A reduction needs the memory of its input until it has ended. So before more than `cap` bytes are being reduced,
            # the oldest reductions are waited for.
            bytes_under_way = sum(other.bytes for other in self._under_way)
            while self._under_way and bytes_under_way + bucket.bytes > self.form.cap:
                oldest = self._under_way.popleft()
                bytes_under_way -= oldest.bytes
                self._wait_for(oldest)
        gradients = [self._take_or_zeros(slot) for slot in bucket.slots]
        bucket.launched = True
        self._next_bucket = max(self._next_bucket, number + 1)
        self.form.launch(bucket, gradients, number, number == len(self._buckets) - 1)
        self._under_way.append(bucket)

    def _take(self, slot: Slot) -> Tensor | None:
        """Takes this rank's gradient of the pass; what this rank has not used has only the mean of earlier passes."""
        slot.set_aside()
        gradient = self.form.take(slot)
        if gradient is not None:
            slot.taken = True
        return gradient

    def _take_or_zeros(self, slot: Slot) -> Tensor:
        """Takes what this rank contributes to a bucket: zeros for a parameter that it has not used, as others may have."""
        gradient = self._take(slot)
        return torch.zeros_like(local(slot.parameter)) if gradient is None else gradient

    def _wait_for(self, bucket: Bucket) -> None:
        assert bucket.wait is not None
        results = bucket.wait()
        bucket.wait = None
        for slot, result in zip(bucket.slots, results, strict=True):
            if slot.result is None:
                slot.result = result
            else:  # the second round
                slot.result.add_(result)

    # -- the end of a window -------------------------------------------------------------------------------------

    def finish_reduction(self) -> None:
        """Reduces the gradients that the end of the backward pass has not reduced, also of parameters that this rank did not
        use. Ranks: all."""
        if self._holding:
            return
        if self._ended:
            self._ended = False
            return
        self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        self._recover()
        self._begin()
        self._has_begun = False
        self._follow()
        if not self._planned:
            self._send_buffers()
            return
        self._waiting = {slot for slot in self._planned if slot.parameter.requires_grad}
        used = self._send_small() if self._is_small else self._send_all()
        if used is None:
            return
        self.form.complete()
        for slot in used:
            if slot.result is not None:
                self.form.put(slot)
            if slot.hooks is not None:
                slot.hooks.call()
        if len(used) < len(self._planned):
            self._put_unused(used)
        self._reset()
        _call_later_hooks(used)
        self._send_buffers()

    def _put_unused(self, used: Sequence[Slot]) -> None:
        """Ends the reduction of parameters that no rank has used: those that were sent have the mean of earlier passes."""
        used_slots = set(map(id, used))
        for slot in self._planned:
            if id(slot) in used_slots:
                continue
            if slot.taken and slot.result is not None:
                self.form.put(slot)
            else:
                self.form.leave(slot)

    def _send_small(self) -> list[Slot]:
        """Reduces the only bucket together with the votes, in one message. Returns the parameters that any rank has used."""
        (bucket,) = self._buckets
        gradients = [self._take_or_zeros(slot) for slot in bucket.slots]
        votes = [slot.taken and slot.fresh for slot in bucket.slots]
        own_votes = torch.tensor(votes, dtype=gradients[0].dtype, device=gradients[0].device)
        self.form.launch(bucket, gradients, 0, True, own_votes)
        assert bucket.wait is not None
        *results, all_votes = bucket.wait()
        bucket.wait = None
        for slot, result in zip(bucket.slots, results, strict=True):
            slot.result = result
        # A rehearsal has no other ranks, whose votes would be added.
        return self._voted_for(all_votes.tolist() if self._others_answer else votes)

    def _voted_for(self, counts: Sequence[float]) -> list[Slot]:
        """Returns the parameters that any rank has used, given the number of these ranks for each."""
        counted = list(zip(self._planned, counts, strict=False))
        if self._fills_unused and any(count for _, count in counted):
            # A parameter that was frozen since the last window has no gradient, and its optimizer leaves it as it is.
            return [slot for slot, count in counted if count or slot.parameter.requires_grad]
        return [slot for slot, count in counted if count]

    def _send_all(self) -> list[Slot] | None:
        """Reduces what the backward pass has not. Returns the parameters that any rank has used; None if there are none."""
        votes = self._vote()
        late: list[int] = []
        used = self._planned
        if not torch.equal(votes, self._all_used):
            counts: list[int] = votes.tolist()
            late = [number for number, count in enumerate(counts[len(self._planned) : -1]) if count]
            used = self._voted_for(counts)
        if not used:
            return None
        # First round: the buckets that no gradient has completed, with zeros where this rank has none. A bucket that no rank
        # has used is left out on all of them, because all have the same votes.
        used_buckets = {id(slot.bucket) for slot in used}
        for number, bucket in enumerate(self._buckets):
            if not bucket.launched and id(bucket) in used_buckets:
                self._launch(number)
        used_singles = [slot for slot in used if slot.bucket is None]
        singles_under_way = [self._send_single(slot, bool(votes[-1])) for slot in used_singles]
        self._finish_launched()
        # Second round: gradients that were computed after their bucket was launched.
        for number in late:
            self._launch(number)
        self._finish_launched()
        for work in singles_under_way:
            if work is not None:
                work.wait()
        return used

    def _vote(self) -> Tensor:
        """Returns, for each planned parameter, whether any rank has a gradient of this window; for each bucket, whether any
        has a gradient that was computed after the bucket was launched; and whether any has a dense gradient of an embedding
        that has lists of rows elsewhere.
        """
        if self._has_sent_all():
            return self._counted(self._all_used)
        used: list[bool] = []
        for slot in self._planned:
            is_sent = slot.result is not None or (slot.bucket is not None and slot.bucket.launched)
            used.append(slot.fresh and (slot.parameter.grad is not None or is_sent))
        late: list[bool] = []
        for bucket in self._buckets:
            late.append(bucket.launched and any(slot.parameter.grad is not None for slot in bucket.slots))
        gradients = [slot.parameter.grad for slot in self._singles if slot.is_sparse]
        has_dense = any(gradient is not None and not gradient.is_sparse for gradient in gradients)
        flags = torch.tensor([*used, *late, has_dense], dtype=torch.uint8)
        waits_in_launch = self.form.bounds_memory and sum(bucket.bytes for bucket in self._buckets) > self.form.cap
        if waits_in_launch and any(used):
            # A rank with more gradients than this one may wait in `_launch` for a reduction, and come here only after it. So
            # this rank must launch all of its buckets before it waits for the vote; otherwise both would wait for ever.
            for number, bucket in enumerate(self._buckets):
                if not bucket.launched:
                    self._launch(number)
        return self._counted(flags)

    def _counted(self, flags: Tensor) -> Tensor:
        """Returns the flags that any rank has set. A rehearsal has no other ranks: it assumes that they would say the same."""
        if not self._others_answer:
            return flags
        return voted(self._votes, self._tag, flags)

    def _has_sent_all(self) -> bool:
        """Returns whether the backward pass has sent the gradients of all parameters, and computed none after that."""
        if self._singles or self._next_bucket < len(self._buckets):
            return False
        return all(slot.fresh and slot.parameter.grad is None for slot in self._planned)

    def _send_single(self, slot: Slot, is_dense_somewhere: bool) -> dist.Work | None:
        """Begins to average a gradient that is in no bucket."""
        gradient = self._take(slot)
        is_sparse = slot.is_sparse and not is_dense_somewhere
        slot.result, work = begin_average(
            gradient, local(slot.parameter), is_sparse, self.form.group_of(slot.parameter)
        )
        return work

    def _finish_launched(self) -> None:
        while self._under_way:
            self._wait_for(self._under_way.popleft())

    def _send_buffers(self) -> None:
        """Gives all ranks the buffers of rank 0, such as the running statistics of batch norms that each has computed alone.

        At the end of the window and not before the next forward pass: evaluation has the same values on all ranks, and needs
        no communication.
        """
        if not self._broadcasts or not self.module.training:
            return
        buffers: dict[int, Tensor] = {}  # by id, since modules may share one
        for module in self._modules:
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel() and not buffer.is_meta:
                    # Not `detach`, which counts writes: a batch norm in evaluation mode has its buffers in a graph that is
                    # yet to be used, where the window ends with another model's pass.
                    buffers[id(buffer)] = local(buffer.data)
        if buffers:
            broadcast_tensors(list(buffers.values()), self.form.group)

    @contextmanager
    def without_buffers(self) -> Iterator[None]:
        """While it is open, the buffers of rank 0 stay with it."""
        before = self._broadcasts
        self._broadcasts = False
        try:
            yield
        finally:
            self._broadcasts = before

    def take_part(self) -> None:
        """Takes part in a reduction to which this rank has nothing to add. Ranks: those that have no batch meanwhile."""
        self._has_begun = True
        self._reduce()

    def _reset(self) -> None:
        self._touched_pass = None
        self._has_begun = False
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.reset()
        for slot in self._planned:
            slot.fresh = slot.taken = False
            slot.result = None
            if slot.hooks is not None:
                slot.hooks.put_back()
        self.form.reset()

    def refuse_unreduced(self, optimizer: Optimizer) -> None:
        """Refuses a step while there are gradients that were not reduced, or not completely (`step-held`)."""
        if self._under_way or any(slot.fresh and slot.parameter.grad is not None for slot in self._planned):
            raise step_held(optimizer)

    def took_part(self, changed: set[Tensor]) -> set[Tensor]:
        """Adds the parameters whose gradients were taken for a reduction that has not ended."""
        return changed.union(slot.parameter for slot in self.slots if slot.taken)

    def restore_pending(self, pending: PendingGradients) -> None:
        """Takes the gradients of a checkpoint, which are in `.grad`, for those of an open window."""
        self._mark_fresh()


def reducers(applied: Iterable[AppliedStrategy]) -> list[Reducer]:
    """Returns those of applied strategies that reduce gradients of whole parameters."""
    return [each for each in applied if isinstance(each, Reducer)]


def _call_later_hooks(used: Iterable[Slot]) -> None:
    """Calls the user's hooks on gradients that are final now."""
    for slot in used:
        for hook in list(slot.later.values()):
            hook(slot.parameter)


class ReducerHook:
    """A forward hook of one model. A copy of the model has it too, and a saved model; there it does nothing."""

    def __init__(self, model: nn.Module | None = None, method: Callable[..., None] | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, module: nn.Module, *arguments: object) -> None:
        if torch.compiler.is_compiling() or self._model is None or self._method is None:
            return
        method = self._method()
        if method is not None and self._model() is module:
            method(module, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducerHook:
        return ReducerHook()

    def __reduce__(self) -> tuple[type[ReducerHook], tuple[()]]:
        return ReducerHook, ()
