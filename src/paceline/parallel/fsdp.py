"""What `shard` and the composed form of `replicate` share: both are FSDP2 states on modules, see `Units`.

broadcast_values         before: every rank starts with the first rank's values
Units.hold_gradients     backward passes keep whole gradients and send nothing
Units.finish_reduction   at a window's end: what was held back is reduced; gradients of modules left alone are averaged
Units.forget             gradients that were cleared before they were reduced: after an error midway, say
Units.reshard            only the shards are left: after evaluation, and after an optimizer step
whole_parameters         for a while, parameters are whole plain tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.base.errors import PlanError, PrepareError
from paceline.parallel import agreement
from paceline.parallel.averages import average_gradients, broadcast_tensors
from paceline.parallel.batch_norm import is_synchronised
from paceline.parallel.stand_ins import step_held
from paceline.parallel.strategy import AppliedStrategy
from paceline.plan.plan import Decision
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.tensors import has_gradient_hooks
from paceline.world.mesh import cpu_group, register_unit
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import is_sharded, whole
from paceline.world.transport import transport_of
from paceline.world.tree import map_tensors

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

    def __init__(self, model: Any, group: Any, alone: Iterable[nn.Parameter] = (), keeps: bool = False) -> None:
        super().__init__(model)
        self._root: FSDPModule = model
        self._group = group
        self._alone = list(alone)
        self._keeps = keeps
        self._holding = 0  # open `hold_gradients`
        self._number: int | None = None  # of the model, where ranks tell each other what they are about to do
        self._statistics = _statistics(model)
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)
        forget_with(model, self.forget)

    def _before_forward(self, model: FSDPModule, args: Any) -> None:
        """Forgets a pass that an exception ended midway; FSDP2 would take this one for its continuation."""
        if internals.left_unfinished(model):
            internals.reset_unfinished(model)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.reshard()  # no backward pass will
            return
        map_tensors(lambda t: t.register_hook(_refuse_double_backward) if t.requires_grad else None, output)

    def bind(self, optimizer: Optimizer) -> list[Decision]:
        """Whole parameters that an unfinished pass left behind are given up after each step."""
        optimizer.register_step_post_hook(lambda *_: self.reshard())
        return []

    def reshard(self) -> None:
        """Gives up whole parameters that some unit still holds: they would be stale once the shards change."""
        for unit in _units(self.module):
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
        groups = _groups(self.module)
        outstanding: int = any(_outstanding(group) for group in groups)
        if self._number is not None:
            (outstanding,) = agreement.Statement(self._hosts, agreement.END, self._number, [outstanding]).heard()
        if outstanding:
            self._root.set_is_last_backward(True)
            self._communicate(True)
            internals.reduce_pending(self._root, reversed(groups))
        if self._alone:
            average_gradients(self._alone, self._group)
        if self._statistics and self.module.training:
            broadcast_tensors(self._statistics, self._group)

    def refuse_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Before each step.

        Raises:
            TrainError: `step-held`.
        """
        if any(_outstanding(group) for group in _groups(self.module)):
            raise step_held(optimizer)

    def forget(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clears whole gradients that no communication has seen, of some parameters or of all."""
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for parameter in _parameters(self.module):
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
        for parameter in _parameters(self.module):
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
        for unit in _units(self.module):  # FSDP2 reduces nothing of a unit that was never gathered
            unit.unshard()
            unit.reshard()
        for parameter in _parameters(self.module):
            shard = internals.sharded_parameter(parameter)
            gradient = pending.gradients.get(shard)
            if gradient is not None:
                like = internals.whole_parameter(parameter)
                own = part_like(gradient, like, pending.placements.get(shard))
                internals.set_pending_gradient(parameter, own)

    def agree(self) -> None:
        """From now on every rank is told what the others are about to gather and reduce. Ranks: all of the group."""
        kind = type(self.module).__name__.removeprefix("FSDP")
        self._number = register_unit(kind)
        self._hosts = cpu_group(self._group)
        names = {module: name for name, module in self.module.named_modules()}
        for group in _groups(self.module):
            name = ", ".join(names[module] for module in internals.group_modules(group))
            _agree(group, self._hosts, register_unit(f"{kind}.{name}" if name else kind))


def _statistics(model: nn.Module) -> list[torch.Tensor]:
    """Buffers of batch norms that each rank computes from its own samples, and that shall be the same on all."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and not is_synchronised(module)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def refuse_copies(model: nn.Module) -> None:
    """Lets `copy.deepcopy` of a divided model say what to do instead: FSDP2 refuses it with a bare AssertionError.

    Args:
        model: after `fully_shard`, which gave each unit a class of its own; that class is told.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]


def _refuse_copy(module: nn.Module, memo: Any) -> NoReturn:
    name = type(module).__name__.removeprefix("FSDP")
    raise PrepareError(
        "model-copy",
        f"a {name} whose parameters are divided over ranks cannot be copied.",
        why="each rank holds a part of them, and what gathers the parts belongs to this model alone",
        fix="copy it before `prepare`, and prepare the copy too: "
        "`model, average, optimizer = accelerator.prepare(model, average, optimizer)`",
    )


def forget_with(owner: Any, forget: Any) -> None:
    """Lets `owner.zero_grad` clear what no communication has seen, too."""

    @wraps(type(owner).zero_grad)
    def zero_grad(self: Any, *args: Any, **named: Any) -> None:
        type(self).zero_grad(self, *args, **named)
        forget()

    owner.zero_grad = MethodType(zero_grad, owner)


def _units(model: nn.Module) -> Iterable[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _groups(model: nn.Module) -> list[Any]:
    """What is gathered and reduced together, in the order of modules."""
    return list(dict.fromkeys(group for unit in _units(model) for group in internals.parameter_groups(unit)))


def _parameters(model: nn.Module) -> Iterator[Any]:
    """The group parameters of all groups."""
    for group in _groups(model):
        yield from internals.group_parameters(group)


def refresh(model: nn.Module) -> None:
    """Lets every unit take up parameters that were put in the place of its own."""
    for parameter in _parameters(model):
        internals.take_up_sharded_parameter(parameter)


def _outstanding(group: Any) -> bool:
    """Whether a parameter group holds gradients that no communication has seen."""
    return any(_has_gradient(parameter) for parameter in internals.group_parameters(group))


def _has_gradient(parameter: Any) -> bool:
    return internals.pending_gradient(parameter) is not None


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


# -- values and gradients ------------------------------------------------------------------------------------------------


def broadcast_values(model: nn.Module, group: Any) -> None:
    """Gives every rank of the group the first one's parameters and buffers, a few MiB at a time.

    Where ranks hold parts already (tensor parallel), the group must consist of ranks that hold the same part.
    """
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    broadcast_tensors([tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors], group)


# -- whole parameters ----------------------------------------------------------------------------------------------------


def part_of(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of a whole tensor, divided as the DTensor `like` is; needs no communication."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()


@contextmanager
def whole_parameters(model: nn.Module, writeback: bool = False) -> Iterator[None]:
    """While it is open, each divided parameter of `model` is a whole plain one. Ranks: all that hold parts.

    Args:
        model: any module; what is not divided stays as it is.
        writeback: each rank takes its part of what was changed inside, also where an exception ends the block: on one
            process, what was changed before the exception stays changed too.
    """
    places: list[tuple[nn.Module, str, Any]] = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if is_sharded(parameter)
    ]
    gathered: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module, name, parameter in places:
            if id(parameter) not in gathered:
                gathered[id(parameter)] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
            module._parameters[name] = gathered[id(parameter)]
    try:
        with undisturbed(model if places else nn.Module()):
            yield
    finally:
        for module, name, parameter in places:
            own = module._parameters[name]
            module._parameters[name] = parameter
            if writeback and own is not None:
                parameter.detach().to_local().copy_(part_of(own.detach(), parameter))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """While it is open, FSDP2 does not look for its shards after a `load_state_dict` into what took their place."""
    with internals.without_taking_up(_parameters(model)):
        yield


def part_like(tensor: torch.Tensor, like: Any, placements: tuple[Any, ...] | None) -> torch.Tensor:
    """This rank's own tensor as a DTensor of the mesh and shape of `like`, where it was one."""
    if placements is None:
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def take_whole_values(model: nn.Module) -> None:
    """Lets `load_state_dict` of the model and its modules take whole tensors for divided parameters."""

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if is_sharded(parameter) and isinstance(value, torch.Tensor):
                state[prefix + name] = divided(value, parameter)

    for module in model.modules():
        if any(is_sharded(parameter) for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(convert)


def take_whole_states(optimizer: torch.optim.Optimizer) -> None:
    """Lets `load_state_dict` of the optimizer take whole states for divided parameters."""

    def convert(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        live = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = dict(zip(numbers, live, strict=False))
        states = {}
        for number, state in saved["state"].items():
            like = parameters.get(number)
            if is_sharded(like):
                state = {key: divided(value, like) if torch.is_tensor(value) else value for key, value in state.items()}
            states[number] = state
        return {**saved, "state": states}

    optimizer.register_load_state_dict_pre_hook(convert)


def divided(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A whole tensor as a DTensor that is divided as `like` is; any other shape, and what is divided, as it is."""
    if is_sharded(tensor) or tensor.shape != like.shape or not tensor.dim():
        return tensor
    from torch.distributed.tensor import DTensor

    local = part_of(tensor.to(like.device), like).clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# -- communication -------------------------------------------------------------------------------------------------------


def _agree(group: Any, ranks: Any, number: int) -> None:
    """Lets a parameter group tell other ranks what it is about to send; and send it in pairs, where that is faster.

    Args:
        group: of parameters.
        ranks: that gather and reduce them; takes tensors on the CPU.
        number: of the unit.
    """
    gather_class, scatter_class = internals.communication_classes()
    plain_gather, plain_scatter = internals.communication_of(group)

    class Gather(gather_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_gather.allocate)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
            statement = agreement.Statement(ranks, agreement.GATHER, number)
            transport = transport_of(group, input_tensor.device)
            if not transport.is_pairwise:
                statement.heard()
                return plain_gather(output_tensor, input_tensor, group, async_op)
            # The parameters travel beside the statement, so that it costs no time.
            under_way = transport.all_gather(output_tensor, input_tensor, tag=number)
            statement.heard()
            under_way.wait()
            return None

    class Scatter(scatter_class):  # type: ignore[misc, valid-type]
        allocate = staticmethod(plain_scatter.allocate)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
            transport = transport_of(group, input_tensor.device)
            if not transport.is_pairwise:
                return plain_scatter(output_tensor, input_tensor, group, op, async_op)
            average = op == dist.ReduceOp.AVG
            transport.reduce_scatter(output_tensor, input_tensor, average, tag=number).wait()
            return None

    def add_zeros() -> None:
        """Zeros for what only other ranks have gradients of."""
        if internals.reduces_gradients(group):
            parameters = internals.group_parameters(group)
            have = [_has_gradient(parameter) for parameter in parameters]
            used = agreement.Statement(ranks, agreement.REDUCE, number, have).heard()
            for parameter, mine, any_rank in zip(parameters, have, used, strict=True):
                if any_rank and not mine:
                    internals.add_zero_gradient(parameter)

    internals.replace_communication(group, Gather(), Scatter(), before_reduction=add_zeros)
