"""Adapters on weights in 4 or 8 bits (bitsandbytes, torchao): the numbers of plain PyTorch on one process, under every plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from late_module import LateModule
from torch import nn
from torch.nn import functional

from paceline import Accelerator
from paceline.base.errors import PacelineError
from paceline.testing import run_ranks
from paceline.world.sharded import plain_tensors

bnb = LateModule("bitsandbytes")
torchao = LateModule("torchao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, ROWS, STEPS = 64, 8, 4
PLANS = [{"replicate": 2}, *({"shard": 2, "zero": stage} for stage in (1, 2, 3))]


def torchao_config(kind: str) -> Any:
    """Returns one of torchao's weight-only forms that compute on a CPU."""
    if kind == "torchao 4-bit":
        return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32))
    if kind == "torchao float8":
        return torchao.Float8WeightOnlyConfig()
    # Its tensors, of codes and scales, cannot be flattened.
    return torchao.Int8WeightOnlyConfig()


class Adapted(nn.Module):
    """A frozen layer and an adapter beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "4-bit":
            self.base = bnb.nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4", compute_dtype=torch.float32)
        elif kind == "8-bit":
            self.base = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
        else:
            self.base = nn.Linear(WIDTH, WIDTH)
            torchao.quantize_(self.base, torchao_config(kind))
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = Adapted(kind)

    def forward(self, x):
        return x + functional.gelu(self.layer(self.norm(x)))


def network(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, WIDTH), Block(kind), Block(kind), nn.Linear(WIDTH, 1))
    return model.to("cpu")  # bitsandbytes quantises here


def rows(step: int):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def pack_for_evaluation(model: nn.Module) -> None:
    """Makes 4-bit layers do in evaluation what they do on a CPU with avx512_bf16; the kernel itself is there only."""
    functions = bnb.functional

    def product(A, B, out=None, transposed_A=False, transposed_B=False, state=None):
        weight, unpacked = functions._convert_weight_packed_for_cpu_inverse(B.clone(), copy.deepcopy(state))
        with torch.no_grad():  # as that kernel, which has no gradient
            return functional.linear(A, functions.dequantize_4bit(weight, unpacked).to(A.dtype))

    functions.gemv_4bit = product
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True


def step(model, optimizer, number: int, part: slice, backward) -> tuple[float, float]:
    """Trains on some rows of a batch, evaluates on the same; returns both losses."""
    x, y = (tensor[part] for tensor in rows(number))
    model.train()
    loss = functional.mse_loss(model(x), y)
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        evaluated = functional.mse_loss(model(x), y)
    return loss.item(), evaluated.item()


def plain(kind: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    model = network(kind)
    for module in model.modules():
        # On a CPU with avx512_bf16 bitsandbytes packs weights in evaluation, and cannot train with them afterwards.
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer, number, slice(None), torch.Tensor.backward) for number in range(STEPS)]
    return losses, values_in(model.state_dict())


def values_in(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the plain tensors in a state by their names, in a dtype that torch can pickle."""
    values = {}
    for name, value in state.items():
        for inner, part in plain_tensors(value).items():
            values[name + inner] = part.float() if part.dtype == torch.float8_e4m3fn else part
    return values


def trained(kind: str, folder: str):
    """Trains under each plan, saves in the middle, goes on from there; returns losses, and the whole state."""
    outcomes = []
    for number, plan in enumerate(PLANS):
        accelerator = Accelerator(cpu=True, plan=plan)
        rank = accelerator.process_index
        part = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        # Ranks that have quantised other values: those of the first rank count, with their statistics.
        model = network(kind, seed=rank)
        pack_for_evaluation(model)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        losses = [step(model, optimizer, done, part, accelerator.backward) for done in range(2)]
        accelerator.save_state(f"{folder}/{number}")
        # What was saved counts, whatever is there: a pass of the wrong batch changes the adapters.
        step(model, optimizer, 9, part, accelerator.backward)
        accelerator.load_state(f"{folder}/{number}")
        losses += [step(model, optimizer, done, part, accelerator.backward) for done in range(2, STEPS)]
        means = accelerator.reduce(torch.tensor(losses, dtype=torch.float64), "mean")
        lines = [line for line in accelerator.plan.explain().splitlines() if "quantised(" in line]
        outcomes.append((means, values_in(accelerator.get_state_dict(model)), len(lines)))
        accelerator.free_memory()
    return outcomes


@pytest.fixture(scope="module", params=["4-bit", "8-bit", "torchao 8-bit", "torchao 4-bit", "torchao float8"])
def runs(request, tmp_path_factory):
    """The kind of layers, the folder of the checkpoints, and what each plan gave."""
    folder = tmp_path_factory.mktemp("saved")
    return request.param, folder, run_ranks(trained, 2, args=(request.param, str(folder)))[0]


def test_the_numbers_and_the_state_of_one_process(runs) -> None:
    kind, _, outcomes = runs
    losses, state = plain(kind)
    for means, saved, named in outcomes:
        torch.testing.assert_close(means, torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=1e-6)
        assert saved.keys() == state.keys()
        for name, value in state.items():
            if value.dtype.is_floating_point:
                torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(saved[name], value), name
        assert named == 1


def went_on(kind: str, folder: str):
    """Loads on one process what two have saved, into a model that was quantised from other values."""
    accelerator = Accelerator(cpu=True)
    model = network(kind, seed=3)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.load_state(folder)
    return [step(model, optimizer, done, slice(None), accelerator.backward) for done in range(2, STEPS)]


def test_a_run_goes_on_at_another_width(runs) -> None:
    kind, folder, _ = runs
    losses, _ = plain(kind)
    resumed = run_ranks(went_on, 1, args=(kind, f"{folder}/{len(PLANS) - 1}"))[0]
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(losses[2:]), rtol=1e-5, atol=1e-6)


def refused(plan: dict[str, int]) -> str:
    try:
        Accelerator(cpu=True, plan=plan).prepare(network("4-bit"))
    except PacelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_axes_that_divide_layers_are_refused(axis: str) -> None:
    assert "[quantised-axis]" in run_ranks(refused, 2, args=({axis: 2},))[0]


def test_a_state_without_statistics_is_refused() -> None:
    for kind, key in (("4-bit", "absmax"), ("8-bit", "SCB")):
        model = Accelerator(cpu=True).prepare(network(kind))
        state = {name: value for name, value in model.state_dict().items() if key not in name and "quant" not in name}
        with pytest.raises(RuntimeError, match=key):
            model.load_state_dict(state)
        model.load_state_dict(network(kind, seed=1).state_dict())
        x, _ = rows(0)
        torch.testing.assert_close(model.eval()(x), network(kind, seed=1).eval()(x), rtol=0, atol=0)
