"""Packed batches by tokens give the losses and weights of whole documents one by one, on any number of processes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler

from paceline import Accelerator, PackedDocuments, TokenBatchSampler, pack_documents, testing
from paceline.base.errors import DataError

TOKENS, WORDS = 24, 11


class Documents:
    """Documents of 2 to 12 tokens; each token's target is in `targets`, and some have none."""

    def __init__(self, count=30):
        generator = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(2, 13, (count,), generator=generator).tolist()
        self.ids = [torch.randint(0, WORDS, (length,), generator=generator) for length in self.lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        targets = ids.roll(-1)
        targets[-1] = -100
        return {"input_ids": ids, "targets": targets, "documents": torch.full_like(ids, index)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, 8), nn.Embedding(12, 8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids) + self.positions(position_ids)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = PackedDocuments(position_ids).attention(q, k, v)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


def model_and_optimizer():
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def loader_of(shuffle=True, tokens=TOKENS, **options):
    dataset = Documents()
    order = RandomSampler(dataset) if shuffle else dataset
    return DataLoader(dataset, batch_sampler=TokenBatchSampler(order, tokens), collate_fn=pack_documents, **options)


@cache
def reference(epochs=2, micro_batches=1):
    """The documents of each step, its loss and the weights at the end: each document goes through the model alone."""
    model, optimizer = model_and_optimizer()
    dataset = Documents()
    torch.manual_seed(5)
    seen, losses = [], []
    for _ in range(epochs):
        torch.empty((), dtype=torch.int64).random_()  # the seed of the workers, which a loader draws first
        batches = list(TokenBatchSampler(RandomSampler(dataset), TOKENS))
        for first in range(0, len(batches), micro_batches):
            documents = [number for batch in batches[first : first + micro_batches] for number in batch]
            loss = torch.zeros((), dtype=torch.float64)
            items = 0
            for number in documents:
                sample = dataset[number]
                logits = model(sample["input_ids"].unsqueeze(0), torch.arange(len(sample["input_ids"])).unsqueeze(0))
                loss = loss + functional.cross_entropy(logits[0], sample["targets"], reduction="sum")
                items += len(sample["input_ids"]) - 1
            (loss / items).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(documents)
            losses.append(float(loss.detach() / items))
    return seen, losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(*, stop=None, resumed=None, micro_batches=1, counts=True, dispatch=None, plan=None, split=True, **options):
    """Trains two epochs.

    Args:
        stop: the number of steps after which the state is saved in a folder of this name, and the run ends: (steps, folder).
        resumed: the folder of a state with which the run goes on.
        counts: whether the items of a loss are counted, or its mean is taken.

    Returns:
        The documents of this rank's batches, the losses over all ranks, the weights.
    """
    accelerator = Accelerator(
        cpu=True, split_batches=split, gradient_accumulation_steps=micro_batches, plan=plan, dispatch_batches=dispatch
    )
    model, optimizer = model_and_optimizer()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(**options))
    torch.manual_seed(5)
    if resumed is not None:
        accelerator.load_state(resumed)
    seen, losses = [], []
    while loader.position.epoch < 2:
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"], batch["position_ids"])
                targets = batch["targets"].flatten()
                loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
                num_items = (targets != -100).sum()
                if counts:
                    accelerator.backward(loss, num_items=num_items)
                else:
                    accelerator.backward(loss / targets.numel())
                optimizer.step()
                optimizer.zero_grad()
            is_idle = not loader.current.real[loader.current.index]
            seen.append([] if is_idle else list(dict.fromkeys(batch["documents"][0].tolist())))
            of_rank = torch.stack([loss.detach(), num_items.double()]) * (not is_idle)
            total_loss, total_items = accelerator.reduce(of_rank)
            losses.append(float(total_loss / total_items))
            if stop is not None and len(seen) == stop[0]:
                accelerator.save_state(stop[1])
                return seen, losses, None
    weights = torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])
    return seen, losses, weights


def merged(results):
    """The documents of all ranks at each step."""
    return [
        [number for part in step for number in part] for step in zip(*(seen for seen, _, _ in results), strict=True)
    ]


def check(results, expected):
    seen, losses, weights = expected
    assert merged(results) == seen
    for _, own_losses, own_weights in results:
        torch.testing.assert_close(torch.tensor(own_losses), torch.tensor(losses), rtol=0, atol=1e-12)
        torch.testing.assert_close(own_weights, weights, rtol=0, atol=1e-12)


CASES = (
    {},
    {"num_workers": 2},
    {"dispatch": True},
    {"plan": {"zero": 3}},
    {"plan": {"zero": 2}, "micro_batches": 2},
)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_same_steps_as_document_by_document(world):
    def cases():
        return [train(**case) for case in CASES[: 4 if world == 1 else None]]

    results = run_ranks(cases, world=world)
    for number, case in enumerate(CASES[: len(results[0])]):
        of_case = [of_rank[number] for of_rank in results]
        if "micro_batches" in case:
            _, _, weights = reference(micro_batches=2)
            torch.testing.assert_close(of_case[0][2], weights, rtol=0, atol=1e-12)
        else:
            check(of_case, reference())


@pytest.mark.parametrize(("world", "later"), [(1, 3), (2, 3), (3, 2), (2, 1)])
def test_a_run_goes_on_in_the_middle_of_an_epoch_at_another_width(tmp_path, world, later):
    folder = str(tmp_path / "state")
    begun = run_ranks(lambda: train(stop=(3, folder)), world=world)
    rest = run_ranks(lambda: train(resumed=folder), world=later)
    seen, losses, weights = reference()
    assert merged(begun) == seen[:3]
    check(rest, (seen[3:], losses[3:], weights))


def test_a_budget_for_each_rank_stays_as_many_batches_at_another_width(tmp_path):
    folder = str(tmp_path / "state")
    begun = run_ranks(lambda: train(stop=(2, folder), split=False, tokens=12), world=2)
    lengths = Documents().lengths
    for seen, _, _ in begun:
        assert all(sum(lengths[number] for number in batch) <= 12 for batch in seen)
    whole = merged(run_ranks(lambda: train(split=False, tokens=12), world=2))
    rest = run_ranks(lambda: train(resumed=folder, split=False, tokens=12), world=3)
    assert merged(begun) + merged(rest) == whole


def test_a_mean_over_packed_tokens_is_that_of_one_process():
    # All tokens are counted here, so that the mean of each rank is one over its own number of tokens.
    one, two, three = (run_ranks(lambda: train(counts=False), world=world)[0] for world in (1, 2, 3))
    torch.testing.assert_close(two[2], one[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(three[2], one[2], rtol=0, atol=1e-12)


def test_ranks_with_other_lengths_are_refused():
    def prepare():
        lengths = Documents().lengths
        lengths[3] += torch.distributed.get_rank()
        loader = DataLoader(Documents(), batch_sampler=TokenBatchSampler(Documents(), TOKENS, lengths))
        Accelerator(cpu=True).prepare(loader)

    with pytest.raises(testing.RankFailed) as caught:
        testing.run_ranks(prepare, world=2)
    assert isinstance(caught.value.__cause__, DataError) and caught.value.__cause__.code == "data-ranks-differ"
