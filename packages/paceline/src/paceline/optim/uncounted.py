"""Notices a loss that is no mean over the samples of its micro-batch, by comparing the ranks.

The mean of the losses of all ranks is that of one process if every sample counts as much on each rank. So the first backward
passes of a run note, for each place where the loss adds up a tensor or takes its mean, how much one element counts: the
gradient that arrives there, by the number that the mean divides by. The ranks tell each other these weights (`Replicas`).

    differs by rank      a mean over a mask, over `ignore_index`, over tokens; a factor, a root or a quotient of own sums
    constant             a sum that nothing divides, or a number that stays the same while the number of samples changes

Nothing is read from a device before the ranks compare themselves, where it is waited for in any case. A window of one process
is judged by itself: its micro-batches divide samples as ranks do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.base.log import warn_once
from paceline.torch_internals.reductions import Reduction, divisor_of, reduction_of

_NODES = 96  # of the graph behind a loss; losses are a few operations away from their mean
_LINEAR = (
    "Add", "Sub", "Rsub", "Mul", "Div", "Neg", "ToCopy", "Sum", "Mean", "Stack", "Unsqueeze", "Squeeze", "View",
    "Select", "TBackward", "Transpose", "Permute", "Expand", "Cat", "Clone", "Slice", "Index", "Gather", "Lerp",
    "Diagonal", "Trace",
)  # fmt: skip
_CURVED = (
    "Sqrt", "Rsqrt", "Pow", "Log", "Exp", "Reciprocal", "Clamp", "Sigmoid", "Softplus", "Relu", "Abs", "Sgn", "Maximum",
    "Minimum", "Where", "Softmax", "SpecialEntr", "Cdist", "LinalgVectorNorm", "LinalgSlogdet", "LinalgDet",
)  # fmt: skip
# What penalties on weights do to them before they add up.
_ELEMENTWISE = (
    "Pow", "Abs", "Sub", "Rsub", "Add", "Mul", "Div", "Neg", "ToCopy", "Clone", "LogBackward", "ExpBackward", "Sqrt",
    "Relu", "SumBackward", "MeanBackward", "VarBackward", "StdBackward", "LinalgVectorNorm", "MaxBackward",
    "AmaxBackward",
)  # fmt: skip
_OF_WHOLE = ("MmBackward", "TBackward", "Transpose", "Permute", "Slice", "Select", "View")

_SUM_TEXT = (
    "a loss is a sum over the samples of its micro-batch. Losses of processes and micro-batches are averaged, so its gradients "
    "depend on their number. For the mean of n samples write `accelerator.backward(loss, num_items=n)`; for the sum over all "
    "processes, `accelerator.backward(loss, num_items=1 / accelerator.num_processes)`"
)
_PART_TEXT = (
    "a loss is a mean over only a part of its micro-batch (a mask, `ignore_index`, class weights, tokens), or a sum that is "
    "divided by another number than that of its samples. Each process and micro-batch divides by its own number, so the result "
    "depends on how the samples are divided. With n for that number, such as `mask.sum()`, `(labels != -100).sum()` or "
    "`weight[labels].sum()`, this is exact: `accelerator.backward(loss * n, num_items=n)`"
)
_PIECES_TEXT = (
    "losses are means over pieces of a micro-batch that have different numbers of samples. Each piece counts as much as the "
    "others, so the result depends on how samples are divided. With x the whole micro-batch, the sums over the pieces are "
    "exact: `accelerator.backward(loss_sum, num_items=len(x))`"
)
_FACTOR_TEXT = (
    "a loss is computed from a number that each process has of its own samples: a factor, or the root, logarithm or quotient "
    "of its sums. One process would take the number of all samples, so the result depends on how they are divided. Take the "
    "mean of a loss for each sample, or a factor that all processes share, such as `accelerator.reduce(factor, 'mean')`"
)
_TOGETHER_TEXT = (
    "a loss is computed of several samples together (a norm, a variance, a product of matrices, a maximum over them), and is "
    "no mean of a loss for each sample. Each process has its own samples, so the result depends on how they are divided. Take "
    "such a mean; or let all processes compute the loss of all samples: "
    "`outputs = accelerator.gather(outputs, with_gradient=True)`"
)
_ITEMS_TEXT = (
    "a loss that was passed with `num_items` is no sum over its items: an item counts more on one process than on another. "
    "Pass the sum, or the mean times the number that it divides by: `accelerator.backward(loss * n, num_items=n)`"
)
_COUNT_TEXT = (
    "a sum over {rows} samples was passed with `num_items={divisor:g}`, which does not follow their number. It counts those "
    "of this process and micro-batch; all are added up. Pass the number of items in the sum, such as `len(x)`"
)
_CONSTANT_TEXT = (
    "a sum over the {rows} samples that this process has of a micro-batch was divided by {divisor:g}, which does not follow "
    "their number. Losses of processes are averaged, so its gradients depend on the number of processes. Divide by the samples "
    "of this process, such as `len(x)`. With a number n that is counted in each micro-batch, such as that of positive targets, "
    "this is exact: `accelerator.backward(loss * n, num_items=n)`"
)
_GLOBAL_TEXT = (
    "a sum over the samples of a micro-batch is divided by {divisor:g}, the number of samples of all processes together. "
    "Losses of processes are averaged, so its gradients are {width} times as small as on one process. Divide by the samples of "
    "this process, such as `len(x)`, here {rows}"
)
_WINDOW_TEXT = (
    "a loss is divided by {steps}, and a window has as many micro-batches (`gradient_accumulation_steps`). "
    "`accelerator.backward` takes the mean over the window by itself, so gradients are {steps} times as small as those of this "
    "mean. Pass the loss undivided"
)
_MEANT_TEXT = "; where you mean the factor {factor}, nothing is wrong"


@dataclass(frozen=True)
class SeenPart:
    """What one rank has seen of one place where its loss adds up a tensor.

    Attributes:
        is_mean: whether the place divides by `count`.
        sizes: the shape of what is added up.
        count: what the mean divides by; 1 of a sum.
        weight: how much one element counts in the loss; None if no gradient came there.
        divisors: what a script divides the result by, and the inverse of what it multiplies it by.
        is_curved: whether the loss is more of the result than a multiple.
        is_divided: whether a division is among them.
        is_penalty: whether it is computed of weights alone.
        is_of_columns: whether it gives more than one number; `weight` is then a norm of what they count.
        is_joint: whether it is no sum over samples.
        tolerance: up to which weights are equal, by the dtype of the gradient.
    """

    is_mean: bool
    sizes: tuple[int, ...]
    count: float
    weight: float | None
    divisors: tuple[float, ...]
    is_divided: bool
    is_curved: bool
    is_penalty: bool
    is_of_columns: bool
    is_joint: bool
    tolerance: float

    @property
    def form(self) -> tuple[object, ...]:
        """What two ranks, or two micro-batches, have in common if they have computed the same loss."""
        return self.is_mean, self.is_of_columns, self.is_joint, len(self.sizes)


@dataclass(frozen=True)
class SeenLoss:
    """What one rank has seen of the loss of one backward pass.

    Attributes:
        number: of the pass in the run; the micro-batches of a pass have the same.
        window: identifies the window, and which of its losses this is.
        rows: the samples of this rank; 0 if it has none.
        items: what it was passed with as `num_items`; None without it.
        place: file and line of the script.
        steps: the micro-batches of a window.
        batch: identifies the micro-batch on its rank; empty if it is not known.
    """

    number: int
    window: tuple[int, ...]
    rows: int
    items: float | Tensor | None
    place: str
    steps: int = 1
    batch: tuple[int, ...] = ()
    parts: tuple[SeenPart, ...] = ()

    @property
    def has_items(self) -> bool:
        return self.items is not None


@dataclass(frozen=True)
class _WayToNode:
    """A way from a loss to a node of its graph: what the node's result is divided by, and how."""

    node: Any
    divisors: tuple[float | Tensor, ...] = ()
    is_divided: bool = False
    is_curved: bool = False


@dataclass
class _PartOfLoss:
    """A place of a graph that adds up a tensor, before its gradient is known."""

    way: _WayToNode
    reduction: Reduction
    is_penalty: bool
    gradient: Tensor | None = None

    def see(self, gradients: Sequence[Tensor | None]) -> None:
        """Called in the backward pass with the gradient of the result."""
        gradient = gradients[0]
        if gradient is None:
            return
        if gradient.numel() == 1:
            self.gradient = gradient.detach()
        elif self.reduction.is_of_columns:
            # Each element by another weight: the gradient of a norm has the same norm everywhere.
            gradient = gradient.detach().flatten()
            weights = torch.linspace(1, 2, gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            self.gradient = (gradient * weights).norm()

    def forget_graph(self) -> None:
        self.way = replace(self.way, node=None)

    def seen(self, factor: float) -> SeenPart:
        """Returns what a rank tells of it, which waits for the device.

        Args:
            factor: what the loss was multiplied by before its backward pass.
        """
        count = float(self.reduction.count) if self.reduction.is_mean else 1.0
        weight = None
        tolerance = 1e-6
        if self.gradient is not None and factor:
            weight = float(self.gradient) / factor / count if count else math.nan
            tolerance = max(tolerance, 8 * torch.finfo(self.gradient.dtype).eps)
        return SeenPart(
            is_mean=self.reduction.is_mean,
            sizes=self.reduction.sizes,
            count=count,
            weight=weight,
            divisors=tuple(map(float, self.way.divisors)),
            is_divided=self.way.is_divided,
            is_curved=self.way.is_curved,
            is_penalty=self.is_penalty,
            is_of_columns=self.reduction.is_of_columns,
            is_joint=self.reduction.is_joint,
            tolerance=tolerance,
        )


@dataclass
class PassLookedAt:
    """A backward pass that is looked at, or one micro-batch of it.

    Attributes:
        loss: what is known of its loss before the pass.
    """

    loss: SeenLoss
    parts: list[_PartOfLoss]
    handles: list[Any]
    factor: float = 0.0

    def close(self, factor: float) -> None:
        """Called after the pass, whose loss was multiplied by a factor; the graph need not live on."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for part in self.parts:
            part.forget_graph()
        self.factor = factor

    def seen(self) -> SeenLoss:
        rows = self.loss.rows if self.factor else 0
        # Not before the pass, as it waits for the device.
        items = None if self.loss.items is None else float(self.loss.items)
        return replace(self.loss, rows=rows, items=items, parts=tuple(part.seen(self.factor) for part in self.parts))


def look_at(loss: Tensor, known: SeenLoss) -> PassLookedAt:
    """Looks at a backward pass that has not run yet, whose loss was not scaled."""
    parts = _parts_of(loss, known.rows)
    handles = [part.way.node.register_prehook(part.see) for part in parts]
    return PassLookedAt(known, parts, handles)


def _parts_of(loss: Tensor, rows: int) -> list[_PartOfLoss]:
    """Returns the places near a loss where it adds up a tensor, or computes of samples together, in one order on all ranks."""
    parts: list[_PartOfLoss] = []
    waiting = [_WayToNode(loss.grad_fn)]
    met: set[Any] = set()
    for _ in range(_NODES):
        if not waiting:
            break
        way = waiting.pop()
        if way.node is None or way.node in met:
            continue
        met.add(way.node)
        reduction = reduction_of(way.node, rows)
        if reduction is not None:
            parts.append(_PartOfLoss(way, reduction, _is_of_weights(way.node)))
        is_joint = reduction is not None and reduction.is_joint
        # What a loss such as `mse_loss` got is looked at, too.
        if not is_joint and (reduction is not None or way.node.name().startswith(_LINEAR + _CURVED)):
            waiting += _further(way, rows)
    return parts


def _further(way: _WayToNode, rows: int) -> list[_WayToNode]:
    """Returns the ways to the nodes below one."""
    name = way.node.name()
    operands = [below for below, _ in way.node.next_functions]
    # A script that has made a list of the losses of each sample may take any mean for one of them.
    if name.startswith(("Stack", "Cat")) and len(operands) == rows > 1:
        return []
    # Products and quotients of two numbers of the loss, as in the Dice loss, count as curves.
    is_product = name.startswith(("Mul", "Div")) and None not in operands and len(operands) == 2
    is_curved = way.is_curved or is_product or name.startswith(_CURVED)
    is_divided = way.is_divided or name.startswith("Div")
    ways = []
    for operand, below in enumerate(operands):
        divisor = divisor_of(way.node, operand)
        divisors = way.divisors if divisor is None else (*way.divisors, divisor)
        ways.append(_WayToNode(below, divisors, is_divided, is_curved))
    return ways


def _is_of_weights(node: Any) -> bool:
    """Returns whether what a node adds up was computed of parameters alone, as a penalty is."""
    waiting = [below for below, _ in node.next_functions]
    for _ in range(_NODES):
        if not waiting:
            return True
        below = waiting.pop()
        if below is None or below.name().endswith("AccumulateGrad"):
            continue
        further = [each for each, _ in below.next_functions]
        # A product with what has no gradient is that of a layer with its input.
        is_layer = below.name().startswith(_OF_WHOLE) and None in further
        if is_layer or not below.name().startswith(_ELEMENTWISE + _OF_WHOLE):
            return False
        waiting += further
    return False


def judge(judged: deque[Sequence[SeenLoss]], by_rank: Sequence[Sequence[SeenLoss]], is_sure: bool) -> None:
    """Warns, once of each kind, of losses whose numbers depend on how samples are divided.

    Args:
        judged: the losses so far, each by rank; those of this call are added.
        by_rank: what `LossWeights.take` has returned on ranks that read different samples.
        is_sure: whether other numbers of samples than so far are not to be expected.
    """
    numbers = sorted({seen.number for own in by_rank for seen in own})
    if not numbers:
        return
    for number in numbers:
        judged.append([seen for own in by_rank for seen in own if seen.number == number])
    for seen in list(judged)[-len(numbers) :]:
        _say(seen, _across_ranks(seen))
    for seen in _micro_batches(judged):
        _say(seen, _across_micro_batches(seen))
    for pieces in _pieces(judged):
        _say(pieces, _across_pieces(pieces))
    for own in judged:
        _say(own, _of_window(own[0]))
        for number in range(len(own[0].parts)):
            _say(own, _of_sum(own[0], number, judged, len(by_rank), is_sure))


def _say(seen: Sequence[SeenLoss], text: str | None) -> None:
    if text is not None:
        warn_once("train", text + seen[0].place)


def _across_ranks(seen: Sequence[SeenLoss]) -> str | None:
    """Returns what is to be said of one loss that several ranks, or micro-batches of one pass, have computed."""
    seen = [each for each in seen if each.rows]
    if len(seen) < 2 or not _have_one_form(seen):
        return None
    rows = [each.rows for each in seen]
    for parts in zip(*(each.parts for each in seen), strict=True):
        if parts[0].is_joint:
            if parts[0].is_penalty:
                continue
            return _TOGETHER_TEXT
        weights = [part.weight for part in parts if part.weight is not None]
        if seen[0].has_items and parts[0].is_penalty:
            continue  # a penalty, which a script multiplies by the number of items
        if len(weights) < len(parts):
            continue
        by_samples = weights if seen[0].has_items else [weight * own for weight, own in zip(weights, rows, strict=True)]
        if _are_equal(by_samples, parts[0].tolerance):
            continue
        # What runs over no samples, as a penalty on weights, counts as much on each rank.
        if _are_equal(weights, parts[0].tolerance) and not _follows_samples(parts, rows):
            continue
        if seen[0].has_items:
            return _ITEMS_TEXT
        if parts[0].is_of_columns and not _are_equal(weights, parts[0].tolerance):
            return _TOGETHER_TEXT
        gradients = [weight * part.count for weight, part in zip(weights, parts, strict=True)]
        if parts[0].is_curved or (parts[0].is_mean and not _are_equal(gradients, parts[0].tolerance)):
            return _FACTOR_TEXT
        return _PART_TEXT
    return None


def _have_one_form(seen: Sequence[SeenLoss]) -> bool:
    """Returns whether ranks have computed the same loss; one of them may have left a term out."""
    return len({tuple(part.form for part in each.parts) for each in seen}) == 1


def _follows_samples(parts: Sequence[SeenPart], rows: Sequence[int]) -> bool:
    """Returns whether more samples mean a longer sum."""
    if len(set(rows)) == 1 or parts[0].is_penalty:
        return False
    return _are_equal([math.prod(part.sizes) / own for part, own in zip(parts, rows, strict=True)], 1e-9)


def _are_equal(values: Sequence[float], tolerance: float) -> bool:
    return all(math.isclose(value, values[0], rel_tol=tolerance) for value in values)


def _micro_batches(judged: Iterable[Sequence[SeenLoss]]) -> list[list[SeenLoss]]:
    """Returns the losses of each window that the micro-batches of the first rank have in common."""
    windows: dict[tuple[int, ...], list[SeenLoss]] = {}
    for seen in judged:
        if seen[0].rows and not seen[0].has_items:
            windows.setdefault(seen[0].window, []).append(seen[0])
    return [own for own in windows.values() if len(own) > 1]


def _across_micro_batches(seen: Sequence[SeenLoss]) -> str | None:
    """Returns what is to be said of the micro-batches of one window. Factors may change from one to the next."""
    for one, other, part, later in _pairs_of_means(seen):
        if not math.isclose(part.count / one.rows, later.count / other.rows, rel_tol=1e-6):
            return _PART_TEXT
    return None


def _pairs_of_means(seen: Sequence[SeenLoss]) -> Iterator[tuple[SeenLoss, SeenLoss, SeenPart, SeenPart]]:
    """Yields each loss, the one after it, and a mean that is in both, over samples of the same shape."""
    for one, other in pairwise(seen):
        if _have_one_form([one, other]):
            for part, later in zip(one.parts, other.parts, strict=True):
                if part.is_mean and not part.is_penalty and part.sizes[1:] == later.sizes[1:]:
                    yield one, other, part, later


def _pieces(judged: Iterable[Sequence[SeenLoss]]) -> list[list[SeenLoss]]:
    """Returns the losses that a line of the script has computed of one micro-batch, for each rank."""
    found: dict[tuple[object, ...], list[SeenLoss]] = {}
    for by_rank in judged:
        for rank, seen in enumerate(by_rank):
            if seen.rows and seen.batch and not seen.has_items:
                found.setdefault((rank, seen.batch, seen.place), []).append(seen)
    return [own for own in found.values() if len(own) > 1]


def _across_pieces(seen: Sequence[SeenLoss]) -> str | None:
    """Returns what is to be said of several losses of one micro-batch."""
    for one, _, part, later in _pairs_of_means(seen):
        # Positions of all samples, of images in two sizes, are so many for each.
        is_of_pieces = any(sizes and sizes[0] % one.rows for sizes in (part.sizes, later.sizes))
        if part.sizes[:1] != later.sizes[:1] and is_of_pieces:
            return _PIECES_TEXT
    return None


def _of_window(seen: SeenLoss) -> str | None:
    """Returns what is to be said of a loss that its script divides by the number of micro-batches."""
    means = [part for part in seen.parts if part.is_mean and not part.is_penalty]
    is_divided = all(part.is_divided and seen.steps in part.divisors for part in means)
    # The mean of as many losses is divided by their number.
    if seen.steps == 1 or seen.has_items or not is_divided or len(means) in (0, seen.steps):
        return None
    return (_WINDOW_TEXT + _MEANT_TEXT).format(steps=seen.steps, factor=f"1 / {seen.steps}")


def _of_sum(seen: SeenLoss, number: int, judged: Iterable[Sequence[SeenLoss]], width: int, is_sure: bool) -> str | None:
    """Returns what is to be said of a sum over samples that is not divided by their number.

    Args:
        seen: what a rank has seen of a loss.
        number: of the sum in it.
        judged: all losses that were seen, each by rank.
        width: the number of ranks that were compared.
        is_sure: see `judge`.
    """
    part = seen.parts[number]
    if part.is_mean or part.is_joint or part.is_penalty or part.is_curved or not seen.rows:
        return None
    if seen.has_items:
        return _of_items(seen, part, judged)
    # Tokens of all samples may have become one dimension. A sum over something else is that of a penalty.
    if not part.sizes or part.sizes[0] % seen.rows:
        return None
    if not part.divisors:
        return _SUM_TEXT if part.sizes[0] == seen.rows else None
    if _is_right(part, seen.rows):
        return None
    # The same place in all passes: does the divisor follow the number of samples?
    same = [each for own in judged for each in own if each.rows and number < len(each.parts)]
    pairs = {(each.rows, math.prod(each.parts[number].divisors)) for each in same if each.parts[number].divisors}
    divisor = math.prod(part.divisors)
    is_constant = all(math.isclose(other, divisor, rel_tol=1e-6) for _, other in pairs)
    rows_change = len({rows for rows, _ in pairs}) > 1
    is_whole = _is_whole(divisor / seen.rows)
    is_global = width > 1 and math.isclose(divisor, seen.rows * width, rel_tol=1e-6)
    if is_constant and not part.is_divided:
        return _SUM_TEXT  # times a factor
    if not is_constant or (is_whole and not rows_change and not is_global):
        return None
    words = {"divisor": divisor, "rows": seen.rows, "width": width, "factor": width}
    if rows_change or not is_whole:
        return _CONSTANT_TEXT.format(**words)
    # On two ranks twice the own samples are as many, as in the mean of halves of squares, `sum / (2 * n)`.
    if width == 2 and not is_sure:
        return None
    return (_GLOBAL_TEXT + _MEANT_TEXT).format(**words)


def _of_items(seen: SeenLoss, part: SeenPart, judged: Iterable[Sequence[SeenLoss]]) -> str | None:
    """Returns what is to be said of `num_items` that is the same number while that of the samples differs, or no multiple."""
    assert seen.items is not None
    items = float(seen.items)
    # Fewer items than elements are those of a mask; more may be the tokens of samples of one length.
    if len(part.sizes) != 1 or part.sizes[0] != seen.rows or items <= seen.rows or part.divisors:
        return None
    numbers = {(each.rows, each.items) for own in judged for each in own if each.rows and each.place == seen.place}
    has_one_count = len({count for _, count in numbers}) == 1
    if not has_one_count or (len({rows for rows, _ in numbers}) == 1 and _is_whole(items / seen.rows)):
        return None
    return _COUNT_TEXT.format(divisor=items, rows=seen.rows)


def _is_whole(quotient: float) -> bool:
    return quotient > 0.5 and math.isclose(quotient, round(quotient), rel_tol=1e-6)


def _is_right(part: SeenPart, rows: int) -> bool:
    """Returns whether a sum is divided by the number of its samples, or by that of its elements for each of them."""
    right = {rows} | {count for count in _products(part.sizes) if count % rows == 0}
    divisors = [*part.divisors, math.prod(part.divisors)]
    return any(math.isclose(divisor, count, rel_tol=1e-6) for divisor in divisors for count in right)


def _products(sizes: Sequence[int]) -> set[int]:
    """Returns the products of some of the sizes, which a sum over several dimensions may be divided by."""
    return {math.prod(some) for length in range(len(sizes) + 1) for some in combinations(sizes, length)}
