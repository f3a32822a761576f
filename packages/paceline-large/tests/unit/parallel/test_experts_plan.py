"""Which modules are experts, and what expert parallelism refuses before a run."""

import pytest
import torch
from parity_models import Experts, ListedExperts, Mixture
from torch import nn

from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.plan import Plan
from paceline.world.layout import Layout
from paceline_large.experts import balance_applied as balance
from paceline_large.experts.balance import STRATEGY as BALANCE
from paceline_large.experts.experts import STRATEGY
from paceline_large.experts.find import find_experts
from paceline_large.pipeline.pipeline import STRATEGY as PIPELINE


class Stacked(nn.Module):
    """Stacked weights, and a forward of other arguments."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3, 3))

    def forward(self, x):
        return x


def around(experts, **attributes):
    """A layer with these experts."""
    layer = nn.Module()
    layer.experts = experts
    vars(layer).update(attributes)
    model = nn.Module()
    model.mlp = layer
    return model


def codes(model, plan=None):
    plan = plan or Plan(Layout(ep=2))
    return [problem.code for problem in STRATEGY.check(plan, model_facts(model))]


def test_stacked_experts_are_found_by_their_structure():
    first, second = find_experts(Mixture())
    assert (first.name, second.name) == ("blocks.0.experts", "blocks.1.experts")
    assert (first.number, first.parameters, first.problem) == (4, ("up", "up_bias", "down"), "")
    assert codes(Mixture()) == []
    # Convolutions and stacked weights of other code are none.
    assert find_experts(nn.Sequential(nn.Conv1d(4, 4, 3), Stacked())) == ()


DTYPES = (torch.float32, torch.float64)


def with_buffer():
    experts = Experts(8, 4)
    experts.register_buffer("scale", torch.ones(4))
    return around(experts)


def with_other_weight():
    experts = Experts(8, 4)
    experts.norm = nn.Parameter(torch.ones(8))
    return around(experts)


def with_shared_weight():
    experts = Experts(8, 4)
    model = around(experts)
    model.other = Experts(8, 4)
    model.other.up = experts.up
    return model


def test_lists_of_experts_are_found_with_what_calls_them():
    (row,) = find_experts(around(nn.ModuleList(nn.Linear(3, 3) for _ in range(4))))
    assert (row.name, row.number, row.caller, row.modules[1]) == ("mlp.experts", 4, "", "mlp.experts.1")
    assert row.parameters[:2] == ("0.weight", "0.bias") and not row.problem
    (row, _) = find_experts(Mixture(listed=True))
    assert (row.name, row.caller, row.modules[0]) == ("blocks.0.moe.experts", "blocks.0.moe", "experts.0")
    # By the class of its modules, too; others are no experts.
    (row,) = find_experts(nn.ModuleDict({"mlps": nn.ModuleList(ExpertLayer(3, 3) for _ in range(2))}))
    assert row.name == "mlps"
    assert find_experts(nn.ModuleList(nn.Linear(3, 3) for _ in range(2))) == ()
    facts = model_facts(Mixture(listed=True))
    assert facts.elements_of(facts.experts) == sum(
        p.numel() for name, p in Mixture(listed=True).named_parameters() if ".experts." in name
    )


class ExpertLayer(nn.Linear):
    pass


def shared_in_a_list():
    experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    experts[1].weight = experts[0].weight
    return around(experts)


def scalars_in_a_list():
    experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    for expert in experts:
        expert.scale = nn.Parameter(torch.ones(()))
    return around(experts)


@pytest.mark.parametrize(
    "model",
    [
        lambda: around(Stacked()),
        lambda: around(nn.ModuleList(nn.BatchNorm1d(3) for _ in range(4))),
        lambda: around(nn.ModuleDict({f"expert{n}": nn.Linear(3, 3).to(dtype) for n, dtype in enumerate(DTYPES)})),
        shared_in_a_list,
        scalars_in_a_list,
        with_buffer,
        with_other_weight,
    ],
)
def test_code_that_cannot_send_tokens_is_refused(model):
    assert codes(model()) == ["experts-code"]


def test_shared_weights_are_refused():
    assert codes(with_shared_weight()) == ["experts-code", "experts-code"]


def test_other_problems():
    assert codes(nn.Linear(2, 2)) == ["experts-none"]
    (problem,) = STRATEGY.check(Plan(Layout(ep=3)), model_facts(Mixture()))
    assert problem.code == "experts-divide" and problem.fix == "set ep to one of 1, 2, 4"
    model = Mixture()
    model.blocks[0].experts.up.register_hook(lambda gradient: gradient)
    assert codes(model) == ["experts-hooks"]


def test_the_option_names_some_of_them():
    assert [row.name for row in find_experts(Mixture(), ["blocks.1.*"])] == ["blocks.1.experts"]
    assert find_experts(Mixture(), ["layers.*"]) == ()
    # A list whose name does not say so is declared.
    model = nn.Module()
    model.moe = ListedExperts(4, 2)
    model.moe.parts = model.moe.experts
    del model.moe.experts
    assert find_experts(model) == ()
    (row,) = find_experts(model, ["*.parts"])
    assert (row.name, row.number, row.caller, row.problem) == ("moe.parts", 2, "moe", "")


def test_memory_counts_the_experts_of_one_rank():
    facts = model_facts(Mixture())
    elements = facts.elements_of(facts.experts)
    assert elements == sum(p.numel() for name, p in Mixture().named_parameters() if ".experts." in name)
    alone = Bytes.alone(facts)
    cost = STRATEGY.cost(Plan(Layout(ep=4)), facts, alone)
    assert alone.parameters - cost.parameters == 4 * elements * 3 // 4
    assert alone.optimizer - cost.optimizer == 8 * elements * 3 // 4


def test_what_depends_on_the_division_is_named():
    model = Mixture()
    model.blocks[0].capacity_factor = 1.25
    model.config = type("Config", (), {"router_aux_loss_coef": 0.01, "output_router_logits": True})()
    facts = model_facts(model)
    plan = Plan(Layout(ep=2))
    decisions = {row.field: row for row in [*STRATEGY.decide(plan, facts), *BALANCE.decide(plan, facts)]}
    assert list(decisions) == ["experts.layers", "experts.capacity", "balance(Mixture)"]
    assert "capacity_factor=1.25" in decisions["experts.capacity"].reason
    assert "router_aux_loss_coef=0.01" in decisions["balance(Mixture)"].reason
    # Under every plan by which ranks read different samples.
    (decision,) = BALANCE.decide(Plan(Layout(replicate=2)), facts)
    assert decision.value == "of each rank"


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_transformers_is_known(masked):
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = MixtralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    facts = model_facts(MixtralForCausalLM(config))
    assert facts.balanced == ("",)
    (decision,) = BALANCE.decide(Plan(Layout(ep=2)), facts)
    assert decision.value == "over 2 ranks"
    assert "pipeline-balance" in {problem.code for problem in PIPELINE.check(Plan(Layout(pp=2)), facts)}
    logits = (torch.randn(6, 4), torch.randn(6, 4))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]) if masked else None
    ours = balance._loss(balance._sums(logits, 4, 2, mask))
    torch.testing.assert_close(ours, load_balancing_loss_func(logits, 4, 2, mask))
