"""Bytes by arithmetic, the order in which plans are tried, and why they are rejected."""

import pytest
from torch import nn

from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import model_facts
from paceline.plan.resolve import draft, resolve
from paceline.planner.estimate import GIB, Need, candidates, choose, division_of, estimate, shown


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)


@pytest.fixture
def need():
    model = nn.Sequential(*[Block() for _ in range(8)])
    return Need((model_facts(model),), activations=1_000_000)


def planned(need, world_size, **settings):
    return resolve(draft(RunSettings.of(settings), [], world_size), need.models, STRATEGIES)


def test_the_textbook_formulas(need):
    a = need.models[0].parameters
    assert a == 8 * (64 * 256 + 256 + 256 * 64 + 64)
    whole = estimate(planned(need, 4), need)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4 * a, 4 * a, 8 * a)
    assert whole.activations == 1_000_000
    first = estimate(planned(need, 4, shard=4, zero=1), need)
    assert (first.parameters, first.gradients, first.optimizer) == (4 * a, 4 * a, 2 * a)
    second = estimate(planned(need, 4, shard=4, zero=2), need)
    assert (second.parameters, second.gradients, second.optimizer) == (4 * a, a, 2 * a)
    third = estimate(planned(need, 4, shard=4), need)
    assert (third.parameters, third.gradients, third.optimizer) == (a, a, 2 * a)


def test_the_cheapest_plan_that_fits_is_chosen_and_the_others_have_reasons(need):
    everything = estimate(planned(need, 4), need).held
    assert choose(need, 4, 4, everything).settings["replicate"] == 4
    tight = choose(need, 4, 4, everything - 1)
    assert (tight.settings["shard"], tight.settings["zero"]) == (4, 1)
    assert tight.estimate.held < everything
    assert "needs" in tight.rejected[0].reason and "can be used" in tight.rejected[0].reason
    assert str(tight.rejected[0]).startswith("--replicate 4: ")


def test_nothing_fits_in_nothing(need):
    found = choose(need, 4, 4, 1000)
    assert found.settings is None and found.estimate is None
    assert len(found.rejected) == len(
        list(candidates(4, 4, {}, ("replicate", "shard", "zero", "recompute", "tp", "pp")))
    )


def test_a_plan_that_cannot_work_is_rejected_in_its_own_words(need):
    found = choose(need, 4, 4, 1000)
    reasons = [each.reason for each in found.rejected if each.settings["tp"] > 1]
    assert reasons and all(reason for reason in reasons)


def test_what_is_fixed_stays_and_what_was_tried_is_left_out(need):
    found = choose(need, 8, 8, 10 * GIB, fixed={"tp": 1, "shard": 2}, opened=("replicate", "zero"))
    assert found.settings == {"replicate": 4, "zero": 1}
    again = choose(need, 4, 4, 10 * GIB, skip=[choose(need, 4, 4, 10 * GIB).settings])
    assert again.settings["shard"] == 4


def test_the_order_is_from_cheap_to_dear():
    names = ("replicate", "shard", "zero", "recompute", "tp", "pp")
    order = [shown(each) for each in candidates(16, 8, {"recompute": "no"}, [n for n in names if n != "recompute"])]
    expected = ["--replicate 16", "--shard 16 --zero 1", "--shard 16 --zero 2", "--replicate 2 --shard 8", "--shard 16"]
    assert order[:5] == expected
    assert order.index("--shard 8 --tp 2") < order.index("--shard 8 --pp 2")


@pytest.mark.needs("large")
def test_how_a_model_is_divided_is_one_line(need):
    (facts,) = need.models
    said = {
        str(settings): division_of(planned(need, 4, **settings), facts)
        for settings in ({}, {"shard": 4, "zero": 2}, {"shard": 2, "zero": 3, "replicate": 2}, {"shard": 2, "cp": 2})
    }
    assert said.pop("{}") == ""
    offloaded = planned(need, 4, shard=4, zero=3, offload="all")
    assert "about 0.0 bytes" in division_of(offloaded, facts)
    assert "about 4.0 bytes" in division_of(offloaded, facts, on_host=True)
    assert [line.partition(": ")[2].partition(", with Adam")[0] for line in said.values()] == [
        "zero=2 divides gradients and optimizer states over 4 ranks; about 7.0 bytes a parameter on each",
        "zero=3 divides parameters, gradients and optimizer states over 2 ranks; about 8.0 bytes a parameter on each",
        "zero=3 divides parameters, gradients and optimizer states over 4 ranks, cp=2 divides each sequence over 2 ranks; "
        "about 4.0 bytes a parameter on each",
    ]
    assert all(line.startswith("Sequential (264.7 thousand parameters): ") for line in said.values())
