"""The parity suite over plans: every strategy and combination gives the numbers of one plain PyTorch process.

`test_parity.py` holds data-parallel plans to many ways of training; here a transformer, a convolutional net with batch
norm, and a model with tied and frozen weights run under every kind of plan, on 2, 4 and 8 processes. Losses, the
gradients' norms and the final weights must agree: float32 within 3e-6 (sums in another order), bf16 within 3e-2.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT, ON_CPU, ConvNet, loss_of
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES

Plan = dict[str, Any]
MODELS = {
    "gpt": lambda layers: GPT(layers=layers),
    "tied": lambda layers: GPT(tied=True, frozen=True, layers=layers),
    "conv": lambda layers: ConvNet(),
}
ROWS, BATCH = 24, 8


@dataclass(frozen=True)
class Case:
    """One way of training a model."""

    model: str = "gpt"
    accumulate: int = 1
    clip: float | None = None
    precision: str = "no"
    items: bool = False
    optimizer: str = "AdamW"
    layers: int = 2

    def __str__(self) -> str:
        parts = [self.model, f"accumulate{self.accumulate}" * (self.accumulate > 1), "clip" * (self.clip is not None)]
        parts += [self.precision * (self.precision != "no"), "items" * self.items]
        return "-".join(part for part in parts if part)


def data_of(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    if case.model == "conv":
        images = torch.randn(ROWS, 1, 6, 6, generator=generator)
        return TensorDataset(images, torch.randint(0, 5, (ROWS,), generator=generator))
    tokens = torch.randint(0, 24, (ROWS, 9), generator=generator)
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def model_and_optimizer(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = MODELS[case.model](case.layers)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Adam turns the last bit of a gradient near zero into a whole step: a larger eps compares what training computes.
    return model, torch.optim.AdamW(trained, lr=0.01, eps=1e-4)


def sum_of(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def plain(case: Case) -> dict[str, Any]:
    """The reference: one process, whole global batches, no Paceline."""
    model, optimizer = model_and_optimizer(case)
    data = data_of(case)
    batches = [data[at : at + BATCH] for at in range(0, ROWS, BATCH)]
    losses, norms = [], []
    dtype = {"bf16": torch.bfloat16}.get(case.precision)
    for start in range(0, len(batches), case.accumulate):
        window = batches[start : start + case.accumulate]
        for x, y in window:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                output = model(x)
            loss = loss_of(output.float(), y)
            (loss * len(x) / sum(len(tokens) for tokens, _ in window)).backward()
            losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        outputs = model(data.tensors[0]).float()
    return {"losses": losses, "norms": norms, "outputs": outputs, "weights": model.state_dict()}


def ours(case: Case, plan: Plan) -> dict[str, Any]:
    """The same loop through `Accelerator`, under a plan."""
    from paceline import Accelerator

    model, optimizer = model_and_optimizer(case)
    accelerator = Accelerator(case.precision, case.accumulate, plan=plan, cpu=ON_CPU)
    width = accelerator.plan.layout.width
    loader = DataLoader(data_of(case), BATCH // width)
    test = DataLoader(data_of(case), BATCH // width)
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    losses, norms, outputs = [], [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            if case.items:
                loss = accelerator.forward_backward(model, (x, y), sum_of, num_items=y.numel()) / y.numel()
            elif accelerator.plan.layout.pp > 1 or x.shape[0] % 2:
                loss = accelerator.forward_backward(model, (x, y), loss_of)
            else:
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather_for_metrics(loss.detach().repeat(len(x))).mean()))
    model.eval()
    with torch.no_grad():
        for x, _ in test:
            outputs.append(accelerator.gather_for_metrics(model(x)))
    weights = {name: weight.cpu() for name, weight in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"losses": losses, "norms": norms, "outputs": torch.cat(outputs).float().cpu(), "weights": weights}


@cache
def reference(case: Case) -> dict[str, Any]:
    return run_ranks(plain, world=1, args=(case,))[0]


def compare(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    assert got["losses"] == pytest.approx(want["losses"], abs=tolerance)
    assert got["norms"] == pytest.approx(want["norms"], abs=tolerance)
    assert sorted(got["weights"]) == sorted(want["weights"])
    for name, weight in want["weights"].items():
        torch.testing.assert_close(
            got["weights"][name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(got["outputs"], want["outputs"], atol=10 * tolerance, rtol=0)


def num_ranks(plan: Plan) -> int:
    from paceline.world.layout import AXES

    return math.prod(plan.get(axis, 1) for axis in AXES)


def for_stages(case: Case, plan: Plan) -> Case:
    """The case with a layer for each stage of a pipeline."""
    return replace(case, layers=max(case.layers, plan.get("pp", 1)))


def check(case: Case, plan: Plan, env: dict[str, str] | None = None) -> None:
    case = for_stages(case, plan)
    ranks = run_ranks(ours, num_ranks(plan), args=(case, plan), env=env, timeout_s=120, group=ON_CPU)
    compare_all(case, ranks)


def compare_all(case: Case, ranks: list[dict[str, Any]]) -> None:
    for got in ranks:
        compare(got, reference(case), {"no": 3e-6, "bf16": 3e-2}[case.precision])


def plan_name(plan: Plan) -> str:
    return "-".join(f"{key}{value}" for key, value in plan.items())


ALONE = [
    {"replicate": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2},
]  # fmt: skip
FOUR = [
    {"replicate": 4}, {"shard": 4, "zero": 1}, {"shard": 4, "zero": 2}, {"shard": 4}, {"tp": 4}, {"cp": 4}, {"pp": 4},
]  # fmt: skip
PAIRS = [
    {"replicate": 2, "shard": 2, "zero": 1}, {"replicate": 2, "shard": 2, "zero": 2}, {"replicate": 2, "shard": 2},
    {"replicate": 2, "tp": 2}, {"replicate": 2, "cp": 2}, {"replicate": 2, "pp": 2},
    {"shard": 2, "tp": 2}, {"shard": 2, "cp": 2}, {"shard": 2, "pp": 2},
    {"shard": 2, "zero": 1, "cp": 2}, {"shard": 2, "zero": 2, "cp": 2},
    {"shard": 2, "zero": 1, "tp": 2}, {"shard": 2, "zero": 2, "tp": 2}, {"shard": 2, "zero": 2, "pp": 2},
    {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2},
]  # fmt: skip
EIGHT = [
    {"replicate": 2, "shard": 2, "tp": 2}, {"pp": 2, "shard": 4}, {"pp": 2, "shard": 2, "tp": 2}, {"shard": 8},
    {"replicate": 2, "shard": 2, "cp": 2}, {"pp": 2, "replicate": 2, "shard": 2},
]  # fmt: skip
WAYS = [Case(accumulate=2, clip=0.05), Case("tied", clip=0.5), Case(items=True, accumulate=3), Case(precision="bf16")]


@pytest.mark.parametrize("plan", ALONE, ids=plan_name)
@pytest.mark.parametrize("case", [Case(), *WAYS], ids=str)
def test_one_axis_on_two(case: Case, plan: Plan) -> None:
    check(case, plan)


SEVERAL_FORMS = [plan for plan in ALONE if "replicate" not in plan]


@pytest.mark.parametrize("plan", SEVERAL_FORMS, ids=plan_name)
def test_as_a_gpu_communicates(plan: Plan) -> None:
    """With the backend's own collectives, and with FSDP2's own objects for them: the form that runs on GPUs."""
    check(Case("tied", accumulate=2, clip=0.05), plan, env={"PACELINE_TRANSPORT": "native"})


@pytest.mark.needs("lens")
def test_as_a_gpu_communicates_in_debug_mode() -> None:
    """There the ranks also tell each other what they are about to send."""
    check(Case(accumulate=2), {"shard": 2}, env={"PACELINE_TRANSPORT": "native", "PACELINE_DEBUG": "1"})


TIED = Case("tied", accumulate=2, clip=0.05)


@pytest.mark.parametrize("plan", FOUR, ids=plan_name)
def test_one_axis_on_four(plan: Plan) -> None:
    check(TIED, plan)


@pytest.mark.parametrize("plan", PAIRS, ids=plan_name)
def test_two_axes_on_four(plan: Plan) -> None:
    check(TIED, plan)


@pytest.mark.parametrize("plan", EIGHT, ids=plan_name)
def test_on_eight(plan: Plan) -> None:
    check(Case(accumulate=2, clip=0.05), plan)


DATA = [plan for plan in [*ALONE, *FOUR, *PAIRS] if not {"tp", "cp", "pp"} & plan.keys()]


@pytest.mark.parametrize("plan", DATA, ids=plan_name)
def test_batch_norm(plan: Plan) -> None:
    check(Case("conv", clip=0.5), plan)


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=plan_name)
@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_recomputed(plan: Plan, recompute: str) -> None:
    check(Case("tied", clip=0.05), {**plan, "recompute": recompute})


def overflowing(plan: Plan) -> list[Any]:
    from paceline import Accelerator

    torch.manual_seed(7)
    model = GPT(layers=2)
    head = [*model.norm.parameters(), *model.head.parameters()]  # one stage of a pipeline has none of these
    rest = [p for p in model.parameters() if all(p is not other for other in head)]
    accelerator = Accelerator("fp16", plan=plan, cpu=ON_CPU, scaler={"init_scale": 1024.0})
    model, *optimizers = accelerator.prepare(model, torch.optim.SGD(rest, 0.1), torch.optim.SGD(head, 0.1))
    seen: list[Any] = []
    for number in range(3):
        tokens = torch.randint(0, 24, (4, 8), generator=torch.Generator().manual_seed(number)).to(accelerator.device)
        factor = 1e37 if number == 1 and accelerator.is_last_process else 1.0
        loss = (
            accelerator.forward_backward(model, (tokens, tokens), lambda *each, by=factor: loss_of(*each) * by) / factor
        )
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((optimizers[0].step_was_skipped, accelerator.scaler.grad_scaler.get_scale(), float(loss)))
    return seen


@pytest.mark.parametrize("plan", ALONE, ids=plan_name)
def test_an_overflow_on_one_rank_is_one_on_all(plan: Plan) -> None:
    for got in run_ranks(overflowing, world=2, args=(plan,), group=ON_CPU):
        assert [each[:2] for each in got] == [(False, 1024.0), (True, 1024.0), (False, 512.0)]
        assert got[2][2] == pytest.approx(overflowing_alone()[2][2], abs=1e-3)


@cache
def overflowing_alone() -> list[Any]:
    return run_ranks(overflowing, world=1, args=({},), group=ON_CPU)[0]


def test_every_strategy_is_held_to_these_numbers() -> None:
    from paceline.plan.resolve import draft
    from paceline.world.layout import AXES

    plans = [*ALONE, *PAIRS, {"recompute": "blocks"}, {"compile": True}, {"offload": "optimizer"}]
    worlds = [int(torch.tensor([plan.get(axis, 1) for axis in AXES]).prod()) for plan in plans]
    drafts = [draft(RunSettings.of(plan), [], world) for plan, world in zip(plans, worlds, strict=True)]
    # They need libraries or models of their own: test_experts.py, test_fp8.py, test_quantised.py.
    elsewhere = {"experts", "fp8", "quantised"}
    assert {s.name for s in STRATEGIES} - elsewhere <= {s.name for s in STRATEGIES for plan in drafts if s.wanted(plan)}
