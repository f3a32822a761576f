"""Checkpoints over real processes: widths, sharing the work, and what fails on one rank."""

import json
import os
import random
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import testing
from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, Manifest, RunState, TrainState, verify
from paceline.checkpoint.format import native_writer
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store.local import LocalStore
from paceline.world.collectives import Collectives
from paceline.world.world import World

STEPS, BATCH = 3, 12


class Net(nn.Module):
    """Tied and frozen parameters, and a buffer that every rank would fill differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def ranks() -> Collectives | None:
    """Collectives of this process, or None for one process without a group."""
    if not dist.is_initialized():
        return None
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return Collectives(world, device=torch.device("cpu"))


class Run:
    """A DDP run on a global batch that is the same at every width."""

    def __init__(self, seed: int = 0) -> None:
        self.collectives = ranks()
        self.rank, self.size = (self.collectives.rank, self.collectives.size) if self.collectives else (0, 1)
        torch.manual_seed(seed)
        net = Net()
        self.model = DistributedDataParallel(net) if self.collectives else net
        self.optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.run = RunState()
        net.seen.fill_(self.rank + 1)

    def state(self) -> TrainState:
        return TrainState(
            models={"model": self.model},
            optimizers={"optimizer": self.optimizer},
            schedulers={"scheduler": self.scheduler},
            run=self.run,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            data = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(self.run.step))
            part = data.chunk(self.size)[self.rank]
            loss = (self.model(part) - part.sum(1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.run.step += 1

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def train_and_save(folder: str, go_on: bool = True) -> torch.Tensor:
    run = Run()
    run.train(STEPS)
    Checkpointer(run.collectives).save(folder, run.state())
    run.train(STEPS if go_on else 0)
    return run.weights()


def load_and_train(folder: str) -> tuple[torch.Tensor, tuple[str, ...], float]:
    run = Run(seed=5)
    loaded = Checkpointer(run.collectives).load(folder, run.state())
    draw = random.random()
    assert run.run.step == STEPS
    seen = (run.model.module if run.collectives else run.model).seen.item()
    assert seen == 1, "buffers are rank 0's, as DDP takes them"
    run.train(STEPS)
    return run.weights(), loaded.notes, draw


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (3, 2), (2, 4)])
def test_resume_at_another_width(tmp_path, before, after) -> None:
    folder = str(tmp_path / "c")
    (expected, *_) = run_ranks(train_and_save, before, args=(folder,)) if before > 1 else [train_and_save(folder)]
    manifest = Manifest.read(LocalStore(), folder)
    assert manifest.world_size == before and manifest.step == STEPS and verify(folder, LocalStore()) == []
    names = set(json.loads((tmp_path / "c/state.json").read_text())["optimizers"]["optimizer"]["state"])
    assert "first.weight" in names and not any(name.startswith(("module.", "frozen")) for name in names)

    results = run_ranks(load_and_train, after, args=(folder,)) if after > 1 else [load_and_train(folder)]
    for weights, notes, _ in results:
        torch.testing.assert_close(weights, expected, rtol=0, atol=0 if before == after else 2e-6)
        assert bool(notes) == (after > before), "every rank knows that some streams are new"
    draws = [draw for *_, draw in results]
    assert len(set(draws)) == after, "each rank goes on with a stream of its own"
    again = run_ranks(load_and_train, after, args=(folder,)) if after > 1 else [load_and_train(folder)]
    assert [draw for *_, draw in again] == draws


def test_ranks_share_the_writing(tmp_path) -> None:
    folder = str(tmp_path / "c")
    run_ranks(train_and_save, 2, args=(folder, False))
    sizes = LocalStore().files(folder)
    one, two = sizes["__0_0.distcp"], sizes["__1_0.distcp"]
    assert max(one, two) < 2 * min(one, two)


def test_rank_0_is_saved_where_replicas_differ(tmp_path) -> None:
    folder = str(tmp_path / "c")

    def save() -> None:
        run = Run()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.fill_(run.rank)
        state = TrainState(models={"model": run.model}, run=run.run, replicas_equal=False)
        Checkpointer(run.collectives).save(folder, state)

    run_ranks(save, 2)
    net = Net()
    Checkpointer().load(folder, TrainState(models={"model": net}))
    assert all((parameter == 0).all() for parameter in net.parameters())


def code_of(work) -> tuple[str, str, float]:
    """What a rank is told, and after how long."""
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        work()
    return caught.value.code, str(caught.value), time.monotonic() - start


class OneRankFails:
    """Its state can be saved on all ranks but one."""

    def __init__(self, rank: int, error: Exception | None) -> None:
        self.rank, self.error = rank, error

    def state_dict(self):
        if dist.get_rank() == self.rank and self.error is not None:
            raise self.error
        return {"value": object() if dist.get_rank() == self.rank else 1}

    def load_state_dict(self, state) -> None: ...


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(("error", "code"), [
    (None, "checkpoint-value"), (ZeroDivisionError("of mine"), "checkpoint-failed"),
    (PermissionError(13, "Permission denied", "a"), "checkpoint-not-writable"),
    (OSError(28, "No space left on device", "a"), "checkpoint-disk-full"),
])  # fmt: skip
def test_one_rank_fails(tmp_path, failing, error, code) -> None:
    folder = str(tmp_path / "c")

    def fail():
        run = Run()
        save = Checkpointer(run.collectives).save
        save(folder, run.state())
        state = TrainState(models={"model": run.model}, custom={"object": OneRankFails(failing, error)})
        return code_of(lambda: save(folder, state))

    results = run_ranks(fail, 3)
    assert {result[:2] for result in results} == {(code, results[0][1])}, "every rank is told the same"
    assert verify(folder, LocalStore()) == [] and os.listdir(tmp_path) == ["c"]


def test_full_disk_on_one_rank(tmp_path) -> None:
    """A limit on the size of files stands for the end of the disk: the system refuses in the same way."""
    folder = str(tmp_path / "c")

    def fill():
        collectives = ranks()
        assert collectives is not None
        torch.manual_seed(0)
        state = TrainState(models={"a": nn.Linear(200, 200, bias=False), "b": nn.Linear(200, 200, bias=False)})
        Checkpointer(collectives).save(folder, state)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if collectives.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
        found = code_of(lambda: Checkpointer(collectives).save(folder, state))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return found[0]

    assert testing.run_ranks(fill, 2) == ["checkpoint-disk-full"] * 2
    assert verify(folder, LocalStore()) == [] and os.listdir(tmp_path) == ["c"]


def test_damage_is_told_to_all(tmp_path) -> None:
    folder = str(tmp_path / "c")
    run_ranks(train_and_save, 2, args=(folder, False))
    for name in ("__0_0.distcp", "__1_0.distcp"):
        with open(f"{folder}/{name}", "r+b") as file:
            file.seek(700)
            file.write(b"other bytes")

    def load():
        run = Run()
        return code_of(lambda: Checkpointer(run.collectives).load(folder, run.state()))[:2]

    one, two = run_ranks(load, 2)
    assert one == two and one[0] == "checkpoint-damaged" and "__0_0" in one[1] and "__1_0" in one[1]


def test_another_model_on_one_rank(tmp_path) -> None:
    """As under a pipeline, ranks may hold other names; together they must hold those of the checkpoint."""
    folder = str(tmp_path / "c")

    def stage(rank: int) -> nn.Module:
        return nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})

    def save() -> float:
        collectives = ranks()
        assert collectives is not None
        model = stage(collectives.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model[f"stage{collectives.rank}"](torch.ones(2)).sum().backward()
        optimizer.step()
        state = TrainState(models={"model": model}, optimizers={"optimizer": optimizer})
        Checkpointer(collectives).save(folder, state)
        return sum(parameter.sum().item() for parameter in model.parameters())

    def load(first: int) -> float | str:
        collectives = ranks()
        assert collectives is not None
        model = stage(first + collectives.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = TrainState(models={"model": model}, optimizers={"optimizer": optimizer})
        if first:
            return code_of(lambda: Checkpointer(collectives).load(folder, state))[1]
        Checkpointer(collectives).load(folder, state)
        assert len(optimizer.state) == 2
        return sum(parameter.sum().item() for parameter in model.parameters())

    assert run_ranks(save, 2) == run_ranks(load, 2, args=(0,))
    one, two = run_ranks(load, 2, args=(1,))
    assert one == two
    assert "2 missing in the checkpoint: stage2.weight (2, 2) (closest: stage0.weight)" in one
    assert "2 only in the checkpoint: stage0.bias (2,) (closest: stage2.bias)" in one


@pytest.mark.parametrize(("rank", "place"), [
    (0, "write_shard"), (1, "write_shard"), (0, "write_index"), (0, "Manifest.write"), (0, "LocalStore.publish"),
])  # fmt: skip
def test_killed_while_saving(tmp_path, place, rank) -> None:
    """SIGKILL of a rank at any point: the old checkpoint loads, the unfinished one never does, the next save cleans up."""
    folder = str(tmp_path / "checkpoint_0")
    testing.run_ranks(train_and_save, 2, args=(folder, False))

    def save_and_die() -> None:
        if dist.get_rank() == rank:
            owner, name = native_writer, place
            if "." in place:
                owner, name = {"Manifest": Manifest, "LocalStore": LocalStore}[place.split(".")[0]], place.split(".")[1]
            setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        train_and_save(folder)

    with pytest.raises(testing.RankFailed):
        testing.run_ranks(save_and_die, 2, timeout_s=20)
    assert Checkpointer().latest(tmp_path) == folder
    run = Run()
    Checkpointer().load(folder, run.state())
    assert run.run.step == STEPS
    Checkpointer().save(folder, run.state())
    assert os.listdir(tmp_path) == ["checkpoint_0"]


def test_automatic_names_agree(tmp_path) -> None:
    def save() -> list[str | None]:
        run = Run()
        saver = Checkpointer(run.collectives, keep=Keep(2))
        saved = [saver.save(saver.next_path(tmp_path), run.state()) for _ in range(3)]
        return [*saved, saver.latest(tmp_path)]

    one, two = run_ranks(save, 2)
    assert one == two == [*(str(tmp_path / f"checkpoint_{n}") for n in range(3)), str(tmp_path / "checkpoint_2")]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]
