"""What `shard` does to a model: its units hold shards, and gather them for a pass."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from paceline.parallel.data.averages import broadcast_values, tensors_of
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
from paceline.parallel.divided_parameters import refuse_tools, take_whole_values
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.parallel.whole_answers import answer_for_whole_tensors
from paceline.plan.facts import ModelFacts
from paceline.plan.fqn import within_some
from paceline.plan.plan import Plan
from paceline.torch_internals.fsdp import own_chunks_only
from paceline.torch_internals.modules import computes_weight
from paceline.torch_internals.tensors import is_view
from paceline.world.sharded import is_sharded, local
from paceline.world.transport import transport_of
from paceline.world.tree import map_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard


@own_chunks_only()
def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Shards the model in place. Ranks: all."""
    plan = context.plan
    broadcast_values(tensors_of(model), context.mesh.same_part_group)
    # FSDP2 shards rows, and needs contiguous parameters; weights in the channels-last format are not.
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    sharding = _Sharding(model, context)
    sharding.shard()
    refuse_copies(model)
    refuse_tools()
    answer_for_whole_tensors()
    sharding.prefetch()
    applied = Units(model, context, sharding.alone, keeps=sharding.reshard is False)
    applied.parameters_on_host = plan.offloads_parameters
    if plan.offloads_parameters and context.runtime.has_own_memory:
        _show_on_host(model, context.events.kept_on_host)
    # The stages of a pipeline begin one after the other: the first would wait for the last before it sends anything.
    group = context.mesh.gradient_group
    collectives = context.collectives if plan.layout.pp == 1 else context.collectives.over(group)
    is_pairwise = transport_of(group, context.device).is_pairwise
    applied.agree(collectives, is_pairwise or context.collectives.debug, context.runtime.others_answer)
    # Before the hooks that divide what is loaded: they need shards in the place of whole parameters.
    model.register_load_state_dict_pre_hook(lambda *_: _reshard_divided(model, applied))
    take_whole_values(model)
    return applied


class _Sharding:
    """The calls of `fully_shard` for one model, inner units first: each takes the parameters that no unit inside has taken.

    Args:
        model: the root.
        context: of the strategy.

    Attributes:
        alone: parameters that FSDP2 ignores, in the same order on all ranks.
        reshard: whether units free their parameters after the forward pass, as `fully_shard` takes it.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        self._model = model
        self._context = context
        self._plan = context.plan
        self._options = context.options
        self._wrapping = STRATEGY.wrapping(self._plan, context.facts)
        # Lists of experts bring each rank whole weights before their modules are called, when FSDP2 would gather them.
        listed = [row.name for row in context.facts.experts if row.modules]
        self.alone = _left_alone(model, self._wrapping, {row.name for row in context.facts.quantised}, listed)
        self.reshard, _ = resolved_reshard(self._plan, self._options)
        output = None if self._options.output_dtype == "auto" else DTYPES[self._options.output_dtype]
        dtype, reduced = param_dtype(self._plan, self._options), reduce_dtype(self._plan, self._options)
        self._precision = MixedPrecisionPolicy(dtype, reduced, output)
        self._full_precision = MixedPrecisionPolicy()
        self._keywords = self._common_keywords()
        # A pipeline stage lacks some of the modules.
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._norms = self._present(_norms_apart(self._plan, self._options, context.facts, self._wrapping))
        self._computed = self._present(
            _computed_weights(model, self._plan, self._options, context.facts, self._wrapping)
        )
        apart = {*self._norms, *self._computed}
        self._units = [module for module in self._present(self._wrapping.units) if module not in apart]

    def shard(self) -> None:
        """Shards all units, and then the root."""
        from torch.distributed.fsdp import fully_shard

        if self._norms:
            # One unit for all of them: they are small, so they stay gathered until the backward pass.
            fully_shard(self._norms, reshard_after_forward=False, mp_policy=self._full_precision, **self._keywords)
        for module in self._computed:
            fully_shard(module, reshard_after_forward=self.reshard, mp_policy=self._full_precision, **self._keywords)
        alone = set(self.alone)
        experts = [module for module in self._model.modules() if _is_divided_over_ep(module, alone)]
        # These hooks must run before FSDP2's own, which register autograd hooks on the outputs.
        for unit in (*experts, *self._units, self._model):
            unit.register_forward_hook(_own_memory)
        for module in experts:
            self._shard_experts(module)
        for unit in reversed(self._units):
            fully_shard(unit, reshard_after_forward=self.reshard, mp_policy=self._precision, **self._keywords)
        # None is torch's own choice for a root: it stays whole, since the backward pass begins with it.
        reshard_root = False if self.reshard is False else None
        _let_be_root(self._model)
        fully_shard(self._model, reshard_after_forward=reshard_root, mp_policy=self._precision, **self._keywords)

    def prefetch(self) -> None:
        """Lets each unit begin to gather those that come next, if `shard.prefetch` says how many."""
        count = self._options.prefetch
        if count == "auto":
            return
        for at, unit in enumerate(self._units):
            following = self._units[at + 1 : at + 1 + count]
            previous = self._units[max(0, at - count) : at]
            unit.set_modules_to_forward_prefetch(following)
            unit.set_modules_to_backward_prefetch(previous[::-1])

    def _shard_experts(self, module: nn.Module) -> None:
        """Divides experts further: ranks along `ep` hold others already. Inputs keep their dtype, as inside of a unit."""
        from torch.distributed.fsdp import fully_shard

        others = tuple(axis for axis in DIVIDING_AXES if axis != "ep")
        keywords = {
            **self._keywords,
            "mesh": self._context.mesh.along(*self._replicas(), others),
            "shard_placement_fn": partial(_dim_of_experts, self._plan.layout.size(*others)),
        }
        keeps_inputs = replace(self._precision, cast_forward_inputs=False)
        fully_shard(module, reshard_after_forward=self.reshard, mp_policy=keeps_inputs, **keywords)

    def _common_keywords(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy

        keywords: dict[str, Any] = {
            "mesh": self._context.mesh.along(*self._replicas(), DIVIDING_AXES),
            "ignored_params": set(self.alone) or None,
        }
        if self._plan.offloads_parameters and self._context.device.type != "cpu":
            # Memory that is a file cannot be page-locked.
            keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=not self._plan.disk_folder)
        return keywords

    def _replicas(self) -> tuple[str, ...]:
        """Returns the mesh dimension in front of the one to divide over, along which FSDP2 averages gradients, too (HSDP)."""
        return ("replicate",) if self._plan.layout.replicate > 1 else ()

    def _present(self, names: Iterable[str]) -> list[Any]:
        return [self._modules[name] for name in names if name in self._modules]


def _let_be_root(model: nn.Module) -> None:
    """Gives a container such as `nn.ModuleDict`, whose modules a script calls one by one, the `forward` that FSDP2 asks for.

    It is never called: each module gathers its parameters as one that is called by itself.
    """
    kind = type(model)
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and kind.forward is nn.Module.forward:

        def forward(self: nn.Module, *inputs: object) -> NoReturn:
            raise NotImplementedError(f"{kind.__name__} has no forward: call the modules in it")

        model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


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
