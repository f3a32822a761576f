"""Packed documents in models of transformers: the numbers of whole documents, whoever packs them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from late_module import LateModule
from shared_ranks import run_ranks
from torch.utils.data import DataLoader

from paceline import Accelerator, TokenBatchSampler, pack_documents

LLAMA = LateModule("transformers.models.llama.modeling_llama")  # before the ranks are forked
WORDS, TOKENS = 17, 20
CLOSE = {"rtol": 0, "atol": 1e-7}  # the models compute norms and losses in float32


class Documents:
    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        self.lengths = torch.randint(2, 11, (14,), generator=generator).tolist()
        self.ids = [torch.randint(0, WORDS, (length,), generator=generator).tolist() for length in self.lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def model_and_optimizer(attention):
    torch.manual_seed(0)
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def weights_of(state):
    return torch.cat([value.flatten() for value in state.values()])


@cache
def reference(attention):
    model, optimizer = model_and_optimizer(attention)
    dataset = Documents()
    for documents in TokenBatchSampler(dataset, TOKENS):
        losses = []
        for number in documents:
            ids = torch.tensor(dataset.ids[number]).unsqueeze(0)
            losses.append(model(input_ids=ids, labels=ids).loss * (ids.numel() - 1))
        (sum(losses) / sum(dataset.lengths[number] - 1 for number in documents)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model.state_dict())


def train(attention, collate, sampler, **options):
    accelerator = Accelerator(cpu=True, split_batches=True)
    loader = DataLoader(Documents(), collate_fn=collate, **sampler, **options)
    model, optimizer, loader = accelerator.prepare(*model_and_optimizer(attention), loader)
    for batch in loader:
        num_items = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**batch).loss
        accelerator.backward(loss * num_items, num_items=num_items)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(accelerator.get_state_dict(model))


def sampler_of():
    return {"batch_sampler": TokenBatchSampler(Documents(), TOKENS)}


def collators():
    import transformers

    return {"ours": pack_documents, "transformers'": transformers.DataCollatorWithFlattening()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_is_document_by_document(attention):
    def cases():
        return [train(attention, collate, sampler_of()) for collate in collators().values()]

    for world in (1, 2, 3):
        for weights in run_ranks(cases, world=world)[0]:
            torch.testing.assert_close(weights, reference(attention), **CLOSE)
    # Documents that see each other are far from it.
    blind = train(attention, lambda samples: pack_documents(samples) | {"position_ids": None}, sampler_of())
    assert (blind - reference(attention)).abs().max() > 1e-4


def test_a_flattening_collator_over_batches_of_samples():
    def case():
        import transformers

        return train("sdpa", transformers.DataCollatorWithFlattening(), {"batch_size": 6})

    one, two, three = (run_ranks(case, world=world)[0] for world in (1, 2, 3))
    torch.testing.assert_close(two, one, **CLOSE)
    torch.testing.assert_close(three, one, **CLOSE)
