"""A pipeline on paper: splits, schedules that take a number of micro-batches, bubbles, drawings, and what is refused."""

from itertools import combinations

import pytest
import torch
import torch.distributed.pipelining
from torch import nn

from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.plan import Plan
from paceline.world.layout import Layout
from paceline_large.pipeline.pipeline import STRATEGY, divide
from paceline_large.pipeline.schedules import draw, order, timeline
from paceline_large.pipeline.split import SCHEDULES, balanced, chain, choose, even, loads, matching, rank_of


class Net(nn.Module):
    def __init__(self, layers=6, tied=False):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def planned(pp=2, **options):
    return Plan(Layout(pp=pp), options={"pipeline": options})


def codes(model=None, pp=2, **options):
    return [problem.code for problem in STRATEGY.check(planned(pp, **options), model_facts(model or Net()))]


@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 5], [5, 1, 1, 1], [1, 2, 3, 4, 5, 6], [0, 0, 3, 0, 0], [2.5, 1, 1]])
@pytest.mark.parametrize("stages", [2, 3])
def test_balanced_is_the_best_there_is(weights, stages):
    def heaviest(begins):
        return max(sum(weights[a:b]) for a, b in zip(begins, (*begins[1:], len(weights)), strict=True))

    best = min(heaviest((0, *cuts)) for cuts in combinations(range(1, len(weights)), stages - 1))
    begins = balanced(weights, stages)
    assert heaviest(begins) == best
    assert list(begins) == sorted(set(begins))


def test_even_gives_the_rest_to_the_first():
    assert even(8, 2) == (0, 4)
    assert even(7, 3) == (0, 3, 5)


def test_a_v_turns_round_at_the_last_rank():
    assert [rank_of(stage, 3, "v") for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [rank_of(stage, 3, "loop") for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_micro_batches_are_equal_and_fit_the_schedule():
    assert choose("1f1b", 8, 16, 4) == ("1f1b", 8)
    assert choose("1f1b", 8, 12, 4) == ("1f1b", 6)
    assert choose("1f1b", 8, 7, 4) == ("1f1b", 7)
    assert choose("1f1b", 8, 6, 4) == ("1f1b", 6)
    assert choose("1f1b", 8, 3, 4) == ("gpipe", 3)
    assert choose("gpipe", 8, 11, 4) == ("gpipe", 1)
    assert choose("interleaved", 9, 9, 4) == ("interleaved", 3)
    assert choose("dualpipev", 8, 2, 2) == ("zbv", 2)


def test_patterns_do_not_cross_dots():
    assert matching("layers.*", ["layers.0", "layers.0.attn", "other.1"]) == ("layers.0",)


CASES = [("gpipe", 4, 1), ("1f1b", 4, 1), ("breadth-first", 2, 2), ("interleaved", 4, 2), ("zero-bubble", 4, 1),
         ("zbv", 4, 2), ("dualpipev", 4, 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "each"), CASES)
def test_the_formula_is_what_the_order_gives(name, ranks, each):
    """torch's own order, played with unit costs, waits as long as the formula of the schedule says."""
    played = timeline(name, ranks * each, 8, each)
    assert played.bubble == pytest.approx(SCHEDULES[name].bubble(8, ranks, each))
    for cells in played.ranks:
        done = [(cell.op, cell.stage, cell.microbatch) for cell in cells]
        assert len(set(done)) == len(done)
        assert sum(op == "F" for op, _, _ in done) == 8 * each


def test_an_order_runs_everything_on_the_rank_that_holds_it():
    for rank, actions in order("zbv", 3, 2, 6).items():
        assert {rank_of(stage, 3, "v") for _, stage, _ in actions} == {rank}


def test_a_schedule_is_drawn():
    assert draw("1f1b", 2, 3).splitlines() == [
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .",
    ]
    assert "f0" in draw("interleaved", 4, 2)


def test_what_is_left_of_a_stage_is_told():
    facts = model_facts(Net())
    made = STRATEGY.decide(planned(schedule="interleaved"), facts)
    told = {each.field: each for each in made}
    assert told["pipeline.split"].value == "layers.0 .. layers.1 | layers.2 .. layers.3 | layers.4 | layers.5"
    assert "6%" in told["pipeline.schedule"].reason  # 1 / (2 x 8 + 1)
    norms = STRATEGY.decide(planned(), model_facts(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(4)))))
    assert "pipeline.batch_layers" in {each.field for each in norms}


def test_parameters_around_the_blocks_count_where_they_are_held():
    facts = model_facts(Net())
    blocks, begins = divide(STRATEGY.options(planned(split="parameters")), facts, 2)
    own = loads(facts, blocks)
    assert sum(own) == facts.parameters
    assert own[0] == 50 * 8 + 2 * (64 + 8) and own[-1] == 2 * (64 + 8) + 16 + 400
    assert begins == (0, 3)


def test_the_fullest_rank_is_what_it_costs():
    facts = model_facts(Net())
    held = Bytes.alone(facts, activations=1600)
    cost = STRATEGY.cost(planned(pp=2, microbatches=8), facts, held)
    assert held.parameters / 2 <= cost.parameters < held.parameters * 0.52
    assert cost.activations == 1600 // 2 * 2 // 8  # half of the blocks, two of eight micro-batches
    assert STRATEGY.cost(planned(pp=2, schedule="gpipe"), facts, held).activations == 800


def test_blocks_are_found_named_or_the_children_of_a_sequence():
    assert chain(model_facts(Net(3)), (), 2) == ("layers.0", "layers.1", "layers.2")
    assert chain(model_facts(Net(2)), ("layers.*.0", "norm"), 2) == ("layers.0.0", "layers.1.0", "norm")
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert chain(model_facts(plain), (), 2) == ("0", "1", "2")


def test_a_subclass_holds_blocks_unless_it_runs_them_in_its_own_way():
    class Stack(nn.Sequential):
        pass

    class Backwards(nn.Sequential):
        def forward(self, x):
            return super().forward(-x)

    class Layers(nn.ModuleList):
        pass

    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def names(container):
        model = Net(0)
        model.layers = container
        return chain(model_facts(model), (), 2)

    assert names(Stack(block(), block())) == ("layers.0", "layers.1")
    assert names(Layers([block(), block()])) == ("layers.0", "layers.1")
    assert names(Backwards(block(), block())) == ()
    assert chain(model_facts(Stack(nn.Linear(2, 2), nn.ReLU())), (), 2) == ("0", "1")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"schedule": "zbv", "stages_per_rank": 3}, "pipeline-stages"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "pipeline-stages"),
        ({"microbatches": 1}, "pipeline-microbatches"),
        ({"schedule": "interleaved", "microbatches": 5, "pp": 2}, "pipeline-microbatches"),
        ({"schedule": "dualpipev", "microbatches": 3}, "pipeline-microbatches"),
        ({"blocks": "stages.*"}, "pipeline-pattern"),
        ({"keep": ["embedding"]}, "pipeline-pattern"),
        ({"blocks": "layers.*, layers.*.0"}, "pipeline-pattern"),
        ({"pp": 8, "microbatches": 8}, "pipeline-blocks"),
        ({"split": "time"}, "pipeline-weights"),
        ({"split": "time", "weights": [1, 2]}, "pipeline-weights"),
        ({"split": "layers.9"}, "pipeline-split"),
        ({"split": "layers.*"}, "pipeline-split"),
        ({"split": "layers.0"}, "pipeline-split"),
        ({"split": ["layers.1", "layers.3"]}, "pipeline-split"),
        ({"pp": 3, "split": ["layers.3", "layers.1"]}, "pipeline-split"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_touched(options, code):
    assert codes(**options) == [code]


def test_what_can_work_is_not_refused():
    assert codes() == []
    assert codes(split="layers.4") == []
    assert codes(split=["layers.4"], keep="embed, norm") == []
    assert codes(split="time", weights=[1, 1, 1, 1, 1, 5]) == []
    for name in SCHEDULES:
        assert codes(Net(8), schedule=name) == [], name


def test_the_number_that_a_message_names_works():
    for options in ({"microbatches": 1}, {"schedule": "interleaved", "microbatches": 5}):
        (problem,) = STRATEGY.check(planned(**options), model_facts(Net()))
        named = int(problem.fix.split("microbatches to ")[1].split(",")[0])
        assert codes(**{**options, "microbatches": named}) == []
    assert torch.distributed.pipelining
