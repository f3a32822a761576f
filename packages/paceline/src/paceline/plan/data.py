"""`DataPlan`, `Position` and `BatchInfo` say which rank reads which samples.

This is pure arithmetic, which the loader, the optimizer and the metrics share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.world.arrived import RowCounts

Tail = Literal["divide", "pad", "drop"]


@dataclass(frozen=True)
class DataPlan:
    """How one loader's samples are divided over the ranks.

    A global batch of `global_batch` consecutive samples (in the epoch's order) is cut into `width` parts of
    `micro_batch` samples, and the rank with data index `i` reads part `i`. So gathering the ranks in order restores the order
    of the samples. If it cannot be cut evenly, as after a resume at another width, the first parts have one sample more.

    Attributes:
        global_batch: samples that all ranks together read at once.
        micro_batch: samples that one rank reads at once: global_batch / width, rounded up.
        accumulate: micro-batches in one optimizer step.
        width, index: how many ranks read different samples, and which share this one reads.
        seed: with the epoch, decides the order of samples, and what datasets draw from on several ranks.
        tail: what becomes of a last global batch that is not full: "divide" it as evenly as it goes, "pad" it with
            the epoch's first samples (the setting `even_batches`), or "drop" it.
        drawn: whether each epoch instead draws its order from the random streams, as torch's DataLoader does.
    """

    global_batch: int
    micro_batch: int
    accumulate: int = 1
    width: int = 1
    index: int = 0
    seed: int = 0
    tail: Tail = "divide"
    drawn: bool = False

    def rows(self, samples: int) -> tuple[int, ...]:
        """Returns the number of real samples of each data index in a global batch of `samples` real samples."""
        if samples < self.global_batch and self.tail == "pad":
            # The filler comes last: the first ranks' batches are full of real samples, the last ones' may have none.
            rows = []
            left = samples
            for loaded in self.rows(self.global_batch):
                rows.append(min(loaded, left))
                left -= rows[-1]
            return tuple(rows)
        # The first `extra` ranks get one sample more; True counts as 1.
        share, extra = divmod(min(samples, self.global_batch), self.width)
        return tuple(share + (i < extra) for i in range(self.width))

    def steps(self, samples: int) -> int:
        """Returns the number of global batches in `samples` samples; one that is not full counts unless it is dropped."""
        full, rest = divmod(samples, self.global_batch)
        return full + (rest > 0 and self.tail != "drop")

    def info(self, samples: int, last: bool | Callable[[], bool]) -> BatchInfo:
        """Returns the facts about this rank's batch in a global batch of `samples` real samples (at least one)."""
        real = self.rows(samples)
        weights = real
        if self.tail == "pad":
            # Filler counts like real rows: with the setting `even_batches`, all ranks have full batches.
            weights = self.rows(self.global_batch)
        # A rank whose weight is 0 still loads a row, so that it can take part in the collectives of the step.
        return BatchInfo(self.index, real, weights, max(1, weights[self.index]), last)


@dataclass(frozen=True)
class Position:
    """The position of a loader. It counts global samples, so that a run can resume with another number of ranks."""

    epoch: int = 0
    samples: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as two integers."""
        return {"epoch": self.epoch, "samples": self.samples}


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Facts about the batch that a loader has just returned; they are the same on all ranks, except for `index`.

    Attributes:
        index: data index of this rank.
        real: real samples of each data index. They stand first in each rank's batch; the rest is filler.
        weights: samples that count in each data index's mean loss. Equal to `real` where the tail is divided
            (a rank without a sample then holds one filler row of weight 0); with padding, all rows that it loaded.
        loaded: rows that lie in this rank's batch, filler included.
        ends: whether the epoch ends with this batch; or a function that looks. To look may read ahead in a sampler or
            stream, which then draws its random numbers earlier: so nobody looks who need not know.
    """

    index: int
    real: tuple[int, ...]
    weights: tuple[int, ...]
    loaded: int
    ends: bool | Callable[[], bool]

    @property
    def last(self) -> bool:
        """Whether the epoch ends with this batch."""
        return self.ends() if callable(self.ends) else self.ends

    @property
    def rows(self) -> RowCounts:
        """The rows of each data index."""
        return RowCounts(self.real, self.weights)

    @property
    def full(self) -> bool:
        """Whether all ranks hold the same number of real samples and no filler."""
        return self.loaded == self.real[0] and all(rows == self.real[0] for rows in self.real)
