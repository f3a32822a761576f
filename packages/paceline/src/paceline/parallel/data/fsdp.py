"""`Units`: a model on which FSDP2's `fully_shard` was called, as `shard` does.

Units.hold_gradients     backward passes accumulate whole gradients, without communication
Units.finish_reduction   at the end of a window: reduces gradients that were held back, and averages those of ignored modules
Units.forget             clears gradients that were not reduced, for example after an error in a backward pass
Units.reshard            frees unsharded parameters, after evaluation and after an optimizer step
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import PlanError, PrepareError
from paceline.parallel.data.agreement import Agreement, announce
from paceline.parallel.data.averages import average_gradients, broadcast_tensors, broadcast_values, by_group
from paceline.parallel.data.batch_norm_applied import is_synchronised
from paceline.parallel.data.division import step_by_owners
from paceline.parallel.divided_parameters import group_parameters, groups, units, whole_parameters
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.parallel.mixtures import divide_gradient, divides_gradient
from paceline.parallel.optimizer_adapter import OptimizerAdapter, step_held
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.plan import Decision
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.tensors import has_hooks_after, has_users_gradient_hooks, take_over_hooks, times_written
from paceline.world.layout import GRADIENT_AXES
from paceline.world.param_groups import parameters_of
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import is_sharded, part_like
from paceline.world.tree import tensors
from paceline.world.written_numbers import note_written

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from paceline.world.collectives import Collectives


class Units(AppliedStrategy):
    """The FSDP2 modules of one model, and the parameters that FSDP2 ignores.

    Args:
        model: the root, after `fully_shard`.
        context: of the strategy, whose option `broadcast_buffers` says whether rank 0's buffers that `forward` changes are
            broadcast at the end of each window in training.
        alone: parameters that FSDP2 ignores; their gradients are averaged here.
        keeps: whether parameters stay unsharded between the micro-batches of a window.
    """

    def __init__(
        self, model: nn.Module, context: Context, alone: Iterable[nn.Parameter] = (), keeps: bool = False
    ) -> None:
        super().__init__(model)
        self._is_stage = context.runner is not None  # see `Reducer`
        self._mesh = context.mesh
        self._root = cast("FSDPModule", model)
        self._group: dist.ProcessGroup = context.mesh.gradient_group
        self._alone = list(alone)
        self._keeps = keeps
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._num_stepped = -1  # the parameters of these optimizers, when new ones were looked for last
        self._holding = 0  # open `hold_gradients`
        self._agreement: Agreement | None = None  # once `agree` was called
        # The modules and parameters of FSDP2 stay the same from here on. Each step needs them several times, and a walk through
        # a thousand modules takes 1 to 2 ms.
        self._units = list(units(model))
        self._groups = groups(model)
        self._parameters = list(group_parameters(model))
        # Names of buffers that `forward` changes by this rank's samples; None until the first training pass has shown them.
        self._changed_buffers: list[str] | None = None if context.options.broadcast_buffers else []
        self._versions: dict[str, tuple[int, int]] = {}
        # A script may compile the prepared model. FSDP2 keeps its own hooks from the compiler in the same way.
        model.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
        model.register_forward_hook(torch.compiler.disable(self._after_forward))
        # Once gradients were held back: whole parameters whose gradients are noted as they are computed, and those whose
        # gradients the last backward pass has computed.
        self._notes = False
        self._noted: set[torch.Tensor] = set()
        self._computed: set[torch.Tensor] = set()
        # The script's hooks on gradients, which are called with the mean of a pass.
        self._hooks: dict[nn.Parameter, GradientHooks] = {}
        self._later_hooks: dict[nn.Parameter, dict[int, Callable[[torch.Tensor], None]]] = {}
        for parameters in self._groups:
            internals.carry_values(parameters, _refuse_values, note_written)
            internals.call_before_reduction(parameters, self._set_aside)
        internals.call_around_final_callback(self._units, after=self._call_hooks)
        forget_with(model, lambda set_to_none: self.forget(set_to_none=set_to_none))

    def _before_forward(self, model: nn.Module, args: tuple[object, ...]) -> None:
        """Resets FSDP2 after a pass that an exception has interrupted: it would take this pass for its continuation."""
        root = cast("FSDPModule", model)
        if internals.left_unfinished(root):
            internals.reset_unfinished(root)
            for hooks in self._hooks.values():
                hooks.put_back()
        self._take_hooks(self._shards())
        self._take_hooks_alone()
        self._refuse_changes()
        # Here, because a parameter may have been unfrozen.
        for parameter in self._parameters:
            shard = internals.sharded_parameter(parameter)
            if shard.requires_grad and is_sharded(shard) and not divides_gradient(shard):
                divide_gradient(shard)
                internals.let_grad_find(parameter)
        self._refuse_converted()
        if self._changed_buffers is None and model.training:
            self._versions = _versions(model)
        # FSDP2 creates the unsharded tensors when it gathers a unit for the first time, and writes into them ever after. Those
        # that are created in inference mode cannot be written outside of it, where training would fail.
        if torch.is_inference_mode_enabled() and not self._was_gathered():
            with torch.inference_mode(False), torch.no_grad():
                self._gather_once()

    def _after_forward(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        if not torch.is_grad_enabled():
            self.reshard()  # there is no backward pass that would do it
            return
        if self._changed_buffers is None and model.training:
            after = _versions(model)
            self._changed_buffers = [
                name for name, version in after.items() if version != self._versions.get(name, version)
            ]
        if self._notes:
            self._note_computed()
        trained = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not trained:  # a frozen model has no backward pass, either
            self.reshard()
        for tensor in trained:
            tensor.register_hook(self._pass_began)

    def _pass_began(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise _double_backward()
        # Some may have been registered since the forward pass; those of shards are also taken as these are reduced.
        if self._holding:
            self._take_hooks(self._shards())
        self._take_hooks_alone()

    def _refuse_changes(self) -> None:
        """Refuses a model in which other parameters stand in the places of divided ones.

        Raises:
            PlanError: `shard-changed`, or `shard-functional-call`.
        """
        for parameter in self._parameters:
            if internals.is_in_place(parameter):
                continue
            if internals.is_called_with_another(parameter):
                raise PlanError(
                    "shard-functional-call",
                    f"the model was called with another tensor in the place of {internals.parameter_name(parameter)}.",
                    why="zero=3; `torch.func.functional_call` got tensors that are not the model's own parameters, and FSDP2 "
                    "gathers its own for every forward pass",
                    fix="use plan={'shard': n, 'zero': 2}, under which ranks hold whole parameters",
                )
            raise PlanError(
                "shard-changed",
                f"{internals.parameter_name(parameter)} is no longer the parameter that was divided over the ranks.",
                why="weights were tied, or replaced by pruning or weight_norm, after `prepare`. FSDP2 would go on with the old "
                "parameter, without a word",
                fix="change the model before `prepare`, or use plan={'shard': n, 'zero': 2}, under which ranks hold whole "
                "parameters",
            )

    def _refuse_converted(self) -> None:
        """Refuses a model that was converted to another dtype, as by `model.double()`, where FSDP2 cannot follow.

        Raises:
            PlanError: `shard-changed`.
        """
        for group in self._groups:
            dtypes: set[torch.dtype] = set()
            for parameter in internals.group_parameters(group):
                shard = internals.sharded_parameter(parameter)
                if shard.requires_grad:
                    dtypes.add(shard.dtype)
                dtype = internals.gathered_dtype(parameter)
                if dtype is not None and dtype != shard.dtype:
                    raise _converted(
                        f"to {shard.dtype}", f"the first pass has made memory for whole parameters of {dtype}"
                    )
            if len(dtypes) > 1:
                raise _converted("in part", "the gradients of a unit are reduced together, in one dtype")

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """Registers the callback before FSDP2's own, which autograd calls at the end of the pass, and which waits."""
        internals.call_around_final_callback(self._units, before=callback)

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets the optimizer refuse gradients that were not reduced, and clear them in `zero_grad`.

        One that may look at whole parameters steps each on its owner, as under ZeRO 1. Unsharded parameters are freed after
        each step, if an unfinished pass has left some.

        Raises:
            PlanError: `shard-optimizer`, if it needs whole parameters; in a step: TrainError `step-held`.
        """
        optimizer = adapter.optimizer
        _refuse_optimizer(optimizer)
        adapter.refuse(self._before_step)
        decisions = step_by_owners(adapter, self.module, self._mesh.along((*GRADIENT_AXES, "tp")))
        adapter.forget(lambda to_none: self.forget(parameters_of(optimizer), to_none))
        adapter.after_step(lambda _: self.reshard())
        self._optimizers.append(weakref.ref(optimizer))
        return decisions

    def _find_new(self) -> None:
        """Averages the gradients of parameters that an optimizer got later: those of a new layer, which is not divided."""
        optimizers = [
            optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None
        ]
        num_stepped = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        if num_stepped == self._num_stepped:
            return
        self._num_stepped = num_stepped
        known = set(map(id, self._alone))
        own = set(map(id, self.module.parameters()))
        new: list[nn.Parameter] = []
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                if id(parameter) in own and id(parameter) not in known and not is_sharded(parameter):
                    new.append(parameter)
                    known.add(id(parameter))
        if new:
            broadcast_values(new, self._mesh.same_part_group)
            self._alone += new

    def reshard(self) -> None:
        """Frees the unsharded parameters of all units: once the shards change, they would be out of date."""
        for unit in self._units:
            unit.reshard()

    def _was_gathered(self) -> bool:
        """Returns whether each unit was gathered at least once."""
        return all(internals.whole_parameter(parameter) is not None for parameter in self._parameters)

    def _gather_once(self) -> None:
        """Gathers and frees each unit in turn. Ranks: all."""
        for unit in self._units:
            unit.unshard()
            unit.reshard()

    @contextmanager
    def hold_gradients(self, alone: bool = False) -> Iterator[None]:
        """While it is open, backward passes accumulate whole gradients without communication.

        Unless hooks of the script's wait for the gradients of each pass, which its forward and backward pass look for.
        """
        self._holding += 1
        self._notes = True
        self._communicate(False)
        try:
            yield
        finally:
            self._holding -= 1
            if not self._holding:
                self._communicate(True)
                if not self._keeps:
                    self.reshard()
        # A schedule holds gradients inside of a window, too, and has ended.
        if self._is_stage and self._holding and self._has_hooks():
            self._reduce_pending()

    def _communicate(self, on: bool) -> None:
        self._root.set_requires_gradient_sync(on)
        # Parameters that stay whole between micro-batches are freed after the last backward pass of the window.
        if self._keeps:
            self._root.set_reshard_after_backward(on)

    def finish_reduction(self) -> None:
        """Reduces gradients that were held back, and averages those of ignored parameters. Ranks: all of the group.

        It does nothing while `hold_gradients` is open, or if the last backward pass has reduced every gradient.
        """
        self._computed.clear()
        if self._holding:
            return
        self._reduce_pending()
        # A forward pass whose output was detached leaves whole parameters in the root.
        self.reshard()
        self._find_new()
        for same_group, parameters in by_group(self._alone, self._mesh.same_part_group).items():
            average_gradients(parameters, same_group)
        if self._changed_buffers and self.module.training:
            buffers = dict(self.module.named_buffers())
            changed = [buffers[name] for name in self._changed_buffers if name in buffers]
            broadcast_tensors(changed, self._group)

    def _reduce_pending(self) -> None:
        """Reduces gradients that were held back, if any rank has some; the others take part with zeros. Ranks: all."""
        outstanding: int = self._has_pending()
        if self._agreement is not None:
            (outstanding,) = self._agreement.end_pass([outstanding])
        if outstanding:
            self._root.set_is_last_backward(True)
            self._communicate(True)
            internals.reduce_pending(self._root, reversed(self._groups))

    def _shards(self) -> Iterator[nn.Parameter]:
        return map(internals.sharded_parameter, self._parameters)

    def _take_hooks_alone(self) -> None:
        # Those of a stage wait for the whole batch. Of shards, FSDP2 itself calls hooks after the accumulation.
        if self._is_stage:
            return
        self._take_hooks(self._alone)
        self._take_hooks(filter(has_hooks_after, self._alone), always=True)
        # They see the mean of each pass, which is then reduced although it is held.
        if self._holding and self._has_hooks():
            self._communicate(True)

    def _take_hooks(self, parameters: Iterable[nn.Parameter], always: bool = False) -> None:
        for parameter in parameters:
            if parameter not in self._hooks and (always or has_users_gradient_hooks(parameter)):
                self._hooks[parameter] = GradientHooks(parameter)
                # These would be called before the others have changed the gradient.
                self._later_hooks[parameter], _ = take_over_hooks(parameter, lambda _: None)

    def _has_hooks(self) -> bool:
        """Returns whether the script has hooks on the gradients of shards."""
        return bool(self._hooks) or any(map(has_hooks_after, self._shards()))

    def _set_aside(self, parameters: Iterable[internals.FSDPParam]) -> None:
        """Called before gradients of a group are reduced."""
        shards = list(map(internals.sharded_parameter, parameters))
        self._take_hooks(shards)
        for shard in shards:
            if shard in self._hooks:
                self._hooks[shard].set_aside()

    def _call_hooks(self) -> None:
        """Called after a backward pass that has reduced gradients. Ranks: all of the group."""
        hooked = [parameter for parameter in self._alone if parameter in self._hooks]
        for same_group, parameters in by_group(hooked, self._mesh.same_part_group).items():
            # A rank that has not used one has zeros of it.
            for parameter in parameters:
                self._hooks[parameter].set_aside()
            average_gradients(parameters, same_group)
        for parameter, hooks in self._hooks.items():
            if not hooks.is_open:
                continue
            hooks.call()
            is_used = parameter.grad is not None
            hooks.put_back()
            if is_used:
                for hook in list(self._later_hooks[parameter].values()):
                    hook(parameter)

    def _has_pending(self) -> bool:
        """Returns whether some gradient was not reduced yet."""
        return any(internals.pending_gradient(parameter) is not None for parameter in self._parameters)

    def _before_step(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer step on gradients that were not reduced.

        Frees whole parameters that a forward pass without a backward pass has left: they are out of date after the step.

        Raises:
            TrainError: `step-held`.
        """
        if self._has_pending():
            raise step_held(optimizer)
        self.reshard()

    def forget(self, parameters: Iterable[torch.Tensor] | None = None, set_to_none: bool = True) -> None:
        """Clears gradients that were not reduced. Those in `.grad` stay.

        Args:
            parameters: whose; None for all.
            set_to_none: as that of `zero_grad`; if False, a parameter that had such a gradient gets zeros.
        """
        chosen = None if parameters is None else set(parameters)
        for parameter in self._parameters:
            shard = internals.sharded_parameter(parameter)
            if chosen is not None and shard not in chosen:
                continue
            if not set_to_none and shard.grad is None and internals.pending_gradient(parameter) is not None:
                shard.grad = torch.zeros_like(shard)
            internals.set_pending_gradient(parameter, None)

    def full_parameters(self, writeback: bool) -> AbstractContextManager[None]:
        """While it is open, every parameter is gathered. Ranks: all."""
        self.reshard()
        return whole_parameters(self.module, writeback)

    def held_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the unsharded gradients that were not reduced yet, with their sharded parameters."""
        for parameter in self._parameters:
            gradient = internals.pending_gradient(parameter)
            if gradient is not None:
                yield internals.sharded_parameter(parameter), gradient

    def _note_computed(self) -> None:
        """Notes from now on which gradients a backward pass computes, of the parameters that were gathered by now.

        The last backward pass of a window reduces the gradients of its whole window, also of parameters that it did not reach.
        """
        for parameter in self._parameters:
            whole = internals.whole_parameter(parameter)
            if whole is not None and whole.requires_grad and whole not in self._noted:
                self._noted.add(whole)
                internals.call_after_accumulation(whole, self._computed.add)

    def took_part(self, changed: set[torch.Tensor]) -> set[torch.Tensor]:
        """Leaves out parameters whose gradients the backward pass has only reduced, and forgets what that has computed."""
        only_reduced = self._noted - self._computed
        self._computed.clear()
        # For the script's hooks each pass is reduced by itself: no gradient waited, and other ranks have computed the rest.
        if self._holding and self._has_hooks():
            return changed
        return changed.difference(self.shards_of(only_reduced))

    def shards_of(self, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields the shards of parameters that are gathered."""
        shards: dict[torch.Tensor, torch.Tensor] = {}
        for group_parameter in self._parameters:
            whole = internals.whole_parameter(group_parameter)
            if whole is not None:
                shards[whole] = internals.sharded_parameter(group_parameter)
        for parameter in parameters:
            yield shards.get(parameter, parameter)

    def pending_gradients(self) -> PendingGradients:
        """Returns unsharded gradients that were not reduced yet, by their sharded parameters."""
        self.reshard()
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in self._parameters:
            gradient = internals.pending_gradient(parameter)
            if gradient is not None:
                gradients[internals.sharded_parameter(parameter)] = gradient
        return PendingGradients(gradients)

    def restore_pending(self, pending: PendingGradients) -> None:
        """Restores such gradients. Ranks: all of the group, which gather each unit once if there are any."""
        self.forget()
        self.reshard()
        if not pending.gradients:
            return
        # FSDP2 does not reduce gradients of a unit that was never gathered.
        self._gather_once()
        for parameter in self._parameters:
            shard = internals.sharded_parameter(parameter)
            gradient = pending.gradients.get(shard)
            if gradient is None:
                continue
            placements = pending.placements.get(shard)
            if placements is not None:
                gradient = part_like(gradient, internals.whole_parameter(parameter), placements)
            internals.set_pending_gradient(parameter, gradient)

    def agree(self, collectives: Collectives, checks_units: bool, others_answer: bool) -> None:
        """From now on the ranks check that they use the model together. Ranks: all of the group.

        Args:
            collectives, checks_units, others_answer: see `Agreement`.
        """
        kind = type(self.module).__name__.removeprefix("FSDP")
        self._agreement = Agreement(kind, self._group, collectives, checks_units, others_answer)
        names = {module: name for name, module in self.module.named_modules()}
        for group in self._groups:
            unit_name = kind
            name = ", ".join(names[module] for module in internals.group_modules(group))
            if name:  # that of the root is empty
                unit_name = f"{kind}.{name}"
            announce(group, self._agreement, unit_name)


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns by name, for each buffer that may differ between ranks, which tensor it is and how often it was changed."""
    versions: dict[str, tuple[int, int]] = {}
    for prefix, module in model.named_modules():
        if is_synchronised(module):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_inference():
                versions[f"{prefix}.{name}".lstrip(".")] = (id(buffer), times_written(buffer))
    return versions


def refuse_copies(model: nn.Module) -> None:
    """Replaces the bare errors and the crash with which torch refuses copies of a sharded model by an error with a fix.

    Args:
        model: after `fully_shard`, which gives each unit a class of its own; the method is set on these classes.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for method in ("__deepcopy__", "__reduce_ex__", "share_memory"):
                setattr(type(module), method, _refuse_copy)


def _refuse_copy(module: nn.Module, *_: object) -> NoReturn:
    name = type(module).__name__.removeprefix("FSDP")
    raise PrepareError(
        "model-copy",
        f"a {name} whose parameters are divided over ranks cannot be copied, pickled or shared with other processes.",
        why="each rank holds shards of them, and only this model can gather them",
        fix="save `accelerator.get_state_dict(model)`; or copy it before `prepare`, and prepare the copy too: "
        "`model, average, optimizer = accelerator.prepare(model, average, optimizer)`",
    )


def forget_with(owner: nn.Module, forget: Callable[[bool], None]) -> None:
    """Makes `owner.zero_grad` also call `forget`, which clears gradients that were not reduced: they are not in `.grad`.

    Args:
        owner: the model.
        forget: gets the `set_to_none` of the call.
    """

    plain: Callable[..., None] = type(owner).zero_grad

    @wraps(plain)
    def zero_grad(self: nn.Module, *args: bool, **keywords: bool) -> None:
        plain(self, *args, **keywords)
        forget(bool(keywords.get("set_to_none", args[0] if args else True)))

    owner.zero_grad = MethodType(zero_grad, owner)  # type: ignore[method-assign]


# -- what cannot work ----------------------------------------------------------------------------------------------------


def _refuse_optimizer(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if kind in _WHOLE_MATRICES:
        raise PlanError(
            "shard-optimizer",
            f"{kind} cannot step parameters that are divided over ranks.",
            why=_WHOLE_MATRICES[kind],
            fix="use AdamW, SGD, or the plan {'replicate': 'auto'}, under which every rank holds whole parameters",
        )


_WHOLE_MATRICES = {
    "LBFGS": "its line search takes inner products over all parameters at once, of which each rank has a part",
    "SparseAdam": "it steps gradients that are lists of rows, which cannot be divided",
}


def _refuse_values(parameter: internals.FSDPParam) -> NoReturn:
    dtype = internals.sharded_parameter(parameter).dtype
    raise PlanError(
        "shard-written",
        f"{internals.parameter_name(parameter)} was written while it was gathered, and its shard cannot take the new values.",
        why=f"the gathered copy, with which passes compute, has another dtype than the shard ({dtype}), or got another shape",
        fix="write it after `optimizer.step()`: there the model holds the shards",
    )


def _converted(how: str, why: str) -> PlanError:
    return PlanError(
        "shard-changed",
        f"the model was converted {how} after `prepare`, and its parameters are divided over ranks.",
        why=why,
        fix="convert it before `prepare`, or choose mixed_precision='bf16' or 'fp16'",
    )


def _double_backward() -> PlanError:
    return PlanError(
        "shard-double-backward",
        "gradients of gradients cannot be computed where parameters are divided over ranks.",
        why="a backward pass with create_graph=True went through the model. FSDP2 frees unsharded parameters in it, and "
        "the second backward pass would need them",
        fix="use plan={'shard': n, 'zero': 2}, under which every rank holds whole parameters",
    )
