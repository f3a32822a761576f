"""`Participant`: one process among others, as a training script sees it: who am I, and who does what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.config.keywords import checked_keywords
from paceline.world.collectives import Collectives
from paceline.world.tree import tensors
from paceline.world.world import World

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")  # tensors, and any nesting of them, come back as they went in


@checked_keywords
class Participant:
    """Identity of this process and work that only some processes do.

    Args:
        world: who this process is; its group is up.
        device: where this process computes.
        collectives: how it talks to the others.
    """

    def __init__(self, world: World, device: torch.device, collectives: Collectives) -> None:
        self.world = world
        self._device = device
        self.collectives = collectives
        self._trigger = False

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._device

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """Number of this process among all."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its host."""
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    def print(self, *args: object, **kwargs: Any) -> None:
        """Prints on the first process of each host."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Returns when every process has called it. Ranks: all."""
        self.collectives.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block while the others wait; then the others run it. Ranks: all."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The same with the first process of each host. Ranks: all."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, here: bool) -> Iterator[None]:
        if not here:
            self.collectives.barrier()
        try:
            yield
        finally:
            if here:
                self.collectives.barrier()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: runs on rank 0, returns None elsewhere."""
        return self._only(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: runs on the first process of each host, returns None elsewhere."""
        return self._only(function, self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: runs on the last rank, returns None elsewhere."""
        return self._only(function, self.is_last_process)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int | None = None) -> Any:
        """Decorator: runs on rank `process_index`, returns None elsewhere."""
        if function is None:
            return lambda inner: self.on_process(inner, process_index)
        return self._only(function, self.process_index == process_index)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: runs on process `local_process_index` of each host, returns None elsewhere."""
        if function is None:
            return lambda inner: self.on_local_process(inner, local_process_index)
        return self._only(function, self.local_process_index == local_process_index)

    def _only(self, function: Callable[P, R], here: bool) -> Callable[P, R | None]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if here else None

        return run

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Gives each process its part of `inputs`, as evenly as possible; the first processes may get one element more.

        Args:
            inputs: a list, tuple, tensor or array (split along dim 0), dict of those of one length, or anything that can be
                sliced and has a length. It is not changed. What has no elements (numbers, text) goes to each process whole.
            apply_padding: repeats the last element so that all parts are of one length.

        Ranks: each gets its own part; nothing is sent.

        Raises:
            DataError: `split-lengths`, where the values of a dict are of several lengths.
        """
        yield split_part(inputs, self.world.rank, self.world.size, apply_padding)

    def gather(self, tensor: T) -> T:
        """Concatenates tensors of all ranks along dim 0; a 0-dim tensor becomes [num_processes]. Ranks: all."""
        if self.world.size > 1 and torch.is_grad_enabled() and any(map(_may_be_trained, tensors(tensor))):
            warn_once("world", _DROPPED)
        return cast(T, self.collectives.gather(tensor))

    def reduce(self, tensor: T, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> T:
        """Returns the sum or mean over ranks of each tensor of a structure. Ranks: all; all get the result."""
        return cast(T, self.collectives.reduce(tensor, reduction, scale))

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pads tensors along `dim` to the largest size on any rank. Ranks: all."""
        return cast(T, self.collectives.pad_across(tensor, dim, pad_index, pad_first))

    def set_trigger(self) -> None:
        """Sets a flag on this rank, which `check_trigger` finds on all ranks."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Returns whether any rank has set the flag; clears it if so. Ranks: all."""
        raised = self.collectives.any(self._trigger)
        self._trigger = self._trigger and not raised
        return raised


# A loss that is gathered for a log has one dimension at most.
_DROPPED = (
    "`gather` was called on a tensor that needs a gradient, and its result has none: a loss that is computed from it trains "
    "nothing. For a loss over the rows of all processes call `accelerator.gather(tensor, with_gradient=True)`; for a log, "
    "`accelerator.gather(tensor.detach())`"
)


def _may_be_trained(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.dim() > 1


def split_part(inputs: Any, rank: int, size: int, pad: bool = False) -> Any:
    """Returns the part of `inputs` that falls to `rank` of `size`; see `Participant.split_between_processes`."""
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items() if _has_elements(value)}
        if len(set(lengths.values())) > 1:
            raise DataError(
                "split-lengths",
                "the values of this dict cannot be split alike.",
                why=", ".join(f"{key!r} has {length} elements" for key, length in lengths.items()),
                fix="give them one length, or split them one by one",
            )
        return {key: split_part(value, rank, size, pad) for key, value in inputs.items()}
    if size == 1 or not _has_elements(inputs):
        return inputs
    return _elements(inputs, rows_of(len(inputs), rank, size, pad))


def _elements(inputs: Any, rows: Sequence[int]) -> Any:
    """Returns the elements with these numbers, as the same type where that can be made of them."""
    if isinstance(inputs, (list, tuple)):
        return type(inputs[:0])(inputs[row] for row in rows)
    if type(inputs).__module__.startswith("datasets."):  # a slice of such a dataset is a dict of columns
        return inputs.select(rows)
    # Without a repeated one at the end, the numbers follow each other, and a view will do.
    if not rows:
        return inputs[:0]
    if len(set(rows)) == len(rows):
        return inputs[rows[0] : rows[-1] + 1]
    if hasattr(inputs, "shape"):
        return inputs[rows]
    return [inputs[row] for row in rows]


def rows_of(length: int, rank: int, size: int, pad: bool) -> list[int]:
    """Returns the numbers of the elements that fall to a rank; with `pad` the last is repeated if others get one more."""
    share, num_with_one_more = divmod(length, size)
    start = rank * share + min(rank, num_with_one_more)
    has_one_more = rank < num_with_one_more
    rows = list(range(start, start + share + has_one_more))
    if pad and num_with_one_more and not has_one_more:
        rows.append(rows[-1] if rows else length - 1)
    return rows


def _has_elements(value: object) -> bool:
    """Returns whether a value has elements to share out: text is one thing."""
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) > 0
