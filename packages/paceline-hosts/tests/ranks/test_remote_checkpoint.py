"""Checkpoints at a URL, written and read by several processes at once."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, CheckpointError
from paceline.checkpoint.keep import Keep
from paceline.testing import run_ranks
from paceline.testing.ranks import RankFailed


class Run:
    """A script: it prepares, goes on where the last one stopped, and trains."""

    def __init__(self, url: str, **options) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, project_dir=url, **options)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(rows), 12 // self.accelerator.num_processes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def epoch(self) -> list[float]:
        losses = []
        for (rows,) in self.loader:
            loss = (self.model(rows) - rows.sum(1, keepdim=True)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses


def train_and_save(url):
    run = Run(url, keep=Keep(last=2))
    assert run.accelerator.logging_dir == "runs"
    saved = []
    for number in range(3):
        run.epoch()
        saved.append(run.accelerator.save_state(background=number == 1))
    run.accelerator.wait_for_save()
    return saved, run.epoch()


def go_on(url):
    run = Run(url)
    run.accelerator.load_state()
    return run.epoch()


def saved_number(path):
    return int(path.rsplit("_", 1)[1])


def saved_names(url):
    from paceline.checkpoint.store import store_for

    return [name for name in store_for(url).list(url) if not name.startswith(".")]


def test_saved_on_two_ranks_and_loaded_at_other_widths(s3) -> None:
    url = f"{s3}/runs/one"
    saved, losses = run_ranks(train_and_save, world=2, args=(url,))[0]
    assert saved == [f"{url}/checkpoints/checkpoint_{number}" for number in range(3)]
    for world in (1, 3):
        for again in run_ranks(go_on, world=world, args=(url,)):
            assert again == pytest.approx(losses, rel=1e-5)
    assert run_ranks(saved_names, world=1, args=(f"{url}/checkpoints",)) == [["checkpoint_1", "checkpoint_2"]]


def test_one_rank_is_killed_while_it_uploads(s3) -> None:
    url = f"{s3}/runs/two"
    _, losses = run_ranks(train_and_save, world=2, args=(url,))[0]

    def dies():
        from paceline.checkpoint.format import native_writer

        run = Run(url)
        run.accelerator.load_state()
        run.epoch()
        if run.accelerator.process_index == 1:
            native_writer.write_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        run.accelerator.save_state()

    with pytest.raises(RankFailed):
        run_ranks(dies, world=2)
    assert run_ranks(go_on, world=2, args=(url,)) == [losses] * 2
    last, _ = run_ranks(train_and_save, world=2, args=(url,))[0]
    assert saved_number(last[-1]) in (5, 6), (
        "the lease of the dead run is free; 3 is left out if a shard of it came through"
    )

    def marks():
        from paceline.checkpoint.store import store_for

        return store_for(url).list(f"{url}/checkpoints/.saving")

    assert run_ranks(marks, world=1) == [[]]


@pytest.mark.parametrize(("url", "code"), [
    ("memory://runs/three", "checkpoint-not-shared"), ("s3://nobody-made-this/run", "checkpoint-bucket"),
])  # fmt: skip
def test_every_rank_is_told(s3, url, code) -> None:
    def saves():
        with pytest.raises(CheckpointError) as error:
            Run(url).accelerator.save_state()
        return error.value.code

    assert run_ranks(saves, world=2) == [code] * 2
