"""accelerate's loader classes, made by hand and prepared, in one process."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from paceline.plan.data import DataPlan, Position
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import DataLoaderConfiguration
from paceline_accelerate.data_loader import prepare_data_loader, skip_first_batches
from paceline_accelerate.dispatch_reader import DispatchReader
from paceline_accelerate.errors import CompatRuntimeError
from paceline_accelerate.loader_classes import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from paceline_accelerate.loader_feed import OwnShardsFeed, SamplerFeed
from paceline_accelerate.sample_order import steps_of_split_batches, steps_of_whole_batches
from paceline_accelerate.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)

NUMBERS = list(range(8))


def lists(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


class Stream(IterableDataset):
    """The numbers 0 to 6."""

    def __iter__(self):
        return iter(range(7))


class Seeded(IterableDataset):
    """Numbers in an order that its generator decides, and does not know `set_epoch`."""

    generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).tolist())


class Told(BatchSampler):
    """Notes the epochs that it is told."""

    def __init__(self) -> None:
        super().__init__(range(8), 2, drop_last=False)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("size", [2, None])
def test_rows_that_are_no_filler_are_counted(even: bool, size: int | None) -> None:
    batches = [[0, 1], [2, 3], [4, 5], [6]]
    full, last = steps_of_whole_batches(batches, 3, size, drop_last=False, even=even)
    assert full.real == (2, 2, 2) and last.real == (1, 0, 0)
    loaded = [list(part) for part in last.parts]
    if not even:
        assert loaded == [[6], [], []] and last.spare == 6
    elif size is None:
        assert loaded == [[6], [0, 1], [2, 3]]
    else:
        assert loaded == [[6, 0], [1, 2], [3, 4]]


def test_a_short_batch_in_the_middle_is_not_lost() -> None:
    batches = [[0, 1], [2], [3, 4], [5, 6]]
    steps = steps_of_whole_batches(batches, 2, 2, drop_last=False, even=True)
    assert [step.parts for step in steps] == [[[0, 1], [2]], [[3, 4], [5, 6]]]
    split = steps_of_split_batches([[0, 1], [2], [3, 4]], 2, 2, drop_last=True, even=True)
    assert [step.parts[1] for step in split] == [[1], [4]]


def test_a_batch_larger_than_the_others_is_split_whole() -> None:
    (step,) = steps_of_split_batches([[0, 1, 2]], 2, 2, drop_last=False, even=False)
    assert step.parts == [[0, 1], [2]] and step.real == (2, 1)


def test_samplers_by_hand() -> None:
    shard = BatchSamplerShard(BatchSampler(range(7), 2, False), num_processes=2, process_index=1)
    assert list(shard) == [[2, 3], [6, 0]] and len(shard) == 2 and shard.total_length == 4
    assert list(SkipBatchSampler(shard, 1)) == [[6, 0]] and len(SkipBatchSampler(shard, 1)) == 1
    with pytest.raises(ValueError, match="multiple of the number"):
        BatchSamplerShard(BatchSampler(range(7), 3, False), 2, 0, split_batches=True)
    assert list(IterableDatasetShard(Stream(), 2, False, 2, 1)) == [2, 3, 6, 0]
    assert list(IterableDatasetShard(Seeded(), 2, False, 2, 1)) == list(IterableDatasetShard(Seeded(), 2, False, 2, 1))
    seeded = SeedableRandomSampler(NUMBERS, data_seed=3)
    first, second = list(seeded), list(seeded)
    seeded.set_epoch(0)
    assert first != second and list(seeded) == first


def test_loaders_by_hand() -> None:
    loader = DataLoaderShard(NUMBERS, batch_size=2, skip_batches=1)
    assert lists(loader) == lists(loader) == [[2, 3], [4, 5], [6, 7]]
    assert isinstance(loader, DataLoader) and loader.total_batch_size == 2 and loader.total_dataset_length == 8
    skipping = SkipDataLoader(NUMBERS, batch_size=2, skip_batches=3)
    assert lists(skipping) == [[6, 7]] and len(skipping) == 1
    assert lists(skip_first_batches(DataLoader(NUMBERS, batch_size=2), 2)) == [[4, 5], [6, 7]]
    assert lists(skip_first_batches(DataLoader(Stream(), batch_size=2), 3)) == [[6]]
    assert lists(DataLoaderDispatcher(NUMBERS, batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    part = prepare_data_loader(DataLoader(NUMBERS, batch_size=2), num_processes=2, process_index=1)
    assert lists(part) == [[2, 3], [6, 7]] and isinstance(part.batch_sampler, BatchSamplerShard)


def test_a_part_without_automatic_batching() -> None:
    part = prepare_data_loader(DataLoader(NUMBERS, batch_size=None), num_processes=2, process_index=1)
    assert list(part) == [1, 3, 5, 7]
    assert (
        prepare_data_loader(DataLoader(NUMBERS, batch_size=None), num_processes=1, process_index=0).total_batch_size
        == 1
    )


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_stateful_loader_is_torchdatas_and_resumes() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = DataLoaderShard(NUMBERS, batch_size=2, use_stateful_dataloader=True, shuffle=True)
    assert isinstance(loader, StatefulDataLoader) and isinstance(loader, DataLoaderShard)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            state = loader.state_dict()
    other = DataLoaderShard(NUMBERS, batch_size=2, use_stateful_dataloader=True, shuffle=True)
    other.load_state_dict(state)
    assert lists(other) == seen[2:]


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_skips_in_its_first_epoch(workers: int) -> None:
    loader = DataLoaderShard(NUMBERS, batch_size=2, use_stateful_dataloader=True, num_workers=workers)
    assert lists(skip_first_batches(loader, 3)) == [[6, 7]]


def test_stream_resumes_by_reading() -> None:
    loader = DataLoaderShard(Stream(), batch_size=2)
    batches = iter(loader)
    next(batches), next(batches)
    other = DataLoaderShard(Stream(), batch_size=2)
    other.load_state_dict(loader.state_dict())
    assert lists(other) == [[4, 5], [6]]


def test_prepared_loaders() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    sampler = Told()
    told = accelerator.prepare(DataLoader(NUMBERS, batch_sampler=sampler))
    assert isinstance(told, DataLoaderShard) and isinstance(told, DataLoader)
    list(told)
    told.set_epoch(4)
    list(told)
    assert sampler.epochs == [0, 4, 4] and told.iteration == 5
    shuffled = DataLoader(NUMBERS, batch_size=2, shuffle=True)
    prepared = accelerator.prepare(shuffled)
    assert isinstance(get_sampler(prepared), SeedableRandomSampler) and isinstance(
        prepared.get_sampler(), RandomSampler
    )
    assert not isinstance(shuffled.sampler, SeedableRandomSampler), "the script's own loader stays what it is"
    assert accelerator.prepare(prepared) is prepared and accelerator.prepare(shuffled) is prepared
    assert prepared._is_accelerate_prepared and prepared.gradient_state.num_steps == 1
    rest = accelerator.skip_first_batches(prepared, 1)
    assert isinstance(rest, DataLoaderShard) and len(rest) == 3


def test_a_generator_can_be_seeded_later() -> None:
    generator = torch.Generator()
    loader = Accelerator(cpu=True).prepare(DataLoader(NUMBERS, batch_size=4, shuffle=True, generator=generator))
    orders = []
    for seed in (1, 2, 1):
        generator.manual_seed(seed)
        orders.append(lists(loader))
    assert orders[0] == orders[2] != orders[1]


def test_split_batches_that_do_not_go() -> None:
    with pytest.raises(ValueError, match="needs to be a round multiple"):
        prepare_data_loader(DataLoader(NUMBERS, batch_size=3), num_processes=2, process_index=0, split_batches=True)
    with pytest.raises(ValueError, match="needs a batch size"):
        loader = DataLoader(NUMBERS, batch_size=None)
        prepare_data_loader(loader, num_processes=2, process_index=0, split_batches=True)


def test_an_epoch_left_by_break_keeps_its_number() -> None:
    loader = DataLoaderShard(NUMBERS, batch_size=2)
    for _ in loader:
        break
    assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]] and loader.iteration == 1


def test_a_change_of_batch_size_goes_on_after_the_samples_that_were_used(caplog) -> None:
    loader = DataLoaderShard(NUMBERS, batch_size=2)
    batches = iter(loader)
    next(batches)
    other = DataLoaderShard(NUMBERS, batch_size=1)
    other.load_state_dict({**loader.state_dict(), "width": 2})
    assert lists(other) == [[2], [3], [4], [5], [6], [7]]
    assert "a global batch is 1 now, and was 2" in caplog.text


@pytest.mark.parametrize(("keeps_workers", "draws"), [(True, 1), (False, 2)])
def test_a_rank_that_reads_nothing_draws_as_often_as_rank_0(keeps_workers: bool, draws: int) -> None:
    loader = DataLoader(NUMBERS, batch_size=2, num_workers=1, persistent_workers=keeps_workers)
    plan = DataPlan(4, 2, width=2, index=1)
    reader = DispatchReader(SamplerFeed(loader, plan), plan, split_batches=False, drop_last=False, slice_fn=None)
    torch.manual_seed(0)
    for epoch in range(2):
        reader.schedule(Position(epoch))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    for _ in range(draws):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(state, torch.get_rng_state())


def test_a_dataset_that_divides_itself_is_read_with_the_draws_of_a_loader() -> None:
    feed = OwnShardsFeed(DataLoader(Stream(), batch_size=2), DataPlan(2, 2), None)
    torch.manual_seed(0)
    for epoch in range(2):
        list(feed.open(Position(epoch)))
    feed.resume(2, {"under_way": True})  # the saved run drew the seed of this epoch
    list(feed.open(Position(2)))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(state, torch.get_rng_state())


def test_batches_that_dispatch_cannot_join() -> None:
    loader = DataLoader([torch.zeros(3), torch.zeros(4)], batch_size=1)
    plan = DataPlan(2, 1, width=2, index=0)
    reader = DispatchReader(SamplerFeed(loader, DataPlan(1, 1)), plan, False, False, None)
    with pytest.raises(CompatRuntimeError, match="dispatch_batches=False"):
        next(reader.global_batches(Position(0)))
