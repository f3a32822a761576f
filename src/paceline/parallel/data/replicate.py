"""`replicate`: every rank holds the whole model and gradients are averaged (DistributedDataParallel).

    apply            wraps the model in torch's DDP; gradients are views of the buckets (no second copy)
    first window     runs without DDP's communication. It shows which parameters the loss reaches, so that only a model with
                     unused parameters pays for DDP's search for them in each step. Its gradients are averaged here, at the
                     end of the backward pass as in DDP: a script may call `loss.backward()` and step an unprepared optimizer
    finish_reduction raises if the backward pass has left a bucket unreduced; DDP itself raises at the next forward pass

DDP refuses models with tensor parallel parameters, and hangs in a pipeline. There FSDP2's `replicate` averages gradients,
unit by unit (`_compose`); in a pipeline it does so at the end of the window.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.base.errors import PlanError, Problem
from paceline.base.log import logger
from paceline.config.kinds import YES_NO, one_of, positive, yes_no_or
from paceline.parallel.data.averages import average_gradients
from paceline.parallel.data.communication_hooks import HOOKS, install
from paceline.parallel.data.fsdp import Units, broadcast_values
from paceline.parallel.data.wrapping import wrapping
from paceline.parallel.stand_ins import step_held
from paceline.parallel.strategy import AppliedStrategy, Context, Strategy
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import listed
from paceline.plan.options import option
from paceline.plan.plan import Decision, Plan
from paceline.torch_internals import ddp
from paceline.torch_internals.dispatch import after_backward_pass
from paceline.torch_internals.fsdp import replicate_function
from paceline.world import runtime
from paceline.world.layout import GRADIENT_AXES
from paceline.world.tree import tensors


@dataclass(frozen=True)
class ReplicateOptions:
    """Options of DistributedDataParallel, under its names."""

    bucket_cap_mb: float = option(25, positive(), "Gradients are averaged in buckets of at most this many MiB.")
    broadcast_buffers: bool = option(
        True, YES_NO, "The buffers of rank 0 are sent to all ranks before each forward pass."
    )
    find_unused_parameters: bool | str = option(
        "auto",
        yes_no_or("auto", "zeros"),
        "Searches the graph of each step for parameters without a gradient; auto: if the first step had some; zeros: "
        "no search, and gradients that are missing after a backward pass become zeros.",
    )
    bypass: str = option(
        "refuse",
        one_of("refuse", "average"),
        "What happens to a loss that was computed with the model inside of DDP: an error, or gradients that are averaged after "
        "the backward pass.",
    )
    gradient_as_bucket_view: bool = option(True, YES_NO, "Gradients are views of the buckets: no second copy.")
    static_graph: bool = option(False, YES_NO, "The graph is the same in every step.")
    comm_hook: str = option("none", one_of("none", *HOOKS), "Compresses gradients before they are sent.")
    comm_wrapper: str = option("none", one_of("none", "bf16", "fp16"), "Casts the data that the hook sends.")
    comm_state: Mapping[str, Any] = option({}, None, "Keywords of the hook's state (PowerSGD).")


class Replicate(Strategy):
    """Data parallel over the `replicate` axis (and over `cp`, and over `shard` where only optimizer states are divided)."""

    name = "replicate"
    stage = 90
    axes = ("replicate",)
    Options = ReplicateOptions

    def wanted(self, plan: Plan) -> bool:
        """Used if several ranks hold whole gradients of the same parameters, and no other strategy averages them."""
        divided = plan.fully_sharded or (plan.layout.shard > 1 and plan.zero == 2)
        return not divided and plan.layout.size(*GRADIENT_AXES) > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Refuses communication hooks together with tensor or pipeline parallelism, where DDP is not used."""
        hook = self.options(plan).comm_hook
        if not _composed(plan) or hook == "none":
            return []
        return [
            Problem(
                "replicate-hook",
                f"gradients cannot be compressed by {hook!r} under this plan.",
                why=f"replicate.comm_hook={hook}; tp={plan.layout.tp}, pp={plan.layout.pp}: DDP, which has hooks, is not used",
                fix="leave replicate.comm_hook out",
            )
        ]

    def keeps_apart(self, plan: Plan) -> str:
        """A gradient can be a view of one bucket, and each model has its own, if DDP averages from the first step on."""
        options: ReplicateOptions = self.options(plan)
        if options.static_graph:
            return "leave options.replicate.static_graph out: the parameters of one model get gradients from the other"
        is_left_to_ddp = options.comm_hook != "none" or options.find_unused_parameters != "auto"
        if not is_left_to_ddp or not options.gradient_as_bucket_view or _composed(plan):
            return ""
        return "set options={'replicate': {'gradient_as_bucket_view': False}} beside the others"

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Says that FSDP2's `replicate` averages the gradients, where DDP cannot."""
        if not _composed(plan):
            return []
        reason = f"tp={plan.layout.tp}, pp={plan.layout.pp}: DDP does not compose with these"
        return [Decision("replicate.form", "fsdp2", "derived", reason=reason)]

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Adds what a ring all-reduce sends: 2 (n - 1) / n of the gradients. DDP's buckets are the gradients themselves.

        FSDP2's `replicate` computes with a copy of the parameters.
        """
        width = plan.layout.size(*GRADIENT_AXES)
        copies = 0
        if _composed(plan):
            copies = before.parameters
        sent = before.sent + 2 * (width - 1) * before.gradients // width
        return replace(before, sent=sent, buffers=before.buffers + copies)

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Wraps the model, and broadcasts the parameters and buffers of the first rank of each gradient group. Ranks: all.

        A model without trainable parameters (a frozen teacher) has no gradients to average, so it is only broadcast.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            broadcast_values(model, context.mesh.gradient_group)
            return AppliedStrategy(model)
        if _composed(context.plan):
            return _compose(model, context)
        return AppliedDDP(model, context)


def _composed(plan: Plan) -> bool:
    """Returns whether FSDP2's `replicate` averages the gradients."""
    return plan.layout.size("tp", "pp") > 1


def _compose(model: nn.Module, context: Context) -> Units:
    """Applies FSDP2's `replicate` to the repeated blocks and the root: they average gradients, and shard nothing."""
    replicate = replicate_function()
    group = context.mesh.gradient_group
    broadcast_values(model, group)
    mesh = context.mesh.along(GRADIENT_AXES)
    # FSDP2 refuses parameters without dimensions; `Units` averages their gradients.
    alone = [parameter for parameter in model.parameters() if parameter.dim() == 0]
    ignored = set(alone) or None
    chosen = wrapping(context.facts, "auto", 0, ())
    present = dict(model.named_modules())  # a pipeline stage lacks some of the modules
    # Inner units first: each call takes the parameters that no unit inside has taken.
    for name in reversed(chosen.units):
        if name in present:
            replicate(present[name], mesh=mesh, ignored_params=ignored)
    replicate(model, mesh=mesh, ignored_params=ignored)
    return Units(model, group, alone)


class AppliedDDP(AppliedStrategy):
    """One model inside of torch's `DistributedDataParallel`.

    DDP averages gradients only in the first backward pass after a forward pass. The rest is averaged here: the first window,
    further backward passes of a step that has several losses, and parameters that were frozen when DDP was constructed.
    """

    wrapped: DistributedDataParallel

    def __init__(self, model: nn.Module, context: Context) -> None:
        options: ReplicateOptions = context.options
        group = context.mesh.gradient_group
        bucket_cap_mb = options.bucket_cap_mb
        if options.comm_hook == "power_sgd" and context.device.type == "cpu":
            # PowerSGD waits for communication inside its callbacks. With more than one bucket it deadlocks on gloo's two
            # threads, so the cap is larger than any model.
            bucket_cap_mb = 1 << 14
        keywords: dict[str, Any] = {}
        if not options.broadcast_buffers:
            keywords["broadcast_buffers"] = False
        if context.device.index is not None:
            keywords["device_ids"] = [context.device.index]
        with warnings.catch_warnings():
            # torch 2.13 calls the argument old, and has no other one that also leaves the first values of buffers alone.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(
                model,
                process_group=group,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=options.find_unused_parameters is True,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
                static_graph=options.static_graph,
                **keywords,
            )
        super().__init__(wrapped, model)
        # DDP itself deals with unused parameters of a static graph, and takes no dense zeros for a sparse gradient.
        sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        self._sends_zeros = options.find_unused_parameters == "zeros" and not (options.static_graph or sparse)
        self._refuses_bypass = options.bypass == "refuse"
        self._context = context
        self._note_frozen()
        self._in_first_window = False  # DDP's own communication is off until it ends
        self._holding = 0  # how many `hold_gradients` are open
        self._learned_graph = False  # whether a pass of a static graph has communicated
        self._armed = False  # whether DDP averages in the next backward pass: a forward pass has prepared it
        self._touched = False  # whether gradients were computed since the last reduction was finished
        self._was_called = False  # whether a forward pass went through DDP
        self._has_optimizer = False  # whether an optimizer of this model was prepared
        self._failed = False  # whether a backward pass has raised
        self._before_waiting: Callable[[], None] | None = None
        self._awaits_gradient = True  # whether the next gradient is the first of its backward pass
        self._watched: dict[int, nn.Parameter] = {}  # parameters with a hook, by their numbers
        self._arrived: set[int] = set()  # the numbers of gradients of this pass, where zeros are sent for the others
        # The numbers of parameters, in the order in which their gradients were computed in the first window.
        self._order: dict[int, None] = {}
        self._watch()
        self._others_answer = runtime.current().others_answer  # False in a rehearsal, which has one rank only
        if not self._others_answer:
            ddp.reduce_in_hook(wrapped)
        elif options.comm_hook != "none":
            install(wrapped, options.comm_hook, options.comm_wrapper, group, options.comm_state)
        # The first window averages dense gradients without a hook. Everything else is left to DDP from the first step on.
        is_left_to_ddp = options.comm_hook != "none" or options.static_graph or sparse
        if options.find_unused_parameters in ("auto", "zeros") and not is_left_to_ddp:
            self._in_first_window = True
            wrapped.require_backward_grad_sync = False

    def _watch(self) -> None:
        """Registers hooks for forward passes of the model and for gradients of its parameters."""
        # The hooks are functions with weak references. A bound method would be copied with the model, and would keep the
        # parameters alive as long as their own hooks.
        before_forward = weakref.WeakMethod(self._before_forward)
        gradient_came = weakref.WeakMethod(self._gradient_came)

        def before(module: nn.Module, _: object) -> None:
            method = before_forward()
            if method is not None:
                method(module)

        def came(number: int, _: object) -> None:
            method = gradient_came()
            if method is not None:
                method(number)

        after_forward = weakref.WeakMethod(self._after_forward)

        def after(module: nn.Module, _: object, outputs: object) -> None:
            # torch.compile cannot trace hooks of tensors that are no leaves.
            if torch.compiler.is_compiling():
                return
            method = after_forward()
            if method is not None:
                method(module, outputs)

        self.wrapped.register_forward_pre_hook(before)
        self._after_forward_hook = self.wrapped.register_forward_hook(after)
        for number, parameter in enumerate(self.wrapped.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(came, number))
                self._watched[number] = parameter

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """Registers the callback with the first gradient of a pass; DDP registers its own, which waits, with the last one."""
        self._before_waiting = callback

    def _gradient_came(self, number: int) -> None:
        self._touched = True
        if self._sends_zeros:
            self._arrived.add(number)
        if not self._awaits_gradient:
            return
        # In the first window every gradient is recorded; later only the first of a backward pass matters.
        if self._in_first_window:
            self._order.setdefault(number)
            return
        self._awaits_gradient = False
        if self._before_waiting is not None and self._armed:
            after_backward_pass(self._before_waiting)

    def _before_forward(self, module: nn.Module) -> None:
        if module is not self.wrapped:  # a copy of the model
            return
        self._was_called = True
        if self._failed:
            self._failed = self._armed = False
            self._begin_anew()
        # DDP prepares its reducer under these two conditions. A second forward pass before the backward pass keeps it armed.
        self._armed |= self.wrapped.require_backward_grad_sync and torch.is_grad_enabled()
        self._awaits_gradient = True
        self._arrived.clear()

    def _after_forward(self, module: nn.Module, outputs: object) -> None:
        """Lets a backward pass from outputs of the first window end with averaged gradients."""
        if not self._in_first_window:
            self._after_forward_hook.remove()
            return
        if self._holding or module is not self.wrapped:
            return
        # The outputs and not the parameters tell that the pass begins: recomputation runs a pass inside of the pass, and a
        # callback of the inner one would come too early.
        for output in tensors(outputs):
            if output.requires_grad:
                output.register_hook(lambda _: after_backward_pass(self._average_first))

    def _average_first(self) -> None:
        """Averages gradients of a backward pass, unless DDP has, or they are held back."""
        if self._touched and not self._armed and not self._holding:
            self.finish_reduction()

    def bind(self, optimizer: Optimizer) -> list[Decision]:
        """Lets steps on gradients that were not averaged be refused (`step-held`), if optimizer states are divided.

        Each rank would step its part of the parameters by its own gradients, and parameters would no longer fit together.
        """
        self._has_optimizer = True
        if self._context.plan.layout.shard > 1:
            optimizer.register_step_pre_hook(self._refuse_unreduced)
        return []

    def _refuse_unreduced(self, optimizer: Optimizer, *_: object) -> None:
        if self._touched and not self._armed:
            raise step_held(optimizer)

    @contextmanager
    def hold_gradients(self) -> Iterator[None]:
        """Opens DDP's `no_sync`."""
        if self.wrapped.static_graph and not self._learned_graph:
            # DDP learns the graph in its first pass, which must communicate. To average these gradients a second time at the
            # end of the window does not change them.
            self._learned_graph = True
            yield
            return
        self._holding += 1
        try:
            with self.wrapped.no_sync():
                yield
        finally:
            self._holding -= 1

    def finish_reduction(self) -> None:
        """Averages the gradients that DDP does not average, and checks that it has averaged the others. Ranks: all.

        Raises:
            PlanError: `unused-parameters`, if this step left out parameters that the first one used;
                `model-bypassed`, if the first loss was computed with the model inside of DDP.
        """
        if self._holding:
            if self._touched and self._armed:
                self._armed = False  # the forward pass was outside of `no_sync`, so DDP has averaged its gradients
            return
        if self._in_first_window:
            self._end_first_window()
            return
        thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        # Gradients without a forward pass that has prepared DDP: all are averaged here. To average some of them a second time
        # does not change them.
        if self._touched and not self._armed:
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            average_gradients(trained, self.wrapped.process_group)
        elif thawed:
            average_gradients(thawed, self.wrapped.process_group)
        if self._sends_zeros and self._touched and self._armed and len(self._arrived) < len(self._watched):
            self._send_zeros()
        if self._touched:
            self._touched = self._armed = False
        try:
            ddp.check_finished(self.wrapped)
        except RuntimeError as error:
            raise PlanError(
                "unused-parameters",
                "some parameters took no part in this loss, so their gradients were not averaged over the ranks.",
                why="the first step used all parameters, so DDP does not search for unused ones: "
                + str(error).splitlines()[0],
                fix="set options={'replicate': {'find_unused_parameters': True}}, or start with `paceline launch --option "
                "replicate.find_unused_parameters=true`",
            ) from None

    def _send_zeros(self) -> None:
        """Adds zeros to the gradients of parameters that this rank's loss did not use.

        DDP's hooks wait for a gradient of each parameter. This backward pass runs those that are left, so the buckets become
        complete and DDP averages them with those of the other ranks.
        """
        missing: list[nn.Parameter] = []
        for number, parameter in self._watched.items():
            if number not in self._arrived and parameter.requires_grad:
                missing.append(parameter)
        if missing:
            torch.autograd.backward(missing, [torch.zeros_like(parameter) for parameter in missing])

    def backward_failed(self) -> None:
        """Lets the next forward pass replace DDP's reducer, which would wait for the rest of this backward pass for ever."""
        self._failed = True

    # -- the first window --------------------------------------------------------------------------------------

    def _end_first_window(self) -> None:
        """Averages the gradients of the first window, and turns DDP's search on if a rank did not use some parameter."""
        names: list[str] = []
        trained: list[nn.Parameter] = []
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                names.append(name)
                trained.append(parameter)
        if all(parameter.grad is None for parameter in trained):
            return  # the backward pass was that of another model
        if self._refuses_bypass:
            self._refuse_bypass()
        # DDP sends buffers in the first forward pass of a window, and takes the first window for a part of the second.
        self.wrapped.require_forward_param_sync = True
        if self._sharing():
            # A parameter has one place for the bucket of a reducer, so two models that share it would disturb each other. This
            # model stays in its first window for ever, where gradients are averaged here.
            counts, _ = _usage(trained, [], self.wrapped.process_group)
            used_here = {parameter for parameter, count in zip(trained, counts, strict=True) if count}
            self._touched = False
            _average_as_ddp(self.wrapped, trained, used_here)
            return
        if not self._has_optimizer:
            # The optimizer is perhaps one of another library, and such have called `gradient.detach_()`, which torch refuses
            # for views.
            self.wrapped.gradient_as_bucket_view = False
        # From now on DDP communicates.
        self._in_first_window = self._touched = self._armed = False
        self.wrapped.require_backward_grad_sync = True
        if not self._others_answer:
            return  # a rehearsal computes no values, so it cannot know which parameters were used: all are taken as used
        group = self.wrapped.process_group
        counts, places = _usage(trained, self._in_order(), group)
        # DDP must search if any rank did not use a parameter. The gradient is averaged if any rank did use it.
        unused: list[str] = []
        used: set[nn.Parameter] = set()
        for name, parameter, count in zip(names, trained, counts, strict=True):
            if count < dist.get_world_size(group):
                unused.append(name)
            if count:
                used.add(parameter)
        if unused and not self._sends_zeros:
            logger("parallel").info("DDP searches for unused parameters: the loss did not reach %s", listed(unused))
            self.wrapped.find_unused_parameters = True
        # All ranks take the first rank's order: buckets must hold the same parameters everywhere.
        by_place = sorted(range(len(trained)), key=places.__getitem__)
        order = [trained[number] for number in by_place]
        # `_order` counts all parameters of the model, and not the trained ones only.
        numbers = {parameter: number for number, parameter in enumerate(self.module.parameters())}
        self._order = {numbers[parameter]: None for parameter in order}
        _average_as_ddp(self.wrapped, order, used)
        self._begin_anew()

    def _in_order(self) -> list[nn.Parameter]:
        """Returns parameters in the order in which their gradients were computed in the first window."""
        parameters = list(self.module.parameters())
        return [parameters[number] for number in self._order]

    def _refuse_bypass(self) -> None:
        """Refuses gradients of a model that was called without DDP around it: later ones would never be averaged."""
        # The loss may have been computed with another prepared model that shares these parameters.
        for applied in (self, *self._sharing()):
            # DDP's forward pass clears the flag, also where a script calls `model.forward`, which runs no hooks.
            if applied._was_called or not applied.wrapped.require_forward_param_sync:
                return
        kind = type(self.module).__name__
        raise PlanError(
            "model-bypassed",
            f"{kind} has gradients, but the prepared {kind} was not called.",
            why="the loss was computed with the model that was passed to `prepare`; its gradients are not averaged over the "
            "ranks, so their parameters would become different",
            fix="call what `prepare` returned: `model = accelerator.prepare(model)`",
        )

    def _sharing(self) -> list[AppliedDDP]:
        """Returns the other models of the run that share parameters with this one."""
        own = set(self.module.parameters())
        sharing: list[AppliedDDP] = []
        for other in self._context.siblings():
            if isinstance(other, AppliedDDP) and other is not self and not own.isdisjoint(other.module.parameters()):
                sharing.append(other)
        return sharing

    def _begin_anew(self) -> None:
        """Replaces DDP's reducer by one whose buckets follow the order of gradients in the first window.

        DDP itself rebuilds its buckets after its first step. A resumed run would then add up the gradients of its first step
        in another order than a run that was not interrupted, and its numbers would differ. So the buckets are final at once.
        """
        place = {id(parameter): at for at, parameter in enumerate(self._in_order())}
        # DDP rebuilds no buckets while it searches for unused parameters, so their order would not become final.
        final = bool(place) and not self.wrapped.find_unused_parameters and not self.wrapped.static_graph
        ddp.replace_reducer(self.wrapped, lambda parameter: place.get(id(parameter), len(place)), final)
        self._note_frozen()

    def _note_frozen(self) -> None:
        """Records the parameters for which DDP has no hooks, because they were frozen when its reducer was built."""
        self._frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]


def _usage(
    parameters: list[nn.Parameter], order: list[nn.Parameter], group: dist.ProcessGroup
) -> tuple[list[int], list[int]]:
    """Counts the ranks on which each parameter has a gradient.

    Returns:
        The counts; and for each parameter the position of its gradient in the order of the group's first rank.
    """
    device = parameters[0].device
    has_gradient = [parameter.grad is not None for parameter in parameters]
    used = torch.tensor(has_gradient, dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    place_of = {id(parameter): place for place, parameter in enumerate(order)}
    own_places = []
    for number, parameter in enumerate(parameters):
        # Unused parameters follow all others, in the order that DDP assumes: the last ones first.
        place_if_unused = 2 * len(parameters) - number
        own_places.append(place_of.get(id(parameter), place_if_unused))
    places = torch.tensor(own_places, dtype=torch.int64, device=device)
    dist.broadcast(places, group=group, group_src=0)
    return used.tolist(), places.tolist()


def _average_as_ddp(model: DistributedDataParallel, order: list[nn.Parameter], used: set[nn.Parameter]) -> None:
    """Averages gradients bucket by bucket as DDP does in later steps, and so with the same rounding."""
    ranks = dist.get_world_size(model.process_group)
    for bucket in ddp.buckets_of(model, order):
        members = [order[number] for number in bucket]
        parts: list[torch.Tensor] = []
        for parameter in members:
            # DDP's buckets hold gradients in the memory layout of the parameters.
            part = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            # DDP divides before it sums, by a multiplication.
            if parameter.grad is not None:
                torch.mul(parameter.grad, 1 / ranks, out=part)
            parts.append(part)
        # [elements of the bucket]: the memory of each part as it lies, whatever its strides.
        rows = [part.as_strided((part.numel(),), (1,)) for part in parts]
        flat = torch.cat(rows)
        dist.all_reduce(flat, group=model.process_group)
        means = flat.split([part.numel() for part in parts])
        for parameter, part, row, mean in zip(members, parts, rows, means, strict=True):
            if parameter in used:
                row.copy_(mean)
                parameter.grad = part


STRATEGY = Replicate()
