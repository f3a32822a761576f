"""How long parts of a pipeline take: the bubble of its batches, and each block for `split="time"`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from paceline.world.tree import map_tensors, tensors


class Meter:
    """Seconds that this rank computed, of those that its batches took.

    Attributes:
        busy_s, total_s: summed over batches.
    """

    def __init__(self) -> None:
        self.busy_s = self.total_s = 0.0

    @property
    def bubble(self) -> float:
        """The share of time in which this rank waited or communicated."""
        return 1 - self.busy_s / self.total_s if self.total_s else 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Takes the time of a piece of a stage's computation."""
        begin = _clock_s()
        yield
        self.busy_s += _clock_s() - begin

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Takes the time of a batch."""
        begin = _clock_s()
        yield
        self.total_s += _clock_s() - begin


class Metered(Protocol):
    """What can be measured: a `Pipe`."""

    meter: Meter | None


@contextmanager
def measure(model: nn.Module) -> Iterator[Meter]:
    """While it is open, batches of a prepared model are timed; `bubble` of what it gives is the share spent waiting.

    Ranks: each measures itself. On an accelerator it waits for each piece, which costs a little.
    """
    # The model's `forward` knows its pipe, and so does what was put around it since.
    pipe: Metered = next(module.forward.pipe for module in model.modules() if hasattr(module.forward, "pipe"))
    pipe.meter = meter = Meter()
    try:
        yield meter
    finally:
        pipe.meter = None


def measure_blocks(
    model: nn.Module, blocks: Sequence[str], *inputs: Any, turns: int = 3, **keywords: Any
) -> list[float]:
    """Seconds that each block takes forward and backward, for `split="time"`.

    Args:
        model: not prepared yet; runs on `inputs` and `named` as they are.
        blocks: names of the blocks, such as `paceline.plan.blocks.repeated_blocks(model)`.
        turns: the least of so many runs counts.

    Ranks: no communication; rank 0's numbers count where ranks differ.
    """
    best = [float("inf")] * len(blocks)
    for _ in range(turns):
        taken = [0.0] * len(blocks)
        calls: list[tuple[int, Any, Any]] = []
        handles = [
            model.get_submodule(name).register_forward_hook(
                lambda _, args, kwargs, output, at=at, calls=calls: calls.append((at, args, kwargs)), with_kwargs=True
            )
            for at, name in enumerate(blocks)
        ]
        with torch.no_grad():
            model(*inputs, **keywords)
        for handle in handles:
            handle.remove()
        for at, args, kwargs in calls:
            args, kwargs = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), (args, kwargs))
            begin = _clock_s()
            block = model.get_submodule(blocks[at])
            outputs = [t.sum() for t in tensors(block(*args, **kwargs)) if t.requires_grad]
            learn = [t for t in (*tensors((args, kwargs)), *block.parameters()) if t.requires_grad]
            if outputs:
                torch.autograd.grad(outputs, learn, allow_unused=True)
            taken[at] += _clock_s() - begin
        best = [min(pair) for pair in zip(best, taken, strict=True)]
    return best


def _clock_s() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
