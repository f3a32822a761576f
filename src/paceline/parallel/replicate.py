"""`replicate`: every rank holds the whole model and gradients are averaged (DistributedDataParallel).

    apply            torch's DDP around the model, gradients as views of the buckets (no second copy)
    first window     DDP looks for parameters that no rank used; where there are none, it stops looking (it costs a walk
                     through the graph each step)
    settle           a backward pass that left a bucket unreduced is an error on the spot, not at the next forward

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.base.errors import PlanError, Problem
from paceline.base.log import logger
from paceline.parallel.communication_hooks import HOOKS, install
from paceline.parallel.strategy import Context, Cost
from paceline.parallel.sync_batch_norm import replace_on_cpu
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan

_OPTIONS = {
    "bucket_cap_mb": 25,
    "broadcast_buffers": True,
    "find_unused_parameters": "auto",
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "comm_hook": "none",
    "comm_wrapper": "none",
    "comm_state": {},
}


class Replicate:
    """Data parallel over the `replicate` axis."""

    name = "replicate"
    stage = 90
    axes = ("replicate",)

    def wanted(self, plan: Plan) -> bool:
        """Wanted where more than one rank stands along the axis."""
        return plan.layout.replicate > 1

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Unknown options and hooks."""
        options = plan.options.get(self.name, {})
        problems = [
            Problem(
                "replicate-option",
                f"replicate has no option called {name!r}.",
                why=f"options: {', '.join(_OPTIONS)}",
                fix="use one of these",
            )
            for name in options
            if name not in _OPTIONS
        ]
        hook = options.get("comm_hook", "none")
        if hook not in ("none", *HOOKS):
            problems.append(
                Problem(
                    "replicate-hook",
                    f"there is no communication hook called {hook!r}.",
                    why=f"replicate.comm_hook={hook!r}; hooks: {', '.join(HOOKS)}",
                    fix="use one of these, or leave comm_hook out",
                )
            )
        return problems

    def cost(self, plan: Plan, facts: ModelFacts) -> Cost:
        """Buckets are the gradients themselves; a ring all-reduce sends 2 (n - 1) / n of them."""
        width = plan.layout.replicate
        trained = facts.parameter_bytes * facts.trainable // max(1, facts.parameters)
        return Cost(held_bytes=0, sent_bytes=2 * (width - 1) * trained // width)

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """Wraps the model; broadcasts rank 0's parameters and buffers. Every rank calls it.

        A model without trainable parameters (a frozen teacher) is broadcast, but not wrapped.
        """
        group = context.mesh.group("replicate")
        if context.device.type == "cpu":
            replace_on_cpu(model, group)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            own = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
            for mine, first in zip(own, context.collectives.broadcast(own), strict=True):
                mine.copy_(first)
            return model
        options = {**_OPTIONS, **context.options}
        looks = options["find_unused_parameters"]
        indexed = context.device.type != "cpu" and context.device.index is not None
        hook = options["comm_hook"]
        # PowerSGD waits inside its callbacks: with more than one bucket it deadlocks on gloo's two threads.
        one_bucket = hook == "power_sgd" and context.device.type == "cpu"
        wrapped = DistributedDataParallel(
            model,
            device_ids=[context.device.index] if indexed else None,
            process_group=group,
            bucket_cap_mb=1 << 14 if one_bucket else options["bucket_cap_mb"],
            broadcast_buffers=options["broadcast_buffers"],
            find_unused_parameters=looks is True or (looks == "auto" and not options["static_graph"]),
            gradient_as_bucket_view=options["gradient_as_bucket_view"],
            static_graph=options["static_graph"],
        )
        wrapped._paceline_looking = looks == "auto" and not options["static_graph"] and hook == "none"  # type: ignore[assignment]
        wrapped._paceline_any = context.collectives.any  # type: ignore[assignment]
        if hook != "none":
            install(wrapped, hook, options["comm_wrapper"], group, options["comm_state"])
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside DDP."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """DDP's `no_sync`."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def settle(self, model: nn.Module) -> None:
        """Checks that all gradients were reduced; after the first time stops looking for unused parameters if it can.

        Raises:
            PlanError: `unused-parameters`, where a later step left out parameters that the first one used.
        """
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        if model._paceline_looking:
            _stop_looking(model)
            return
        try:
            model._check_reducer_finalized()
        except RuntimeError as error:
            raise PlanError(
                "unused-parameters",
                "some parameters took no part in this loss, so their gradients were not averaged over the ranks.",
                why=f"all were used in the first step, so find_unused_parameters was turned off. {str(error).splitlines()[0]}",
                fix="set options={'replicate': {'find_unused_parameters': True}}",
            ) from None


def _stop_looking(model: DistributedDataParallel) -> None:
    """Rebuilds DDP's reducer without the search, where no rank has a parameter that the loss did not reach."""
    if all(p.grad is None for p in model.parameters()):
        return  # this backward was not for this model
    unused = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
    model._paceline_looking = False  # type: ignore[assignment]
    if model._paceline_any(bool(unused)):  # type: ignore[operator]
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        logger("parallel").info(
            "find_unused_parameters stays on: %d parameters got no gradient (%s)", len(unused), shown
        )
        return
    gradients = {p: p.grad for p in model.parameters()}  # views of the old buckets, which they keep alive
    model.find_unused_parameters = False
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


STRATEGY = Replicate()
