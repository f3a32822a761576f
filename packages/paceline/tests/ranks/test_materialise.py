"""Models from the meta device start with the same values under every plan, one rank's memory at a time."""

import ctypes
import resource
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from parity_models import GPT, ConvNet, loss_of
from shared_ranks import run_ranks
from torch import nn

from paceline import testing

PLANS: list[dict[str, Any]] = [
    {"replicate": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2},
    {"shard": 2},
    {"shard": 3},
    {"shard": 2, "replicate": 2},
]


def named(plan: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in plan.items())


def started(kind: str, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The values of a model after `prepare`, and after one step."""
    from paceline import Accelerator

    # All ranks read the same samples here, which one process does not read twice.
    accelerator = Accelerator(plan=plan, cpu=True, options={"batch_norm": {"statistics": "local"}})
    torch.manual_seed(100 + 3 * accelerator.process_index)  # only rank 0's seed counts
    with torch.device("meta"):
        model: nn.Module = GPT(tied=True) if kind == "gpt" else ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    tokens = torch.arange(16).view(2, 8)
    inputs = tokens if kind == "gpt" else torch.linspace(-1, 1, 2 * 36).view(2, 1, 6, 6)
    loss = loss_of(model(inputs), tokens if kind == "gpt" else tokens[:, 0] % 5)
    accelerator.backward(loss)
    optimizer.step()
    after = accelerator.get_state_dict(model)
    return {**before, **{f"{name} after": value for name, value in after.items()}, "loss": loss.detach()}


@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_values_are_those_of_one_process(kind: str) -> None:
    (want,) = run_ranks(started, world=1, args=(kind, {}))
    weight = want["embed.weight" if kind == "gpt" else "stages.0.0.weight"]
    assert weight.std() > 0.1
    for plan in PLANS if kind == "gpt" else PLANS[::3]:
        world = plan.get("shard", 1) * plan.get("replicate", 1)
        for got in run_ranks(started, world=world, args=(kind, plan)):
            assert sorted(got) == sorted(want)
            for name, value in want.items():
                atol = 2e-6 if "after" in name or name == "loss" else 0
                torch.testing.assert_close(got[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def peak(plan: dict[str, Any]) -> tuple[int, int]:
    """Bytes by which the peak resident set of this rank grew in `prepare`, and bytes of the whole model."""
    from paceline import Accelerator

    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # larger blocks go back to the system as soon as they are free
    # All ranks read the same samples here, which one process does not read twice.
    accelerator = Accelerator(plan=plan, cpu=True, options={"batch_norm": {"statistics": "local"}})
    with torch.device("meta"):
        small = nn.Linear(4, 4)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2000, 2000), nn.Tanh()) for _ in range(16)))
    accelerator.prepare(small)  # what the first `prepare` imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accelerator.prepare(model)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return grown, sum(parameter.numel() * 4 for parameter in model.parameters())


def test_a_rank_never_holds_the_whole_model() -> None:
    for grown, size in testing.run_ranks(peak, world=4, args=({"shard": 4},)):
        # The rank's own quarter is larger than what memory that was free before could have taken.
        assert size / 8 <= grown < size / 2


class Frozen(nn.Module):
    """A weight and a buffer that a library keeps in a dtype which gloo does not send, and which differs between ranks."""

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.full((4, 4), value).to(dtype), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), value).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.weight.to(x.dtype) * self.scale.float().sum()


def frozen_values(plan: dict[str, Any], dtypes: list[torch.dtype]) -> None:
    from paceline import Accelerator

    for dtype in dtypes:
        accelerator = Accelerator(plan=plan, cpu=True)
        model = Frozen(dtype, 1.0 + accelerator.process_index)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.layer.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        state = accelerator.get_state_dict(model)
        assert state["weight"].dtype == state["scale"].dtype == dtype
        assert state["weight"].float().eq(1).all() and state["scale"].float().eq(1).all()


@pytest.mark.parametrize("plan", PLANS[:4:3], ids=named)
def test_frozen_values_of_any_dtype_are_those_of_the_first_rank(plan: dict[str, Any]) -> None:
    run_ranks(frozen_values, world=2, args=(plan, [torch.float8_e4m3fn, torch.int16, torch.uint32]))
