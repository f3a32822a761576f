"""`save_fsdp_optimizer` and `load_fsdp_optimizer` under each way of dividing states: what comes back is what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.compat.accelerate.accelerator import Accelerator
from paceline.compat.accelerate.sharded import load_fsdp_optimizer, save_fsdp_optimizer
from paceline.optim.lamb import Lamb
from paceline.optim.lion import Lion
from paceline.testing import run_ranks

OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Lion": Lion, "Lamb": Lamb}  # Lamb's states are whole, each on one rank


def steps(settings: dict[str, object], kind: str, folder: str, resume: bool) -> dict[str, list[float]]:
    """Two steps, saved after the first; or the second one alone, from what the first one left."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = OPTIMIZERS[kind](module.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(module, optimizer)
    weights = Path(folder) / "weights.pt"
    if resume:
        with accelerator.full_parameters(model, writeback=True):
            accelerator.unwrap_model(model).load_state_dict(torch.load(weights, weights_only=True))
        load_fsdp_optimizer(None, accelerator, optimizer, model, folder)
    for number in range(1 if resume else 2):
        loss = model(torch.ones(4, 3)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not resume and number == 0:
            save_fsdp_optimizer(None, accelerator, optimizer, model, folder)
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                torch.save(state, weights)
            accelerator.wait_for_everyone()
    return {name: value.flatten().tolist() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_saved_optimizer_goes_on_at_the_same_place(tmp_path: Path, zero: int, kind: str) -> None:
    env = {"PACELINE_SHARD": "2", "PACELINE_ZERO": str(zero)}
    want = run_ranks(steps, 2, args=({}, kind, str(tmp_path), False), env=env)[0]
    saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert sorted(saved["state"]) == sorted(want)
    assert run_ranks(steps, 2, args=({}, kind, str(tmp_path), True), env=env)[0] == want
    alone = run_ranks(steps, 1, args=({}, kind, str(tmp_path), True))[0]
    for name, values in want.items():
        assert alone[name] == pytest.approx(values, abs=1e-6), "one process takes it too"
