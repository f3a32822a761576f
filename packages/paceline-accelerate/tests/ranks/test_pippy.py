"""`prepare_pippy` of accelerate's door: a model's forward passes over several processes."""

from __future__ import annotations

import pytest
import torch
from late_module import LateModule
from torch import nn

from paceline.base.errors import CompatError
from paceline.testing import run_ranks
from paceline_accelerate.inference import prepare_pippy
from paceline_accelerate.state import PartialState

GPT2 = LateModule("transformers.models.gpt2.modeling_gpt2", optional=True)  # before the ranks are forked
# torch's tracing, of itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(8, 3)

    def forward(self, x, mask=None):
        # torch gives the first stage all arguments, so it has to use them.
        x = self.first(x) if mask is None else self.first(x) * mask
        for block in self.blocks:
            x = block(x)
        return self.last(x), x


def _outputs(rows, gather, by_name):
    torch.manual_seed(0)
    state = PartialState(cpu=True)
    model = Net().eval()
    x, mask = torch.randn(rows, 6), torch.rand(rows, 1)
    with torch.no_grad():
        wanted = model(x, mask)
    if by_name:
        model = prepare_pippy(model, example_kwargs={"x": x[:2], "mask": mask[:2]}, gather_output=gather)
    else:
        model = prepare_pippy(model, example_args=(x[:2], mask[:2]), gather_output=gather)
    # Only the arguments of rank 0 count.
    if state.process_index > 0:
        x, mask = torch.zeros(1, 6), torch.zeros(1, 1)
    output = model(x=x, mask=mask) if by_name else model(x, mask)
    if output is not None:
        torch.testing.assert_close(output, wanted, atol=1e-6, rtol=1e-6)
    return output is not None, model.hf_split_points


@pytest.mark.parametrize(("rows", "gather", "by_name"), [(4, False, False), (7, False, True), (13, True, False)])
def test_the_last_rank_has_the_output_for_any_number_of_rows(rows, gather, by_name):
    (first, points), (last, _) = run_ranks(_outputs, world=2, args=(rows, gather, by_name))
    assert (first, last) == (gather, True) and points == ["blocks.2"]


def test_three_stages_and_one_process():
    assert [has for has, _ in run_ranks(_outputs, world=3, args=(5, False, False))] == [False, False, True]
    assert run_ranks(_outputs, world=1, args=(5, False, False)) == [(True, [])]


def test_a_language_model_of_transformers():
    def work():
        transformers = pytest.importorskip("transformers")
        PartialState(cpu=True)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
        ).eval()
        tokens = torch.randint(0, 32, (5, 8))
        with torch.no_grad():
            wanted = model(tokens).logits
        model = prepare_pippy(model, example_args=(tokens[:1],), gather_output=True)
        # torch's trace leaves the tensor of transformers' `ModelOutput`, as it does under accelerate.
        torch.testing.assert_close(model(tokens), wanted, atol=1e-5, rtol=1e-5)

    run_ranks(work, world=2)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "example_args=\\(inputs"),
        ({"split_points": ["blocks.1", "blocks.2"], "example_args": (torch.zeros(1, 6),)}, "divide it into 3 stages"),
        ({"split_points": ["blocks.9"], "example_args": (torch.zeros(1, 6),)}, "no module blocks.9"),
    ],
)
def test_a_wrong_split_is_said_on_all_ranks(keywords, message):
    def work():
        PartialState(cpu=True)
        with pytest.raises(CompatError, match=message):
            prepare_pippy(Net().eval(), **keywords)

    run_ranks(work, world=2)


def test_a_call_without_a_batch_is_said_on_all_ranks():
    def work():
        PartialState(cpu=True)
        model = prepare_pippy(Net().eval(), example_args=(torch.zeros(1, 6),))
        with pytest.raises(CompatError, match="rank 0 passed no tensor"):
            model()

    run_ranks(work, world=2)
