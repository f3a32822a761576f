"""`Window`: gradients that no optimizer has stepped yet, of an accumulation window that is open when a state is saved.

window/RANK/MODEL/NAME              what lies in `.grad` on that rank
window/RANK/MODEL/NAME:STRATEGY     what a strategy keeps beside it

same layout       every rank takes back its own, bit by bit
another layout    each parameter gets the weighed sum of all ranks' parts: what the gradient would be if the window ended
                  here. Every strategy takes it for a gradient that was reduced before, and adds the rest of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.base.errors import Problem
from paceline.checkpoint.state.codec import Encoder
from paceline.world.parts import Part, part_of_whole, regions
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import is_sharded, local, part_like

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
Box = tuple[slice, ...]


class Counters(Protocol):
    """The owner of gradient scale."""

    def window_state(self) -> dict[str, Any]:
        """Where the window stands; the same on all ranks, `items` aside."""

    def load_window(self, state: Mapping[str, Any] | None) -> None:
        """Goes on in that window, or begins a new one."""


@dataclass(frozen=True)
class Gradients:
    """One model's.

    Attributes:
        parameters: gives them by name.
        pending: what strategies keep, by their names.
        restore_pending: gives that back; without any, what they keep is dropped.
        layout: models with an equal one are divided alike.
        ranks: that hold gradients of one parameter which differ, or are divided: all but those along `pp`.
        stale: whether an optimizer has stepped a parameter's gradient, or cleared it, since the last backward pass.
    """

    parameters: Callable[[], Mapping[str, Tensor]]
    pending: Callable[[], Mapping[str, PendingGradients]]
    restore_pending: Callable[[Mapping[str, PendingGradients]], None]
    layout: str
    ranks: int
    stale: Callable[[Tensor], bool]


@dataclass
class Window:
    """The gradients of all models, and where their window stands.

    Attributes:
        models: by name.
        counters: of the window.
        index: which share of each batch this rank reads.
        width: how many shares there are.
        apart: whether ranks have parameters of their own, so that their gradients do not belong together.
    """

    models: Mapping[str, Gradients]
    counters: Counters
    index: int = 0
    width: int = 1
    apart: bool = False
    _own: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    _sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def layout(self) -> dict[str, str]:
        """How each model is divided."""
        return {name: model.layout for name, model in self.models.items()}

    # -- save ------------------------------------------------------------------------------------------------

    def encode(self, encoder: Encoder, rank: int) -> dict[str, Any]:
        """JSON; empty where no window is open and no gradient waits."""
        counters = dict(self.counters.window_state())
        items = counters.pop("items")
        parts: dict[str, Any] = {}
        open_strategies: dict[str, list[str]] = {}
        for model, gradients in self.models.items():
            pending_of = gradients.pending()
            for name, parameter in gradients.parameters().items():
                if gradients.stale(parameter):
                    continue
                path = f"{model}/{name}"
                # `.grad` may be the very tensor that a strategy keeps, which is written once.
                kept_by_strategy = any(
                    pending.gradients.get(parameter) is parameter.grad for pending in pending_of.values()
                )
                if parameter.grad is not None and not kept_by_strategy:
                    # Once a strategy has summed a gradient over `equal` ranks, each of them holds the sum.
                    equal = 1
                    for pending in pending_of.values():
                        if not pending.open:
                            equal = max(equal, pending.equal.get(parameter, 1))
                    parts[path] = _entry(encoder, f"window/{rank}/{path}", parameter.grad, gradients.ranks * equal)
                for strategy, pending in pending_of.items():
                    if parameter in pending.gradients:
                        equal = pending.equal.get(parameter, 1) if pending.open else 1
                        key = f"{path}:{strategy}"
                        tensor = pending.gradients[parameter]
                        parts[key] = _entry(encoder, f"window/{rank}/{key}", tensor, gradients.ranks * equal)
            open_strategies[model] = [strategy for strategy, pending in pending_of.items() if pending.open]
        if counters["sync"] and not parts:
            return {}
        own = {"items": items, "index": self.index, "open": open_strategies, "parts": parts}
        shared = {"layout": self.layout, "width": self.width, "apart": self.apart, "counters": counters}
        return {**shared, "ranks": {str(rank): own}}

    # -- load ------------------------------------------------------------------------------------------------

    def match(self, saved: Mapping[str, Any], shapes: Shapes, rank: int) -> tuple[dict[str, Tensor], list[Problem]]:
        """Empty tensors for this rank's own parts, where the layout is the same; and what is wrong.

        Args:
            saved: what `encode` gave, of all ranks; empty where no window was open.
            shapes: shape and dtype of each tensor of the checkpoint.
            rank: of this process.
        """
        if not saved:
            return {}, []
        if not self._alike(saved):
            return {}, [_apart_problem()] if saved["apart"] else []
        targets: dict[str, Tensor] = {}
        for part in _own(saved, rank)["parts"].values():
            path = part["tensor"]["$tensor"]
            shape, dtype = shapes[path]
            targets[path] = torch.empty(shape, dtype=dtype)
        return targets, []

    def _alike(self, saved: Mapping[str, Any]) -> bool:
        alike: bool = saved["layout"] == self.layout and saved["width"] == self.width
        return alike

    def sums(self, saved: Mapping[str, Any], shapes: Shapes, factor: float) -> Iterator[dict[str, Tensor]]:
        """Where the layout is another: adds up what the ranks held. Gives tensors to read into, few at a time.

        Args:
            saved, shapes: see `match`.
            factor: what gradients are multiplied by.

        At most one whole parameter is in memory besides this rank's own gradients.
        """
        self._sums = []
        if not saved or self._alike(saved):
            return
        counts_items = any(own["items"] is not None for own in saved["ranks"].values())
        if counts_items and saved["counters"]["divisor"] is not None:
            factor *= saved["width"] / self.width  # the window's end multiplies by the width that there will be
        for model, gradients in self.models.items():
            # FSDP2 may show whole parameters within a window; asked for what it keeps, it shows its shards again.
            gradients.pending()
            for name, parameter in gradients.parameters().items():
                parts = _parts_of(saved, f"{model}/{name}")
                if not parts or not parameter.requires_grad:
                    continue
                mine = part_of_whole(parameter)
                # Parts of many ranks are added up: in half precision each sum would lose bits.
                wide = torch.promote_types(parameter.dtype, torch.float32)
                total = torch.zeros(local(parameter).shape, dtype=wide)
                for part in parts:
                    path = part["tensor"]["$tensor"]
                    shape, dtype = shapes[path]
                    read = torch.empty(shape, dtype=dtype)
                    yield {path: read}
                    _add(total, mine, read, _part_from_json(part["part"]), factor / part["share"])
                self._sums.append((parameter, total.to(parameter.dtype)))

    def apply(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int, factor: float) -> None:
        """Puts gradients and counters back; without any in the checkpoint, a new window begins.

        Args:
            saved: see `match`.
            tensors: those that `match` named, read.
            rank: of this process.
            factor: what gradients are multiplied by.

        Ranks: all; communicates where some strategy must gather parameters before it can hold gradients.
        """
        own: Mapping[str, Any] | None = None
        if saved and self._alike(saved):
            own = _own(saved, rank)
        for model, gradients in self.models.items():
            gradients.restore_pending({})
            for parameter in gradients.parameters().values():
                parameter.grad = None
            if own is not None:
                self._give_back(model, gradients, own, tensors, factor)
        for parameter, total in self._sums:
            parameter.grad = part_like(total.to(local(parameter).device), parameter)
        self._sums = []
        counters: dict[str, Any] | None = None
        if saved:
            counters = {**saved["counters"], "items": self._items(saved, own)}
        self.counters.load_window(counters)

    def _give_back(
        self, model: str, gradients: Gradients, own: Mapping[str, Any], tensors: Mapping[str, Tensor], factor: float
    ) -> None:
        """Gives one model what this rank held: gradients in `.grad`, and what its strategies kept beside them."""
        pending_of: dict[str, tuple[dict[Tensor, Tensor], dict[Tensor, tuple[Any, ...]]]] = {}
        for name, parameter in gradients.parameters().items():
            for key, part in own["parts"].items():
                path, _, strategy = key.partition(":")
                if path != f"{model}/{name}":
                    continue
                tensor = tensors[part["tensor"]["$tensor"]].to(local(parameter).device)
                if factor != 1.0:
                    tensor = tensor * factor
                placements: tuple[Any, ...] | None = None
                if part["placements"] is not None:
                    placements = tuple(map(_placement, part["placements"]))
                if not strategy:
                    parameter.grad = part_like(tensor, parameter, placements)
                    continue
                values, placements_of = pending_of.setdefault(strategy, ({}, {}))
                values[parameter] = tensor
                if placements is not None:
                    placements_of[parameter] = placements
        opened = own["open"].get(model, [])
        for strategy in opened:
            pending_of.setdefault(strategy, ({}, {}))
        pending: dict[str, PendingGradients] = {}
        for strategy, (values, placements_of) in pending_of.items():
            pending[strategy] = PendingGradients(values, placements_of, open=strategy in opened)
        gradients.restore_pending(pending)

    def _items(self, saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> int | None:
        """Items that count for this rank; at another width the first share has those of all."""
        if own is not None:
            items: int | None = own["items"]
            return items
        by_share = {of_rank["index"]: of_rank["items"] for of_rank in saved["ranks"].values()}
        if any(items is None for items in by_share.values()):
            return None
        return sum(by_share.values()) if self.index == 0 else 0


def _own(saved: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """What this rank held; between windows, one on which no gradient waited (a frozen stage, say) has told nothing."""
    nothing: dict[str, Any] = {"items": None, "index": rank, "open": {}, "parts": {}}
    own: Mapping[str, Any] = saved["ranks"].get(str(rank), nothing)
    return own


def _parts_of(saved: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    """What all ranks held of one parameter's gradient, in `.grad` and in their strategies."""
    parts: list[Mapping[str, Any]] = []
    for own in saved["ranks"].values():
        parts += [part for key, part in own["parts"].items() if key.partition(":")[0] == path]
    return parts


def _part_from_json(described: list[list[list[int]]]) -> Part:
    """A `Part`, of which JSON has made lists."""
    return tuple(tuple((start, stop) for start, stop in runs) for runs in described)


def _entry(encoder: Encoder, path: str, gradient: Tensor, ranks: int) -> dict[str, Any]:
    """One gradient: which part of the whole it is, and by what it is divided where all ranks' parts are added up."""
    placements: list[list[Any]] | None = None
    share = ranks
    placed = gradient
    if is_sharded(gradient):
        from torch.distributed.tensor import Replicate

        placements = []
        reduced: list[Any] = []
        for axis, placement in enumerate(gradient.placements):
            placements.append(_described(placement))
            reduced.append(Replicate() if placement.is_partial() else placement)
            # Shards, and parts that are to be summed, add up to the whole once over the axis. Copies do so once for each
            # rank, and so do parts of a mean.
            if not (placement.is_replicate() or getattr(placement, "reduce_op", "sum") == "avg"):
                share //= gradient.device_mesh.size(axis)
        placed = part_like(local(gradient), gradient, reduced)
    return {
        "tensor": encoder.encode(local(gradient), path),
        "part": part_of_whole(placed),
        "share": share,
        "placements": placements,
    }


def _add(total: Tensor, own_part: Part, read: Tensor, read_part: Part, weight: float) -> None:
    """Adds what two parts of one whole have in common."""
    for read_box, box_in_read in regions(read_part):
        for own_box, box_in_own in regions(own_part):
            pairs = zip(read_box, own_box, strict=True)
            common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
            if any(run.start >= run.stop for run in common):
                continue
            source = _shifted(common, read_box, box_in_read)
            target = _shifted(common, own_box, box_in_own)
            total[target].add_(read[source].to(total.dtype), alpha=weight)


def _shifted(box: Box, whole: Box, own: Box) -> Box:
    """A box of the whole, counted as in a rank's own tensor, where the box `whole` is `own`."""
    offsets = [b.start - a.start for a, b in zip(whole, own, strict=True)]
    return tuple(slice(run.start + offset, run.stop + offset) for run, offset in zip(box, offsets, strict=True))


def _described(placement: Any) -> list[Any]:
    if placement.is_partial():
        return ["partial", placement.reduce_op]
    if placement.is_replicate():
        return ["replicate"]
    factor = getattr(placement, "split_factor", None)
    return ["shard", placement.dim] if factor is None else ["strided", placement.dim, factor]


def _placement(described: list[Any]) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds: dict[str, Any] = {
        "partial": Partial,
        "replicate": Replicate,
        "shard": Shard,
        "strided": lambda dim, factor: _StridedShard(dim, split_factor=factor),
    }
    kind, *arguments = described
    return kinds[kind](*arguments)


def _apart_problem() -> Problem:
    return Problem(
        "checkpoint-window",
        "the checkpoint was saved in the middle of an accumulation window, of which another layout cannot take the rest.",
        why="ranks had parameters of their own (LocalSGD, between two averages), so their gradients have no common mean",
        fix="load it under the layout that saved it; or save at the end of a window, after an average",
    )
