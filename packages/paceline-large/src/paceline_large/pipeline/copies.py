"""Parameters that several stages of a pipeline hold: tied weights (an embedding and the head), and those of the root.

Each of these ranks computes a part of the gradient. At the end of a window they add the parts up in the order of the ranks,
so that all of them have the same bits, and their optimizers take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import PlanError
from paceline.world.collectives import Collectives
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import local, part_like
from paceline.world.works import wait_all

Holders = dict[int, str]  # rank along pp -> the name under which it holds the parameter


class Copies:
    """The shared parameters of one model.

    Args:
        model: the model, pruned to this rank's stages.
        groups: for each parameter, the ranks that hold it and its name there; the same on all ranks.
        collectives: of the ranks along `pp`.

    Attributes:
        collectives: of the ranks along `pp`.
        groups: the entries of `groups` with several ranks.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Holders], collectives: Collectives) -> None:
        self._model = model
        self.collectives = collectives
        self.groups = [group for group in groups if len(group) > 1]
        self._before: dict[str, Tensor] = {}  # gradients of earlier windows, which are summed already, by name
        self._open = False  # whether there may be gradients that are not summed yet
        self._names = self._names_now()  # of this rank's parameters
        self._shared: list[nn.Parameter | None] | None = None  # this rank's parameter of each group, at the last batch

    def _own(self) -> list[nn.Parameter | None]:
        """Returns this rank's parameter of each group, or None. Looked up each time: FSDP2 replaces parameters."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return [parameters.get(group.get(self.collectives.rank, "")) for group in self.groups]

    def changed(self) -> bool:
        """Returns whether this rank has other parameters than before: new names, or others in the places of shared ones."""
        own = self._own()
        if self._shared is None:
            # The first batch: strategies that came after the pipeline have put theirs in their places.
            self._shared = own
        was_replaced = any(now is not before for now, before in zip(own, self._shared, strict=True))
        return was_replaced or not self._names_now() <= self._names

    def _names_now(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters(remove_duplicate=False)}

    def refuse_changes(self) -> None:
        """Called on all ranks where one has other parameters. Those that one rank alone holds are followed.

        Ranks: all along `pp`.

        Raises:
            PlanError: `pipeline-changed`.
        """
        names = self._names_now()
        own = self._own()
        replaced: list[str] = []
        for group, now, before in zip(self.groups, own, self._shared or own, strict=True):
            if now is not before:
                replaced.append(group[self.collectives.rank])
        known = {name for group in self.groups for name in group.values()}
        holders: dict[str, int] = {}
        refused: set[str] = set()
        for names_of_rank, replaced_there in self.collectives.gather_object((sorted(names), replaced)):
            refused.update(replaced_there)
            for name in names_of_rank:
                holders[name] = holders.get(name, 0) + 1
        refused |= {name for name, count in holders.items() if count > 1 and name not in known}
        if refused:
            raise PlanError(
                "pipeline-changed",
                f"{min(refused)} was added to the model, or replaced, after `prepare`, on several stages of the pipeline.",
                why=f"pp={self.collectives.size}: one stage runs it, and the others would keep, and save, a copy that is never "
                "trained",
                fix="change the model before `prepare`; a module that `prepare` has seen may be replaced by another one",
            )
        self._names = names
        self._shared = own

    def owned_elsewhere(self) -> set[int]:
        """Returns the `id` of each parameter that a lower rank holds, too, and counts in norms."""
        rank = self.collectives.rank
        elsewhere: set[int] = set()
        for group, parameter in zip(self.groups, self._own(), strict=True):
            if parameter is not None and min(group) != rank:
                elsewhere.add(id(parameter))
        return elsewhere

    def begin(self) -> None:
        """Called before gradients accumulate: moves gradients of earlier windows aside, since they are summed already."""
        if self._open or not self.groups:
            return
        self._open = True
        for group, parameter in zip(self.groups, self._own(), strict=True):
            if parameter is not None and parameter.grad is not None:
                self._before[group[self.collectives.rank]] = parameter.grad
                parameter.grad = None

    def pending_gradients(self) -> PendingGradients:
        """Returns gradients of earlier windows, and for each parameter the number of ranks that hold it."""
        rank = self.collectives.rank
        before: dict[Tensor, Tensor] = {}
        equal: dict[Tensor, int] = {}
        for group, parameter in zip(self.groups, self._own(), strict=True):
            if parameter is None:
                continue
            equal[parameter] = len(group)
            if group[rank] in self._before:
                before[parameter] = self._before[group[rank]]
        return PendingGradients(before, equal=equal, open=self._open)

    def restore_pending(self, pending: PendingGradients) -> None:
        """Restores what `pending_gradients` returned."""
        self._open = pending.open
        self._before = {}
        for group, parameter in zip(self.groups, self._own(), strict=True):
            if parameter is not None and parameter in pending.gradients:
                placements = pending.placements.get(parameter)
                gradient = pending.gradients[parameter]
                if placements is not None:
                    gradient = part_like(gradient, parameter, placements)
                self._before[group[self.collectives.rank]] = gradient

    def sum(self) -> None:
        """Adds up the gradients of all holders. Ranks: all along `pp`."""
        if not self._open:
            return
        self._open = False
        own = self._own()
        has_gradient = [parameter is not None and parameter.grad is not None for parameter in own]
        ranks_with_gradient = self.collectives.sum_ints(list(map(int, has_gradient)))
        for group, parameter, count in zip(self.groups, own, ranks_with_gradient, strict=True):
            # A parameter that no rank used has no gradient on one process either; a zero would let an optimizer with
            # momentum or weight decay step it.
            if parameter is None or not (parameter.requires_grad and count):
                continue
            # This rank's part of the loss did not use it, but the other holders send their parts and wait for this one.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._exchange(parameter.grad, sorted(group))
        # Gradients of earlier windows that were not cleared come back, on top of the new sum.
        for group, parameter in zip(self.groups, own, strict=True):
            before = self._before.pop(group.get(self.collectives.rank, ""), None)
            if parameter is None or before is None:
                continue
            if parameter.grad is None:
                parameter.grad = before
            else:
                parameter.grad = parameter.grad + before

    def _exchange(self, gradient: Tensor, holders: list[int]) -> None:
        """Sums a gradient (or the shard of it that lies here) over its holders, in place."""
        part = local(gradient)
        mine = part.contiguous()
        rank = self.collectives.rank
        group = self.collectives.group
        parts = {rank: mine}
        operations = []
        # Point to point, because the ranks that hold one parameter are no process group of their own.
        for holder in holders:
            if holder != rank:
                parts[holder] = torch.empty_like(mine)
                peer = dist.get_global_rank(group, holder)
                operations.append(dist.P2POp(dist.isend, mine, peer, group))
                operations.append(dist.P2POp(dist.irecv, parts[holder], peer, group))
        wait_all(dist.batch_isend_irecv(operations))
        # Added up in the order of ranks, so that all holders get the same bits.
        total = parts[holders[0]].clone()
        for holder in holders[1:]:
            total += parts[holder]
        part.copy_(total)
