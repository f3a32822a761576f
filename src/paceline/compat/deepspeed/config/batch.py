"""The batch triangle: `train_batch_size = micro-batch x accumulation steps x ranks that read different samples`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.errors import ConfigError, PacelineError, Problem

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


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


BatchError.__module__ = __name__  # where it can be found again when it travels between processes


def closed(given: Mapping[str, int | None], places: Mapping[str, str], width: int) -> Batch:
    """Finds what is not given of the three numbers.

    Args:
        given: the three by name; None for one that is not given.
        places: where each was given.
        width: ranks that read different samples.

    Raises:
        BatchError: `deepspeed-batch`.
    """
    train, micro, steps = (given.get(name) for name in (TRAIN, MICRO, STEPS))
    if train is None and micro is None:
        raise _open(given, places)
    if micro is None:
        assert train is not None
        steps = steps or 1
        micro = train // width // steps
    elif steps is None:
        steps = 1 if train is None else train // micro // width
    found = Batch(micro * steps * width if train is None else train, micro, steps, width)
    if found.train != micro * steps * width or 0 in (micro, steps):
        raise _unequal(found, given, places)
    return found


def triples(wanted: Batch, given: Mapping[str, int | None]) -> list[Batch]:
    """The nearest triples that close; as few as possible of the given numbers change."""
    width, found = wanted.width, []

    def add(micro: int, steps: int) -> None:
        if micro > 0 and steps > 0:
            found.append(Batch(micro * steps * width, micro, steps, width))

    micro, steps = max(wanted.micro, 1), max(wanted.accumulate, 1)
    if given.get(MICRO) is not None:
        for each in (wanted.train // (micro * width), -(-wanted.train // (micro * width))):
            add(micro, each)
    if given.get(STEPS) is not None:
        for each in (wanted.train // (steps * width), -(-wanted.train // (steps * width))):
            add(each, steps)
    if given.get(MICRO) is None and given.get(STEPS) is None:
        for each in (wanted.train // width, -(-wanted.train // width)):
            add(each, 1)
    add(micro, steps)
    return sorted(set(found), key=lambda one: (abs(one.train - wanted.train), one.train, one.accumulate))[:3]


def _unequal(found: Batch, given: Mapping[str, int | None], places: Mapping[str, str]) -> PacelineError:
    numbers = {TRAIN: found.train, MICRO: found.micro, STEPS: found.accumulate}
    said = [
        f"{name} = {value}" + (f" ({places[name]})" if given.get(name) is not None else " (what the others leave)")
        for name, value in numbers.items()
    ]
    why = [*said, f"{found.width} {'rank reads' if found.width == 1 else 'ranks read'} samples of their own"]
    if found.width == 1:
        why.append("one process alone: was the script not started by a launcher?")
    near = "; or ".join(
        f"{TRAIN} {each.train}, {MICRO} {each.micro}, {STEPS} {each.accumulate}" for each in triples(found, given)
    )
    what = f"the batch does not divide: {found.train} is not {found.micro} x {found.accumulate} x {found.width}."
    return BatchError.of([Problem("deepspeed-batch", what, why, f"set {near}")])


def _open(given: Mapping[str, int | None], places: Mapping[str, str]) -> PacelineError:
    what = f"neither {TRAIN} nor {MICRO} is given."
    steps = f"{STEPS} = {given[STEPS]} ({places[STEPS]})" if given.get(STEPS) is not None else ""
    auto = [f"{name} is auto ({places[name]}), and nobody said what that is" for name in (TRAIN, MICRO)
            if name in places]  # fmt: skip
    fix = f'give one of the two: "{MICRO}": 8'
    return BatchError.of([Problem("deepspeed-batch", what, [*filter(None, [steps]), *auto], fix)])
