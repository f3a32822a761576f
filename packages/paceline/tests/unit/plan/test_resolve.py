"""Settings, world and facts become a plan, or one error that holds every problem."""

import json

import pytest
import torch
from torch import nn

from paceline import PlanError
from paceline.base.errors import Problem
from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES, Strategy, strategies_for
from paceline.plan.facts import ModelFacts, Quantised, model_facts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.world.layout import Layout

CODE = Decision("shard", 3, "file", "run.yaml:12")


class Toy(Strategy):
    name, stage, axes = "toy", 10, ("tp",)

    def check(self, plan, facts):
        return [Problem("plan-option", "toy refuses", fix="no toy")] if facts.name == "Linear" else []


def test_what_the_axes_leave_becomes_replicas():
    plan = draft(RunSettings.of({"shard": 2}), [], world_size=6)
    assert plan.layout == Layout(replicate=3, shard=2)
    assert "replicate = 3  <- derived: 6 processes" in plan.explain()


def test_a_plan_of_the_wrong_size_names_each_value_and_its_source():
    with pytest.raises(PlanError) as caught:
        draft(
            RunSettings.of({"shard": 3, "tp": 2, "replicate": 1}),
            [CODE, Decision("tp", 2, "command line", "--tp")],
            world_size=4,
        )
    text = str(caught.value)
    assert caught.value.code == "plan-size"
    assert "needs 6 processes, but there are 4" in text
    assert "shard=3 (run.yaml:12) x tp=2 (--tp)" in text
    assert "--procs 6" in text


def test_all_problems_come_at_once():
    with pytest.raises(PlanError) as caught:
        draft(RunSettings.of({"mixed_precision": "fp12", "accumulate": 0, "replicate": 3}), [], world_size=1)
    assert [p.code for p in caught.value.problems] == ["plan-size", "plan-precision", "plan-accumulate"]
    assert str(caught.value).startswith("3 problems:")


def test_an_axis_that_no_strategy_serves_is_refused():
    with pytest.raises(PlanError, match="no strategy serves the axis `cp`") as caught:
        resolve(Plan(layout=Layout(cp=2)), [], [Toy()])
    assert caught.value.code == "plan-axis"


def test_options_of_a_strategy_that_does_not_exist_are_refused():
    with pytest.raises(PlanError, match="plan-option"):
        resolve(Plan(options={"replicat": {}}), [], [Toy()])


def test_strategies_are_chosen_in_stage_order_and_check_each_model():
    chosen = resolve(Plan(layout=Layout(tp=2)), [model_facts(nn.ReLU())], [Toy()])
    assert chosen.strategies == ("toy",)
    with pytest.raises(PlanError, match="toy refuses"):
        resolve(Plan(layout=Layout(tp=2)), [model_facts(nn.Linear(1, 1))], [Toy()])


def test_a_stage_of_the_shard_axis_takes_what_the_others_leave_and_says_why():
    assert draft(RunSettings.of({}), [], 4).layout == Layout(replicate=4)
    plan = draft(RunSettings.of({"zero": 1}), [Decision("zero", 1, "command line", "--zero")], world_size=4)
    assert (plan.layout, plan.zero) == (Layout(shard=4), 1)
    plan = draft(RunSettings.of({"shard": 2}), [], world_size=4)
    assert (plan.layout, plan.zero) == (Layout(replicate=2, shard=2), 3)
    assert "zero = 3  <- derived: shard=2: parameters, gradients and optimizer states are divided" in plan.explain()
    plan = draft(RunSettings.of({"zero": 2}), [Decision("zero", 2, "command line", "--zero")], world_size=1)
    assert "zero = 0  <- derived (--zero): zero=2 divides nothing, since shard is 1" in plan.explain()


def test_half_precision_weights_cannot_be_scaled():
    with pytest.raises(PlanError, match=r"weight.*\[fp16-parameters\]"):
        resolve(Plan(precision="fp16"), [model_facts(nn.Linear(2, 2).half())], [])


def test_facts_count_tied_parameters_once_and_read_meta_models():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.b.weight = self.a.weight
            self.norm.weight.requires_grad_(False)

    with torch.device("meta"):
        facts = model_facts(Tied())
    assert facts.parameters == 16 + 4 + 4 + 8
    assert facts.trainable == facts.parameters - 4
    assert facts.tied == (("a.weight", "b.weight"),)
    assert facts.batch_norms == ("norm",)
    assert facts.parameter_bytes == 4 * facts.parameters


def test_a_plan_prints_and_becomes_json():
    plan = draft(
        RunSettings.of({"accumulate": 4}), [Decision("accumulate", 4, "code", "Accelerator(...)")], world_size=2
    )
    assert "accumulate = 4  <- code (Accelerator(...))" in plan.explain()
    assert json.loads(plan.to_json())["layout"]["replicate"] == 2


# -- stages and options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "world", "places"),
    [
        ({"zero": 0, "shard": 2}, 2, ("zero=0 (run.yaml:3)", "shard=2 (--shard)")),
        ({"zero": 2, "shard": 1, "replicate": 2}, 2, ("zero=2 (run.yaml:3)", "shard=1 (--shard)")),
    ],
)
def test_a_stage_and_an_axis_that_contradict_are_refused(settings, world, places):
    decisions = [
        Decision("zero", settings["zero"], "file", "run.yaml:3"),
        Decision("shard", settings["shard"], "command line", "--shard"),
    ]
    with pytest.raises(PlanError) as caught:
        draft(RunSettings.of(settings), decisions, world)
    assert [problem.code for problem in caught.value.problems] == ["plan-zero"]
    assert all(place in str(caught.value) for place in places) and caught.value.problems[0].fix


def test_a_stage_for_many_processes_works_on_one():
    for settings in ({"zero": 3}, {"zero": 2, "shard": 1}, {"zero": 1, "replicate": 1}):
        plan = draft(RunSettings.of(settings), [], 1)
        assert plan.zero == 0 and any("divides nothing" in each.reason for each in plan.decisions)
    plan = draft(RunSettings.of({"zero": 3, "offload": "all"}), [], 1)
    assert plan.zero == 3 and plan.offloads_parameters
    plan = draft(RunSettings.of({"zero": 3, "tp": 2}), [], 2)
    assert plan.zero == 0 and plan.layout.shard == 1  # nothing is left for `shard`, which nobody asked for


def test_everything_wrong_with_stage_and_size_is_told_at_once():
    with pytest.raises(PlanError) as caught:
        draft(RunSettings.of({"zero": 0, "shard": 4, "replicate": 2}), [], 2)
    assert {problem.code for problem in caught.value.problems} == {"plan-size", "plan-zero"}


def test_options_name_where_they_were_said():
    told = [Decision("options.replicate.comm_hok", "bf16", "file", "run.yaml:7"),
            Decision("options.replicate.broadcast_buffers", "maybe", "command line", "--option")]  # fmt: skip
    options = {"replicate": {"comm_hok": "bf16", "broadcast_buffers": "maybe"}}
    with pytest.raises(PlanError) as caught:
        resolve(
            draft(RunSettings.of({"options": options}), told, 2),
            [model_facts(nn.Linear(2, 2))],
            [STRATEGIES.get("replicate")],
        )
    assert [problem.code for problem in caught.value.problems] == ["strategy-option", "strategy-value"]
    assert "it comes from run.yaml:7" in str(caught.value) and "it comes from --option" in str(caught.value)


def test_options_that_no_strategy_of_the_plan_reads_say_so():
    told = [Decision("options.shard.reshard", "no", "command line", "--option")]
    plan = draft(RunSettings.of({"options": {"shard": {"reshard": "no"}}}), told, 2)
    plan = resolve(plan, [model_facts(nn.Linear(2, 2))], [STRATEGIES.get("replicate"), STRATEGIES.get("shard")])
    assert (
        "options.shard.reshard = no  <- command line (--option): no effect: this plan does not use shard"
        in plan.explain()
    )


# A model that has what each strategy is for.
EVERYTHING = ModelFacts(
    "Everything", 1, 1, 4, quantised=(Quantised("weight", "4-bit", 1),), batch_norms=("norm",), balanced=("",),
    batch_layers=(("embedding", "Embedding max_norm=1"),), modules=(("norm", "SyncBatchNorm"),),
)  # fmt: skip
SETTINGS = (
    {"offload": "activations"}, {"offload": "optimizer"}, {"offload": "all"}, {"compile": True}, {"recompute": "blocks"},
    pytest.param({"mixed_precision": "fp8"}, marks=pytest.mark.needs("large")),
    {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {},
    {"tp": 2, "zero": 1}, {"ep": 2, "zero": 3}, {"ep": 2, "zero": 1}, {"cp": 2, "zero": 3}, {"pp": 2, "recompute": "2"},
)  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_strategy_that_a_plan_uses_is_left_unasked(settings) -> None:
    """Whether a strategy may be of use is known before it is imported, and `wanted` is its own word."""
    for world_size in (2, 4) if settings.keys() & {"tp", "pp", "cp", "ep", "zero"} else (1, 2):
        plan = draft(RunSettings.of(settings), [], world_size)
        wanted = {strategy.name for strategy in STRATEGIES if strategy.wanted(plan) and strategy.concerns([EVERYTHING])}
        assert wanted <= {strategy.name for strategy in strategies_for(plan, [EVERYTHING])}


def test_a_plan_of_one_process_asks_few_strategies() -> None:
    assert strategies_for(Plan()) == strategies_for(Plan(), [model_facts(nn.Linear(2, 2))]) == []
    names = [strategy.name for strategy in strategies_for(Plan(), [EVERYTHING])]
    assert names == ["converted_batch_norm", "quantised"]
    asked = strategies_for(Plan(options={"zero": {"divide": "rows"}}))
    assert "zero" in [strategy.name for strategy in asked]
