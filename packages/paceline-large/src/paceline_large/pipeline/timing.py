"""Measures a pipeline: the bubble of its batches, and the time of each block for `split="time"`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.world.tree import map_tensors, tensors


class Meter:
    """The computing time of this rank, and the time of its batches.

    Attributes:
        busy_s: seconds in which this rank computed, summed over batches.
        total_s: seconds of all batches.
    """

    def __init__(self) -> None:
        self.busy_s = self.total_s = 0.0

    @property
    def bubble(self) -> float:
        """The share of time in which this rank waited or communicated."""
        if not self.total_s:
            return 0.0
        return 1 - self.busy_s / self.total_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measures a part of a stage's computation."""
        begin = _clock_s()
        yield
        self.busy_s += _clock_s() - begin

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Measures a batch."""
        begin = _clock_s()
        yield
        self.total_s += _clock_s() - begin


class Metered(Protocol):
    """An object that can be measured: a `Pipe`."""

    meter: Meter | None


@contextmanager
def measure(model: nn.Module) -> Iterator[Meter]:
    """While it is open, batches of a prepared model are measured; `bubble` of the meter is the share of waiting.

    Ranks: each measures itself. On an accelerator it synchronizes the device after each part, which takes some time.
    """
    # The pipe is an attribute of the model's `forward`, also if other modules were put around the model since.
    forwards = [module.forward for module in model.modules()]
    pipe: Metered = next(forward.pipe for forward in forwards if hasattr(forward, "pipe"))
    meter = Meter()
    pipe.meter = meter
    try:
        yield meter
    finally:
        pipe.meter = None


def measure_blocks(
    model: nn.Module, blocks: Sequence[str], *inputs: Any, turns: int = 3, **keywords: Any
) -> list[float]:
    """Measures the seconds that each block takes forward and backward, for `split="time"`.

    Args:
        model: not prepared yet.
        blocks: names of the blocks, such as `paceline.plan.blocks.repeated_blocks(model)`.
        inputs, keywords: the arguments with which the model is called.
        turns: the number of runs, of which the fastest counts.

    Ranks: no communication; rank 0's numbers count where ranks differ.
    """
    number_of = {model.get_submodule(name): number for number, name in enumerate(blocks)}
    calls: list[tuple[nn.Module, tuple[object, ...], dict[str, object]]] = []

    def note_call(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        calls.append((block, args, kwargs))

    best = [float("inf")] * len(blocks)
    for _ in range(turns):
        calls.clear()
        handles = [block.register_forward_hook(note_call, with_kwargs=True) for block in number_of]
        with torch.no_grad():
            model(*inputs, **keywords)
        for handle in handles:
            handle.remove()
        taken = [0.0] * len(blocks)  # a block may be called several times in one run
        for block, args, kwargs in calls:
            taken[number_of[block]] += _both_passes_s(block, args, kwargs)
        best = list(map(min, best, taken))
    return best


def _both_passes_s(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> float:
    """Returns the seconds of one call of a block, and of its backward pass to parameters and inputs."""

    def as_leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    args, kwargs = map_tensors(as_leaf, (args, kwargs))
    begin = _clock_s()
    output = block(*args, **kwargs)
    outputs = [tensor.sum() for tensor in tensors(output) if tensor.requires_grad]
    inputs = (*tensors((args, kwargs)), *block.parameters())
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, allow_unused=True)
    return _clock_s() - begin


def _clock_s() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
