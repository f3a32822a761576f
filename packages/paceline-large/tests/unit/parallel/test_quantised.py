"""What a plan knows of quantised weights, and what it forecasts and refuses; layers stand in for those of the libraries."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from paceline.config.settings import RunSettings
from paceline.parallel.data.shard import STRATEGY as SHARD
from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.resolve import draft
from paceline_large.quantised.quantised import STRATEGY


class Params4bit(nn.Parameter):
    """Named as bitsandbytes' class: planning knows it by its name."""


class Int8Params(nn.Parameter):
    """Named as bitsandbytes' class."""


def model_of(trains: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    four = Params4bit(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    four.quant_state = SimpleNamespace(absmax=torch.zeros(1), code=torch.zeros(16), nested=False)
    model[0].weight = four
    if trains:
        model[1].weight = Int8Params(torch.zeros(8, 8, dtype=torch.float16))
    else:
        model[1].weight = Int8Params(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    model[1].state = SimpleNamespace(threshold=6.0)
    return model


def plan_of(**layout: int):
    return draft(RunSettings.of(layout), [], 2)


def test_bytes_are_those_of_weights_and_statistics() -> None:
    facts = model_facts(model_of())
    rows = [(row.name, row.kind, row.bytes, row.batch_threshold) for row in facts.quantised]
    assert rows == [("0.weight", "4-bit", 32 + 4 * 17, 0.0), ("1.weight", "8-bit", 64 + 4 * 8, 6.0)]
    assert facts.parameter_bytes == 100 + 96 + 256
    # Three of four bytes a parameter, were it the average over all of them.
    assert Bytes.alone(facts).gradients == facts.trainable_bytes == 256


def test_shard_divides_everything_else() -> None:
    facts = model_facts(model_of())
    cost = SHARD.cost(plan_of(shard=2, zero=3), facts, Bytes.alone(facts))
    assert cost.parameters == 100 + 96 + 128 and cost.gradients == 128
    assert cost.sent == (2 * 256 + 256) // 2


def test_what_the_plan_says_and_refuses() -> None:
    facts = model_facts(model_of())
    fields = [decision.field for decision in STRATEGY.decide(plan_of(shard=2), facts)]
    assert fields == ["quantised(Sequential)", "quantised.threshold(Sequential)"]
    for layout, refused in (({"tp": 2}, 1), ({"pp": 2}, 1), ({"shard": 2, "zero": 3}, 0), ({"replicate": 2}, 0)):
        assert [problem.code for problem in STRATEGY.check(plan_of(**layout), facts)] == ["quantised-axis"] * refused
    trained = model_facts(model_of(trains=True))
    assert len(STRATEGY.check(plan_of(shard=2, zero=3), trained)) == 1
    assert not STRATEGY.check(plan_of(shard=2, zero=2), trained)
