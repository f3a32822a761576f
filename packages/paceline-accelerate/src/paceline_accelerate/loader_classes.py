"""accelerate's loader classes, built on Paceline's `PreparedLoader` and on `loader_feed`.

DataLoaderAdapter      iterates over any DataLoader
DataLoaderShard        yields the part of one process
DataLoaderDispatcher   is read by the first process, which sends the others their parts
SkipDataLoader         skips the first batches of each epoch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, SequentialSampler

from paceline.base.errors import CompatError
from paceline.base.log import warn_once
from paceline.data.active import ActiveLoaders
from paceline.data.dispatch import DispatchFeed
from paceline.data.feed import NOTHING, Feed
from paceline.data.loader import PreparedLoader
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.world.collectives import Collectives
from paceline_accelerate.dispatch_reader import DispatchReader
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.loader_feed import SamplerFeed
from paceline_accelerate.nested import slice_tensors
from paceline_accelerate.samplers import BatchSamplerShard, IterableDatasetShard, get_sampler, set_sampler
from paceline_accelerate.state import PartialState
from paceline_accelerate.stateful_loader import batches_of, stateful, torchdata_state, without_torchdata


class DataLoaderStateMixin:
    """Tells `GradientState` about the loop that runs over a loader.

    A loader class that a script writes calls `begin` before its loop and `end` after it, and sets the attributes during the
    loop. Loaders that were prepared do all of this by themselves.

    Attributes:
        end_of_dataloader: whether the current batch is the last of its epoch.
        remainder: number of real samples in a last global batch that is not full; -1 where it is unknown.
    """

    end_of_dataloader = False
    remainder = -1

    _drop_last = False  # whether a last global batch that is not full is skipped
    _gradient_state: GradientState | None = None

    @property
    def gradient_state(self) -> GradientState:
        """The state of the accelerator that was made last, unless a script has set another one."""
        return self._gradient_state or GradientState()

    @gradient_state.setter
    def gradient_state(self, state: GradientState) -> None:
        self._gradient_state = state

    def begin(self) -> None:
        """Marks the start of a loop: `gradient_state` shows this loader from now on."""
        self.reset()
        dataset: Any = getattr(self, "dataset", None)
        batch = getattr(self, "total_batch_size", None)
        if batch and hasattr(dataset, "__len__") and not self._drop_last:
            self.remainder = len(dataset) % batch
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Marks the end of the loop: `gradient_state` no longer shows this loader."""
        self.gradient_state._remove_dataloader(self)

    def reset(self) -> None:
        """Sets the attributes back to their values before a loop."""
        self.end_of_dataloader = False
        self.remainder = -1


class DataLoaderAdapter(PreparedLoader, DataLoader[Any]):
    """Iterates over a DataLoader and has the DataLoader's attributes.

    `DataLoader` is a base class only so that `isinstance(loader, DataLoader)` holds: its constructor is never called.

    Args:
        dataset, batch_sampler, kwargs: as for `DataLoader`.
        use_stateful_dataloader: whether the loader is also a `StatefulDataLoader` of torchdata for `isinstance`.

    Raises:
        CompatError: `compat-argument`, where torchdata is missing.
    """

    use_stateful_dataloader = False
    source: DataLoader[Any] | None = None  # the loader that the script passed to `prepare`
    _stateful: DataLoader[Any] | None = None  # the original in torchdata's class, once a script has asked for it
    _drop_last = False
    _has_begun = False  # whether any loop has begun
    _is_through = False  # whether the last loop has reached its end
    _is_accelerate_prepared = False
    _set_by_script: Mapping[str, int] = MappingProxyType({})  # attributes of the loop that a script has set itself
    _feed: Any

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        self.adapt(DataLoader(dataset, **kwargs), use_stateful_dataloader)

    @classmethod
    def over(cls, *args: Any, **options: Any) -> Self:
        """Returns a loader that `adapt` initializes. `__init__` would make another DataLoader from a dataset."""
        loader = object.__new__(cls)
        loader.adapt(*args, **options)
        return loader

    def adapt(
        self,
        base: DataLoader[Any],
        use_stateful_dataloader: bool = False,
        feed: Feed | None = None,
        device: torch.device | None = None,
        active: ActiveLoaders | None = None,
        *,
        drop_last: bool = False,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        non_blocking: bool = False,
    ) -> None:
        """Initializes the loader from a DataLoader that yields this process's part.

        It stands in place of `__init__`, which has to take accelerate's arguments.

        Args:
            base: the DataLoader.
            use_stateful_dataloader: see the class.
            feed: reads the DataLoader; None makes a `SamplerFeed`.
            device: where batches are moved to; None leaves them where they are.
            active: the loaders that are being iterated, to which this one adds itself; None takes those of `GradientState()`.
            drop_last: whether a last global batch that is not full is skipped.
            rng_types, synchronized_generator: for the feed; see `DataLoaderShard`.
            non_blocking: whether copies to the device are asynchronous.
        """
        if use_stateful_dataloader and find_spec("torchdata") is None:
            raise CompatError(
                "compat-argument",
                "use_stateful_dataloader=True needs torchdata.",
                why="a stateful loader is a StatefulDataLoader, which is torchdata's; it is not installed",
                fix="run `pip install torchdata`, or leave use_stateful_dataloader out: a saved state goes on exactly as well",
            )
        self.use_stateful_dataloader = use_stateful_dataloader
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._drop_last = drop_last
        self.skip_batches = 0
        if feed is None:
            feed = SamplerFeed(base, _plan_of(base), rng_types, synchronized_generator, use_stateful_dataloader)
        if active is None:
            # A loader that a script makes itself belongs to the accelerator that was made last.
            active = GradientState().active_loaders
        asked = {"batch_size": feed.plan.micro_batch}
        PreparedLoader.__init__(
            self, base, feed, device or torch.device("cpu"), active, non_blocking, arguments={}, asked=asked
        )

    def join(self, active: ActiveLoaders) -> None:
        """Makes it a loader of another run, whose windows end with its epochs from now on."""
        self._active = active

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Makes `isinstance(loader, StatefulDataLoader)` hold for a stateful loader."""
        if not self.use_stateful_dataloader:
            return type(self)
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader  # type: ignore[no-any-return]

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The DataLoader that is iterated; that of a stateful loader is one of torchdata's, with the same parts."""
        if not self.use_stateful_dataloader:
            return self.original
        if self._stateful is None:
            self._stateful = stateful(self.original)
        return self._stateful

    # -- the loop --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        # In every epoch anew, unlike the position of a checkpoint, after which only one epoch goes on.
        if self.skip_batches:
            self.start_after(self.skip_batches)
        self._has_begun = True
        self._is_through = False
        self.begin()
        try:
            yield from super().__iter__()
            self._is_through = True
        finally:
            self.end()

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its epoch, or the last loop has reached its end."""
        return bool(self._set_by_script.get("end", self._is_through or super().end_of_dataloader))

    @end_of_dataloader.setter
    def end_of_dataloader(self, value: bool) -> None:
        self._set_by_script = {**self._set_by_script, "end": value}

    def begin(self) -> None:
        """Is called at the start of each loop, for subclasses of scripts.

        This class itself has nothing to do here, because it derives the loop's attributes from its position.
        """
        self.reset()

    def end(self) -> None:
        """Is called at the end of each loop, also when the loop was left by `break`."""

    def reset(self) -> None:
        """Is called by `begin`; forgets what a script has set."""
        self._set_by_script = {}

    def _begin(self) -> Any:
        mark = self.cursor.mark
        if mark is not None and self.cursor.chosen is None:
            # accelerate counts only epochs that were read to their end: after a `break` the next loop has the same number.
            return Position(mark.epoch), NOTHING
        return super()._begin()

    def train(self) -> None:
        """Notes that a backward pass ran inside a loop over this loader: processes without a batch take part from now on."""
        super().train()
        self.takes_part = True

    @property
    def takes_part(self) -> bool:
        """Whether a process that has no batch at the last step takes part in it, with a row of weight 0."""
        return bool(getattr(self._feed, "takes_part", True))

    @takes_part.setter
    def takes_part(self, value: bool) -> None:
        self._feed.takes_part = value

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        """The position of a stateful loader.

        Raises:
            AttributeError: for a loader that is not stateful.
        """
        if not self.use_stateful_dataloader:
            raise AttributeError("dl_state_dict")
        return self.state_dict()

    @property
    def iteration(self) -> int:
        """The number of the epoch."""
        return self.position.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    # -- the position ----------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch; samplers and the dataset are told at once, and again when the epoch begins."""
        super().set_epoch(epoch)
        if isinstance(self._feed, SamplerFeed):
            self._feed.tell_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, with the states of the random streams from which the rest of the epoch is drawn.

        That of a stateful loader has the keys of torchdata too.
        """
        state = super().state_dict()
        state["under_way"] = state["samples"] > 0
        if "streams" not in state and isinstance(self._feed, SamplerFeed):
            state["generators_now"] = [generator.get_state() for generator in self._feed.generators()]
        if not self.use_stateful_dataloader:
            return state
        is_finished = self._is_through and not state["under_way"]
        num_batches = state.get("batches", 0)
        if is_finished and state["length"] is not None:
            num_batches = len(self)
        num_samples = None
        if self.plan.width == 1 and isinstance(get_sampler(self.original), SequentialSampler):
            num_samples = min(num_batches * self.plan.global_batch, state["length"])
        return {**torchdata_state(self.original.num_workers, num_batches, is_finished, num_samples), **state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next loop go on where `state_dict` was taken, with the batch size that this script has.

        A stateful loader also takes a state of torchdata's `StatefulDataLoader`, of this process's part of the data.
        """
        num_batches = batches_of(state_dict)
        if self.use_stateful_dataloader and "samples" not in state_dict and num_batches is not None:
            self.start_after(num_batches)
            return
        state_dict = without_torchdata(state_dict)
        super().load_state_dict(state_dict)
        resume = getattr(self._feed, "resume", None)
        if resume is not None:
            resume(int(state_dict["epoch"]), state_dict)
        self.takes_part |= self.trains

    def _resize(self, saved: Mapping[str, Any]) -> None:
        was = saved["global_batch"]
        now = self.plan.global_batch
        if was not in (None, now):
            warn_once(
                "data",
                f"a global batch is {now} now, and was {was} where the position was saved: a process's batch keeps its size "
                "under accelerate's names, so the number of processes decides. The order of samples goes on.",
            )

    def adjust_state_dict_for_prefetch(self) -> None:
        """Does nothing: batches that were read ahead do not count in a position."""

    # -- what scripts ask ------------------------------------------------------------------------------------

    def get_sampler(self) -> Any:
        """Returns the sampler of single samples."""
        return get_sampler(self.original)

    def set_sampler(self, sampler: Any) -> None:
        """Replaces the sampler of single samples."""
        set_sampler(self.original, sampler)

    @property
    def remainder(self) -> int:
        """The number of real samples in a last global batch that is not full, and 0 if that batch is full.

        It is -1 before the first loop, where the number is unknown, and where an incomplete last batch is dropped.
        """
        return self._set_by_script.get("remainder", self._own_remainder())

    @remainder.setter
    def remainder(self, value: int) -> None:
        self._set_by_script = {**self._set_by_script, "remainder": value}

    def _own_remainder(self) -> int:
        return -1 if not self._has_begun or self._drop_last else super().remainder

    @property
    def total_dataset_length(self) -> int:
        """The number of samples of the dataset.

        Raises:
            TypeError: the dataset has no length.
        """
        dataset: Any = self.original.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        return len(dataset)


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """Yields the part of one process.

    Args:
        dataset, kwargs: as for `DataLoader`; a `BatchSamplerShard` or an `IterableDatasetShard` among them selects the part.
        device: where batches are moved to; None leaves them where they are.
        rng_types: names of the random streams that are synchronized over the processes at the start of an epoch: "torch",
            "cuda", "generator".
        synchronized_generator: the stream that is called "generator".
        skip_batches: how many batches are skipped at the start of each epoch.
        use_stateful_dataloader: whether the loader is also a `StatefulDataLoader` for `isinstance`.
        iteration: number of the first epoch.

    Ranks: where `rng_types` are given, all ranks iterate together, because the streams are sent from rank 0.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: object = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if device is not None:
            device = torch.device(device)  # scripts also pass a name
        self.adapt(
            DataLoader(dataset, **kwargs),
            use_stateful_dataloader,
            device=device,
            drop_last=_drop_last,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            non_blocking=_non_blocking,
        )
        self.skip_batches = skip_batches
        self.set_epoch(iteration)


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """Lets the first process read the data and send each process its part.

    Args:
        dataset, kwargs: as for `DataLoader`.
        split_batches: whether a batch of the DataLoader is divided over the processes; if not, each process gets a whole one.
        skip_batches: how many batches are skipped at the start of each epoch.
        use_stateful_dataloader: whether the loader is also a `StatefulDataLoader` for `isinstance`.
        slice_fn: cuts one process's part out of a joined batch: (batch, slice, process_index=, num_processes=).
        iteration: number of the first epoch.

    Ranks: all iterate together.
    """

    split_batches = False
    _newest: BatchInfo | None = None  # what the last loop knows of the batch that it yielded last

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: object = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        state = PartialState()
        self.adapt(
            DataLoader(dataset, **kwargs),
            state.num_processes,
            state.process_index,
            state.collectives,
            split_batches=split_batches,
            drop_last=_drop_last,
            slice_fn=slice_fn,
            use_stateful_dataloader=use_stateful_dataloader,
            device=state.device,
            non_blocking=_non_blocking,
        )
        self.skip_batches = skip_batches
        self.set_epoch(iteration)

    def adapt(
        self,
        base: DataLoader[Any],
        width: int,
        index: int,
        collectives: Collectives,
        *,
        split_batches: bool,
        drop_last: bool,
        slice_fn: Callable[..., Any] | None,
        use_stateful_dataloader: bool,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Initializes the loader from a DataLoader that the process with index 0 reads.

        Args:
            base: the DataLoader.
            width: number of processes that read different samples.
            index: number of this process among them.
            collectives: the collectives of these processes.
            split_batches, slice_fn, use_stateful_dataloader: see the class.
            drop_last: whether a last global batch that is not full is skipped.
            seed: seed of the order of samples.
            options: `device`, `active` and `non_blocking`, as for the base class.
        """
        self.split_batches = split_batches
        self.slice_fn = slice_fn or slice_tensors
        self.state = PartialState()
        batch = batch_size_of(base) or 1
        micro = batch
        if split_batches:
            micro = max(1, batch // width)
        plan = DataPlan(micro * width, micro, width=width, index=index, seed=seed, tail="pad")
        # A `StatefulDataLoader` makes its first iterator before the loop begins. Making it draws a random number, so a script
        # that was written for it sees other numbers afterwards unless the same is done here.
        is_early = use_stateful_dataloader
        if width == 1:
            feed: Any = SamplerFeed(base, plan, is_early=is_early)
        else:
            # The first process reads one batch a step where batches are split, and else one batch for each process.
            num_first = 1 if split_batches else width
            reading = DataPlan(batch, batch, seed=seed)
            samples = SamplerFeed(base, reading, is_early=is_early and index == 0, num_first=num_first)
            reader = DispatchReader(samples, plan, split_batches, drop_last, slice_fn)
            if is_early and index:
                reader.draw_early()
            feed = _Dispatched(reader, plan, collectives)
        super().adapt(base, use_stateful_dataloader, feed, drop_last=drop_last, **options)

    def __iter__(self) -> Iterator[Any]:
        self._newest = None
        for batch in super().__iter__():
            self._newest = self.current
            yield batch

    def _own_remainder(self) -> int:
        """The number of real rows of the last global batch, also after the loop; -1 until that batch is the current one."""
        newest = self._newest
        return -1 if newest is None or not newest.last else sum(newest.real)


class _Dispatched(DispatchFeed):
    """A `DispatchFeed` that a checkpoint can resume."""

    takes_part = True  # every process gets rows at every step

    def __init__(self, reader: DispatchReader, plan: DataPlan, collectives: Collectives) -> None:
        super().__init__(reader, plan, collectives)
        self.resume = reader.resume


class SkipDataLoader(DataLoaderShard):
    """A DataLoader that skips the first batches of each epoch.

    Args:
        dataset, kwargs: as for `DataLoader`.
        skip_batches: how many batches are skipped.
        use_stateful_dataloader: whether the loader is also a `StatefulDataLoader` for `isinstance`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def batch_size_of(dataloader: DataLoader[Any]) -> int | None:
    """Returns the batch size of a loader, or else of its batch sampler; None where neither has one."""
    size: int | None = dataloader.batch_size
    # torch's DataLoader has none itself where it was given a batch sampler.
    if size is None:
        size = getattr(dataloader.batch_sampler, "batch_size", None)
    return size


def _plan_of(base: DataLoader[Any]) -> DataPlan:
    """Derives batch sizes and the number of processes from the parts that a loader is made of."""
    if isinstance(base.dataset, IterableDatasetShard):
        shard = base.dataset
        return DataPlan(shard.rows * shard.num_processes, shard.rows, 1, shard.num_processes, shard.process_index)
    part: Any = base.batch_sampler
    if part is None:  # without automatic batching, for which the shard stands in place of the sampler
        part = base.sampler
    size = getattr(part, "batch_size", None) or 1
    if not isinstance(part, BatchSamplerShard):
        return DataPlan(size, size)
    width = part.num_processes
    micro = size
    if part.split_batches:
        micro = size // width
    # The shard itself fills batches up where `even_batches` asks for it, so the plan has no "pad".
    return DataPlan(micro * width, micro, 1, width, part.process_index, tail="drop" if part.drop_last else "divide")
