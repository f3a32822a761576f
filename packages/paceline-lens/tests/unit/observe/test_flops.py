"""Operations of layers whose numbers are known."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline_lens.observe.flops import Flops, counted, of
from paceline_lens.observe.flops_text import text
from paceline_lens.observe.phases import Phases


def simple():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


class Attention(nn.Module):
    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v)


def test_known_layers_exactly():
    assert of(nn.Linear(10, 5), torch.randn(8, 10)).macs == 8 * 10 * 5
    assert of(nn.Linear(10, 5, bias=False), torch.randn(2, 4, 10)).macs == 2 * 4 * 10 * 5
    convolution = nn.Conv2d(3, 6, 5, stride=2, padding=1, groups=3)
    rows = of(convolution, torch.randn(2, 3, 20, 20))
    assert rows.macs == 2 * 6 * 9 * 9 * (3 // 3) * 5 * 5
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8)
    assert of(Attention(), q, k, k).macs == 2 * 4 * (16 * 8 * 24 + 16 * 24 * 8)
    assert of(nn.LSTM(4, 6), torch.randn(3, 2, 4)).macs == 3 * 2 * 4 * 6 * (4 + 6)


def test_the_simple_model_has_the_numbers_that_people_know():
    profile = of(simple(), torch.randn(8, 1, 28, 28))
    assert (profile.parameters, profile.macs, profile.forward) == (101_770, 813_056, 1_626_112)
    assert "101.77 K" in text(profile) and "813.06 K" in text(profile)
    first = profile.model.children[1]
    assert (first.name, first.kind, first.parameters, first.macs) == ("1", "Linear", 100_480, 8 * 784 * 128)


def test_on_the_meta_device_nothing_is_computed_and_the_numbers_are_the_same():
    with torch.device("meta"):
        model = simple()
    assert of(model, torch.randn(8, 1, 28, 28)).macs == 813_056
    with torch.inference_mode():
        assert of(simple(), torch.randn(8, 1, 28, 28)).macs == 813_056


def train(model, flops, steps, micro=1, run=None):
    phases = Phases()
    phases.listeners.append(flops)
    phases.follow_model(model)
    flops.follow_model(model)
    for _ in range(steps):
        for _ in range(micro):
            loss = (run or model)(torch.randn(8, 784)).sum()
            with phases.during("backward"):
                loss.backward()
        with phases.during("step"):
            model.zero_grad()
    phases.end()
    return flops


def test_every_micro_batch_of_the_chosen_step_and_no_other_with_backward_as_it_is():
    told = []
    flops = train(simple(), Flops(step=2, totals=lambda own: (2 * own, 4 * own), tell=told.append), 4, micro=3)
    profile = flops.profile
    assert (profile.step, profile.micro_batches, flops.complete) == (2, 3, True)
    assert profile.forward == 3 * 1_626_112
    # Weights of both layers, and the input of the second alone: the first one's needs no gradient.
    assert profile.backward == 3 * 2 * 8 * (784 * 128 + 2 * 128 * 10)
    assert (profile.copy, profile.everywhere, profile.recomputed) == (2 * profile.forward, 4 * profile.forward, 0)
    assert profile.model.calls == 3 and told == [flops.text()]


def test_the_root_takes_at_least_as_long_as_its_parts_and_no_longer_than_the_step():
    profile = train(simple(), Flops(step=1), 3).profile
    model = profile.model
    assert 0 < sum(part.latency_ms for part in model.children) <= model.latency_ms <= profile.total_ms
    assert model.latency_ms <= profile.forward_ms * 1.5 + 1
    assert profile.backward_ms > 0 and profile.step_ms > 0


def test_what_is_computed_again_is_told_apart():
    model = nn.Sequential(nn.Linear(784, 784, bias=False), nn.Linear(784, 784, bias=False))

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False, early_stop=False)

    flops = train(Again(), Flops(step=1), 2)
    assert flops.profile.recomputed == flops.profile.forward == 2 * 2 * 8 * 784 * 784
    assert flops.profile.backward == 2 * 3 * 8 * 784 * 784
    assert flops.profile.model.children[0].calls == 1


def test_without_a_step_after_it_and_in_a_file(tmp_path):
    told = []
    flops = train(simple(), Flops(step=1, file=str(tmp_path / "profile.txt"), tell=told.append), 1)
    flops.finish()
    assert told == [] and "813.06 K" in (tmp_path / "profile.txt").read_text()
    assert flops.profile.to_dict()["model"]["children"][1]["macs"] == 8 * 784 * 128
    never = train(simple(), Flops(step=9), 2)
    never.finish()
    assert never.profile is None and never.text() == ""


@pytest.mark.parametrize("depth, lines", [(0, 1), (-1, 5)])
def test_how_deep_the_text_goes(depth, lines):
    shown = text(of(simple(), torch.randn(8, 784)), depth=depth, top=2)
    tree = shown[shown.index("\nmodules\n") :].splitlines()[3:-1]
    assert len(tree) == lines


class Leaving(BaseException):
    """As the end of a pipeline's stage, which no hook of a module sees."""


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.linear(x)
        raise Leaving


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        try:
            self.inner(x)
        except Leaving:
            return x


def test_a_part_that_is_left_early_is_not_open_any_more():
    model = Outer()
    with counted([model]) as (counter, tree):
        for _ in range(3):
            model(torch.randn(2, 4))
    names = {part.name: part for _, part in tree.take().walk()}
    assert counter.forward == names[""].flops == names["inner"].flops == names["inner.linear"].flops == 3 * 64
    assert names["inner"].calls == 3 and names[""].latency_ms >= names["inner"].latency_ms > 0
