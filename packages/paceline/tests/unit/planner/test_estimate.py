"""Bytes by arithmetic, the order in which plans are tried, and why they are rejected."""

from dataclasses import replace

import pytest
from torch import nn

from paceline.config.settings import RunSettings, searched_settings
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import model_facts
from paceline.plan.resolve import draft, resolve
from paceline.planner.estimate import GIB, Need, candidates, choose, division_of, elsewhere, estimate, offloads, shown


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
    assert len(found.rejected) == len(list(candidates(4, 4, {}, searched_settings(), offloads(need))))


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
def test_offload_is_chosen_only_where_no_plan_without_it_fits(need):
    need = replace(need, activations=0)
    a = need.models[0].parameters
    assert choose(need, 1, 1, 16 * a).settings["offload"] == "no"
    states = choose(need, 1, 1, 16 * a - 1)
    assert (states.settings["offload"], states.settings["zero"]) == ("optimizer", 0)
    assert {rejected.settings["offload"] for rejected in states.rejected} == {"no"}
    # A copy of the parameters, of their gradients and two states wait on the host, of which the first two are copied.
    assert (states.estimate.host, states.estimate.host_traffic) == (16 * a, 8 * a)
    (line,) = elsewhere(states.estimate)
    assert "wait in the host's memory" in line and " s at 32 GB/s" in line
    everything = choose(need, 1, 1, 8 * a - 1)
    assert shown(everything.settings) == "--zero 3 --offload all"
    # Stage 3 on four ranks leaves 4a and what it gathers; all of that goes before offload is tried.
    assert choose(need, 4, 4, 8 * a).settings["offload"] == "no"
    fixed = {"shard": 4, "zero": 2}
    held = estimate(planned(need, 4, **fixed), need).held
    two = choose(need, 4, 4, held - 1, fixed, ["offload"])
    assert two.settings == {"offload": "optimizer"}
    assert choose(need, 4, 4, two.estimate.held - 1, fixed, ["offload"]).settings is None


@pytest.mark.needs("large")
def test_files_are_tried_where_a_folder_was_named_and_the_host_has_no_other_memory(need):
    a = need.models[0].parameters
    on_host = replace(need, activations=0, on_host=True)
    assert choose(on_host, 1, 1, 10 * a).settings is None
    states = choose(on_host, 1, 1, 10 * a, folder="/d")
    assert states.settings["offload"] == "optimizer=disk:/d" and states.estimate.host == 0
    assert (states.estimate.disk, states.estimate.disk_traffic) == (8 * a, 16 * a)
    (line,) = elsewhere(states.estimate)
    assert "are on disk" in line and " s at 3 GB/s" in line
    assert choose(on_host, 1, 1, 7 * a, folder="/d").settings["offload"] == "all=disk:/d"
    # Where the host's memory is known, it counts, too.
    beside = replace(need, activations=0)
    little = choose(beside, 1, 1, 10 * a, folder="/d", host=15 * a)
    assert little.settings["offload"] == "optimizer=disk:/d"
    assert any("of the host's memory a rank" in rejected.reason for rejected in little.rejected)


@pytest.mark.needs("large")
def test_activations_wait_on_the_host_before_states_do(need):
    a = need.models[0].parameters
    many = replace(need, activations=100 * a)
    chosen = choose(many, 1, 1, 50 * a, fixed={"recompute": "no"}, opened=["offload"])
    assert chosen.settings == {"offload": "activations"} and chosen.estimate.host_traffic == 2 * chosen.estimate.host
    both = choose(many, 1, 1, 34 * a, fixed={"recompute": "no"}, opened=["offload"])
    assert both.settings == {"offload": "optimizer+activations"}


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
