"""What `experts` does to a model: each rank keeps some experts of each layer, and computes them for the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.parallel.data.division import step_by_owners
from paceline.parallel.data.shard import STRATEGY as SHARD
from paceline.parallel.data.shard import param_dtype
from paceline.parallel.divided_parameters import refuse_tools, take_whole_values, whole_parameters
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.parallel.whole_answers import answer_for_whole_tensors
from paceline.plan.experts import Experts
from paceline.plan.plan import Decision, Plan
from paceline.torch_internals.modules import parameter_table
from paceline.world.forward import override_forward
from paceline.world.sharded import is_sharded
from paceline_large.experts.listed import ListedExperts
from paceline_large.experts.travel import ExpertRanks
from paceline_large.removed_parameters import refuse_removed


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Divides the experts, with the values of the first rank along `ep`. Ranks: all."""
    mesh = context.mesh.along("ep")
    group = context.mesh.layers_group("ep")
    present = dict(model.named_modules())  # a pipeline stage lacks some
    for row in context.facts.experts:
        if row.name not in present:
            continue
        module = present[row.name]
        ranks = ExpertRanks(group, row.number, context.runtime.others_answer)
        _divide(module, row, mesh)
        if row.modules:
            ListedExperts(present[row.caller], row.modules, ranks, _computed_dtype(context.plan))
        else:
            override_forward(module, "experts", StackedExperts(module, ranks).forward)
    take_whole_values(model)
    refuse_removed(model)
    refuse_tools()
    answer_for_whole_tensors()
    return DividedExperts(model, context)


class DividedExperts(AppliedStrategy):
    """A model whose experts are divided.

    Args:
        model: after the division.
        context: of the strategy.
    """

    def __init__(self, model: nn.Module, context: Context) -> None:
        super().__init__(model)
        self._context = context

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Lets an optimizer that may look at whole parameters step each on its owner."""
        # Otherwise `shard` does it, whose ranks hold parts of the same parameters.
        # So does `tensor`.
        if self._context.plan.fully_sharded or self._context.plan.layout.tp > 1:
            return []
        return step_by_owners(adapter, self.module, self._context.mesh.along("ep"))

    @contextmanager
    def full_parameters(self, writeback: bool) -> Iterator[None]:
        """While it is open, each rank has all experts, and computes those of its own tokens."""
        with whole_parameters(self.module, writeback):
            yield

    def uneven_steps(self) -> AbstractContextManager[None]:
        """Refuses it: each forward pass waits for the tokens of the other ranks.

        Raises:
            TrainError: `experts-uneven`.
        """
        raise TrainError(
            "experts-uneven",
            "ranks whose experts are divided cannot take different numbers of steps.",
            why=f"ep={self._context.plan.layout.ep}: a rank without batches would not compute its experts for the others",
            fix="give all ranks as many batches, as prepared loaders do",
        )


def _divide(module: nn.Module, row: Experts, mesh: Any) -> None:
    """Replaces the weights of one layer's experts by DTensors. Ranks: all along `ep`."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for key in row.parameters:
        owner, _, name = key.rpartition(".")
        table = parameter_table(module.get_submodule(owner))
        parameter = table[name]
        assert parameter is not None
        # With None nothing is sent: a parameter on the meta device has no values yet.
        source = None if parameter.is_meta else 0
        divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=source)
        table[name] = nn.Parameter(divided, requires_grad=parameter.requires_grad)


def _computed_dtype(plan: Plan) -> torch.dtype | None:
    """Returns the dtype to which FSDP2 casts the inputs of layers; None where it casts nothing."""
    return param_dtype(plan, SHARD.options(plan)) if plan.fully_sharded else None


class StackedExperts:
    """The experts of one layer, whose weights are stacked in one module."""

    def __init__(self, module: nn.Module, ranks: ExpertRanks) -> None:
        self._ranks = ranks
        # Attributes that count the experts, which the code of the model may use.
        self._counts = [
            name
            for name, value in vars(module).items()
            if type(value) is int and value == ranks.experts and "expert" in name
        ]

    def forward(
        self, module: nn.Module, original: Callable[..., Any], tokens: Tensor, choices: Tensor, weights: Tensor
    ) -> Tensor:
        """Stands in the place of the module's forward. Shape: tokens [..., H], choices [..., K], weights [..., K]."""
        if not any(map(is_sharded, parameter_table(module).values())):  # all experts are on this rank at the moment
            return original(tokens, choices, weights)  # type: ignore[no-any-return]

        def run(tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
            with self._own_experts(module):
                return original(tokens, choices, weights)  # type: ignore[no-any-return]

        flat = (each.reshape(-1, each.shape[-1]) for each in (tokens, choices, weights))
        return self._ranks.compute(run, *flat).view(tokens.shape)

    @contextmanager
    def _own_experts(self, module: nn.Module) -> Iterator[None]:
        """While it is open, the module has this rank's experts alone, as plain tensors that autograd follows."""
        table = parameter_table(module)
        before = dict(table)
        for name, parameter in before.items():
            if is_sharded(parameter):
                table[name] = parameter.to_local()
        for name in self._counts:
            setattr(module, name, self._ranks.own)
        try:
            yield
        finally:
            table.update(before)
            for name in self._counts:
                setattr(module, name, self._ranks.experts)
