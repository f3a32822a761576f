"""Experts that are modules of a list: which tokens each of them gets is written in the layer that calls them.

    route      the layer runs once, where each expert only notes its tokens and returns zeros
    weights    each rank gets the weights of its own experts whole; between passes it has some rows of each expert
    compute    all noted tokens travel to the ranks of their experts at once (`travel`), which call them, and back
    answer     the layer runs again, where each expert returns the results of the tokens that it had noted

What an expert computes must not depend on the experts before it. The first run draws the same random numbers as the second one,
and changes no buffer. Weights are divided by rows, since each of them stays a tensor with a name of its own, of which every
rank along `ep` holds a part: as a DTensor, which checkpoints, norms and optimizers know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from paceline.base.errors import TrainError
from paceline.torch_internals.modules import buffer_table, parameter_table
from paceline.world.forward import override_forward
from paceline.world.sharded import is_sharded, local
from paceline.world.tree import map_tensors, tensors
from paceline_large.experts.travel import ExpertRanks, Route
from paceline_large.hooks_on_parts import HooksOnParts


@dataclass
class _Calls:
    """What the experts of a layer are called with, in the order of the calls.

    Attributes:
        numbers: of the experts.
        tokens: Shape: each [..., H].
        results: of the tokens; None as long as calls are noted.
    """

    numbers: list[int] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    results: Iterator[tuple[int, Tensor]] | None = None


class ListedExperts:
    """The experts of one layer, which are modules of a list.

    Args:
        layer: the module whose forward calls the experts.
        experts: their names in it.
        ranks: that divide them.
        dtype: in which the experts compute; None for that of their weights.
    """

    def __init__(self, layer: nn.Module, experts: Sequence[str], ranks: ExpertRanks, dtype: torch.dtype | None) -> None:
        self._experts = experts
        self._ranks = ranks
        self._dtype = dtype
        self._calls: _Calls | None = None  # while the layer runs
        self._hooks = HooksOnParts(
            "the tokens of all processes along `ep`, on the one that computes this expert: what it keeps for a loss is missing "
            "on the others. Take the output of the layer."
        )
        for number, name in enumerate(experts):
            for inner_name, inner in layer.get_submodule(name).named_modules(prefix=f"{type(layer).__name__}.{name}"):
                self._hooks.add(inner_name, inner)
            override_forward(layer.get_submodule(name), "experts", self._expert_forward(number))
        override_forward(layer, "experts", self._layer_forward)

    def _layer_forward(self, layer: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stands in the place of the layer's forward. Ranks: all that divide the experts."""
        experts = [layer.get_submodule(name) for name in self._experts]
        if not _are_divided(experts):  # all experts are on this rank at the moment
            return original(*args, **kwargs)
        self._hooks.look()
        noted = _Calls()
        with self._answering(noted), _without_traces(layer, tensors((args, kwargs))):
            # In a context without variables, in which transformers keeps what it records of a pass, such as router logits.
            Context().run(original, *args, **kwargs)
        # Some of the layer's input without a row, so that this rank takes part in both passes without a call, too.
        first = next(tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point())
        results = self._computed(experts, noted, first.reshape(-1, first.shape[-1])[:0])
        with self._answering(_Calls(results=iter(zip(noted.numbers, results, strict=False)))):
            output = original(*args, **kwargs)
        if noted.numbers:
            return output
        return map_tensors(lambda tensor: tensor + results[0].sum() if tensor.is_floating_point() else tensor, output)

    @contextmanager
    def _answering(self, calls: _Calls) -> Iterator[None]:
        """While it is open, calls of experts are noted in `calls`, or are answered from its results."""
        self._calls = calls
        try:
            yield
        finally:
            self._calls = None

    def _expert_forward(self, number: int) -> Callable[..., Any]:
        """Returns what stands in the place of an expert's forward."""

        def forward(expert: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls = self._calls
            if calls is None and not _are_divided([expert]):
                return original(*args, **kwargs)
            if calls is None or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
                raise TrainError(
                    "experts-call",
                    f"expert {number}, a {type(expert).__name__}, was called in a way that cannot be sent to its rank.",
                    why="an expert of a list is called inside of its layer's forward, with the tokens as its only argument",
                    fix="call it so: `self.experts[i](tokens)`; or stack the weights of the experts in one module",
                )
            if calls.results is None:
                calls.numbers.append(number)
                calls.tokens.append(args[0])
                return torch.zeros_like(args[0])
            noted, result = next(calls.results, (-1, args[0]))
            if noted != number or result.shape[:-1] != args[0].shape[:-1]:
                raise TrainError(
                    "experts-call",
                    f"expert {number}, a {type(expert).__name__}, got other tokens than when its layer ran before.",
                    why="a layer with a list of experts runs twice; which expert gets a token must be the same both times",
                    fix="let it depend on the layer's input, weights and torch's random numbers alone",
                )
            return result

        return forward

    def _computed(self, experts: list[nn.Module], noted: _Calls, no_row: Tensor) -> list[Tensor]:
        """Returns the results of the noted tokens, and at the end some without a row. Shape: no_row [0, H]."""
        rows = [tokens.reshape(-1, tokens.shape[-1]) for tokens in noted.tokens]
        tokens = torch.cat([*rows, no_row])
        numbers = torch.tensor(noted.numbers, dtype=torch.long, device=tokens.device)
        counts = torch.tensor([len(row) for row in rows], dtype=torch.long, device=tokens.device)
        choices = numbers.repeat_interleave(counts, output_size=len(tokens))

        def run(tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
            return self._run(experts, tokens, choices[:, 0], weights[:, 0])

        results = self._ranks.compute(run, tokens, choices[:, None], tokens.new_ones(len(tokens), 1))
        parts = results.split([len(row) for row in [*rows, no_row]])
        shapes = [row.shape for row in [*noted.tokens, no_row]]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _run(self, experts: list[nn.Module], tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Calls this rank's experts. Shape: tokens [R, H], choices [R], weights [R], 0 for a row of nobody; gives [R, H]."""
        by_expert = self._ranks.rows_by_expert(choices)
        used = [bool(len(rows)) for rows in by_expert]
        if self._ranks.others_answer and not weights.any():
            used = [False] * len(used)
        first = dist.get_rank(self._ranks.group) * self._ranks.own
        own = experts[first : first + self._ranks.own]
        results = []
        for expert, whole, rows in zip(own, self._whole_weights(experts, used), by_expert, strict=True):
            if len(rows):
                with _parameters_replaced(expert, whole):
                    results.append(expert(tokens[rows]))
        order = torch.cat(by_expert)
        computed = torch.cat(results)
        return torch.zeros_like(computed).index_copy(0, order, computed)

    def _whole_weights(self, experts: list[nn.Module], used: list[bool]) -> list[list[Tensor]]:
        """Returns the weights of each of this rank's experts. Ranks: all that divide the experts."""
        shapes = [parameter.shape for parameter in experts[0].parameters()]
        device = next(experts[0].parameters()).device
        parts = []
        for expert, is_used in zip(experts, self._ranks.gather_flags(used, device), strict=True):
            for parameter in expert.parameters():
                assert is_sharded(parameter)
                # An expert that gets no token of any rank has no gradient: optimizers skip it, as on one process.
                part = parameter.to_local() if is_used else local(parameter.detach())
                parts.append(part.to(self._dtype or parameter.dtype))
        whole = _WholeWeights.apply(self._ranks.group, shapes, *parts)  # type: ignore[no-untyped-call]
        return [list(whole[at : at + len(shapes)]) for at in range(0, len(whole), len(shapes))]


class _WholeWeights(Function):
    """Gives each rank all rows of the weights of its own experts, for some rows of those of all; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, shapes: list[torch.Size], *parts: Tensor) -> tuple[Tensor, ...]:
        """Shape: parts are [some rows, ...] by expert and weight; gives [rows, ...] of this rank's experts."""
        ranks = dist.get_world_size(group)
        num_experts = len(parts) // len(shapes) // ranks  # of each rank
        # What each rank has of the weights of one expert, and its number of elements for all experts of a rank.
        sizes_by_rank: list[list[torch.Size]] = []
        numbers: list[int] = []
        for rank in range(ranks):
            sizes = [_part(shape, rank, ranks) for shape in shapes]
            sizes_by_rank.append(sizes)
            numbers.append(num_experts * sum(size.numel() for size in sizes))
        # Every rank gets as much of this one, and this one from each rank what that has.
        sent = [numbers[dist.get_rank(group)]] * ranks
        ctx.route = Route(group, sent, numbers)
        ctx.part_sizes = [part.shape for part in parts]
        ctx.whole_sizes = sizes_by_rank
        flat = torch.cat([part.reshape(-1) for part in parts])
        arrived = ctx.route.carry(flat).split(numbers)
        pieces_by_rank: list[list[Tensor]] = []
        for of_rank, sizes in zip(arrived, sizes_by_rank, strict=True):
            pieces_by_rank.append(_pieces(of_rank, sizes * num_experts))
        return tuple(torch.cat(rows) for rows in zip(*pieces_by_rank, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        num_weights = len(ctx.whole_sizes[0])
        by_rank: list[list[Tensor]] = [[] for _ in ctx.whole_sizes]
        for number, gradient in enumerate(gradients):
            rows = [of_rank[number % num_weights][0] for of_rank in ctx.whole_sizes]
            for pieces, part in zip(by_rank, gradient.split(rows), strict=True):
                pieces.append(part.reshape(-1))
        arrived = ctx.route.back().carry(torch.cat([piece for pieces in by_rank for piece in pieces]))
        returned = _pieces(arrived, ctx.part_sizes)
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(gradient if is_needed else None for gradient, is_needed in zip(returned, needed, strict=True)),
        )


def _part(shape: torch.Size, rank: int, ranks: int) -> torch.Size:
    """Returns the shape of a rank's rows of a weight, as `Shard(0)` divides it."""
    most = -(-shape[0] // ranks)
    rows = min(max(shape[0] - rank * most, 0), most)
    return torch.Size([rows, *shape[1:]])


def _pieces(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cuts a vector into tensors of these shapes."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _are_divided(experts: Sequence[nn.Module]) -> bool:
    return any(is_sharded(parameter) for expert in experts for parameter in expert.parameters())


@contextmanager
def _parameters_replaced(expert: nn.Module, whole: list[Tensor]) -> Iterator[None]:
    """While it is open, an expert has these tensors in the place of its parameters."""
    replaced = []
    values = iter(whole)
    for module in expert.modules():
        table = parameter_table(module)
        for name, parameter in table.items():
            if parameter is not None:
                replaced.append((table, name, parameter))
                table[name] = next(values)
    try:
        yield
    finally:
        for table, name, parameter in replaced:
            table[name] = parameter


@contextmanager
def _without_traces(layer: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """While it is open, what a layer does to its buffers and to the random numbers is undone at the end."""
    kept = []
    for module in layer.modules():
        table = buffer_table(module)
        kept.append((table, dict(table)))
        for name, buffer in table.items():
            if buffer is not None:
                table[name] = buffer.clone()
    devices = {tensor.device for tensor in inputs if tensor.device.type not in ("cpu", "meta")}
    forked: Any = nullcontext()
    if not any(tensor.is_meta for tensor in inputs):
        device_type = next((device.type for device in devices), "cuda")  # the default, not used without devices
        forked = torch.random.fork_rng(list(devices), device_type=device_type)
    try:
        with forked:
            yield
    finally:
        for table, before in kept:
            table.clear()
            table.update(before)
