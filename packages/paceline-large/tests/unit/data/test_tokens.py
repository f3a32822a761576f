"""Batches by tokens and packed documents: what lies in a batch, and what is refused."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader, RandomSampler

from paceline import Accelerator, DataError, PackedDocuments, PlanError, TokenBatchSampler, pack_documents
from paceline.data.prepare import prepare_loader
from paceline.data.skip import skip_first_batches
from paceline_large.documents.packing import _compiled_flex_attention
from paceline_large.documents.tokens import even_parts

LENGTHS = [4, 1, 3, 2, 2, 5, 8, 1, 1, 1, 6, 3]


class Documents:
    """Documents whose tokens are the number of the document."""

    lengths = LENGTHS

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"input_ids": torch.full((LENGTHS[index],), index)}


def loader_of(tokens=8, order=None, **options):
    sampler = TokenBatchSampler(order or Documents(), tokens)
    return DataLoader(Documents(), batch_sampler=sampler, collate_fn=pack_documents, **options)


def documents_in(batch):
    return list(dict.fromkeys(batch["input_ids"][0].tolist()))


def parts(width, index, loader=None, **options):
    loader = loader_of() if loader is None else loader
    prepared = prepare_loader(loader, width=width, index=index, device="cpu", **options)
    return prepared, [documents_in(batch) for batch in prepared]


def test_batches_hold_whole_documents_in_order():
    assert list(TokenBatchSampler(Documents(), 8)) == [[0, 1, 2], [3, 4], [5], [6], [7, 8, 9], [10], [11]]
    assert len(TokenBatchSampler(Documents(), 8)) == 7


def test_prepared_batches_are_those_of_the_sampler():
    prepared, batches = parts(1, 0)
    assert batches == list(TokenBatchSampler(Documents(), 8))
    assert len(prepared) == 7


def test_an_order_that_is_drawn_is_that_of_a_plain_loader():
    torch.manual_seed(3)
    plain = [documents_in(batch) for batch in loader_of(order=RandomSampler(Documents()))]
    torch.manual_seed(3)
    loader = loader_of(order=RandomSampler(Documents()))
    assert parts(1, 0, loader, drawn=True)[1] == plain
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_no_rank_has_more_tokens_than_the_budget(width):
    by_rank = [parts(width, index)[1] for index in range(width)]
    for step in zip(*by_rank, strict=True):
        assert all(sum(LENGTHS[document] for document in batch) <= 8 for batch in step)
    # A rank without a document has one of filler, with the weight 0, at the last step only.
    read = [document for step in zip(*by_rank, strict=True) for batch in step for document in batch]
    assert sorted(set(read)) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("width", [2, 3])
def test_the_same_global_batches_at_any_width(width):
    whole = parts(1, 0)[1]
    loaders = [parts(width, index, split_batches=True)[0] for index in range(width)]
    for batch, *of_ranks in zip(whole, *loaders, strict=True):
        real = loaders[0].current.real
        together = [documents_in(part) for part, rows in zip(of_ranks, real, strict=True) if rows]
        assert list(itertools.chain(*together)) == batch


def test_workers_read_the_same():
    assert parts(2, 1, loader_of(num_workers=2))[1] == parts(2, 1)[1]


def test_without_automatic_batching_the_dataset_makes_the_batches():
    class Batched(Documents):
        def __getitem__(self, indices):
            return pack_documents([Documents()[index] for index in indices])

    loader = DataLoader(Batched(), sampler=TokenBatchSampler(Documents(), 8), batch_size=None)
    assert parts(2, 1, loader)[1] == parts(2, 1)[1]


def test_parts_are_as_even_as_can_be():
    draw = random.Random(0)
    for _ in range(500):
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 7))]
        width = draw.randint(1, 4)

        def largest(counts, lengths=lengths):
            rest = iter(lengths)
            return max(sum(itertools.islice(rest, count)) for count in counts)

        counts = even_parts(lengths, width)
        possible = [chosen for chosen in itertools.product(range(8), repeat=width) if sum(chosen) == len(lengths)]
        assert sum(counts) == len(lengths)
        assert largest(counts) == min(map(largest, possible))
        assert (min(counts) > 0) == (len(lengths) >= width)


def test_a_resume_begins_at_the_document_with_any_budget():
    prepared = prepare_loader(loader_of(), width=1, index=0, device="cpu")
    batches = iter(prepared)
    next(batches), next(batches)
    state = prepared.state_dict()
    assert state["samples"] == 5
    same, other = loader_of(), loader_of(tokens=9)
    rest = []
    for loader in (same, other):
        again = prepare_loader(loader, width=1, index=0, device="cpu")
        again.load_state_dict(state)
        rest.append([documents_in(batch) for batch in again])
    assert rest[0] == [[5], [6], [7, 8, 9], [10], [11]]
    assert rest[1] == [[5], [6, 7], [8, 9, 10], [11]]


def test_batches_at_the_beginning_are_left_out():
    prepared = prepare_loader(loader_of(), width=1, index=0, device="cpu")
    rest = [documents_in(batch) for batch in skip_first_batches(prepared, 3)]
    assert rest == [[6], [7, 8, 9], [10], [11]]


def code_of(call):
    with pytest.raises((DataError, PlanError)) as caught:
        call()
    return caught.value


def test_budgets_and_lengths_that_cannot_be():
    error = code_of(lambda: TokenBatchSampler(Documents(), 5))
    assert error.code == "data-tokens" and "6 (8), 10 (6)" in str(error)
    for tokens in (0, True, 2.5):
        assert code_of(lambda tokens=tokens: TokenBatchSampler(Documents(), tokens)).code == "data-tokens"
    for lengths in (None, [1, 2], [1.5] * 3, [1, 0, 2]):
        assert code_of(lambda lengths=lengths: TokenBatchSampler([1, 2, 3], 8, lengths)).code == "data-lengths"


def test_a_column_of_lengths_is_found():
    class Table(Documents):
        lengths = None
        column_names = ("input_ids", "length")

        def __getitem__(self, index):
            return LENGTHS if index == "length" else super().__getitem__(index)

    assert list(TokenBatchSampler(Table(), 8)) == list(TokenBatchSampler(Documents(), 8))


def test_a_packed_row():
    row = pack_documents([
        {"input_ids": [5, 6, 7], "labels": torch.tensor([5, 6, 7]), "attention_mask": [1, 1, 1]},
        {"input_ids": [8, 9], "labels": torch.tensor([8, 9]), "attention_mask": [1, 1]},
    ])  # fmt: skip
    assert {name: value.tolist() for name, value in row.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[-100, 6, 7, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }


def test_samples_that_cannot_be_packed():
    for samples in (
        [torch.arange(3)],
        [{"input_ids": [1, 2], "labels": [1]}],
        [{"input_ids": [[1, 2]]}],
        [{"input_ids": []}],
        [{"input_ids": [1, 0], "attention_mask": [1, 0]}],
        [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
    ):
        assert code_of(lambda samples=samples: pack_documents(samples)).code == "data-pack"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_stays_inside_of_documents():
    torch.manual_seed(0)
    lengths = [3, 1, 4]
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    documents = PackedDocuments(torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0))
    alone = [
        nn.functional.scaled_dot_product_attention(*of_document, is_causal=True)
        for of_document in zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    ]
    result = documents.attention(q, k, v)
    torch.testing.assert_close(result, torch.cat(alone, dim=2), rtol=0, atol=1e-14)
    # What accelerators compute, without its compiled kernel, of which torch warns.
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=documents.block_mask), result, rtol=0, atol=1e-12)


@pytest.mark.long  # a C++ compiler runs
@pytest.mark.filterwarnings("ignore")  # of torch's own imports
def test_the_compiled_kernel_stays_inside_of_documents_too() -> None:
    flex = _compiled_flex_attention()
    for lengths in ([37, 150, 5, 64], [100, 300]):
        documents = PackedDocuments(torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0))
        query, key, value = torch.randn(3, 1, 4, sum(lengths), 16, generator=torch.Generator().manual_seed(0))
        result = flex(query, key, value, block_mask=documents.block_mask)
        torch.testing.assert_close(result, documents.attention(query, key, value), rtol=0, atol=2e-6)
    # torch has no backward pass of it for the CPU, which is why the CPU computes with the whole mask.
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex(query.requires_grad_(), key, value, block_mask=documents.block_mask)


class Blind(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 2)

    def forward(self, input_ids):
        return self.embed(input_ids)


class Seeing(Blind):
    def forward(self, input_ids, position_ids):
        return self.embed(input_ids)


def test_a_model_without_positions_is_refused_in_either_order():
    assert code_of(lambda: Accelerator(cpu=True).prepare(Blind(), loader_of())).code == "pack-positions"
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Blind())
    assert code_of(lambda: accelerator.prepare(loader_of())).code == "pack-positions"
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(loader_of())
    assert code_of(lambda: accelerator.prepare(Blind())).code == "pack-positions"
    Accelerator(cpu=True).prepare(Seeing(), loader_of())
    # A model that does not see documents may get batches by tokens that are not packed.
    padded = DataLoader(Documents(), batch_sampler=TokenBatchSampler(Documents(), 8), collate_fn=list)
    Accelerator(cpu=True).prepare(Blind(), padded)


def test_the_plan_says_how_tokens_are_divided():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(loader_of())
    assert "data.tokens(Documents) = 8" in accelerator.plan.explain()
