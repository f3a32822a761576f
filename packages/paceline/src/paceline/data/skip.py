"""`skip_first_batches`: an epoch without its beginning, for scripts that keep count of batches themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from paceline.base.errors import DataError
from paceline.config.keywords import checked_keywords
from paceline.data.feed import rewired
from paceline.data.loader import PreparedLoader

Loader = TypeVar("Loader")  # to type checkers a loader stays what it was


class SkippedLoader:
    """A loader whose epochs begin after their first batches; all else is looked up in the loader.

    Attributes:
        loader: the whole one. Its position moves as this one is iterated, so that `state_dict` and the epochs after
            this one are right.
        count: batches that are left out of each epoch.
    """

    def __init__(self, loader: PreparedLoader | DataLoader[Any], count: int) -> None:
        self.loader = loader
        self.count = count

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For `isinstance`, it is what the loader is."""
        return type(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            self.loader.start_after(self.count)
            return iter(self.loader)
        if isinstance(self.loader.dataset, IterableDataset):
            # A stream can only be read over.
            return islice(iter(self.loader), self.count, None)
        name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        rest = _Rest(getattr(self.loader, name), self.count)
        return iter(rewired(self.loader, **{name: rest}))

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.count)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Rest:
    """A sampler without its first entries: nothing of the dataset is read to leave them out."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self.sampler = sampler
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.sampler), self.count, None)


@checked_keywords
def skip_first_batches(loader: Loader, count: int = 0) -> Loader:
    """`loader` without the first `count` batches of each epoch.

    For a prepared loader the count is from the epoch's start, also where `load_state_dict` has just put it into the
    middle of one: a script that restores a state and skips by hand skips once. Over an indexed dataset nothing is read
    to skip. `load_state_dict` makes it needless.

    Args:
        loader: a prepared loader, a plain DataLoader, or what this function returned.
        count: batches of this rank.

    Ranks: none must call; each passes the same count.

    Raises:
        DataError: `data-skip`, `data-loader-kind`.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise DataError(
            "data-skip",
            f"{count!r} batches cannot be skipped.",
            why="the number of batches to leave out is a whole number, 0 or more",
            fix="pass the number of batches of this epoch that were used, such as `step % len(loader)`",
        )
    if type(loader) is SkippedLoader:  # to `isinstance` it is the loader that it shortens
        shortened = cast(SkippedLoader, loader)
        return cast(Loader, SkippedLoader(shortened.loader, shortened.count + count))
    if not isinstance(loader, PreparedLoader | DataLoader):
        raise DataError(
            "data-loader-kind",
            f"batches of a {type(loader).__name__} cannot be skipped.",
            why="it is neither a prepared loader nor a torch.utils.data.DataLoader",
            fix="pass the loader itself, or use itertools.islice",
        )
    return cast(Loader, SkippedLoader(loader, count))
