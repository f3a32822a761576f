"""Which layers are random: as they say themselves, and as the generators show in the first pass."""

import copy
import pickle

import torch
from torch import nn
from torch.nn import functional

from paceline.parallel.draws import PassFindings, watch_first_pass
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import model_facts
from paceline.plan.plan import Plan
from paceline.plan.resolve import resolve
from paceline.world.layout import Layout


class ByHand(nn.Module):
    """Drops by functions alone."""

    def __init__(self):
        super().__init__()
        self.attn_drop, self.layer = 0.1, nn.Linear(2, 2)

    def forward(self, x):
        return functional.dropout(self.layer(x), self.attn_drop, self.training)


class Noise(nn.Module):
    """Random without a word of it, before and after a child."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x) + torch.randn(2)


def net():
    many = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)) for _ in range(5)))
    return nn.Sequential(
        nn.Dropout(0.1), nn.Dropout(0.0), nn.RReLU(), ByHand(), Noise(), many, nn.LSTM(2, 2, 2, dropout=0.2)
    )


def test_a_plan_of_several_ranks_names_each_layer_that_says_that_it_is_random():
    text = resolve(Plan(Layout(replicate=2)), [model_facts(net())], STRATEGIES).explain()
    (line,) = [each for each in text.splitlines() if "random_layers(Sequential)" in each]
    shown = (
        "0 (Dropout p=0.1), 2 (RReLU), 3 (ByHand attn_drop=0.1), 5 of 5.*.1 (Dropout p=0.5), 6 (LSTM dropout=0.2)  <-"
    )
    assert shown in line and "each rank for its own part of the batch" in line
    assert "random_layers" not in resolve(Plan(), [model_facts(net())], STRATEGIES).explain()


def test_the_first_training_pass_shows_who_drew():
    model, reports = net()[:5], []
    watch_first_pass(model, torch.device("cpu"), reports.append)
    before = torch.get_rng_state()
    with torch.no_grad():
        model(-torch.ones(16, 2))  # no training pass
    torch.set_rng_state(before)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    want = copied(-torch.ones(16, 2))
    loaded(-torch.ones(16, 2))
    assert reports == []
    torch.set_rng_state(before)
    assert torch.equal(model(-torch.ones(16, 2)), want)
    model(-torch.ones(16, 2))
    assert reports == [PassFindings(["0", "2", "3", "4"], [], [])]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
