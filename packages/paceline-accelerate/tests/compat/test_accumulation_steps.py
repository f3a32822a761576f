"""The count of micro-batches: accelerate 1.15 ends a window where `accelerator.step` divides by the number of steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline_accelerate.accelerator import Accelerator


class Loop:
    """A loop over 24 batches, with windows of 4 micro-batches."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        layer = nn.Linear(1, 1)
        loader = DataLoader([torch.ones(1)] * 24, batch_size=1)
        self.model, self.loader = self.accelerator.prepare(layer, loader)

    def run(self, count: int) -> list[tuple[int, bool]]:
        """Runs micro-batches until it breaks; returns the step and whether the window ended, of each."""
        rows = []
        for number, batch in enumerate(self.loader):
            if number == count:
                break
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).sum())
            rows.append((self.accelerator.step, self.accelerator.sync_gradients))
        return rows


def test_backward_outside_of_accumulate_counts_nothing() -> None:
    loop = Loop()
    loop.run(2)
    loop.accelerator.backward(loop.model(torch.ones(1)).sum())
    assert loop.run(3) == [(3, False), (4, True), (5, False)]


def test_a_loaded_step_goes_on_in_its_window(tmp_path: Path) -> None:
    loop = Loop()
    loop.run(2)
    loop.accelerator.save_state(tmp_path)
    resumed = Loop()
    resumed.accelerator.load_state(tmp_path)
    assert resumed.run(3) == [(3, False), (4, True), (5, False)]


def test_another_number_of_steps_divides_the_same_count() -> None:
    loop = Loop()
    loop.run(4)
    loop.accelerator.gradient_accumulation_steps = 3
    assert loop.run(3) == [(5, False), (6, True), (7, False)]


def test_a_set_value_of_sync_gradients_changes_no_count() -> None:
    loop = Loop()
    loop.run(2)
    loop.accelerator.sync_gradients = True
    assert loop.run(3) == [(3, False), (4, True), (5, False)]


def test_free_memory_begins_a_window() -> None:
    loop = Loop()
    loop.run(2)
    loop.accelerator.free_memory()
    loop.model, loop.loader = loop.accelerator.prepare(nn.Linear(1, 1), DataLoader([torch.ones(1)] * 24, batch_size=1))
    assert loop.run(4) == [(1, False), (2, False), (3, False), (4, True)]
