"""What context parallel, recompute and compile say before a run."""

import pytest
import torch
from torch import nn

from paceline.parallel.compile import STRATEGY as COMPILE
from paceline.parallel.recompute import STRATEGY as RECOMPUTE
from paceline.plan.cost import Bytes
from paceline.plan.facts import model_facts
from paceline.plan.plan import Plan
from paceline.world.layout import Layout
from paceline_large.context.context import STRATEGY as CONTEXT
from paceline_large.random_streams import RandomStreams
from paceline_large.tensor.tensor import STRATEGY as TENSOR


def encoder(heads=6, layers=4):
    layer = nn.TransformerEncoderLayer(24, heads, 32, batch_first=True)
    return model_facts(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))


FLAT = model_facts(nn.Linear(2, 2))


def codes(strategy, plan, facts):
    return [problem.code for problem in strategy.check(plan, facts)]


def plan(cp=2, tp=1, **other):
    return Plan(Layout(cp=cp, tp=tp), **other)


def test_context_needs_blocks():
    assert codes(CONTEXT, plan(), FLAT) == ["context-blocks"]
    assert codes(CONTEXT, plan(options={"context": {"blocks": "layers.*"}}), FLAT) == []
    assert codes(CONTEXT, plan(), encoder()) == []


def test_ulysses_needs_heads_that_divide():
    ulysses = {"context": {"method": "ulysses"}}
    assert codes(CONTEXT, plan(cp=4, options=ulysses), encoder()) == ["context-heads"]
    assert codes(CONTEXT, plan(cp=3, options=ulysses), encoder()) == []
    assert codes(CONTEXT, plan(cp=3, tp=4, options=ulysses), encoder()) == ["context-heads"]
    (problem,) = CONTEXT.check(plan(cp=4, options=ulysses), encoder())
    assert "1, 2, 3, 6 divide 6" in str(problem)


def test_positions_are_divided_once():
    twice = {"tensor": {"sequence": True}}
    assert "context-sequence" in codes(TENSOR, plan(tp=2, options=twice), encoder())
    assert "context-sequence" not in codes(TENSOR, plan(tp=2), encoder())
    assert "context-sequence" not in codes(TENSOR, plan(cp=1, tp=2, options=twice), encoder())


def test_context_is_not_compiled():
    assert codes(CONTEXT, plan(compile=True), encoder()) == ["context-compile"]


@pytest.mark.parametrize(("cp", "method"), [(2, "ulysses"), (3, "ulysses"), (4, "ring")])
def test_auto_takes_ulysses_where_heads_divide(cp, method):
    (decision,) = CONTEXT.decide(plan(cp=cp), encoder())
    assert (decision.field, decision.value) == ("context.method", method)
    assert "6" in decision.reason
    assert CONTEXT.decide(plan(cp=cp, options={"context": {"method": "ring"}}), encoder()) == []


def test_context_divides_activations():
    held = CONTEXT.cost(plan(cp=4), encoder(), Bytes(activations=3400))
    assert held.activations == 850
    assert held.sent > 0


@pytest.mark.parametrize(("recompute", "again"), [("blocks", 4), ("selective", 4), ("2", 2), ("3", 2), ("9", 1)])
def test_recompute_tells_what_is_kept(recompute, again):
    (decision,) = RECOMPUTE.decide(plan(1, recompute=recompute), encoder())
    assert decision.value == again
    costs = RECOMPUTE.cost(plan(1, recompute=recompute), encoder(), Bytes(activations=3400))
    assert 0 < costs.activations <= 3400


def test_recompute_blocks_costs_less_than_less_of_it():
    bytes_of = {
        how: RECOMPUTE.cost(plan(1, recompute=how), encoder(layers=12), Bytes(activations=10**6)).activations
        for how in ("blocks", "selective", "2")
    }
    assert bytes_of["blocks"] < bytes_of["2"] < 10**6
    assert bytes_of["blocks"] < bytes_of["selective"] < 10**6


def test_recompute_needs_blocks_and_known_operations():
    assert codes(RECOMPUTE, plan(1, recompute="blocks"), FLAT) == ["recompute-blocks"]
    wrong = plan(1, recompute="selective", options={"recompute": {"save": "mm, matmulator"}})
    (problem,) = RECOMPUTE.check(wrong, encoder())
    assert problem.code == "recompute-operation"
    assert "matmulator" in problem.what and "mm," not in problem.what
    assert not RECOMPUTE.wanted(plan(1))


def test_tensor_parallel_blocks_are_not_compiled():
    assert codes(COMPILE, plan(1, tp=2, compile=True), encoder()) == ["compile-tensor"]
    eager = {"compile": {"backend": "eager"}}
    assert codes(COMPILE, plan(1, tp=2, compile=True, options=eager), encoder()) == []
    assert not COMPILE.wanted(plan(1))


def test_the_eager_backend_does_not_recompute() -> None:
    eager = {"compile": {"backend": "eager"}}
    assert codes(COMPILE, plan(1, compile=True, recompute="blocks", options=eager), encoder()) == ["compile-recompute"]
    assert codes(COMPILE, plan(1, compile=True, recompute="blocks"), encoder()) == []


def test_compile_tells_its_regions():
    (decision,) = COMPILE.decide(plan(1, compile=True), encoder())
    assert decision.value == 4
    (decision,) = COMPILE.decide(plan(1, compile=True), FLAT)
    assert decision.value == 1 and "whole model" in decision.reason


def test_generators_go_on_as_if_nothing_had_happened_where_nothing_was_drawn():
    streams = RandomStreams(0, torch.device("cpu"))
    before = torch.get_rng_state()
    streams.open()
    streams.close()
    assert torch.equal(before, torch.get_rng_state())


def test_each_peer_draws_its_own_numbers_inside_and_the_same_ones_outside():
    draws = []
    for rank in range(2):
        torch.manual_seed(0)
        streams = RandomStreams(rank, torch.device("cpu"))
        inside = []
        for _ in range(2):
            streams.open()
            inside.append(float(torch.rand(())))
            streams.open()  # a region in a region, which an error leaves open
            streams.abandon()
        draws.append((*inside, float(torch.rand(()))))
    assert len({draw for each in draws for draw in each[:2]}) == 4
    assert draws[0][2] == draws[1][2]
