"""What the strategy `batch_norm` says before a run."""

import pytest
from torch import nn

from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import model_facts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import resolve
from paceline.world.layout import Layout

NET = model_facts(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
CHOSEN = Decision("options.batch_norm.statistics", "local", "command line", "--option")


def explained(layout: Layout, facts=NET, **other) -> str:
    return resolve(Plan(layout, **other), [facts], STRATEGIES).explain()


def test_statistics_of_all_ranks_are_the_default_and_the_plan_says_so_with_their_cost():
    text = explained(Layout(replicate=2))
    assert "strategies batch_norm -> replicate" in text
    assert "batch_norm.statistics = synced  <- derived: 1 layer (1) normalised by the batch of all 2" in text
    assert "one small all-reduce per layer" in text


def test_local_statistics_are_a_choice_that_the_plan_names():
    text = explained(Layout(replicate=2), options={"batch_norm": {"statistics": "local"}}, decisions=(CHOSEN,))
    assert "batch_norm.statistics = local  <- derived (--option): 1 layer (1) normalised by each rank's part" in text


@pytest.mark.parametrize(
    ("layout", "facts"), [(Layout(), NET), (Layout(replicate=2), model_facts(nn.Linear(2, 2)))], ids=["one", "without"]
)
def test_nothing_is_said_where_there_is_nothing_to_do(layout, facts):
    assert "batch_norm" not in explained(layout, facts)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)


def test_a_batch_norm_over_divided_positions_is_refused():
    facts = model_facts(nn.Sequential(nn.ModuleList(Block() for _ in range(3))))
    plan = Plan(Layout(cp=2))
    (problem,) = STRATEGIES.get("batch_norm").check(plan, facts)
    assert problem.code == "batch-norm-sequence" and "0.0.norm" in problem.what
