"""The batch triangle: `train_batch_size = micro-batch x accumulation steps x ranks that read different samples`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.errors import ConfigError, PacelineError, Problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """The three numbers of a batch, all known: `train = micro * accumulate * width`."""

    train: int
    micro: int
    accumulate: int
    width: int

    def __str__(self) -> str:
        return f"{self.train} = {self.micro} x {self.accumulate} x {self.width}"


class BatchError(ConfigError, AssertionError):
    """A batch triangle that does not close; an AssertionError too, which DeepSpeed raises there."""


def closed(given: Mapping[str, int | None], places: Mapping[str, str], width: int) -> Batch:
    """Finds what is not given of the three numbers.

    Args:
        given: the three by name; None for one that is not given.
        places: where each was given.
        width: ranks that read different samples.

    Raises:
        BatchError: `deepspeed-batch`.
    """
    train = given.get(TRAIN)
    micro = given.get(MICRO)
    steps = given.get(STEPS)
    if train is None and micro is None:
        why = []
        if steps is not None:
            why.append(f"{STEPS} = {steps} ({places[STEPS]})")
        for name in (TRAIN, MICRO):
            if name in places:
                why.append(f"{name} is auto ({places[name]}), and nobody said what that is")
        what = f"neither {TRAIN} nor {MICRO} is given."
        raise BatchError.of([Problem("deepspeed-batch", what, why, f'give one of the two: "{MICRO}": 8')])
    if micro is None:
        assert train is not None
        steps = steps or 1
        micro = train // width // steps
    elif steps is None:
        steps = 1 if train is None else train // micro // width
    closed_train = micro * steps * width
    if train is None:
        train = closed_train
    batch = Batch(train, micro, steps, width)
    if train != closed_train or 0 in (micro, steps):
        raise _unequal(batch, given, places)
    return batch


def triples(wanted: Batch, given: Mapping[str, int | None]) -> list[Batch]:
    """Lists up to three batches whose numbers fit together, the nearest to `wanted` first.

    In each of them one of the given numbers changes: either the global batch, or what is left of it for the other two.
    """
    width = wanted.width
    micro = max(wanted.micro, 1)
    steps = max(wanted.accumulate, 1)
    # Pairs of a micro-batch and a number of micro-batches; the global batch follows from them.
    pairs = [(micro, steps)]
    if given.get(MICRO) is not None:
        fewer, more = _around(wanted.train, micro * width)
        pairs += [(micro, fewer), (micro, more)]
    if given.get(STEPS) is not None:
        smaller, larger = _around(wanted.train, steps * width)
        pairs += [(smaller, steps), (larger, steps)]
    if given.get(MICRO) is None and given.get(STEPS) is None:
        smaller, larger = _around(wanted.train, width)
        pairs += [(smaller, 1), (larger, 1)]
    batches = {Batch(size * count * width, size, count, width) for size, count in pairs if size > 0 and count > 0}

    def distance(batch: Batch) -> tuple[int, int, int]:
        return abs(batch.train - wanted.train), batch.train, batch.accumulate

    return sorted(batches, key=distance)[:3]


def _around(total: int, divisor: int) -> tuple[int, int]:
    """Returns the quotient, rounded down and rounded up."""
    return total // divisor, -(-total // divisor)


def _unequal(batch: Batch, given: Mapping[str, int | None], places: Mapping[str, str]) -> PacelineError:
    why = []
    for name, value in ((TRAIN, batch.train), (MICRO, batch.micro), (STEPS, batch.accumulate)):
        origin = places[name] if given.get(name) is not None else "what the others leave"
        why.append(f"{name} = {value} ({origin})")
    if batch.width == 1:
        why.append("1 rank reads samples of their own")
        why.append("one process alone: was the script not started by a launcher?")
    else:
        why.append(f"{batch.width} ranks read samples of their own")
    nearest = []
    for triple in triples(batch, given):
        nearest.append(f"{TRAIN} {triple.train}, {MICRO} {triple.micro}, {STEPS} {triple.accumulate}")
    what = f"the batch does not divide: {batch.train} is not {batch.micro} x {batch.accumulate} x {batch.width}."
    return BatchError.of([Problem("deepspeed-batch", what, why, f"set {'; or '.join(nearest)}")])
