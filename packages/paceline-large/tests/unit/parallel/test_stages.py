"""Stages of a model in one process: what each holds, what passes through it, and what a stub is."""

import pytest
import torch
from parity_models import GPT
from torch import nn

from paceline.base.errors import PlanError
from paceline.optim.rebind import parameter_names, rebind
from paceline.plan.blocks import repeated_blocks
from paceline_large.pipeline.specs import Spec, specs
from paceline_large.pipeline.stages import EndOfStage, Stages, Visit
from paceline_large.pipeline.timing import measure_blocks

CPU = torch.device("cpu")


def cut(model, begins=(0, 2), own=(0,), keep=()):
    return Stages(model, repeated_blocks(model), begins, own, keep, CPU)


def passes(model, stages, visit, x):
    with stages.entering(visit):
        try:
            return model(x)
        except EndOfStage as leave:
            return leave.hidden


def test_stages_one_after_the_other_are_the_model():
    torch.manual_seed(0)
    whole = GPT()
    x = torch.randint(0, 24, (2, 8))
    want = whole(x)
    names = list(whole.state_dict())
    parts = []
    outputs, hidden = {}, None
    for number in range(2):
        torch.manual_seed(0)
        model = GPT()
        stages = cut(model, own=(number,))
        stages.outputs = outputs
        visit = Visit(number, hidden, {})
        hidden = passes(model, stages, visit, x)
        outputs |= visit.recorded
        parts.append(list(model.state_dict()))
        assert stages.units[0].slots is model._modules
    assert torch.equal(hidden, want)
    assert sorted(parts[0] + parts[1]) == sorted(names)
    assert all(name.startswith(("embed", "positions", "blocks.0", "blocks.1")) for name in parts[0])


def test_the_model_is_itself_again_after_a_pass():
    model = GPT()
    stages = cut(model, own=(0, 1))
    before = {name: id(module) for name, module in model.named_modules()}
    passes(model, stages, Visit(0, None), torch.zeros(1, 4, dtype=torch.long))
    assert {name: id(module) for name, module in model.named_modules()} == before
    with pytest.raises(ZeroDivisionError), stages.entering(Visit(1, None)):
        assert type(model.blocks[0]).__name__ == "Stub"
        assert any(module is model.blocks[0].held for module in model.modules())  # found by what looks through modules
        raise ZeroDivisionError
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_a_stub_keeps_plain_attributes_and_says_where_the_rest_is():
    model = GPT()
    model.head.kind = "sliding"
    cut(model)
    assert model.head.kind == "sliding" and model.head.out_features == 24
    assert not hasattr(model.head, "weight")
    with pytest.raises(AttributeError, match="held by another stage"):
        _ = model.head.weight
    with pytest.raises(PlanError) as caught:
        model.head(torch.zeros(1, 16))
    assert caught.value.code == "pipeline-elsewhere"
    assert "in another stage" in repr(model)


def test_a_module_whose_number_of_calls_depends_on_the_data_is_refused():
    class Looks(GPT):
        def forward(self, tokens):
            for _ in range(int(tokens.max())):
                self.embed(tokens)
            return super().forward(tokens)

    model = Looks()
    stages = cut(model, own=(0, 1))
    visit = Visit(0, None, {})
    hidden = passes(model, stages, visit, torch.full((1, 4), 1))
    stages.outputs = visit.recorded
    assert passes(model, stages, Visit(1, hidden), torch.full((1, 4), 1)).shape == (1, 4, 24)
    with pytest.raises(PlanError, match="this is call 3, and the first micro-batch made 2") as caught:
        passes(model, stages, Visit(1, hidden), torch.full((1, 4), 2))
    assert caught.value.code == "pipeline-calls"


def test_what_is_kept_is_in_every_stage():
    model = GPT()
    stages = cut(model, own=(1,), keep=["embed"])
    assert model.embed.weight.shape == (24, 16)
    assert stages.holds("embed.weight", (0,)) and stages.holds("embed.weight", (1,))
    assert stages.holds("head.weight", (1,)) and not stages.holds("head.weight", (0,))


def test_specs_leave_objects_out():
    tree = {"a": torch.zeros(2, dtype=torch.int64), "b": (1, "x", object())}
    assert specs(tree) == {"a": Spec((2,), torch.int64), "b": (1, "x", None)}
    assert Spec((2,), torch.int64) != Spec((2,), torch.int32)


def test_an_optimizer_keeps_what_its_rank_holds():
    model = GPT(tied=True)
    optimizer = torch.optim.SGD(
        [{"params": [model.embed.weight]}, {"params": [model.positions.weight]}, {"params": model.blocks.parameters()}],
        lr=0.1,
    )
    before = parameter_names([model])
    cut(model, own=(1,))
    rebind(optimizer, before, [model], [(("embed.weight", "head.weight"),)])
    assert optimizer.param_groups[0]["params"][0] is model.head.weight
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        1,
        0,
        len(list(model.blocks[2:].parameters())),
    ]


def test_an_optimizer_may_keep_nothing():
    model = GPT()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = parameter_names([model])
    cut(model, own=(0,))
    rebind(optimizer, before, [model], [()])
    assert optimizer.param_groups[0]["params"] == []
    optimizer.step()


def test_blocks_are_measured(monkeypatch):
    now = [0.0]

    class Takes(nn.Linear):
        def __init__(self, seconds):
            super().__init__(4, 4)
            self.seconds = seconds

        def forward(self, x):
            now[0] += self.seconds
            return super().forward(x)

    monkeypatch.setattr("paceline_large.pipeline.timing._clock_s", lambda: now[0])
    model = nn.Sequential(Takes(1.0), Takes(3.0))
    assert measure_blocks(model, ["0", "1"], torch.randn(4, 4)) == [1.0, 3.0]
    assert all(p.grad is None for p in model.parameters())
