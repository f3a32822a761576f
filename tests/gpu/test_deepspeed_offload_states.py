"""DeepSpeed's `offload_states`: tensors leave the accelerator and come back, and training goes on with the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.testing import run_ranks
from paceline.world.sharded import local
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.offload_states import OffloadStateTypeEnum, get_state_devices

KINDS = ("optim_states", "lp_params")


def trained(stage: int, kinds: tuple[str, ...] | None) -> tuple[list[float], set[str], set[str]]:
    """Returns the losses, and the kinds of devices of the tensors while they are away and afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).to(engine.device)
    losses: list[float] = []
    away: set[str] = set()
    back: set[str] = set()
    include = None if kinds is None else [OffloadStateTypeEnum[kind] for kind in kinds]
    for _ in range(4):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if kinds == ():
            continue
        engine.offload_states(include=include)
        for kind in kinds or KINDS:
            away |= {device.type for device in get_state_devices(engine, OffloadStateTypeEnum[kind])}
        engine.reload_states()
        for kind in KINDS:
            states = engine.offloaded.tensors(OffloadStateTypeEnum[kind])
            # The number of steps is on the host with most optimizers.
            back |= {local(state).device.type for state in states if state.dim()}
    return losses, away, back


def all_of(device: str) -> list[Any]:
    seen = []
    for stage in range(4):
        expected, *_ = trained(stage, ())
        for kinds in (None, ("optim_states",), ("lp_params", "lp_grads")):
            losses, away, back = trained(stage, kinds)
            seen.append((stage, kinds, losses == expected, away, back))
    return seen


@pytest.mark.parametrize("procs", [1, 2])
def test_states_leave_the_device_and_come_back(device: torch.device, procs: int) -> None:
    if torch.accelerator.device_count() < procs:
        pytest.skip(f"missing: {procs} accelerators")
    for rank in run_ranks(all_of, procs, args=(device.type,), group=False):
        for stage, kinds, equal, away, back in rank:
            assert equal and away == {"cpu"} and back == {device.type}, (stage, kinds, away, back)
