"""`DividedBatchSampler`: a batch sampler that says itself how ranks divide its batches.

The batches of any other sampler are divided by their numbers of samples. `paceline.TokenBatchSampler` divides by tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Sampler

from paceline.data.entries import Entries
from paceline.data.order import Order
from paceline.plan.data import DataPlan
from paceline.plan.plan import Decision


class DividedBatchSampler(Sampler[list[int]], ABC):
    """The base class of such samplers.

    Attributes:
        sampler: the order of the samples of which it makes batches.
    """

    sampler: Sampler[int]

    @property
    def divides(self) -> bool:
        """Whether the batches are as this class makes them; a subclass of the user's may make others."""
        return True

    @property
    @abstractmethod
    def asked(self) -> Mapping[str, Any]:
        """What the script asked of it, by name. A run that goes on says which of these have changed."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """What must be the same on all ranks, by what it is."""

    @abstractmethod
    def order(self, samples: Order) -> DividedOrder:
        """Returns the order of its batches, for an order of samples."""

    @abstractmethod
    def parts(self, samples: Sequence[int], width: int) -> tuple[int, ...]:
        """Returns how many consecutive samples of a global batch each of `width` ranks gets."""

    @abstractmethod
    def rows_in(self, batch: object) -> int | None:
        """Returns over how many rows a loss of the batch is a mean; None if the shapes of its tensors say it."""

    @abstractmethod
    def decision(self, dataset: str, group: int, width: int) -> Decision:
        """Says in the plan how batches are divided.

        Args:
            dataset: name of the class of the dataset.
            group: the number of the sampler's batches in a global batch.
            width: the number of ranks that read different samples.
        """


class DividedOrder(ABC):
    """The order of the batches of such a sampler; see `Order`."""

    sampler: DividedBatchSampler

    @abstractmethod
    def length(self) -> int | None: ...

    @abstractmethod
    def open(self, plan: DataPlan, epoch: int, keep: int, note: Mapping[str, Any]) -> EntriesOfBatches: ...


class EntriesOfBatches(Entries, ABC):
    """The batches of one epoch, each a list of indices."""

    @abstractmethod
    def start_at(self, sample: int) -> None:
        """Lets a batch begin with this sample: a resume begins there, maybe with batches of other sizes."""


def divided_sampler(loader: object) -> DividedBatchSampler | None:
    """Returns the sampler of a loader, if it divides its batches itself."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:  # without automatic batching
        sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DividedBatchSampler) and sampler.divides:
        return sampler
    return None
