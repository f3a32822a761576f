"""What `shard` does to a model: its units hold shards, and gather them for a pass."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PlanError
from paceline.parallel.data.averages import broadcast_values, tensors_of
from paceline.parallel.data.division import step_by_owners
from paceline.parallel.data.fsdp import Units, refuse_copies
from paceline.parallel.data.shard import (
    DIVIDING_AXES,
    DTYPES,
    HALVES,
    STRATEGY,
    ShardOptions,
    param_dtype,
    reduce_dtype,
    resolved_reshard,
)
from paceline.parallel.data.wrapping import Wrapping, leaks
from paceline.parallel.divided_parameters import refuse_tools, take_whole_states, take_whole_values
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.parallel.whole_answers import answer_for_whole_tensors
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import within_some
from paceline.plan.plan import Decision, Plan
from paceline.torch_internals.fsdp import own_chunks_only
from paceline.torch_internals.modules import computes_weight
from paceline.torch_internals.tensors import is_view
from paceline.world.layout import GRADIENT_AXES
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded, local
from paceline.world.transport import transport_of
from paceline.world.tree import map_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


@own_chunks_only()
def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Shards the model in place. Ranks: all."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    group = context.mesh.gradient_group
    broadcast_values(tensors_of(model), context.mesh.same_part_group)
    plan = context.plan
    options = context.options
    chosen = STRATEGY.wrapping(plan, context.facts)
    # Lists of experts bring each rank whole weights before their modules are called, when FSDP2 would gather them.
    listed = [row.name for row in context.facts.experts if row.modules]
    alone = _left_alone(model, chosen, {row.name for row in context.facts.quantised}, listed)
    # FSDP2 shards rows, and needs contiguous parameters; weights in the channels-last format are not.
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    reshard, _ = resolved_reshard(plan, options)
    # One mesh dimension to divide over. With a second one in front, FSDP2 also averages gradients along that (HSDP).
    replicas = ("replicate",) if plan.layout.replicate > 1 else ()
    mesh = context.mesh.along(*replicas, DIVIDING_AXES)
    output = None
    if options.output_dtype != "auto":
        output = DTYPES[options.output_dtype]
    precision = MixedPrecisionPolicy(param_dtype(plan, options), reduce_dtype(plan, options), output)
    keywords: dict[str, Any] = {"mesh": mesh, "ignored_params": set(alone) or None}
    if plan.offloads_parameters and context.device.type != "cpu":
        # Memory that is a file cannot be page-locked.
        keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=not plan.disk_folder)

    # A pipeline stage lacks some of the modules.
    present: dict[str, Any] = dict(model.named_modules())
    apart = _norms_apart(plan, options, context.facts, chosen)
    norms = [present[name] for name in apart if name in present]
    if norms:
        # One unit for all of them: they are small, so they stay gathered until the backward pass.
        fully_shard(norms, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(), **keywords)
    for name in _computed_weights(model, plan, options, context.facts, chosen):
        fully_shard(present[name], reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(), **keywords)
        apart.append(name)
    units = [present[name] for name in chosen.units if name in present and name not in apart]
    experts = [module for module in model.modules() if _is_divided_over_ep(module, set(alone))]
    # These hooks must run before FSDP2's own, which register autograd hooks on the outputs.
    for unit in (*experts, *units, model):
        unit.register_forward_hook(_own_memory)
    for unit in experts:
        # Ranks along `ep` hold other experts, and do not divide them any further. Inputs keep their dtype, as inside of a unit.
        others = tuple(axis for axis in DIVIDING_AXES if axis != "ep")
        keywords_of_experts = {
            **keywords,
            "mesh": context.mesh.along(*replicas, others),
            "shard_placement_fn": partial(_dim_of_experts, plan.layout.size(*others)),
        }
        keeps_inputs = replace(precision, cast_forward_inputs=False)
        fully_shard(unit, reshard_after_forward=reshard, mp_policy=keeps_inputs, **keywords_of_experts)
    # Inner units first: `fully_shard` takes the parameters that no unit inside has taken.
    for unit in reversed(units):
        fully_shard(unit, reshard_after_forward=reshard, mp_policy=precision, **keywords)
    # None is torch's own choice for a root: it stays whole, since the backward pass begins with it.
    reshard_root = None
    if reshard is False:
        reshard_root = False
    fully_shard(model, reshard_after_forward=reshard_root, mp_policy=precision, **keywords)
    refuse_copies(model)
    refuse_tools()
    answer_for_whole_tensors()
    if options.prefetch != "auto":
        for at, unit in enumerate(units):
            following = units[at + 1 : at + 1 + options.prefetch]
            previous = units[max(0, at - options.prefetch) : at]
            unit.set_modules_to_forward_prefetch(following)
            unit.set_modules_to_backward_prefetch(previous[::-1])
    applied = DividedUnits(model, context, alone, keeps=reshard is False)
    applied.parameters_on_host = plan.offloads_parameters
    if plan.offloads_parameters and context.runtime.has_own_memory:
        _show_on_host(model, context.events.kept_on_host)
    # The stages of a pipeline begin one after the other: the first would wait for the last before it sends anything.
    collectives = context.collectives if plan.layout.pp == 1 else None
    with_statements = transport_of(group, context.device).is_pairwise or context.collectives.debug
    applied.agree(collectives, with_statements, context.runtime.others_answer)
    # Before the hooks that divide what is loaded: they need shards in the place of whole parameters.
    model.register_load_state_dict_pre_hook(lambda *_: _reshard_divided(model, applied))
    take_whole_values(model)
    return applied


def _show_on_host(model: nn.Module, kept_on_host: Callable[[Tensor], object]) -> None:
    """Shows a rehearsal, where the CPU stands for the device, which shards and gradients FSDP2 would keep on the host."""
    for parameter in model.parameters():
        if is_sharded(parameter):
            kept_on_host(local(parameter))
            parameter.register_post_accumulate_grad_hook(lambda reduced: kept_on_host(local(reduced.grad)))


def _reshard_divided(model: nn.Module, applied: Units) -> None:
    """Frees whole parameters before values are loaded; inside `full_parameters` the model is not divided, and stays so."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        applied.reshard()


class DividedUnits(Units):
    """A model whose parameters are sharded.

    Args:
        model: the root, after `fully_shard`.
        context: of the strategy.
        alone: parameters that FSDP2 ignores.
        keeps: whether parameters stay unsharded between the micro-batches of a window.
    """

    def __init__(self, model: nn.Module, context: Context, alone: list[nn.Parameter], keeps: bool) -> None:
        broadcasts = context.options.broadcast_buffers
        mesh = context.mesh
        is_stage = context.runner is not None
        super().__init__(model, mesh.gradient_group, alone, keeps, broadcasts, mesh.same_part_group, is_stage)
        self._context = context

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets the optimizer load unsharded states, refuse gradients that were not reduced, and clear them in `zero_grad`.

        One that may look at whole parameters steps each on its owner, as under ZeRO 1.

        Raises:
            PlanError: `shard-optimizer`, if it needs whole parameters; in a step: TrainError `step-held`.
        """
        _refuse_optimizer(adapter.optimizer)
        adapter.refuse(self.before_step)
        decisions = step_by_owners(adapter, self.module, self._context.mesh.along((*GRADIENT_AXES, "tp")))
        take_whole_states(adapter.optimizer)
        adapter.forget(lambda to_none: self.forget(parameters_of(adapter.optimizer), to_none))
        return [*decisions, *super().bind(adapter)]


def _is_divided_over_ep(module: nn.Module, alone: Container[nn.Parameter]) -> bool:
    """Returns whether a module holds experts that ranks along `ep` divide, and that FSDP2 is to divide further."""
    return any(_over_ep(parameter) and parameter not in alone for parameter in module.parameters(recurse=False))


def _over_ep(parameter: nn.Parameter) -> bool:
    """Returns whether ranks along `ep` have divided a parameter."""
    return is_sharded(parameter) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _dim_of_experts(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Returns along which dim ranks divide the experts of one rank along `ep`: dim 0 (None) if it divides evenly, or dim 1.

    There may be fewer of these experts than ranks, some of which would have none, and others one that is whole.
    """
    from torch.distributed.tensor import Shard

    own = local(parameter)
    if own.shape[0] % ranks and own.dim() > 1 and own.shape[1] % ranks == 0:
        return Shard(1)
    return None


def _left_alone(
    model: nn.Module, wrapping: Wrapping, quantised: Container[str], experts: list[str]
) -> list[nn.Parameter]:
    """Returns the parameters that FSDP2 ignores: of ignored modules, quantised, without rows, and of experts that `ep` divides.

    All ranks have one order.
    """
    # A tied parameter counts under each of its names. If one of them is ignored and another is in a unit, FSDP2 would
    # divide the parameter in the unit only, and refuse the model.
    alone: dict[nn.Parameter, None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        has_rows = parameter.dim() > 0 and parameter.numel() > 0
        of_experts = _over_ep(parameter) and within_some(name, experts)
        if not has_rows or name in quantised or within_some(name, wrapping.alone) or of_experts:
            alone[parameter] = None
    return list(alone)


def _norms_apart(plan: Plan, options: ShardOptions, facts: ModelFacts, wrapping: Wrapping) -> list[str]:
    """Returns batch norms that need a unit of their own: their statistics are float32, and so must be their weights."""
    if param_dtype(plan, options) not in HALVES.values():
        return []
    return [name for name in facts.batch_norms if not within_some(name, wrapping.alone)]


def _computed_weights(
    model: nn.Module, plan: Plan, options: ShardOptions, facts: ModelFacts, wrapping: Wrapping
) -> list[str]:
    """Returns the modules that compute a weight from their parameters, and need units of their own.

    torch computes such a weight in float32 under autocast, too, for example with the vectors of `spectral_norm`, which are
    buffers. A list of parametrizations is called wherever the weight is read, so that the layer itself need not be.
    """
    if param_dtype(plan, options) not in HALVES.values():
        return []
    return [
        name
        for name, module in model.named_modules()
        if computes_weight(module) and not within_some(name, wrapping.alone) and not leaks(name, facts, wrapping.alone)
    ]


def _own_memory(module: nn.Module, args: object, output: Any) -> Any:
    """A forward hook that copies outputs which are views: an in-place operation on a view would drop FSDP2's hook on it."""
    if not torch.is_grad_enabled():
        return output

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.requires_grad and is_view(tensor) else tensor

    return map_tensors(own, output)


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
