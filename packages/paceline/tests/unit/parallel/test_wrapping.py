"""Units are found from names and sizes alone; `shard` says on paper what it will do."""

import pytest
import torch
from parity_models import GPT
from torch import nn

from paceline.config.settings import RunSettings
from paceline.parallel.data.shard import STRATEGY
from paceline.parallel.data.shard_applied import _left_alone
from paceline.parallel.data.wrapping import wrapping
from paceline.parallel.strategy import strategies_of
from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.resolve import draft


def units(model, wrap="auto", min_params=0, ignored=()):
    return wrapping(model_facts(model), wrap, min_params, ignored)


def plan(world=4, options=None, **settings):
    return draft(RunSettings.of({"shard": world, **settings, "options": {"shard": options or {}}}), [], world)


def test_repeated_blocks_are_units():
    assert units(GPT()).units == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert units(GPT(), "none").units == ()
    assert units(nn.Linear(2, 2)).units == ()


def test_a_list_that_repeats_is_no_unit_but_what_it_holds_is():
    def feed_forward():
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    layers = nn.ModuleList(nn.ModuleList([nn.MultiheadAttention(4, 2), feed_forward()]) for _ in range(2))
    assert units(nn.ModuleDict({"layers": layers})).units == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
    named = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": feed_forward()}) for _ in range(2))
    assert units(named).units == ("0.mlp", "1.mlp")
    tiles = nn.ModuleList(nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]) for _ in range(2))
    assert units(tiles).units == ()


def test_classes_are_units_inside_one_another():
    found = units(GPT(layers=2), ["Block", "Attention"])
    assert found.units == ("blocks.0", "blocks.0.attention", "blocks.1", "blocks.1.attention")
    assert units(GPT(), "Block, Layer").problems[0].code == "shard-wrap"


def test_sizes_count_what_no_unit_holds_yet():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(10, 10), nn.Linear(2, 2)
            self.pair = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            self.many = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.attention = nn.MultiheadAttention(10, 2)

    # 110 | 6 | 42 + 42 | 42 x 3, but a list cannot be called | 440, whose output layer is never called
    assert units(Net(), "size", 60).units == ("wide", "pair", "attention")
    assert units(Net(), "size", 41).units == (
        "wide", "pair.0", "pair.1", "many.0", "many.1", "many.2", "attention",
    )  # fmt: skip
    assert units(Net(), "size", 1000).units == ()


def test_tied_parameters_stay_in_one_unit():
    model = GPT(tied=True)
    model.blocks[2].up_proj.weight = model.blocks[1].up_proj.weight
    found = units(model)
    assert found.units == ("blocks.0", "blocks.3") and found.tied == ("blocks.1", "blocks.2")
    decisions = STRATEGY.decide(plan(), model_facts(model))
    assert "blocks.1, blocks.2 share parameters" in decisions[0].reason
    inside = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    inside[0][1].weight = inside[0][0].weight
    assert units(inside).units == ("0", "1")


def test_modules_left_alone():
    found = units(GPT(), ignored="LayerNorm, blocks.1")
    assert "blocks.1" in found.alone and "norm" in found.alone and "blocks.0.norm1" in found.alone
    assert "blocks.1.norm1" not in found.alone  # the outermost only
    assert found.units == ("blocks.0", "blocks.2", "blocks.3")
    assert units(GPT(), ignored=["adapter*"]).problems[0].code == "shard-ignored"


def test_a_tied_parameter_of_an_ignored_module_is_ignored_everywhere():
    model = GPT(tied=True, layers=2)
    chosen = units(model, "Embedding", ignored="head")
    assert chosen.units == ("embed", "positions") and chosen.tied == ()
    (ignored,) = _left_alone(model, chosen, (), [])
    assert ignored is model.embed.weight


@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 3},
        {"zero": 2},
        *(
            pytest.param(each, marks=pytest.mark.needs("large"))
            for each in ({"tp": 2}, {"pp": 2}, {"tp": 2, "zero": 3})
        ),
    ],
)
def test_what_lets_models_share_parameters(settings):
    """The settings that the remedies name are those that keep models apart, and without them nothing does."""

    def remedies(settings):
        width = 4 // (settings.get("tp", 1) * settings.get("pp", 1))
        drafted = plan(**settings, shard=width)
        return [remedy for strategy in strategies_of(drafted) if (remedy := strategy.keeps_apart(drafted))]

    text = ", ".join(remedies(settings))
    assert all(f"{name}=" in text for name in settings)
    assert remedies({"zero": 1, **{name: 1 for name in settings}}) == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"reshard": 3}, "shard-reshard"),
        ({"reshard": 4}, "shard-reshard"),
        ({"param_dtype": "fp16"}, "shard-float16"),
        ({"wrap": "Layer"}, "shard-wrap"),
    ],
)
def test_problems_are_told_before_anything_is_touched(options, code):
    assert [each.code for each in STRATEGY.check(plan(options=options), model_facts(GPT()))] == [code]


def test_replicate_beside_tensor_parallel_has_no_hooks():
    from paceline.parallel.data.replicate import STRATEGY as REPLICATE

    def checked(hook):
        of = draft(RunSettings.of({"replicate": 2, "tp": 2, "options": {"replicate": {"comm_hook": hook}}}), [], 4)
        return [each.code for each in REPLICATE.check(of, model_facts(GPT()))]

    assert checked("none") == [] and checked("bf16") == ["replicate-hook"]


def test_widths_that_work():
    assert STRATEGY.check(plan(options={"reshard": 2}), model_facts(GPT())) == []
    with_tp = draft(RunSettings.of({"shard": 4, "tp": 2, "options": {"shard": {"reshard": 2}}}), [], 8)
    assert [each.code for each in STRATEGY.check(with_tp, model_facts(GPT()))] == ["shard-reshard"]


def test_decisions_have_reasons():
    def chosen(of):
        return {each.field: each.value for each in STRATEGY.decide(of, model_facts(GPT()))}

    assert chosen(plan())["shard.reshard"] is True
    assert chosen(draft(RunSettings.of({"shard": 2, "tp": 2, "zero": 2}), [], 4))["shard.reshard"] is False
    assert chosen(draft(RunSettings.of({"shard": 2, "pp": 2}), [], 4))["shard.reshard"] is False
    half = chosen(plan(mixed_precision="bf16"))
    assert (half["shard.param_dtype"], half["shard.reduce_dtype"]) == ("bfloat16", "float32")
    assert "shard.reshard" not in chosen(plan(options={"reshard": "no"}))
    assert all(each.reason for each in STRATEGY.decide(plan(offload="all"), model_facts(GPT())))


def test_costs_are_sixteen_bytes_a_parameter_over_the_ranks():
    facts = model_facts(GPT())
    alone = Bytes.alone(facts)
    cost = STRATEGY.cost(plan(), facts, alone)
    assert cost.parameters + cost.gradients + cost.optimizer == 16 * facts.parameters // 4
    block = sum(p.numel() for p in GPT().blocks[0].parameters())
    assert cost.buffers >= 2 * 4 * block
    kept = STRATEGY.cost(plan(options={"reshard": "no"}), facts, alone)
    assert kept.buffers > cost.buffers and kept.sent < cost.sent


def test_a_recipe_touches_nothing():
    from paceline.parallel.materialise import Recipe

    with torch.device("meta"):
        model = GPT(tied=True)
    state = torch.get_rng_state()
    assert Recipe(model).missing("GPT") == []
    assert all(p.is_meta for p in model.parameters()) and torch.equal(state, torch.get_rng_state())
    model.head.weight = nn.Parameter(torch.empty(24, 16, device="meta"))
    model.blocks[0].scale = nn.Parameter(torch.empty(2, device="meta"))
    (problem,) = Recipe(model).missing("GPT")
    assert problem.code == "model-meta" and "blocks.0.scale" in str(problem)


def test_parents_that_initialise_their_children_and_ties():
    from paceline.parallel.materialise import Recipe

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Embedding(4, 4, padding_idx=1), nn.MultiheadAttention(4, 2)
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight

        def _init_weights(self, module):
            if isinstance(module, nn.BatchNorm1d):
                module.weight.data.fill_(3.0)

    with torch.device("meta"):
        model = Net()
    Recipe(model).run(model, torch.device("cpu"), 5)
    assert model.head.weight is model.embed.weight and float(model.embed.weight[1].detach().abs().sum()) == 0
    assert float(model.embed.weight.detach().std()) > 0.5  # the embedding's values, not the head's
    assert float(model.attention.out_proj.bias.detach().abs().sum()) == 0  # which the attention sets, not the layer
    assert model.norm.weight.tolist() == [3.0] * 4 and model.norm.running_var.tolist() == [1.0] * 4
    with torch.device("meta"):
        other = Net()
    torch.manual_seed(1)
    Recipe(other).run(other, torch.device("cpu"), 5)
    assert torch.equal(other.attention.in_proj_weight, model.attention.in_proj_weight)
