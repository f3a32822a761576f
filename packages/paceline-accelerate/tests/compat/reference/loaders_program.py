"""What loaders give under accelerate's interface; the same file runs under the real library and under ours.

    python record_loaders.py    (an environment with the real accelerate 1.15.0)    -> recorded_loaders.json.xz
    test_loaders.py             under `paceline.compat`                             -> compared with it

Each case prepares one loader and iterates it a few times. What is compared: the samples that this process sees, where a
batch says that it is the last, and the state of torch's random stream (as a checksum) whenever the loop body runs.
"""

import random
import zlib

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Numbers(Dataset):
    """The numbers from 0 on."""

    def __init__(self, count, draws=False):
        self.count, self.draws = count, draws

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.draws:
            torch.rand(1)
        return torch.tensor(index)


class Stream(IterableDataset):
    """The same numbers, one after another; `set_epoch` adds 100 for each epoch."""

    def __init__(self, count, generator=None):
        self.count, self.epoch = count, 0
        if generator is not None:
            self.generator = generator

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = range(self.count)
        if hasattr(self, "generator"):
            order = torch.randperm(self.count, generator=self.generator).tolist()
        return (torch.tensor(number + 100 * self.epoch) for number in order)


class Backwards(Sampler):
    """A sampler of the script's own, without random numbers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))


class Drawing(Backwards):
    """One that draws from every stream, and knows `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        shift = random.randrange(7) + int(np.random.randint(7)) + self.epoch
        return iter([(index + shift) % self.count for index in torch.randperm(self.count).tolist()])


class Groups(BatchSampler):
    """Batches of the script's own: of `size` samples, each from another place; told apart by `says_size`."""

    def __init__(self, count, size, drop_last=False, says_size=True):
        self.count, self.size, self.drop_last = count, size, drop_last
        if says_size:
            self.batch_size = size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count // self.size if self.drop_last else -(-self.count // self.size)

    def __iter__(self):
        order = [(index + self.epoch) % self.count for index in range(self.count)]
        for start in range(0, self.count, self.size):
            batch = order[start : start + self.size]
            if len(batch) == self.size or not self.drop_last:
                yield batch


class Uneven(Groups):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self, count):
        super().__init__(count, 2, says_size=False)
        self.lengths = []
        while sum(self.lengths) < count:
            self.lengths.append(min(len(self.lengths) % 3 + 1, count - sum(self.lengths)))

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        start = 0
        for length in self.lengths:
            yield list(range(start, start + length))
            start += length


def loader_of(kind, count, batch, drop_last=False, workers=0):
    """The loader of a case."""
    data = Numbers(count, draws=kind == "augmented")
    rest = {"num_workers": workers}
    seeded = torch.Generator().manual_seed(11)
    if kind in ("sequential", "augmented"):
        return DataLoader(data, batch, drop_last=drop_last, **rest)
    if kind == "shuffled":
        return DataLoader(data, batch, shuffle=True, drop_last=drop_last, **rest)
    if kind == "own generator":
        return DataLoader(data, batch, shuffle=True, drop_last=drop_last, generator=seeded, **rest)
    if kind == "sampler's generator":
        return DataLoader(data, batch, sampler=RandomSampler(data, generator=seeded), drop_last=drop_last, **rest)
    if kind == "replacement":
        sampler = RandomSampler(data, replacement=True, num_samples=count + 3)
        return DataLoader(data, batch, sampler=sampler, drop_last=drop_last, **rest)
    if kind == "weighted":
        return DataLoader(data, batch, sampler=WeightedRandomSampler([1.0 + i for i in range(count)], count), **rest)
    if kind == "subset":
        return DataLoader(data, batch, sampler=SubsetRandomSampler(range(0, count, 2)), **rest)
    if kind == "backwards":
        return DataLoader(data, batch, sampler=Backwards(count), drop_last=drop_last, **rest)
    if kind == "drawing":
        return DataLoader(data, batch, sampler=Drawing(count), drop_last=drop_last, **rest)
    if kind == "groups":
        return DataLoader(data, batch_sampler=Groups(count, batch, drop_last), **rest)
    if kind == "groups without size":
        return DataLoader(data, batch_sampler=Groups(count, batch, drop_last, says_size=False), **rest)
    if kind == "uneven":
        return DataLoader(data, batch_sampler=Uneven(count), **rest)
    if kind == "batches as sampler":
        sampler = BatchSampler(SequentialSampler(data), batch, drop_last)
        return DataLoader(data, batch_size=None, sampler=sampler, collate_fn=Collate(), **rest)
    if kind == "stream":
        return DataLoader(Stream(count), batch, drop_last=drop_last, **rest)
    if kind == "stream's generator":
        return DataLoader(Stream(count, seeded), batch, drop_last=drop_last, **rest)
    raise ValueError(kind)


class Collate:
    """A list of numbers as one tensor."""

    def __call__(self, batch):
        return torch.as_tensor(batch)


class ByIndexList(Numbers):
    """Takes a list of indices."""

    def __getitem__(self, index):
        return torch.as_tensor(index)


def checksum():
    """Of torch's random stream."""
    return zlib.crc32(torch.get_rng_state().numpy().tobytes()) % 100_000


def epoch_of(loader, accelerator, stop=None):
    """One iteration: the batches, the checksum where the body runs first and behind the loop, which batch was the last."""
    batches, ends, first = [], [], None
    for step, batch in enumerate(loader):
        first = checksum() if first is None else first
        batches.append(batch.flatten().tolist())
        if accelerator.gradient_state.end_of_dataloader:
            ends.append([step, accelerator.gradient_state.remainder])
        torch.rand(1)  # as a model with dropout would
        if step + 1 == stop:
            break
    return {"batches": batches, "streams": [first, checksum()], "ends": ends}


def attributes_of(loader):
    """What scripts ask a prepared loader."""
    values = {}
    for name in ("total_batch_size", "total_dataset_length", "batch_size", "use_stateful_dataloader", "iteration"):
        try:
            values[name] = getattr(loader, name)
        except Exception as error:
            values[name] = type(error).__name__
    try:
        values["length"] = len(loader)
    except TypeError:
        values["length"] = None
    for name in ("sampler", "batch_sampler", "synchronized_generator", "dataset"):
        values[name] = type(getattr(loader, name, None)).__name__
    values["rng_types"] = [str(kind) for kind in getattr(loader, "rng_types", None) or []]
    values["class"] = [type(loader).__name__, isinstance(loader, DataLoader)]
    return values


def case(kind, count, batch, drop_last=False, workers=0, place=True, skip=0, **options):
    """One loader: two plain epochs, one after `set_epoch`, one that is left, and the one after it."""
    set_seed(42)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = loader_of(kind, count, batch, drop_last, workers)
    if kind == "batches as sampler":
        loader = DataLoader(ByIndexList(count), batch_size=None, sampler=loader.sampler)
    try:
        loader = accelerator.prepare_data_loader(loader, device_placement=place)
    except Exception as error:
        return {"error": "refused", "kind": type(error).__name__}
    said = {"prepared": checksum(), "attributes": attributes_of(loader), "epochs": []}
    said["epochs"].append(epoch_of(loader, accelerator))
    if skip:
        rest = skip_first_batches(loader, skip)
        said["epochs"].append(epoch_of(rest, accelerator))
        said["skipped"] = [type(rest).__name__, isinstance(rest, DataLoader)]
    said["epochs"].append(epoch_of(loader, accelerator))
    loader.set_epoch(5)
    said["epochs"].append(epoch_of(loader, accelerator))
    said["epochs"].append(epoch_of(loader, accelerator, stop=1))
    said["epochs"].append(epoch_of(loader, accelerator))
    said["after"] = checksum()
    accelerator.free_memory()
    return said


def cases():
    """Name -> keywords of `case`."""
    chosen = {}

    def add(kind, count, batch, **options):
        words = [f"{name}={value}" for name, value in options.items()]
        chosen[", ".join([kind, f"{count} by {batch}", *words])] = {
            "kind": kind, "count": count, "batch": batch, **options
        }  # fmt: skip

    for count in (1, 4, 11):
        for batch in (2, 3):
            for even in (True, False):
                for drop in (True, False):
                    add("sequential", count, batch, even_batches=even, drop_last=drop)
        for even in (True, False):
            for drop in (True, False):
                add("sequential", count, 6, even_batches=even, drop_last=drop, split_batches=True)
    shuffles = ("shuffled", "own generator", "sampler's generator", "replacement", "weighted", "subset", "drawing")
    for kind in (*shuffles, "backwards", "augmented"):
        for even in (True, False):
            add(kind, 11, 2, even_batches=even)
        add(kind, 11, 2, use_seedable_sampler=True)
        add(kind, 11, 2, use_seedable_sampler=True, data_seed=7)
        add(kind, 11, 6, split_batches=True)
        add(kind, 11, 2, dispatch_batches=True)
        add(kind, 11, 2, dispatch_batches=True, use_seedable_sampler=True)
        add(kind, 11, 2, skip=2)
        add(kind, 11, 2, skip=2, use_seedable_sampler=True)
        add(kind, 11, 2, drop_last=True)
    for kind in ("groups", "groups without size", "uneven", "batches as sampler"):
        for count in (1, 7, 11):
            for even in (True, False):
                add(kind, count, 2, even_batches=even)
                add(kind, count, 2, even_batches=even, drop_last=True)
            add(kind, count, 6, split_batches=True)
        add(kind, 11, 2, skip=2)
        if kind in ("groups", "groups without size"):
            add(kind, 11, 2, dispatch_batches=True)
    for kind in ("sequential", "stream", "stream's generator"):
        for count in (1, 7, 11):
            for drop in (True, False):
                if count > 6 or not drop:  # the real one fails where rank 0 has nothing to send
                    add(kind, count, 2, dispatch_batches=True, drop_last=drop)
                    add(kind, count, 6, dispatch_batches=True, drop_last=drop, split_batches=True)
                if kind != "sequential":
                    add(kind, count, 2, dispatch_batches=False, drop_last=drop)
                    add(kind, count, 6, dispatch_batches=False, drop_last=drop, split_batches=True)
                    if count > 6 or not drop:
                        add(kind, count, 2, drop_last=drop)
        add(kind, 11, 2, dispatch_batches=True, skip=2)
        add(kind, 11, 2, dispatch_batches=False, skip=2)
        add(kind, 11, 2, dispatch_batches=True, even_batches=False)
    for kind in ("shuffled", "stream", "augmented"):
        add(kind, 11, 2, workers=1)
        add(kind, 11, 2, place=False)
        add(kind, 11, 2, use_stateful_dataloader=True)
        add(kind, 11, 2, non_blocking=True)
    return chosen


def everything():
    """Every case, on this process."""
    said = {}
    for name, options in cases().items():
        try:
            said[name] = case(**options)
        except Exception as error:
            error.add_note(f"in the case {name}")
            raise
    return said
