"""A small run to save and load."""

import pytest
import torch
from killed_saves import kill_at  # noqa: F401  (fixture)
from torch import nn

from paceline.checkpoint import RunState, TrainState


class Counting:
    """A registered object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self):
        return {"count": self.count, "history": (1, 2)}

    def load_state_dict(self, state) -> None:
        self.count = state["count"]
        assert state["history"] == (1, 2)


class Run:
    """A model with everything around it; `train` goes on where it stands."""

    def __init__(self, *, width: int = 5, seed: int = 0, hidden: str = "hidden") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential()
        self.model.add_module(hidden, nn.Linear(4, width))
        self.model.add_module("norm", nn.BatchNorm1d(width))
        self.model.add_module("drop", nn.Dropout(0.5))
        self.model.add_module("out", nn.Linear(width, 3))
        self.model.add_module("frozen", nn.Linear(3, 3).requires_grad_(False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.custom = Counting()
        self.run = RunState()

    def state(self, **changes) -> TrainState:
        owners = {
            "models": {"model": self.model},
            "optimizers": {"optimizer": self.optimizer},
            "schedulers": {"scheduler": self.scheduler},
            "custom": {"object": self.custom},
            "scaler": self.scaler,
            "run": self.run,
        }
        return TrainState(**{**owners, **changes})

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(8, 4)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.run.step += 1
            self.custom.count += 2
            losses.append(loss.item())
        return losses


@pytest.fixture
def make_run() -> type[Run]:
    return Run
