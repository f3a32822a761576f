"""Tokens travel to the ranks of their experts, and the results travel back.

    sort       the (token, expert) pairs of this rank by the expert                                  [P, H]
    send       each pair to the rank of its expert, by an all-to-all with uneven splits               [R, H]
    compute    by the code of the model, with this rank's experts
    return     the same way back, and each token is the sum of its pairs

Each loss is a mean over the rank's own samples, and gradients of ranks are averaged. An expert gets the gradients of the tokens
of all ranks along `ep`, which autograd adds: they are divided by their number on the way to it, and multiplied again behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Route:
    """How many rows this rank sends to each rank, and receives from each.

    Attributes:
        group: the ranks along `ep`.
        sent: rows for each rank.
        received: rows from each rank.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def back(self) -> Route:
        """The same way in the other direction."""
        return Route(self.group, self.received, self.sent)

    def carry(self, rows: Tensor) -> Tensor:
        """Sends rows, which are sorted by their rank. Shape: [sum of sent, ...]; gives [sum of received, ...]."""
        arrived = rows.new_empty((sum(self.received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), self.received, self.sent, group=self.group)
        return arrived


class _Carry(Function):
    """`Route.carry` of several tensors; their gradients travel back, multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, route: Route, factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        ctx.factor = factor
        return tuple(route.carry(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        back = ctx.route.back()
        # With `create_graph=True` all ranks take part in the second pass, also one whose experts got no rows: its gradients
        # may have no graph.
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        returned = []
        # All ranks have the same graph, so they all need the same of these.
        for gradient, needed in zip(gradients, ctx.needs_input_grad[2:], strict=True):
            carried: Tensor | None = None
            if needed:
                carried = _CarryGradient.apply(back, ctx.factor, gradient, anchor)  # type: ignore[no-untyped-call]
            returned.append(carried)
        return None, None, *returned


class _CarryGradient(Function):
    """`Route.carry` of a gradient that is multiplied by a factor, as a penalty on gradients needs it (`create_graph=True`).

    The factors of a pair of ways cancel out, but for what reaches an expert between them: its gradients, and those of its
    gradients alike. So on the way back nothing is multiplied once more.
    """

    @staticmethod
    def forward(ctx: Any, route: Route, factor: float, gradient: Tensor, anchor: Tensor) -> Tensor:
        ctx.route = route
        return route.carry(gradient * factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.route.back().carry(gradient), None


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks along `ep`, each of which has as many experts of a layer.

    Attributes:
        group: of these ranks; no other messages travel in it.
        experts: the number of experts of the layer on all ranks together.
        others_answer: False in a rehearsal, where the messages of other ranks are not there.
    """

    group: dist.ProcessGroup
    experts: int
    others_answer: bool = True

    @property
    def own(self) -> int:
        """The number of experts of each rank."""
        return self.experts // dist.get_world_size(self.group)

    def compute(
        self, run: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: Tensor, choices: Tensor, weights: Tensor
    ) -> Tensor:
        """Computes the experts of this rank's tokens.

        Args:
            run: the code of the model, for tokens of this rank's experts.
            tokens: of this rank.
            choices: the experts of each token; numbers from `experts` on stand for none.
            weights: of the experts, by which their results are multiplied.

        Shape: tokens [T, H], choices [T, K], weights [T, K]; gives [T, H]. `run` gets [R, H], [R, 1], [R, 1].

        Ranks: all of the group, in the forward and in the backward pass.
        """
        num_chosen = choices.shape[1]
        flat = choices.reshape(-1)
        # A stable order, so that the pairs of one expert stay in the order of the tokens.
        order = torch.argsort(flat, stable=True)
        if self.others_answer:
            counts = torch.bincount(flat, minlength=self.experts)[: self.experts]
            route, of_experts = self._route(counts)
            order = order[: sum(route.sent)]  # without pairs of no expert
        else:
            route, of_experts = self._even_route(flat)
        rows_of_pairs = order // num_chosen
        ranks = dist.get_world_size(self.group)
        carried_tokens, carried_weights = _Carry.apply(  # type: ignore[no-untyped-call]
            route, float(ranks), tokens[rows_of_pairs], weights.reshape(-1)[order]
        )
        computed = self._run(run, carried_tokens, of_experts, carried_weights)
        (results,) = _Carry.apply(route.back(), 1 / ranks, computed)  # type: ignore[no-untyped-call]
        return torch.zeros_like(tokens).index_add(0, rows_of_pairs, results.to(tokens.dtype))

    def rows_by_expert(self, experts: Tensor) -> list[Tensor]:
        """Returns the rows of each of this rank's experts, whose numbers are counted here. Shape: experts [R]; each [r]."""
        if not self.others_answer:  # a rehearsal knows no values
            rows = torch.arange(len(experts), device=experts.device)
            return list(rows.tensor_split(self.own))
        counts = torch.bincount(experts, minlength=self.own).tolist()
        return list(torch.argsort(experts, stable=True).split(counts))

    def gather_flags(self, own: list[bool], device: torch.device) -> list[bool]:
        """Returns the flags of the experts of all ranks, from those of this rank's experts. Ranks: all of the group."""
        if not self.others_answer:
            return [True] * self.experts
        flags = torch.tensor(own, dtype=torch.int64, device=device)
        gathered = [torch.empty_like(flags) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, flags, group=self.group)
        return [bool(flag) for flag in torch.cat(gathered).tolist()]

    def _route(self, counts: Tensor) -> tuple[Route, Tensor]:
        """Tells the other ranks how many pairs each of their experts gets. Shape: counts [experts].

        Returns:
            The route, and the expert of each row that arrives, as this rank counts its own. Shape: [R].
        """
        by_rank = counts.view(-1, self.own)
        arriving = torch.empty_like(by_rank)
        dist.all_to_all_single(arriving, by_rank, group=self.group)
        # One copy to the host for both, since an accelerator has to finish its work first.
        sent, received = torch.stack([by_rank.sum(1), arriving.sum(1)]).tolist()
        own_experts = torch.arange(self.own, device=counts.device).repeat(len(arriving))
        return Route(self.group, sent, received), own_experts.repeat_interleave(arriving.view(-1))

    def _even_route(self, pairs: Tensor) -> tuple[Route, Tensor]:
        """Returns what `_route` does if all experts get as many pairs: a rehearsal knows no values. Shape: pairs [P]."""
        ranks = dist.get_world_size(self.group)
        sizes = [len(range(rank, len(pairs), ranks)) for rank in range(ranks)]
        of_experts = torch.arange(len(pairs), device=pairs.device) % self.own
        return Route(self.group, sizes, sizes), of_experts

    def _run(
        self, run: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        """Computes the rows that have arrived. Shape: tokens [R, H], experts [R], weights [R]; gives [R, H]."""
        num_rows = len(tokens)
        if not num_rows:
            # Without a row the code of the model may give a result that depends on nothing, and this rank would leave the
            # others alone in the backward pass. So it gets a row of zeros, whose weight is 0.
            tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
            experts = torch.cat([experts, experts.new_zeros(1)])
            weights = torch.cat([weights, weights.new_zeros(1)])
        return run(tokens, experts[:, None], weights[:, None])[:num_rows]
