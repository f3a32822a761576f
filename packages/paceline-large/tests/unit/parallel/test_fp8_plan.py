"""Which layers multiply in float8, what the plan says of it, and what is refused before anything is touched."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
from parity_models import GPT
from torch import nn

from paceline.base.errors import PlanError, PrepareError
from paceline.optim import adamw8bit
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import model_facts
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import resolve
from paceline.world.layout import Layout
from paceline_large.float8 import fp8
from paceline_large.float8.precision import PRECISION
from paceline_large.torchao_release import torchao_problem


@pytest.fixture(autouse=True)
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torchao, whether it is installed or not: planning needs no more of it."""
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.0")


def planned(model: nn.Module, options: dict[str, Any] | None = None, **sizes: int) -> Plan:
    plan = Plan(layout=Layout(**sizes), precision="fp8", options={"fp8": options or {}})
    return resolve(plan, [model_facts(model)], STRATEGIES)


def codes(model: nn.Module, options: dict[str, Any] | None = None, **sizes: int) -> list[str]:
    with pytest.raises(PlanError) as caught:
        planned(model, options, **sizes)
    return [problem.code for problem in caught.value.problems]


def value(plan: Plan, field: str) -> list[Any]:
    return [decision.value for decision in plan.decisions if decision.field == field]


def chosen(model: nn.Module, options: dict[str, Any] | None = None, **sizes: int) -> tuple[str, ...]:
    plan = planned(model, options, **sizes)
    return fp8.STRATEGY.choose(plan, model_facts(model)).layers


def gpt(**arguments: Any) -> nn.Module:
    return GPT(layers=2, width=64, heads=4, **arguments)


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
IN_BLOCK = (*(f"attention.{name}" for name in LAYERS), "up_proj", "down_proj")
IN_BLOCKS = tuple(f"blocks.{number}.{name}" for number in range(2) for name in IN_BLOCK)


def test_the_head_is_left_out_unless_it_is_asked_for() -> None:
    # A head of 24 classes would not fit either.
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    assert chosen(model) == ("0",)
    assert chosen(model, {"layers": "auto,2"}) == ("0", "2")
    assert chosen(model, {"layers": ["2"]}) == ("2",)
    assert chosen(gpt()) == IN_BLOCKS
    plan = planned(model)
    assert value(plan, "fp8.layers") == [1] and value(plan, "fp8.left_out") == ["2"]


def test_a_head_that_shares_its_weight_with_the_embedding_is_one_wherever_it_stands() -> None:
    model = nn.Module()
    model.head, model.embed = nn.Linear(64, 32, bias=False), nn.Embedding(32, 64)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
    model.embed.weight = model.head.weight
    assert chosen(model) == ("blocks.0.0", "blocks.1.0")


def test_sizes_that_do_not_fit_are_left_out_and_explained() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 2))
    assert chosen(model) == ("1", "2")
    assert codes(model, {"recipe": "mxfp8"}) == ["fp8-layers"]
    assert chosen(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2)), {"recipe": "mxfp8"}) == ("0",)
    assert "0" in value(planned(model), "fp8.left_out")
    # Each of two ranks has a part.
    assert chosen(gpt(), {"recipe": "mxfp8"}, tp=2) == IN_BLOCKS
    assert codes(gpt(), {"recipe": "mxfp8"}, tp=4) == ["fp8-layers"]


def test_layers_that_torchs_attention_reads_itself_are_left_out() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert not any("out_proj" in name for name in chosen(model)) and len(chosen(model)) == 4


def test_a_function_may_choose() -> None:
    def of_blocks(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module.in_features == 64 and "attention" not in name

    assert chosen(gpt(), {"layers": of_blocks}) == ("blocks.0.up_proj", "blocks.1.up_proj")


def test_what_cannot_work_is_refused_with_the_names_of_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    with pytest.raises(PlanError) as caught:
        planned(model, {"layers": "*"})
    assert caught.value.code == "fp8-shapes" and "0 (64 x 8), 2 (2 x 64)" in str(caught.value)
    assert codes(model, {"layers": "decoder.*"}) == ["fp8-layers"]
    assert codes(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == ["fp8-layers"]
    assert codes(gpt().double()) == ["fp8-dtype"]
    assert "fp8-context" in codes(gpt(), {"recipe": "tensorwise"}, cp=2)
    assert codes(gpt(), {"recipe": "delayed"}) == ["strategy-value"]


class Float8Linear(nn.Linear):
    """Has the name of torchao's class, by which planning knows it."""


def test_a_model_that_was_converted_already_is_refused() -> None:
    assert codes(nn.Sequential(Float8Linear(64, 64), nn.Linear(64, 64))) == ["fp8-converted"]


@pytest.mark.parametrize("version", ["", "0.17.0", "0.9"])
def test_without_a_torchao_that_has_the_recipes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(PlanError) as caught:
        planned(gpt())
    assert caught.value.code == "torchao-missing" and "fp8" in caught.value.problems[0].fix
    with pytest.raises(PrepareError) as refused:
        adamw8bit([torch.zeros(1)])
    assert refused.value.code == "torchao-missing" and "low-bit" in refused.value.problems[0].fix


@pytest.mark.parametrize("version", ["0.18.0", "0.20.1", "1.0", "0.19.0.dev20260101"])
def test_later_releases_of_torchao_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert torchao_problem("", "fp8", "") is None


def test_the_plan_says_whether_numbers_depend_on_the_number_of_processes() -> None:
    for recipe, row in fp8.RECIPES.items():
        plan = planned(gpt(), {"recipe": recipe}, replicate=2)
        [decision] = [decision for decision in plan.decisions if decision.field == "fp8.numbers"]
        assert decision.value == recipe and row.numbers in decision.reason and "powers of two" not in decision.reason
        [on_three] = [
            each for each in planned(gpt(), {"recipe": recipe}, replicate=3).decisions if each.field == "fp8.numbers"
        ]
        assert ("powers of two" in on_three.reason) == row.has_powers
    assert [recipe for recipe, row in fp8.RECIPES.items() if row.depends] == ["tensorwise"]


def test_the_dtype_of_everything_else_is_decided_by_the_device() -> None:
    cpu = PRECISION.settle(Plan(precision="fp8"), accelerated=False)
    assert cpu.half == "" and value(cpu, "options.fp8.dtype") == ["float32"]
    assert PRECISION.under(cpu.options["fp8"]).dtype is None
    elsewhere = PRECISION.settle(Plan(precision="fp8"), accelerated=True)
    assert elsewhere.half == "bf16" and PRECISION.under(elsewhere.options["fp8"]).dtype is torch.bfloat16
    given = Plan(precision="fp8", options={"fp8": {"dtype": "bf16"}}, decisions=(Decision("x", 1, "code"),))
    assert PRECISION.settle(given, accelerated=False) is given


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_large.float8.fp8_applied import _check_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(PlanError, match="fp8-device"):
        _check_device(torch.device("cuda"))
