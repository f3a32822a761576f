"""Which layers are divided how: tables, models' own plans, names; and everything that is refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as old_spectral_norm

from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.plan import Plan
from paceline.world.layout import Layout
from paceline_large.tensor.options import TensorOptions
from paceline_large.tensor.plan import divide, divided_elements
from paceline_large.tensor.tensor import STRATEGY


class Attention(nn.Module):
    def __init__(self, names="q_proj k_proj v_proj o_proj", width=16, kv=16, **numbers):
        super().__init__()
        *first, last = names.split()
        sizes = [width, kv, kv] if len(first) == 3 else [3 * width]
        for name, size in zip(first, sizes, strict=True):
            setattr(self, name, nn.Linear(width, size))
        setattr(self, last, nn.Linear(width, width))
        for name, number in (numbers or {"num_heads": 4}).items():
            setattr(self, name, number)

    def forward(self, x):
        return x


class MLP(nn.Module):
    def __init__(self, names="fc1 fc2", width=16, hidden=32, **more):
        super().__init__()
        *first, last = names.split()
        for name in first:
            setattr(self, name, nn.Linear(width, hidden))
        setattr(self, last, nn.Linear(hidden, width))
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self, attn=None, mlp=None):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attn, self.mlp = attn or Attention(), mlp or MLP()

    def forward(self, x):
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self, attn=Attention, mlp=MLP, vocabulary=24, tied=False, blocks=2):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, 16)
        self.pos = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(attn(), mlp()) for _ in range(blocks))
        self.head = nn.Linear(16, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, x):
        return x


def division(model, width=2, **options):
    return divide(model_facts(model), width, TensorOptions(**options))


def problems(model, width=2, **options):
    plan = Plan(Layout(tp=width), options={"tensor": options})
    return STRATEGY.check(plan, model_facts(model))


def codes(*args, **kwargs):
    return [problem.code for problem in problems(*args, **kwargs)]


@pytest.mark.parametrize(
    "names", ["q_proj k_proj v_proj o_proj", "wq wk wv wo", "query key value out", "to_q to_k to_v to_out", "q k v o"]
)
def test_an_attention_is_known_by_its_names(names):
    found = division(Model(lambda: Attention(names)))
    *first, last = (f"blocks.1.attn.{name}" for name in names.split())
    assert [found.styles[name] for name in first] == ["colwise"] * 3 and found.styles[last] == "rowwise"
    assert found.groups[0].heads == 4 and not found.problems


@pytest.mark.parametrize(
    "names", ["fc1 fc2", "c_fc c_proj", "gate_proj up_proj down_proj", "w1 w3 w2", "linear1 linear2", "up down"]
)
def test_an_mlp_is_known_by_its_names(names):
    found = division(Model(mlp=lambda: MLP(names)))
    *first, last = (f"blocks.0.mlp.{name}" for name in names.split())
    assert {found.styles[name] for name in first} == {"colwise"} and found.styles[last] == "rowwise"


def test_a_sequence_of_two_linear_layers():
    def mlp(act):
        return lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), act, nn.Linear(32, 16), nn.Dropout())

    assert division(Model(mlp=mlp(nn.GELU()))).styles["blocks.0.mlp.1"] == "colwise"
    for act in (nn.Softmax(-1), nn.LayerNorm(32), nn.PReLU()):
        found = division(Model(mlp=mlp(act)))
        assert found.styles["blocks.0.mlp.1"] == "colwise_gather" and found.styles["blocks.0.mlp.3"] == "rowwise_split"
        assert type(act).__name__ in found.whole["blocks.0.mlp"]


def test_q_k_and_v_in_one_matrix_are_computed_whole():
    found = division(Model(lambda: Attention("c_attn c_proj")))
    assert found.styles["blocks.0.attn.c_attn"] == "colwise_gather"
    assert "one matrix" in found.whole["blocks.0.attn"]


def test_an_attention_with_parameters_of_its_own_is_computed_whole():
    class Scaled(Attention):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(1))

    assert not division(Model(Scaled)).groups[0].split
    assert not division(Model(lambda: Attention(color=3))).groups[0].split  # nobody says how many heads


def test_norms_of_single_heads_have_partial_gradients():
    class Normed(Attention):
        def __init__(self):
            super().__init__()
            self.q_norm, self.norm = nn.LayerNorm(4), nn.LayerNorm(16)

    found = division(Model(Normed))
    assert found.styles["blocks.0.attn.q_norm"] == "partial" and "blocks.0.attn.norm" not in found.styles


def test_norms_over_all_heads_need_the_whole():
    class Normed(Attention):
        def __init__(self):
            super().__init__()
            self.q_norm = nn.LayerNorm(16)

    assert not division(Model(Normed)).groups[0].split


def test_torchs_attention_stays_whole_and_its_mlp_is_divided():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32) for _ in range(2))

    found = division(Encoder())
    assert found.styles["layers.0.linear1"] == "colwise" and found.styles["layers.0.linear2"] == "rowwise"
    assert "one matrix" in found.whole["layers.0.self_attn"]


def test_the_vocabulary_is_divided_where_a_head_has_a_row_for_each_token():
    found = division(Model())
    assert (found.styles["tok"], found.styles["head"], found.head) == ("vocabulary", "colwise_gather", "head")
    assert "pos" not in found.styles
    assert "tok" not in division(Model(), vocabulary=False).styles
    odd = division(Model(vocabulary=25))
    assert "tok" not in odd.styles and "26 would" in odd.whole["head"] and not odd.problems


def test_a_models_own_plan():
    model = Model(tied=True)
    model.tp_plan = {"blocks.*.mlp.fc1": "colwise", "blocks.*.mlp.fc2": "rowwise", "head": "colwise_gather_output"}
    found = division(model)
    assert found.source == "model" and found.styles["blocks.1.mlp.fc1"] == "colwise"
    assert found.styles["tok"] == "vocabulary"  # it shares the head's weight
    # A latent attention stays whole.
    model.tp_plan |= {"blocks.*.attn.out": "rowwise", "blocks.*.attn.kv": "mla_kv_a_proj"}
    latent = division(model)
    assert latent.styles == found.styles and "blocks.*.attn" in latent.whole
    model.tp_plan |= {"blocks.*.attn": "embedding_colwise"}
    (problem,) = problems(model)
    assert problem.code == "tensor-style" and "embedding_colwise" in problem.what


def test_a_table_wins():
    model = Model()
    model.tp_plan = {"*.fc1": "colwise"}
    found = division(model, plan={"blocks.0.*": "replicated", "*.fc1": "colwise", "*.fc2": "rowwise"})
    assert found.source == "table" and not found.problems
    assert found.styles["blocks.1.mlp.fc1"] == "colwise" and found.styles["blocks.0.mlp.fc1"] == "replicated"
    assert division(model, plan={"*": "replicated"}).problems == ()


def test_tables_that_do_not_fit():
    assert codes(Model(), plan={"*.fc1": "diagonal"}) == ["tensor-style"]
    assert codes(Model(), plan="colwise") == ["tensor-style"]
    assert codes(Model(), plan={"*.fc9": "colwise", "*": "replicated"}) == ["tensor-pattern"]
    assert codes(Model(), plan={"tok": "colwise", "head": "replicated"}) == ["tensor-pattern"]
    # What `tensor-nothing` advises.
    assert codes(nn.Conv2d(1, 2, 3)) == ["tensor-nothing"] and codes(nn.Conv2d(1, 2, 3), plan={"*": "replicated"}) == []
    assert codes(Model(blocks=1), plan={"*.fc1": "colwise"}) == ["tensor-unpaired"]
    assert codes(Model(blocks=1), plan={"*.fc2": "rowwise"}) == ["tensor-unpaired"]
    assert codes(Model(vocabulary=25), plan={"tok": "vocabulary"}) == ["tensor-width"]
    assert codes(Model(tied=True), plan={"tok": "vocabulary", "head": "replicated"}) == ["tensor-tied"]


@pytest.mark.parametrize("normalise", [parametrizations.weight_norm, parametrizations.spectral_norm, old_spectral_norm])
def test_a_layer_whose_weight_is_computed_from_others_stays_whole(normalise):
    model = Model()
    normalise(model.blocks[0].mlp.fc1)
    found = division(model)
    assert "blocks.0.mlp.fc2" not in found.styles and found.styles["blocks.1.mlp.fc2"] == "rowwise"
    assert found.whole["blocks.0.mlp.fc1"] == "its weight is computed from other parameters"
    (problem,) = problems(model, plan={"blocks.0.mlp.fc1": "colwise"})
    assert problem.code == "tensor-pattern" and "blocks.0.mlp.fc1 is computed from other parameters" in problem.why
    assert codes(model, plan={"*.fc1": "replicated"}) == []
    sequence = nn.Sequential(normalise(nn.Linear(4, 4)), nn.Tanh())
    assert "the weights of 0 are computed from other parameters" in problems(sequence)[0].why


def test_hooks_and_sparse_gradients_would_be_lost():
    model = Model()
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    model.pos.sparse = True
    assert codes(model) == ["tensor-hooks", "tensor-sparse"]


def test_heads_that_cannot_be_shared():
    problem = problems(Model(lambda: Attention(num_heads=4, kv=8)), 3)[0]
    assert problem.code == "tensor-heads" and "blocks.0.attn has 4 heads and 2 key-value heads" in problem.what
    assert problem.fix == "use tp = 2 or 4"
    assert "so in 1 more block" in problem.why
    assert codes(Model(lambda: Attention(head_dim=8)), 4) == ["tensor-heads"]
    (problem,) = problems(Model(lambda: Attention(num_heads=8, kv=6)), 2)  # 3 key-value heads
    assert problem.code == "tensor-heads" and problem.fix == "use tp = 1, or a table that leaves its layers out"


def test_fewer_key_value_heads_than_ranks():
    model = Model(lambda: Attention(num_heads=4, kv=4))
    found = division(model, 4)
    assert found.problems == ()
    assert found.styles["blocks.0.attn.q_proj"] == "colwise"
    assert found.styles["blocks.0.attn.k_proj"] == found.styles["blocks.1.attn.v_proj"] == "shared_heads"
    assert found.whole["blocks.0.attn.k_proj"].startswith("key-value heads: 1 for 4 ranks")
    two = division(Model(lambda: Attention(num_heads=4, kv=8)), 2)
    assert two.styles["blocks.0.attn.k_proj"] == "colwise"
    table = {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise"}
    assert division(model, 4, plan=table).styles["blocks.0.attn.k_proj"] == "shared_heads"


def test_widths_that_cannot_be_shared():
    problem = problems(Model(mlp=lambda: MLP(hidden=30)), 4)[0]
    assert problem.code == "tensor-width" and "blocks.0.mlp.fc1 puts out 30 features" in problem.what
    assert "32 wide" in problem.fix


def test_a_model_of_which_nothing_is_known():
    (problem,) = problems(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    assert problem.code == "tensor-nothing" and '"*.fc1": "colwise"' in problem.fix
    assert codes(nn.Linear(4, 4), plan={"*": "replicated"}) == []


def test_requests_on_top():
    assert codes(Model(vocabulary=25), loss=True) == ["tensor-loss"]
    assert codes(Model(), loss=True, sequence=True) == []

    class Convolved(MLP):
        pass

    class Odd(Block):
        def __init__(self):
            super().__init__()
            self.mix = nn.Conv1d(16, 16, 3)

    model = Model()
    model.blocks = nn.ModuleList(Odd() for _ in range(2))
    (problem,) = problems(model, sequence=True)
    assert problem.code == "tensor-sequence" and "blocks.0.mix" in problem.why


def test_it_is_decided_with_reasons():
    plan = Plan(Layout(tp=2))
    told = {each.field: each for each in STRATEGY.decide(plan, model_facts(Model(lambda: Attention("c_attn c_proj"))))}
    assert told["tensor.layers"].value == "2 colwise, 3 colwise_gather, 2 rowwise, 2 rowwise_split, 1 vocabulary"
    assert told["tensor.computed_whole"].value == "blocks.0.attn and 1 more"


def test_the_divided_part_of_the_bytes_is_shared():
    model = Model(tied=True)
    facts = model_facts(model)
    divided = divided_elements(division(model), facts)
    per_block = 4 * 16 * 16 + 3 * 16 + 2 * 16 * 32 + 32
    assert divided == 2 * per_block + 24 * 16
    cost = STRATEGY.cost(Plan(Layout(tp=2)), facts, Bytes.alone(facts))
    assert cost.parameters == 4 * (facts.parameters - divided // 2)
    assert cost.optimizer == 2 * cost.gradients == 2 * cost.parameters


def test_a_head_that_shares_its_bias_with_a_whole_module_stays_whole():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.bias = nn.Linear(16, 32), nn.Parameter(torch.zeros(32))
            self.decoder.bias = self.bias

    model = Model()
    model.tok, model.head = nn.Embedding(32, 16), Head()
    found = divide(model_facts(model), 2, TensorOptions())
    assert not found.problems and "head.decoder" not in found.styles
    assert "shares a parameter" in found.whole["embedding and head"]
