"""What `balance` does to a model: the loss by which transformers balances experts is over the tokens of all ranks.

    chosen     how often each expert was chosen, over layers and tokens                            [E]
    shares     the sums of the routers' probabilities                                              [E]
    loss       E * sum(chosen / rows * shares / rows), rows: tokens of all layers

A product of two means over tokens: the mean of what ranks make of their own tokens is not that of the whole batch. So the sums
are added over ranks, with gradients, and each rank has the same loss, which `accelerator.backward` averages.

While the model runs, its code finds another function under the name of transformers' own.

Source of the loss: Fedus et al., "Switch Transformers", JMLR 2022, equations (4) to (6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.parallel.data.peers import PEERS, BatchPeers, SharedBatches
from paceline.parallel.differentiable import Differentiable
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.plan.facts import BALANCE
from paceline.torch_internals.dispatch import has_no_values
from paceline.world.forward import override_forward
from paceline.world.layout import GRADIENT_AXES
from paceline.world.tree import tensors


def apply(model: nn.Module, context: Context) -> AppliedStrategy:
    """Replaces the loss while a model runs that adds it. Ranks: all."""
    all_peers: list[BatchPeers] = []
    present = dict(model.named_modules())  # a pipeline stage lacks some
    group = context.mesh.layers_group(*GRADIENT_AXES)
    for name in context.facts.balanced:
        if name not in present:
            continue
        module = present[name]
        peers = _LossPeers(group, dist.get_world_size(group), context.idle, parts=context.plan.layout.cp)
        if not hasattr(module, PEERS):
            override_forward(module, "balance", _balanced_forward)
        setattr(module, PEERS, peers)
        all_peers.append(peers)
    return SharedBatches(model, all_peers)


@dataclass
class _LossPeers(BatchPeers):
    """The ranks whose tokens the loss is computed of.

    Attributes:
        parts: how many ranks divide the positions of a sample in the blocks of the model.
        compared: whether the model's own function was compared with the one in its place.
    """

    parts: int = 1
    compared: bool = False

    def compares(self) -> bool:
        """Returns True once."""
        was_compared = self.compared
        self.compared = True
        return not was_compared


def _balanced_forward(self: nn.Module, original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Stands in the place of the forward of a model that adds the loss. Ranks: all peers, in training."""
    peers: _LossPeers | None = getattr(self, PEERS)
    if peers is None or peers.paused or peers.ranks == 1 or not self.training:
        return original(*args, **kwargs)
    function: Any = unwrap(type(self).forward)
    names = function.__globals__
    own = names[BALANCE]

    def balance(
        gate_logits: object, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        if not isinstance(gate_logits, tuple) or num_experts is None:  # the model has no logits
            return own(gate_logits, num_experts, top_k, attention_mask)
        if peers.parts > 1:
            _refuse_rest(gate_logits[0], attention_mask, tensors((args, kwargs)), peers.parts)
        sums = _sums(gate_logits, num_experts, top_k, attention_mask)
        if peers.compares():
            _compare(_loss(sums), own(gate_logits, num_experts, top_k, attention_mask), self)
        if peers.idle():  # this rank's rows are filler
            sums = sums * 0
        return _loss(_SumOfRanks.call(sums, peers.group))

    names[BALANCE] = balance
    try:
        return original(*args, **kwargs)
    finally:
        names[BALANCE] = own


def _sums(gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None) -> Tensor:
    """Returns what this rank adds: chosen, shares and rows. Shape: logits each [T, E], mask [B, S], B S = T; [2 E + 1]."""
    device = gate_logits[0].device
    sums = torch.zeros(2 * num_experts + 1, device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(-1)
        counted = torch.ones(len(logits), device=device)
        if attention_mask is not None:
            counted = attention_mask.reshape(-1).to(counted)
        of_experts = torch.zeros(num_experts, device=device)
        chosen = of_experts.scatter_add(0, probabilities.topk(top_k).indices.view(-1), counted.repeat_interleave(top_k))
        shares = (probabilities.float() * counted[:, None]).sum(0)
        sums = sums + torch.cat([chosen, shares, counted.sum()[None]])
    return sums


def _loss(sums: Tensor) -> Tensor:
    """Shape: sums [2 E + 1]; returns []."""
    num_experts = len(sums) // 2
    chosen, shares, rows = sums.split([num_experts, num_experts, 1])
    return num_experts * torch.dot(chosen / rows, shares / rows)


def _compare(ours: Tensor, theirs: Tensor, model: nn.Module) -> None:
    """Refuses a model whose own function is another one."""
    ours, theirs = ours.detach(), theirs.detach()
    if has_no_values(ours) or torch.allclose(ours, theirs.to(ours), rtol=1e-3, equal_nan=True):
        return
    raise TrainError(
        "experts-balance",
        f"{type(model).__name__} balances its experts by another loss than the one that is known under its name.",
        why=f"`{BALANCE}` gives {float(theirs):g} for tokens of this rank, and the known one {float(ours):g}",
        fix="call the model with `output_router_logits=False`, and add the loss in the loop, of the rows that "
        "`accelerator.gather(router_logits, with_gradient=True)` returns",
    )


def _refuse_rest(logits: Tensor, mask: Tensor | None, arguments: Sequence[Tensor], parts: int) -> None:
    """Refuses sequences of which ranks have parts that are not alike: there would be logits of positions that only fill.

    Shape: logits [T, E], of this rank's part; mask [B, S]; the first of the arguments is [B, S], or [B, S, D] with numbers.
    """
    inputs = arguments[0]
    whole = inputs.numel() // inputs.shape[-1] if inputs.is_floating_point() else inputs.numel()
    if mask is None and len(logits) * parts == whole:
        return
    raise TrainError(
        "experts-sequence",
        "the loss that balances experts cannot be computed of these parts of sequences.",
        why=f"cp={parts} divides sequences; "
        + ("the batch has an attention mask" if mask is not None else "their length is no multiple of 2 * cp"),
        fix=f"give the model sequences without padding, whose length is a multiple of {2 * parts}; or call it with "
        "`output_router_logits=False`",
    )


class _SumOfRanks(Differentiable):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _SumOfRanks.call(gradient, ctx.group), None
