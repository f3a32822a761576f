"""What `shard` and the composed form of `replicate` share: both are FSDP2 states on modules, see `Units`.

broadcast_values         before: every rank starts with the first rank's values
Units.hold_gradients     backward passes keep whole gradients and send nothing
Units.finish_reduction   at a window's end: what was held back is reduced; gradients of modules left alone are averaged
Units.forget             gradients that were cleared before they were reduced: after an error midway, say
Units.reshard            only the shards are left: after evaluation, and after an optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.base.errors import PlanError, PrepareError
from paceline.parallel.data.agreement import END, Statement, announce
from paceline.parallel.data.averages import average_gradients, broadcast_tensors
from paceline.parallel.data.batch_norm import is_synchronised
from paceline.parallel.divided_parameters import group_parameters, groups, units, whole_parameters
from paceline.parallel.stand_ins import step_held
from paceline.parallel.strategy import AppliedStrategy
from paceline.plan.plan import Decision
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.tensors import has_gradient_hooks
from paceline.world.mesh import cpu_group, register_unit
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import is_sharded, local, part_like
from paceline.world.tree import tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Units(AppliedStrategy):
    """The FSDP2 modules of one model, and what they leave out.

    Args:
        model: the root, after `fully_shard` or `replicate`.
        group: over which gradients are averaged.
        alone: parameters that FSDP2 does not see; their gradients are averaged here.
        keeps: whether parameters stay whole between the micro-batches of a window.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, alone: Iterable[nn.Parameter] = (), keeps: bool = False
    ) -> None:
        super().__init__(model)
        self._root = cast("FSDPModule", model)
        self._group = group
        self._alone = list(alone)
        self._keeps = keeps
        self._holding = 0  # open `hold_gradients`
        self._number: int | None = None  # of the model, where ranks tell each other what they are about to do
        self._statistics = _statistics(model)
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)
        forget_with(model, self.forget)

    def _before_forward(self, model: nn.Module, args: tuple[object, ...]) -> None:
        """Forgets a pass that an exception ended midway; FSDP2 would take this one for its continuation."""
        root = cast("FSDPModule", model)
        if internals.left_unfinished(root):
            internals.reset_unfinished(root)

    def _after_forward(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not torch.is_grad_enabled():
            self.reshard()  # no backward pass will
            return
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(_refuse_double_backward)

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """FSDP2 waits in a callback of autograd's, at the end of the pass."""
        internals.call_before_final_callback(units(self.module), callback)

    def bind(self, optimizer: Optimizer) -> list[Decision]:
        """Whole parameters that an unfinished pass left behind are given up after each step."""
        optimizer.register_step_post_hook(lambda *_: self.reshard())
        return []

    def reshard(self) -> None:
        """Gives up whole parameters that some unit still holds: they would be stale once the shards change."""
        for unit in units(self.module):
            unit.reshard()

    @contextmanager
    def hold_gradients(self) -> Iterator[None]:
        """While it is open, backward passes accumulate whole gradients without communication."""
        self._holding += 1
        self._communicate(False)
        try:
            yield
        finally:
            self._holding -= 1
            if not self._holding:
                self._communicate(True)

    def _communicate(self, on: bool) -> None:
        self._root.set_requires_gradient_sync(on)
        if self._keeps:
            self._root.set_reshard_after_backward(on)

    def finish_reduction(self) -> None:
        """Reduces gradients that were held back, and averages those of modules left alone. Ranks: all of the group.

        Nothing happens while `hold_gradients` is open, or where every gradient was reduced during the last backward pass.
        """
        if self._holding:
            return
        _refuse_hooks(self.module)
        outstanding: int = self._has_pending()
        if self._number is not None:
            (outstanding,) = Statement(self._hosts, END, self._number, [outstanding]).heard()
        if outstanding:
            self._root.set_is_last_backward(True)
            self._communicate(True)
            internals.reduce_pending(self._root, reversed(groups(self.module)))
        if self._alone:
            average_gradients(self._alone, self._group)
        if self._statistics and self.module.training:
            broadcast_tensors(self._statistics, self._group)

    def _has_pending(self) -> bool:
        """Whether some gradient was seen by no communication."""
        return any(internals.pending_gradient(parameter) is not None for parameter in group_parameters(self.module))

    def refuse_step(self, optimizer: Optimizer, *_: object) -> None:
        """Before each step.

        Raises:
            TrainError: `step-held`.
        """
        if self._has_pending():
            raise step_held(optimizer)

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clears whole gradients that no communication has seen, of some parameters or of all."""
        chosen: set[int] | None = None
        if parameters is not None:
            chosen = set(map(id, parameters))
        for parameter in group_parameters(self.module):
            if chosen is None or id(internals.sharded_parameter(parameter)) in chosen:
                internals.set_pending_gradient(parameter, None)

    def full_parameters(self, writeback: bool) -> AbstractContextManager[None]:
        """Gathers every parameter."""
        self.reshard()
        return whole_parameters(self.module, writeback)

    def pending_gradients(self) -> PendingGradients:
        """Gradients that no communication has seen, by the parameters of which this rank keeps shards."""
        self.reshard()
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in group_parameters(self.module):
            gradient = internals.pending_gradient(parameter)
            if gradient is not None:
                gradients[internals.sharded_parameter(parameter)] = gradient
        return PendingGradients(gradients)

    def restore_pending(self, pending: PendingGradients) -> None:
        """Takes them back. Ranks: all of the group, which gather each unit once where there is anything."""
        self.forget()
        self.reshard()
        if not pending.gradients:
            return
        for unit in units(self.module):  # FSDP2 reduces nothing of a unit that was never gathered
            unit.unshard()
            unit.reshard()
        for parameter in group_parameters(self.module):
            shard = internals.sharded_parameter(parameter)
            gradient = pending.gradients.get(shard)
            if gradient is None:
                continue
            placements = pending.placements.get(shard)
            if placements is not None:
                gradient = part_like(gradient, internals.whole_parameter(parameter), placements)
            internals.set_pending_gradient(parameter, gradient)

    def agree(self) -> None:
        """From now on every rank is told what the others are about to gather and reduce. Ranks: all of the group."""
        kind = type(self.module).__name__.removeprefix("FSDP")
        self._number = register_unit(kind)
        self._hosts = cpu_group(self._group)
        names = {module: name for name, module in self.module.named_modules()}
        for group in groups(self.module):
            name = ", ".join(names[module] for module in internals.group_modules(group))
            announce(group, self._hosts, register_unit(f"{kind}.{name}" if name else kind))


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    """Buffers of batch norms that each rank computes from its own samples, and that shall be the same on all."""
    buffers: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not is_synchronised(module):
            buffers += module.buffers(recurse=False)
    return buffers


def refuse_copies(model: nn.Module) -> None:
    """Lets `copy.deepcopy` of a divided model say what to do instead: FSDP2 refuses it with a bare AssertionError.

    Args:
        model: after `fully_shard`, which gave each unit a class of its own; that class is told.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]


def _refuse_copy(module: nn.Module, memo: dict[int, object]) -> NoReturn:
    name = type(module).__name__.removeprefix("FSDP")
    raise PrepareError(
        "model-copy",
        f"a {name} whose parameters are divided over ranks cannot be copied.",
        why="each rank holds a part of them, and what gathers the parts belongs to this model alone",
        fix="copy it before `prepare`, and prepare the copy too: "
        "`model, average, optimizer = accelerator.prepare(model, average, optimizer)`",
    )


def forget_with(owner: nn.Module | Optimizer, forget: Callable[[], None]) -> None:
    """Lets `owner.zero_grad` clear what no communication has seen, too."""

    plain: Callable[..., None] = type(owner).zero_grad

    @wraps(plain)
    def zero_grad(self: nn.Module | Optimizer, *args: bool, **keywords: bool) -> None:
        plain(self, *args, **keywords)
        forget()

    owner.zero_grad = MethodType(zero_grad, owner)  # type: ignore[method-assign]


# -- what cannot work ----------------------------------------------------------------------------------------------------


def _refuse_double_backward(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise PlanError(
            "shard-double-backward",
            "gradients of gradients cannot be computed where parameters are divided over ranks.",
            why="a backward pass with create_graph=True went through the model; FSDP2 gives parameters up in it, of which "
            "the second one would need the values",
            fix="use plan={'shard': n, 'zero': 2}, under which every rank holds whole parameters",
        )


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and has_gradient_hooks(parameter):
            raise PlanError(
                "shard-hooks",
                f"a hook on the gradient of {name} was never called.",
                why="`register_hook` on a parameter that is divided over ranks: autograd computes with a whole copy of it",
                fix="change `p.grad` after `accelerator.backward(loss)`, or use `register_post_accumulate_grad_hook` after "
                "`prepare`",
            )


def broadcast_values(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives every rank of the group the first one's parameters and buffers, a few MiB at a time.

    Where ranks hold parts already (tensor parallel), the group must consist of ranks that hold the same part.
    """
    values = [local(tensor.detach()) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    broadcast_tensors(values, group)
