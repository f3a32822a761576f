"""How `pipeline` prunes a model to the stages of this rank, and runs it as a `Pipe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.parallel.data.averages import broadcast_values, tensors_of
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.options import names_of
from paceline.world.collectives import Collectives
from paceline_large.pipeline.copies import Copies, Holders
from paceline_large.pipeline.pipe import Pipe
from paceline_large.pipeline.pipeline import divide, microbatches, per_rank
from paceline_large.pipeline.specs import Spec
from paceline_large.pipeline.split import SCHEDULES, rank_of
from paceline_large.pipeline.stages import Stages


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Prunes the model to this rank's stages. Ranks: all; rank 0's values and split are used.

    Args:
        model: the whole model, on every rank.
        context: see `Context`.
    """
    options = context.options
    mesh = context.mesh
    facts = context.facts
    group = context.collectives.over(mesh.group("pp"))
    ranks = context.plan.layout.pp
    rank = group.rank
    shapes = {name: Spec.of(parameter) for name, parameter in model.named_parameters()}
    # Before the model is pruned, so that all ranks have the values of rank 0 for every stage. A model on the meta device
    # has no values yet; a model that is built apart has those of this rank's stage only, see `_level`.
    if not (facts.meta or facts.apart):
        broadcast_values(tensors_of(model), lambda _: mesh.group("pp"))
    blocks, begins = context.collectives.broadcast_object(divide(options, facts, ranks * per_rank(options)))
    placement = SCHEDULES[options.schedule].placement
    stages_of: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(len(begins)):
        stages_of[rank_of(stage, ranks, placement)].append(stage)
    whole_names = list(model.state_dict())
    trained = [name for name, _ in model.named_parameters()]
    stages = Stages(model, blocks, begins, stages_of[rank], names_of(options.keep), context.device)
    # For each parameter of the whole model its holders, computed alike on all ranks; a tied one may be held by several
    # stages, under different names.
    tied = {names[0]: names for names in facts.tied}
    holders = [_holders(tied.get(name, (name,)), stages, stages_of) for name in trained]
    if facts.apart:
        _level(model, dict(zip(trained, holders, strict=True)), shapes, group, context.device)
    # Ranks that gather shards together, or compute experts for each other, must run the same number of passes.
    peers = None
    if context.plan.fully_sharded or context.plan.layout.ep > 1:
        peers = context.collectives.over(mesh.along(("shard", "ep")).get_group())
    copies = Copies(model, holders, group)
    _take_whole_state(model, whole_names)
    return Pipe(
        model,
        stages,
        copies,
        options.schedule,
        microbatches(options, ranks),
        peers,
        facts,
        whole_names,
        others_answer=context.runtime.others_answer,
    )


def _take_whole_state(model: nn.Module, whole_names: Sequence[str]) -> None:
    """Lets `load_state_dict` of the model take a state dict of the whole model: it takes out what other stages hold."""

    def take_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        own_names = set(module.state_dict(keep_vars=True))
        for name in whole_names:
            if name not in own_names:
                state.pop(prefix + name, None)

    model.register_load_state_dict_pre_hook(take_out)


def _holders(names_of_one: Sequence[str], stages: Stages, stages_of: Sequence[Sequence[int]]) -> Holders:
    """Returns the ranks that hold one parameter, each with the name under which it holds it."""
    holders: Holders = {}
    for rank, own in enumerate(stages_of):
        for name in names_of_one:
            if stages.holds(name, own):
                holders[rank] = name
                break
    return holders


def _level(
    model: nn.Module, holders_of: dict[str, Holders], shapes: dict[str, Spec], group: Collectives, device: torch.device
) -> None:
    """Gives parameters that several ranks have built the values of the first of these ranks. Ranks: all along `pp`.

    Args:
        model: pruned to this rank's stages.
        holders_of: name -> rank along `pp` -> the name under which it holds the parameter.
        shapes: of each parameter; ranks that do not hold it need its shape for the broadcast.
        group: the ranks along `pp`.
        device: of this rank.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, holders in holders_of.items():
        if len(holders) < 2:
            continue
        own = parameters.get(holders.get(group.rank, ""))
        # A rank that does not hold it takes part in the broadcast all the same: its group is that of all ranks along `pp`.
        if own is None:
            value = shapes[name].empty(device)
        else:
            value = own.detach()
        value = group.broadcast(value, src=min(holders))
        if own is not None:
            own.data.copy_(value)
