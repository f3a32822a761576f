"""`WindowState`: gradients that no optimizer has stepped yet, if a state is saved in an open accumulation window.

window/RANK/MODEL/NAME              the gradient in `.grad` on that rank
window/RANK/MODEL/NAME:STRATEGY     the gradient that a strategy holds beside it
window/RANK/MODEL/NAME#NUMBER       what of these is older than the window (nobody has cleared it)

same layout       every rank loads its own gradients, with the same bits
another layout    each parameter gets the weighted sum of all ranks' parts, which is its gradient if the window ended here.
                  Strategies treat it as a gradient that was reduced before, and add the rest of the window to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
        """Returns the state of the windows; the same on all ranks, except for `counts`."""

    def older_gradients(self) -> Mapping[Tensor, Sequence[Tensor]]:
        """Returns copies of gradients from before the open windows, by parameter."""

    def load_window(self, state: Mapping[str, Any] | None, older: Mapping[Tensor, Sequence[Tensor]]) -> None:
        """Continues windows from their state, or begins new ones."""


@dataclass(frozen=True)
class WindowGradients:
    """The gradients of one model.

    Attributes:
        parameters: returns the parameters by name.
        pending: returns the gradients that strategies hold beside `.grad`, by the names of the strategies.
        restore_pending: restores these gradients; strategies that are not named drop theirs.
        layout: a description of the layout; models with equal descriptions are divided in the same way.
        ranks: the number of ranks that hold different gradients, or different parts, of one parameter: all except for `pp`.
        stale: returns whether a parameter's gradient was stepped or cleared since the last backward pass.
    """

    parameters: Callable[[], Mapping[str, Tensor]]
    pending: Callable[[], Mapping[str, PendingGradients]]
    restore_pending: Callable[[Mapping[str, PendingGradients]], None]
    layout: str
    ranks: int
    stale: Callable[[Tensor], bool]


@dataclass
class WindowState:
    """The gradients of all models, and the state of their window.

    Attributes:
        models: the gradients of each model, by its name.
        counters: the owner of the window's counters.
        index: the part of each batch that this rank reads.
        width: the number of parts.
        apart: whether ranks have different values of the same parameters (LocalSGD), so that gradients cannot be summed.
    """

    models: Mapping[str, WindowGradients]
    counters: Counters
    index: int = 0
    width: int = 1
    apart: bool = False
    _sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _older: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def layout(self) -> dict[str, str]:
        """How each model is divided."""
        return {name: model.layout for name, model in self.models.items()}

    # -- save ------------------------------------------------------------------------------------------------

    def encode(self, encoder: Encoder, rank: int) -> dict[str, Any]:
        """Returns JSON; empty if no window is open and no gradient is left to step."""
        counters = dict(self.counters.window_state())
        counts = counters.pop("counts")
        parts: dict[str, Any] = {}
        older: dict[str, Any] = {}
        older_of = self.counters.older_gradients()
        open_strategies: dict[str, list[str]] = {}
        for model, gradients in self.models.items():
            pending_of = gradients.pending()
            for name, parameter in gradients.parameters().items():
                if gradients.stale(parameter):
                    continue
                path = f"{model}/{name}"
                # A strategy may hold the same tensor as `.grad`, which is written once only.
                is_pending = any(pending.gradients.get(parameter) is parameter.grad for pending in pending_of.values())
                # Once a strategy has summed a gradient over `equal` ranks, each of them holds the sum.
                equal = 1
                for pending in pending_of.values():
                    if not pending.open:
                        equal = max(equal, pending.equal.get(parameter, 1))
                if parameter.grad is not None and not is_pending:
                    parts[path] = _entry(encoder, f"window/{rank}/{path}", parameter.grad, gradients.ranks * equal)
                for number, copy in enumerate(older_of.get(parameter, ())):
                    key = f"{path}#{number}"
                    older[key] = _entry(encoder, f"window/{rank}/{key}", copy, gradients.ranks * equal)
                for strategy, pending in pending_of.items():
                    if parameter in pending.gradients:
                        # While a strategy waits for the sum over the stages (`open`), `equal` ranks along `pp` hold this same
                        # value, and each of them adds it when all parts are summed.
                        equal = pending.equal.get(parameter, 1) if pending.open else 1
                        key = f"{path}:{strategy}"
                        tensor = pending.gradients[parameter]
                        parts[key] = _entry(encoder, f"window/{rank}/{key}", tensor, gradients.ranks * equal)
            open_strategies[model] = [strategy for strategy, pending in pending_of.items() if pending.open]
        if counters["sync"] and not parts:
            return {}
        own = {"counts": counts, "index": self.index, "open": open_strategies, "parts": parts, "older": older}
        shared = {"layout": self.layout, "width": self.width, "apart": self.apart, "counters": counters}
        return {**shared, "ranks": {str(rank): own}}

    # -- load ------------------------------------------------------------------------------------------------

    def match(self, saved: Mapping[str, Any], shapes: Shapes, rank: int) -> tuple[dict[str, Tensor], list[Problem]]:
        """Returns tensors to read this rank's own gradients into, if the layout is the same; and problems.

        Args:
            saved: the merged results of `encode` of all ranks; empty if no window was open.
            shapes: shape and dtype of each tensor of the checkpoint.
            rank: of this process.
        """
        if not saved:
            return {}, []
        if not self._alike(saved):
            return {}, [_apart_problem()] if saved["apart"] else []
        targets: dict[str, Tensor] = {}
        own = _own(saved, rank)
        for part in (*own["parts"].values(), *own["older"].values()):
            path = part["tensor"]["$tensor"]
            shape, dtype = shapes[path]
            targets[path] = torch.empty(shape, dtype=dtype)
        return targets, []

    def _alike(self, saved: Mapping[str, Any]) -> bool:
        alike: bool = saved["layout"] == self.layout and saved["width"] == self.width
        return alike

    def sums(self, saved: Mapping[str, Any], shapes: Shapes, factor: float) -> Iterator[dict[str, Tensor]]:
        """Sums the gradients of all ranks, if the layout is another one. Yields tensors to read into, one at a time.

        Args:
            saved, shapes: see `match`.
            factor: a factor for gradients.

        Besides this rank's own gradients at most one unsharded parameter is in memory.
        """
        self._sums = []
        self._older = []
        if not saved or self._alike(saved):
            return
        # The end of a window that counts items multiplies by the width that there will be, but not what is older than it.
        ratio = saved["width"] / self.width if _counts_items(saved["counters"]) else 1.0
        for model, gradients in self.models.items():
            # FSDP2 may keep parameters unsharded within a window. This call reshards them.
            gradients.pending()
            for name, parameter in gradients.parameters().items():
                parts = _entries_of(saved, "parts", f"{model}/{name}", ":")
                if not parts or not parameter.requires_grad:
                    continue
                total = yield from _summed(parameter, parts, shapes, factor * ratio)
                older = _entries_of(saved, "older", f"{model}/{name}", "#")
                if older:
                    of_before = yield from _summed(parameter, older, shapes, factor)
                    total += (1 - ratio) * of_before
                    self._older.append((parameter, of_before.to(parameter.dtype)))
                self._sums.append((parameter, total.to(parameter.dtype)))

    def apply(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int, factor: float) -> None:
        """Restores gradients and counters; if the checkpoint has none, a new window begins.

        Args:
            saved: see `match`.
            tensors: the tensors that `match` has returned, after they were read.
            rank: of this process.
            factor: a factor for gradients.

        Ranks: all; it communicates if a strategy must gather parameters before it can hold gradients.
        """
        own: Mapping[str, Any] | None = None
        if saved and self._alike(saved):
            own = _own(saved, rank)
        older: dict[Tensor, list[Tensor]] = {}
        for model, gradients in self.models.items():
            # What this run has accumulated so far is dropped, also where the checkpoint has no gradients.
            gradients.restore_pending({})
            for parameter in gradients.parameters().values():
                parameter.grad = None
            if own is not None:
                self._give_back(model, gradients, own, tensors, factor)
                older |= _older_of(model, gradients, own, tensors, factor)
        for parameter, total in self._sums:
            parameter.grad = part_like(total.to(local(parameter).device), parameter)
        for parameter, total in self._older:
            older[parameter] = [part_like(total.to(local(parameter).device), parameter)]
        self._sums = []
        self._older = []
        counters: dict[str, Any] | None = None
        if saved:
            counters = {**saved["counters"], "counts": self._counts(saved, own)}
        self.counters.load_window(counters, older)

    def _give_back(
        self,
        model: str,
        gradients: WindowGradients,
        own: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        factor: float,
    ) -> None:
        """Restores this rank's gradients of one model: in `.grad`, and those that its strategies hold beside it."""
        pending_of: dict[str, tuple[dict[Tensor, Tensor], dict[Tensor, tuple[Any, ...]]]] = {}
        for name, parameter in gradients.parameters().items():
            for key, part in own["parts"].items():
                path, _, strategy = key.partition(":")
                if path != f"{model}/{name}":
                    continue
                tensor, placements = _read(part, tensors, parameter, factor)
                if not strategy:
                    parameter.grad = part_like(tensor, parameter, placements)
                    continue
                values, placements_of = pending_of.setdefault(strategy, ({}, {}))
                values[parameter] = tensor
                if placements is not None:
                    placements_of[parameter] = placements
        opened = own["open"].get(model, [])
        # A strategy may have an open window in which it holds no gradient yet.
        for strategy in opened:
            pending_of.setdefault(strategy, ({}, {}))
        pending: dict[str, PendingGradients] = {}
        for strategy, (values, placements_of) in pending_of.items():
            pending[strategy] = PendingGradients(values, placements_of, open=strategy in opened)
        gradients.restore_pending(pending)

    def _counts(self, saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> list[list[float | None]]:
        """Returns what this rank has counted of each mean. With another number of ranks, the first one gets the sum of all."""
        if own is not None and own["counts"] is not None:
            counts: list[list[float | None]] = own["counts"]
            return counts
        # Ranks with the same index read the same part of each batch, so what they have is counted once.
        by_share = {of_rank["index"]: of_rank["counts"] for of_rank in saved["ranks"].values()}
        summed: list[list[float | None]] = []
        for of_window in zip(*by_share.values(), strict=True):
            sums: list[float | None] = []
            for of_mean in zip(*of_window, strict=True):
                counts_here = [count for count in of_mean if count is not None]
                total = sum(counts_here) if self.index == 0 else 0.0
                sums.append(total if counts_here else None)
            summed.append(sums)
        return summed


def _counts_items(counters: Mapping[str, Any]) -> bool:
    """Returns whether gradients of an open window are parts of a mean over items."""
    means = [mean for window in counters["windows"] for mean in window["means"]]
    return any(mean["kind"] == "items" for mean in means)


def _own(saved: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Returns the saved state of this rank; an empty one if it had no gradients, as a stage with frozen parameters."""
    nothing: dict[str, Any] = {"counts": None, "index": rank, "open": {}, "parts": {}, "older": {}}
    own: Mapping[str, Any] = saved["ranks"].get(str(rank), nothing)
    return own


def _read(
    entry: Mapping[str, Any], tensors: Mapping[str, Tensor], parameter: Tensor, factor: float
) -> tuple[Tensor, tuple[Any, ...] | None]:
    """Returns the tensor of an entry on the parameter's device, times a factor, and its placements if it was a DTensor."""
    tensor = tensors[entry["tensor"]["$tensor"]].to(local(parameter).device)
    if factor != 1.0:
        tensor = tensor * factor
    if entry["placements"] is None:
        return tensor, None
    return tensor, tuple(map(_placement, entry["placements"]))


def _older_of(
    model: str, gradients: WindowGradients, own: Mapping[str, Any], tensors: Mapping[str, Tensor], factor: float
) -> dict[Tensor, list[Tensor]]:
    """Returns what this rank's gradients of one model have from before the window, divided as these gradients are."""
    older: dict[Tensor, list[Tensor]] = {}
    if not own["older"]:
        return older
    pending_of = gradients.pending().values()
    for name, parameter in gradients.parameters().items():
        for key, entry in own["older"].items():
            if key.partition("#")[0] != f"{model}/{name}":
                continue
            tensor, placements = _read(entry, tensors, parameter, factor)
            gradients_here = [parameter.grad, *(pending.gradients.get(parameter) for pending in pending_of), parameter]
            like = next((gradient for gradient in gradients_here if is_sharded(gradient)), None)
            older.setdefault(parameter, []).append(part_like(tensor, like, placements))
    return older


def _summed(
    parameter: Tensor, entries: Sequence[Mapping[str, Any]], shapes: Shapes, factor: float
) -> Generator[dict[str, Tensor], None, Tensor]:
    """Yields tensors to read entries into, one after the other; returns their sum, in the shape of this rank's shard."""
    mine = part_of_whole(parameter)
    # Sums over many ranks would lose precision in half precision.
    total = torch.zeros(local(parameter).shape, dtype=torch.promote_types(parameter.dtype, torch.float32))
    for entry in entries:
        path = entry["tensor"]["$tensor"]
        shape, dtype = shapes[path]
        # It has the shape of the shard of the rank that saved it.
        read = torch.empty(shape, dtype=dtype)
        # The caller reads the file into this tensor before it asks for the next one.
        yield {path: read}
        _add(total, mine, read, _part_from_json(entry["part"]), factor / entry["share"])
    return total


def _entries_of(saved: Mapping[str, Any], kind: str, path: str, separator: str) -> list[Mapping[str, Any]]:
    """Returns the entries of one parameter on all ranks.

    Args:
        saved: see `WindowState.match`.
        kind: "parts", from `.grad` and from strategies, or "older".
        path: of the parameter.
        separator: between the path and the rest of an entry's name.
    """
    entries: list[Mapping[str, Any]] = []
    for own in saved["ranks"].values():
        entries += [entry for key, entry in own[kind].items() if key.partition(separator)[0] == path]
    return entries


def _part_from_json(described: list[list[list[int]]]) -> Part:
    """Converts the lists of JSON to a `Part`."""
    runs_of_dims = []
    for runs in described:
        runs_of_dims.append(tuple((start, stop) for start, stop in runs))
    return tuple(runs_of_dims)


def _entry(encoder: Encoder, path: str, gradient: Tensor, ranks: int) -> dict[str, Any]:
    """Returns the JSON of one gradient: its tensor, its part of the whole, and its divisor when all parts are summed."""
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
            # Over a mesh axis, shards and partial sums add up to the gradient itself. Replicas, and partial means, add up to
            # the gradient times the number of ranks, by which the sum must be divided.
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
    """Adds the overlap of a part that was read to this rank's part."""
    for read_box, box_in_read in regions(read_part):
        for own_box, box_in_own in regions(own_part):
            # The intersection of the two boxes in the whole tensor, dim by dim.
            runs: list[slice] = []
            for a, b in zip(read_box, own_box, strict=True):
                runs.append(slice(max(a.start, b.start), min(a.stop, b.stop)))
            if any(run.start >= run.stop for run in runs):
                continue  # the boxes have no element in common
            common = tuple(runs)
            source = _shifted(common, read_box, box_in_read)
            target = _shifted(common, own_box, box_in_own)
            # A part in half precision is converted before it is scaled and added, so that nothing is rounded to half precision.
            total[target].add_(read[source].to(total.dtype), alpha=weight)


def _shifted(box: Box, whole: Box, own: Box) -> Box:
    """Translates a box of the whole into a box of a rank's own tensor, in which the box `whole` is at `own`."""
    offsets = [b.start - a.start for a, b in zip(whole, own, strict=True)]
    return tuple(slice(run.start + offset, run.stop + offset) for run, offset in zip(box, offsets, strict=True))


def _described(placement: Any) -> list[Any]:
    if placement.is_partial():
        return ["partial", placement.reduce_op]
    if placement.is_replicate():
        return ["replicate"]
    # FSDP2 over tensor parallelism divides a dim a second time, in another order of ranks: only such placements have it.
    factor = getattr(placement, "split_factor", None)
    if factor is None:
        return ["shard", placement.dim]
    return ["strided", placement.dim, factor]


def _placement(described: list[Any]) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    from paceline.torch_internals.dtensor import strided_shard

    kinds: dict[str, Any] = {"partial": Partial, "replicate": Replicate, "shard": Shard, "strided": strided_shard}
    kind, *arguments = described
    return kinds[kind](*arguments)


def _apart_problem() -> Problem:
    return Problem(
        "checkpoint-window",
        "the checkpoint was saved in the middle of an accumulation window, which another layout cannot continue.",
        why="ranks had different parameters (LocalSGD, between two averages), so their gradients have no common mean",
        fix="load it under the layout that has saved it; or save at the end of a window, after parameters were averaged",
    )
