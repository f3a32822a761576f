"""`replicate`: every rank holds the whole model and gradients are averaged (DistributedDataParallel).

    apply            torch's DDP around the model, gradients as views of the buckets (no second copy)
    first window     runs without DDP's communication: which parameters the loss reaches is seen, gradients are averaged
                     here, and only a model with unused parameters pays for DDP's search for them in each later step
    settle           a backward pass that left a bucket unreduced is an error on the spot, not at the next forward

DDP refuses models of which tensor parallel ranks hold parts, and hangs in a pipeline. There FSDP2's replicate form
averages gradients, unit by unit (`_compose`), and what a pipeline held is averaged at the end of the window.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.base.errors import PlanError, Problem
from paceline.base.log import logger
from paceline.config.kinds import YES_NO, YES_NO_AUTO, one_of, positive
from paceline.parallel.averages import average_gradients
from paceline.parallel.communication_hooks import HOOKS, install
from paceline.parallel.fsdp import Units, broadcast_values, whole_parameters
from paceline.parallel.stand_ins import step_held
from paceline.parallel.strategy import Context, Strategy
from paceline.parallel.wrapping import wrapping
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.torch_internals import ddp
from paceline.torch_internals.fsdp import replicate_function
from paceline.world import runtime
from paceline.world.held import Held
from paceline.world.layout import GRADIENT_AXES


@dataclass(frozen=True)
class ReplicateOptions:
    """Options of DistributedDataParallel, under its names."""

    bucket_cap_mb: float = option(25, positive(), "Gradients are averaged in buckets of at most this many MiB.")
    broadcast_buffers: bool = option(True, YES_NO, "Rank 0's buffers go to all ranks before each forward pass.")
    find_unused_parameters: bool | str = option(
        "auto",
        YES_NO_AUTO,
        "Searches each step's graph for parameters without gradient; auto: where the first step had some.",
    )
    gradient_as_bucket_view: bool = option(True, YES_NO, "Gradients are views of the buckets: no second copy.")
    static_graph: bool = option(False, YES_NO, "The graph is the same in every step.")
    comm_hook: str = option("none", one_of("none", *HOOKS), "Compresses gradients on the way.")
    comm_wrapper: str = option("none", one_of("none", "bf16", "fp16"), "Casts what the hook sends.")
    comm_state: Mapping[str, Any] = option({}, None, "Keywords of the hook's state (PowerSGD).")


class Replicate(Strategy):
    """Data parallel over the `replicate` axis (and over `cp`, and over `shard` where only optimizer states are divided)."""

    name = "replicate"
    stage = 90
    axes = ("replicate",)

    Options = ReplicateOptions

    def wanted(self, plan: Plan) -> bool:
        """Wanted where ranks hold whole gradients of the same parameters that nothing else averages."""
        divided = plan.fully_sharded or (plan.layout.shard > 1 and plan.zero == 2)
        return not divided and plan.layout.size(*GRADIENT_AXES) > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Beside tensor or pipeline parallel there are no communication hooks."""
        hook = self.options(plan).comm_hook
        if not _composed(plan) or hook == "none":
            return []
        return [
            Problem(
                "replicate-hook",
                f"gradients cannot be compressed by {hook!r} under this plan.",
                why=f"replicate.comm_hook={hook}; tp={plan.layout.tp}, pp={plan.layout.pp}: DDP, which has hooks, fails there",
                fix="leave replicate.comm_hook out",
            )
        ]

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Which form averages the gradients."""
        if not _composed(plan):
            return []
        reason = f"tp={plan.layout.tp}, pp={plan.layout.pp}: DDP does not compose with these"
        return [Decision("replicate.form", "fsdp2", "derived", reason=reason)]

    def cost(self, plan: Plan, facts: ModelFacts, held: Bytes) -> Bytes:
        """Buckets are the gradients themselves; a ring all-reduce sends 2 (n - 1) / n of them.

        FSDP2's form computes with a copy of the parameters.
        """
        width = plan.layout.size(*GRADIENT_AXES)
        copies = held.parameters if _composed(plan) else 0
        sent = held.sent + 2 * (width - 1) * held.gradients // width
        return replace(held, sent=sent, buffers=held.buffers + copies)

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """Wraps the model; broadcasts rank 0's parameters and buffers. Every rank calls it.

        A model without trainable parameters (a frozen teacher) is broadcast, but not wrapped.
        """
        group = context.mesh.gradient_group
        if not any(parameter.requires_grad for parameter in model.parameters()):
            own = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
            for mine, first in zip(own, context.collectives.broadcast(own), strict=True):
                mine.copy_(first)
            return model
        if _composed(context.plan):
            return _compose(model, context, group)
        options = context.options
        hook = options.comm_hook
        # PowerSGD waits inside its callbacks: with more than one bucket it deadlocks on gloo's two threads.
        one_bucket = hook == "power_sgd" and context.device.type == "cpu"
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if context.device.index is None else [context.device.index],
            process_group=group,
            bucket_cap_mb=1 << 14 if one_bucket else options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters is True,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            **({} if options.broadcast_buffers else {"broadcast_buffers": False}),
        )
        _STATES[wrapped] = state = _State([p for p in model.parameters() if not p.requires_grad])
        _watch(wrapped, state)
        if not state.others_answer:
            ddp.reduce_in_hook(wrapped)
        elif hook != "none":
            install(wrapped, hook, options.comm_wrapper, group, options.comm_state)
        if (
            hook == "none"
            and options.find_unused_parameters == "auto"
            and not options.static_graph
            and not _sparse(model)
        ):
            state.looking = True
            wrapped.require_backward_grad_sync = False
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside DDP."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def bind(self, optimizer: Optimizer, model: nn.Module, context: Context) -> None:
        """Copies of parameters that an unfinished pass left behind are given up after each step.

        Where optimizer states are divided, steps on gradients that were never averaged are refused: `step-held`.
        """
        if model in _UNITS:
            optimizer.register_step_post_hook(_UNITS[model].reshard)
        if model in _STATES and context.plan.layout.shard > 1:
            optimizer.register_step_pre_hook(partial(_refuse_held, _STATES[model]))

    def held(self, model: nn.Module) -> Held:
        """Whole gradients that were not reduced yet."""
        return _UNITS[model].held() if model in _UNITS else Held()

    def take(self, model: nn.Module, held: Held) -> None:
        """Takes them back."""
        if model in _UNITS:
            _UNITS[model].take(held)

    def full(self, model: nn.Module, writeback: bool) -> AbstractContextManager[Any]:
        """Plain parameters in the place of FSDP2's."""
        if model not in _UNITS:
            return nullcontext()
        _UNITS[model].reshard()
        return whole_parameters(model, writeback)

    @contextmanager
    def hold_gradients(self, model: nn.Module) -> Iterator[None]:
        """DDP's `no_sync`, or the same in FSDP2's form."""
        if model in _UNITS:
            with _UNITS[model].hold():
                yield
            return
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        state = _STATES[model]
        if model.static_graph and not state.begun:
            # DDP learns the graph in its first pass, which must communicate; averaged again later, it stays as it is.
            state.begun = True
            yield
            return
        state.held += 1
        try:
            with model.no_sync():
                yield
        finally:
            state.held -= 1

    def settle(self, model: nn.Module) -> None:
        """Checks that all gradients were reduced; averages those that DDP does not, and the first ones.

        DDP averages in the first backward pass after a forward pass. Others follow where a step has several losses.

        Raises:
            PlanError: `unused-parameters`, where a later step left out parameters that the first one used;
                `model-bypassed`, where the first loss came from the model inside DDP.
        """
        if model in _UNITS:
            _UNITS[model].settle()
        if not isinstance(model, DistributedDataParallel):
            return
        state = _STATES[model]
        if state.held:
            if state.touched and state.armed:
                state.armed = False  # a forward pass outside of the block: DDP has averaged its gradients
            return
        if state.looking:
            _first_window(model, state)
            return
        thawed = [parameter for parameter in state.frozen if parameter.requires_grad]
        if state.touched and not state.armed:  # what is averaged already, averaged again, stays as it is
            average_gradients([p for p in model.module.parameters() if p.requires_grad], model.process_group)
        elif thawed:
            average_gradients(thawed, model.process_group)
        if state.touched:
            state.touched = state.armed = False
        try:
            ddp.check_finished(model)
        except RuntimeError as error:
            raise PlanError(
                "unused-parameters",
                "some parameters took no part in this loss, so their gradients were not averaged over the ranks.",
                why="all were used in the first step, so DDP does not search for unused ones: "
                + str(error).splitlines()[0],
                fix="set options={'replicate': {'find_unused_parameters': True}}, or start with `paceline launch --option "
                "replicate.find_unused_parameters=true`",
            ) from None

    def failed(self, model: nn.Module) -> None:
        """DDP waits for the rest of a backward pass for ever after: it begins anew with the next forward pass."""
        if model in _STATES:
            _STATES[model].failed = True


def _composed(plan: Plan) -> bool:
    """Whether gradients are averaged by FSDP2's replicate form."""
    return plan.layout.size("tp", "pp") > 1


def _compose(model: nn.Module, context: Context, group: Any) -> nn.Module:
    """FSDP2 states on the repeated blocks and the root, that reduce gradients and divide nothing."""
    replicate = replicate_function()
    broadcast_values(model, group)
    mesh = context.mesh.along(GRADIENT_AXES)
    alone = [parameter for parameter in model.parameters() if parameter.dim() == 0]
    found = wrapping(context.facts, "auto", 0, ())
    present = dict(model.named_modules())
    for name in reversed(found.units):
        if name in present:
            replicate(present[name], mesh=mesh, ignored_params=set(alone) or None)
    replicate(model, mesh=mesh, ignored_params=set(alone) or None)
    _UNITS[model] = Units(model, group, alone)
    return model


_UNITS: weakref.WeakKeyDictionary[nn.Module, Units] = weakref.WeakKeyDictionary()


def _sparse(model: nn.Module) -> bool:
    """Whether some gradient is sparse: DDP sums those from the first step on, and we could not."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def _refuse_held(state: _State, optimizer: Optimizer, *_: Any) -> None:
    if state.touched and not state.armed:
        raise step_held(optimizer)


@dataclass
class _State:
    frozen: list[nn.Parameter]  # unknown to DDP; those that are trained later are averaged here
    looking: bool = False  # the first window has not ended yet
    others_answer: bool = field(default_factory=lambda: runtime.current().others_answer)  # not in a rehearsal
    held: int = 0  # open `hold_gradients`
    begun: bool = False  # a pass of a static graph has communicated
    armed: bool = False  # after a forward pass: DDP averages in the next backward pass
    touched: bool = False  # gradients came since the last `settle`
    failed: bool = False  # by an error in a backward pass
    # Numbers of parameters, as gradients came in the first window; the parameters' hooks would keep themselves alive.
    order: dict[int, None] = field(default_factory=dict)


def _watch(model: DistributedDataParallel, state: _State) -> None:
    """Notes forward passes, and gradients that come."""
    owner = weakref.ref(model)

    def before(module: nn.Module, _: Any) -> None:  # no method: a copy of the model copies its hooks
        if module is not owner():
            return
        if state.failed:
            state.failed = state.armed = False
            _begin_anew(module, state.order)
        state.armed |= module.require_backward_grad_sync and torch.is_grad_enabled()

    def came(number: int, _: Any) -> None:
        state.touched = True
        if state.looking:
            state.order.setdefault(number)

    model.register_forward_pre_hook(before)
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(came, number))


def _begin_anew(model: Any, order: Iterable[int]) -> None:
    """A new reducer in the place of DDP's, whose buckets follow `order` from now on, if there is one.

    DDP would rebuild its buckets after its first step; then a run that was resumed would add up its first gradients in
    another order than one that was not. So the buckets are final from the start.
    """
    own = list(model.module.parameters())
    place = {id(own[number]): at for at, number in enumerate(order)}
    final = bool(place) and not model.find_unused_parameters and not model.static_graph
    ddp.replace_reducer(model, lambda parameter: place.get(id(parameter), len(place)), final)


_STATES: weakref.WeakKeyDictionary[DistributedDataParallel, _State] = weakref.WeakKeyDictionary()


def _check_called(model: DistributedDataParallel) -> None:
    """Refuses gradients of a model that was called past DDP, whose later ones nobody would average.

    Until the first window ends, DDP takes this flag down in each forward pass.
    """
    own = set(model.module.parameters())
    others = (other for other in _STATES if other is not model and not other.require_forward_param_sync)
    if model.require_forward_param_sync and not any(own & set(other.module.parameters()) for other in others):
        kind = type(model.module).__name__
        raise PlanError(
            "model-bypassed",
            f"{kind} has gradients, but the prepared {kind} was not called.",
            why="the loss was computed with the model as it was before `prepare`; its gradients are not averaged over the "
            "ranks, which would drift apart",
            fix="call what `prepare` returned: `model = accelerator.prepare(model)`",
        )


def _first_window(model: DistributedDataParallel, state: _State) -> None:
    """Averages the gradients of the first window; turns DDP's search on if some rank left a parameter unused."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if all(p.grad is None for p in parameters):
        return  # this backward was not for this model
    _check_called(model)
    state.looking = state.touched = False
    model.require_backward_grad_sync = True
    if not state.others_answer:
        return  # which parameters were used is a value, and a rehearsal has none: all are taken as used
    group, ranks = model.process_group, dist.get_world_size(model.process_group)
    own = list(model.module.parameters())
    counts, places = _told(parameters, [own[number] for number in state.order], group)
    if min(counts) < ranks:
        names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        unused = [name for name, count in zip(names, counts, strict=True) if count < ranks]
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        logger("parallel").info("DDP searches for unused parameters: the loss did not reach %s", shown)
        model.find_unused_parameters = True
    at = {id(parameter): number for number, parameter in enumerate(model.module.parameters())}
    order = [parameters[number] for number in sorted(range(len(parameters)), key=places.__getitem__)]
    state.order = {at[id(parameter)]: None for parameter in order}
    used = {p for p, count in zip(parameters, counts, strict=True) if count}
    _average_as_ddp(model, order, used)
    _begin_anew(model, state.order)


def _told(parameters: list[nn.Parameter], order: list[nn.Parameter], group: Any) -> tuple[list[int], list[int]]:
    """On how many ranks each parameter has a gradient; and the places in which they came on the group's first rank."""
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    came = {id(parameter): number for number, parameter in enumerate(order)}
    last = len(parameters)  # the rest as DDP guesses: the last ones first
    places = [came.get(id(p), 2 * last - number) for number, p in enumerate(parameters)]
    told = torch.tensor(places, dtype=torch.int64, device=device)
    dist.broadcast(told, group=group, group_src=0)
    return used.tolist(), told.tolist()


def _average_as_ddp(model: Any, order: list[nn.Parameter], used: set[nn.Parameter]) -> None:
    """Averages gradients bucket by bucket as DDP will: with the same bits, wherever a run is resumed."""
    ranks = dist.get_world_size(model.process_group)
    for bucket in ddp.buckets_of(model, order):
        members = [order[number] for number in bucket]
        # In the memory order of the parameters, as DDP's buckets are.
        parts = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in members]
        for part, parameter in zip(parts, members, strict=True):
            if parameter.grad is not None:
                torch.mul(parameter.grad, 1 / ranks, out=part)
        flat = torch.cat([part.as_strided((part.numel(),), (1,)) for part in parts])
        dist.all_reduce(flat, group=model.process_group)
        for parameter, part, mean in zip(members, parts, flat.split([p.numel() for p in members]), strict=True):
            if parameter in used:
                parameter.grad = mean.clone().as_strided(part.shape, part.stride())


STRATEGY = Replicate()
