"""Float8: the losses of torchao in plain PyTorch, under each plan; what the plan says of the number of processes is measured.

The reference is a loop without Paceline: torchao's own layers in the place of those that the plan chose, whole batches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from late_module import LateModule
from parity_models import GPT, loss_of
from shared_ranks import run_ranks
from torch import nn

# Loaded before the ranks are forked.
FLOAT8 = LateModule("torchao.float8")
MXFP8 = LateModule("torchao.prototype.moe_training.mxfp8_linear")
STEPS = 2  # the second loss is that of weights which the first step has changed
# 32 rows of activations for each of two ranks, and as many features: a block of mxfp8. torch multiplies such numbers
# one by one on a CPU, so that twice the width is four times the time.
ROWS, LENGTH, WIDTH = 4, 16, 32
RECIPES = ("rowwise_with_gw_hp", "mxfp8", "rowwise", "tensorwise")
Numbers = tuple[list[float], dict[str, torch.Tensor]]


def model_and_optimizer(width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = GPT(layers=2, width=width, heads=4)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def tokens_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 24, (ROWS, LENGTH), generator=generator)


class MxLinear(nn.Linear):
    """What torchao's `MXFP8Linear` computes, emulated without kernels of CUDA."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice as Dim0
        from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Dim1
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        e4m3 = torch.float8_e4m3fn
        kernels = (KernelPreference.EMULATED, Dim0.TORCH, Dim1.TORCH)
        y = mx_mm.apply(x, self.weight, e4m3, e4m3, e4m3, 32, *kernels, ScaleCalculationMode.RCEIL, False)
        return y + self.bias


def convert(model: nn.Module, recipe: str) -> nn.Module:
    """Converts all linear layers of the blocks as torchao's users do."""
    if recipe == "mxfp8":
        for block in model.blocks:
            for module in block.modules():
                if type(module) is nn.Linear:
                    module.__class__ = MxLinear
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name.startswith("blocks."))


@cache
def plain(recipe: str, width: int = WIDTH) -> Numbers:
    """torchao in plain PyTorch on one process."""
    model, optimizer = model_and_optimizer(width)
    convert(model, recipe)
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step)
        loss = loss_of(model(tokens), tokens.roll(1, 1))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def ours(recipe: str, plan: dict[str, Any], width: int = WIDTH) -> Numbers:
    """The same loop through `Accelerator`."""
    from paceline import Accelerator

    model, optimizer = model_and_optimizer(width)
    options = {"fp8": {"recipe": recipe}, "compile": {"backend": "aot_eager"}}
    accelerator = Accelerator("fp8", plan=plan, options=options, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    layout = accelerator.plan.layout
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step).chunk(layout.width)[layout.data_index(accelerator.process_index)]
        if layout.pp > 1:
            loss = accelerator.forward_backward(model, (tokens, tokens.roll(1, 1)), loss_of)
        else:
            loss = loss_of(model(tokens), tokens.roll(1, 1))
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, accelerator.get_state_dict(model)


def all_recipes(plan: dict[str, Any], recipes: tuple[str, ...], width: int = WIDTH) -> list[Numbers]:
    return [ours(recipe, plan, width) for recipe in recipes]


def differences(plan: dict[str, Any], recipes: tuple[str, ...] = RECIPES, width: int = WIDTH) -> dict[str, float]:
    """How far the losses of a plan on two processes are from those of torchao on one, at most."""
    found = run_ranks(all_recipes, world=2, args=(plan, recipes, width), timeout_s=200)[0]
    result = {}
    for recipe, (losses, _) in zip(recipes, found, strict=True):
        expected, _ = plain(recipe, width)
        result[recipe] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return result


def test_one_process_has_the_numbers_of_torchao_to_the_last_bit() -> None:
    found = run_ranks(all_recipes, world=1, args=({}, RECIPES), timeout_s=200)[0]
    for recipe, (losses, weights) in zip(RECIPES, found, strict=True):
        expected_losses, expected_weights = plain(recipe)
        assert losses == expected_losses, recipe
        for name, weight in expected_weights.items():
            assert weights[name].dtype == torch.float32 and torch.equal(weights[name], weight), (recipe, name)


def test_two_processes_differ_by_what_the_plan_says() -> None:
    found = differences({})
    # Sums in another order; the weights of a step of AdamW enlarge them a little.
    assert found["rowwise_with_gw_hp"] < 2e-6
    assert found["mxfp8"] < 2e-6
    assert 1e-5 < found["rowwise"] < 2e-3
    assert 1e-5 < found["tensorwise"] < 1e-2


@pytest.mark.parametrize(
    "plan",
    [
        {"zero": 1},
        {"zero": 2},
        {"zero": 3},
        {"pp": 2},
        {"cp": 2},
        {"zero": 3, "recompute": "selective"},
        {"pp": 2, "recompute": "blocks"},
    ],
    ids=str,
)
def test_recipes_that_keep_the_numbers_do_so_under_each_plan(plan: dict[str, Any]) -> None:
    found = differences(plan, RECIPES[:2])
    assert max(found.values()) < 2e-6, found


def test_under_tensor_parallelism_blocks_keep_the_numbers_and_rows_do_not() -> None:
    found = differences({"tp": 2}, RECIPES[:2], width=2 * WIDTH)  # half of it is a block of mxfp8
    assert found["mxfp8"] < 2e-6
    assert 1e-5 < found["rowwise_with_gw_hp"] < 5e-3


@pytest.mark.slow
# torch looks at `.grad` of what a graph begins with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("plan", [{}, {"zero": 3}, {"pp": 2, "recompute": "blocks"}], ids=str)
def test_compiled_blocks_have_the_same_numbers(plan: dict[str, Any]) -> None:
    found = differences({**plan, "compile": True}, RECIPES[:1])
    assert max(found.values()) < 2e-6, found


def gradient_differences(recipe: str) -> float:
    """How far the gradients of a layer from two halves of a batch are from those of the whole, relative to their norm."""
    from paceline_large.float8.float8_products import product_by
    from paceline_large.float8.fp8 import RECIPES as DEFINED

    torch.manual_seed(0)
    x = torch.randn(64, 64)
    x[32:] *= 5  # halves of different sizes, as ranks have
    weight = torch.randn(128, 64) * 0.05
    after = torch.randn(64, 128) * 1e-3
    product = product_by(recipe, DEFINED[recipe].rows, torch.device("cpu"))

    def gradient(part: slice) -> torch.Tensor:
        trained = weight.clone().requires_grad_()
        product(x[part], trained).backward(after[part])
        return trained.grad

    whole = gradient(slice(None))
    halves = gradient(slice(32)) + gradient(slice(32, None))
    return float((halves - whole).norm() / whole.norm())


def scaled_differences(recipe: str, factor: float) -> float:
    """How far the gradient of a layer's input is from itself, relative to its norm, if the loss was multiplied."""
    from paceline_large.float8.float8_products import product_by
    from paceline_large.float8.fp8 import RECIPES as DEFINED

    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(64, 64) * 0.05
    after = torch.randn(32, 64) * 1e-3
    product = product_by(recipe, DEFINED[recipe].rows, torch.device("cpu"))

    def gradient(factor: float) -> torch.Tensor:
        trained = x.clone().requires_grad_()
        product(trained, weight).backward(after * factor)
        return trained.grad / factor

    return float((gradient(factor) - gradient(1.0)).norm() / gradient(1.0).norm())


def measured() -> dict[str, float]:
    return {recipe: gradient_differences(recipe) for recipe in RECIPES}


def measured_scaled() -> dict[str, tuple[float, float]]:
    return {recipe: (scaled_differences(recipe, 4.0), scaled_differences(recipe, 3.0)) for recipe in RECIPES}


def test_a_loss_three_times_as_large_is_rounded_elsewhere_where_scales_are_powers_of_two() -> None:
    from paceline_large.float8.fp8 import RECIPES as DEFINED

    (found,) = run_ranks(measured_scaled, world=1)
    for recipe, (of_four, of_three) in found.items():
        assert of_four == 0.0, recipe
        assert (1e-2 < of_three < 1e-1) if DEFINED[recipe].has_powers else of_three < 1e-6, recipe


def test_halves_of_a_batch_differ_from_the_whole_as_the_table_says() -> None:
    (found,) = run_ranks(measured, world=1)
    assert found["rowwise_with_gw_hp"] < 1e-6
    assert found["mxfp8"] < 1e-6
    assert 2e-4 < found["rowwise"] < 1e-2
    assert 5e-3 < found["tensorwise"] < 2e-1


def in_bfloat16(plan: dict[str, Any]) -> tuple[list[float], set[torch.dtype], str]:
    from paceline import Accelerator

    model, optimizer = model_and_optimizer()
    accelerator = Accelerator("fp8", plan=plan, options={"fp8": {"dtype": "bf16"}}, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    layout = accelerator.plan.layout
    losses = []
    for step in range(2):
        tokens = tokens_of(step).chunk(layout.width)[layout.data_index(accelerator.process_index)]
        loss = loss_of(model(tokens), tokens.roll(1, 1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    dtypes = {weight.dtype for weight in accelerator.get_state_dict(model).values()}
    return losses, dtypes, accelerator.plan.explain()


def test_everything_else_may_be_in_bfloat16_with_weights_in_their_own_dtype() -> None:
    whole, dtypes, explained = run_ranks(in_bfloat16, world=1, args=({},), timeout_s=100)[0]
    assert dtypes == {torch.float32} and "bf16, with its rounding" in explained
    for plan in ({}, {"zero": 3}):
        losses, dtypes, _ = run_ranks(in_bfloat16, world=2, args=(plan,), timeout_s=100)[0]
        assert dtypes == {torch.float32}
        assert losses == pytest.approx(whole, abs=1e-2)


def resumed(folder: str, plan: dict[str, Any], saves: bool = True) -> tuple[list[float], list[float], set[torch.dtype]]:
    """Losses of steps 2 and 3 of a run, and those of a new run that has loaded the state after step 1.

    With `saves=False` the state is there already, and the first list is empty.
    """
    from paceline import Accelerator

    def steps(accelerator: Any, model: nn.Module, optimizer: Any, numbers: range) -> list[float]:
        losses = []
        layout = accelerator.plan.layout
        for step in numbers:
            tokens = tokens_of(step).chunk(layout.width)[layout.data_index(accelerator.process_index)]
            loss = loss_of(model(tokens), tokens.roll(1, 1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses

    def prepared() -> tuple[Any, nn.Module, Any]:
        accelerator = Accelerator("fp8", plan=plan, cpu=True)
        return accelerator, *accelerator.prepare(*model_and_optimizer())

    went_on = []
    if saves:
        accelerator, model, optimizer = prepared()
        steps(accelerator, model, optimizer, range(2))
        accelerator.save_state(folder)
        went_on = steps(accelerator, model, optimizer, range(2, 4))
    accelerator, model, optimizer = prepared()
    steps(accelerator, model, optimizer, range(1))  # whatever it was
    accelerator.load_state(folder)
    again = steps(accelerator, model, optimizer, range(2, 4))
    return went_on, again, {weight.dtype for weight in accelerator.get_state_dict(model).values()}


@pytest.mark.parametrize("plan", [{}, {"zero": 2}, {"zero": 3}], ids=str)
def test_a_resumed_run_has_the_same_numbers(plan: dict[str, Any], tmp_path: Any) -> None:
    went_on, again, dtypes = run_ranks(resumed, world=2, args=(str(tmp_path / "state"), plan), timeout_s=100)[0]
    assert went_on == again
    assert dtypes == {torch.float32}
    ((_, alone, _),) = run_ranks(resumed, world=1, args=(str(tmp_path / "state"), {}, False), timeout_s=100)
    assert alone == pytest.approx(went_on, abs=2e-6)


def with_rows(rows: int) -> list[float]:
    from paceline import Accelerator

    losses = []
    for recipe in RECIPES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 3))
        accelerator = Accelerator("fp8", options={"fp8": {"recipe": recipe}}, cpu=True)
        model = accelerator.prepare(model)
        loss = model(torch.randn(rows, 64)).square().mean()
        accelerator.backward(loss)
        losses.append(float(model[0].weight.grad.norm()))
    return losses


def test_any_number_of_rows_is_taken() -> None:
    for rows in (1, 33):
        (norms,) = run_ranks(with_rows, world=1, args=(rows,), timeout_s=100)
        assert all(norm > 0 for norm in norms)
        assert max(norms) == pytest.approx(min(norms), rel=0.1)


def converted_by_the_script(plan: dict[str, Any], gathers: bool) -> tuple[str, list[float]]:
    """A model that the script has converted by torchao, under another precision."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from paceline import Accelerator, PlanError

    model, _ = model_and_optimizer()
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    if gathers:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name.startswith("blocks."))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    accelerator = Accelerator("no", plan=plan, cpu=True)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except PlanError as error:
        return error.code, []
    layout = accelerator.plan.layout
    losses = []
    for step in range(2):
        tokens = tokens_of(step).chunk(layout.width)[layout.data_index(accelerator.process_index)]
        loss = loss_of(model(tokens), tokens.roll(1, 1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return "", losses


def conversions(cases: list[tuple[dict[str, Any], bool]]) -> list[tuple[str, list[float]]]:
    return [converted_by_the_script(*case) for case in cases]


def test_layers_that_a_script_has_converted_itself() -> None:
    cases = [({"tp": 2}, False), ({"zero": 2}, False), ({"zero": 1}, True), ({"zero": 2}, True), ({"zero": 3}, True)]
    found = run_ranks(conversions, world=2, args=(cases,), timeout_s=200)[0]
    assert [code for code, _ in found] == ["", "", "fp8-gather", "fp8-gather", ""]
    expected = plain("rowwise_with_gw_hp")[0][:2]
    assert found[0][1] == pytest.approx(expected, abs=5e-3)
    assert found[1][1] == pytest.approx(expected, abs=2e-6)
    assert found[4][1] == pytest.approx(plain("tensorwise")[0][:2], abs=1e-2)
