"""Checkpoint folders that the real accelerate wrote, taken over by `load_state` and the command, under any plan."""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tarfile
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from safetensors.torch import load_file

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.cli.main import main
from paceline.testing import run_ranks
from paceline_accelerate.sharded import merge_fsdp_weights

REFERENCE = Path(__file__).parent / "reference"
sys.path.insert(0, str(REFERENCE))
import folders_program as program  # noqa: E402

# Each recorded folder under another plan than it was saved under.
RUNS = [
    ("plain", {}), ("torch", {"shard": 2}), ("ddp", {"replicate": 2}), ("ddp", {}), ("plain", {"pp": 2}),
    ("fsdp1-sharded", {"shard": 2}), ("fsdp2-sharded", {"shard": 2}), ("fsdp2-sharded", {"pp": 2}),
    ("fsdp2-full", {"shard": 2, "zero": 1}), ("fsdp2-full", {}),
]  # fmt: skip


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("accelerate")
    with tarfile.open(REFERENCE / "folders.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def prepared(plan, seed=4):
    accelerator = Accelerator(cpu=True, plan=plan)
    net, optimizer, schedule = program.made(seed)
    inputs, targets = program.rows()
    data = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(data, 32 // accelerator.plan.layout.width)
    return accelerator, *accelerator.prepare(net, optimizer, loader, schedule)


def taken_over(kind: str, plan: dict, folder: str) -> None:
    want = torch.load(f"{folder}/{kind}/want.pt", weights_only=True)
    accelerator, net, optimizer, loader, schedule = prepared(plan)
    counter = program.Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(f"{folder}/{kind}/state")
    assert counter.count == want["count"]
    if accelerator.is_main_process:
        assert want["draws"] == (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    state = accelerator.get_state_dict(net)
    assert state.keys() == want["weights"].keys()
    assert all(torch.equal(state[name], value) for name, value in want["weights"].items())
    # accelerate steps a schedule once for each process; that of 2 saw 2 optimizer steps.
    assert schedule.scheduler.last_epoch == 4
    assert accelerator.states.counters.step == (4 if kind in ("plain", "torch") else 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    for batch in loader:
        accelerator.forward_backward(net, batch, program.loss_of)
        optimizer.step()
        optimizer.zero_grad()
    after = accelerator.get_state_dict(net)
    for name, value in want.get("went_on", {}).items():
        torch.testing.assert_close(after[name], value, atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def ranks_of(plan: dict) -> int:
    return 2 if plan else 1


@pytest.mark.parametrize(("kind", "plan"), RUNS, ids=str)
def test_a_run_goes_on_from_accelerates_folder(kind, plan, folders) -> None:
    run_ranks(taken_over, world=ranks_of(plan), args=(kind, plan, str(folders)), timeout_s=60)


def taken_over_under_its_names(folder: str) -> None:
    from paceline_accelerate.accelerator import Accelerator as Theirs

    for kind in ("plain", "fsdp1-sharded", "fsdp2-sharded", "fsdp2-full"):
        want = torch.load(f"{folder}/{kind}/want.pt", weights_only=True)
        accelerator = Theirs(cpu=True)
        net, optimizer, schedule = accelerator.prepare(*program.made(4))
        counter = program.Counter()
        accelerator.register_for_checkpointing(counter)
        accelerator.load_state(f"{folder}/{kind}/state")
        state = accelerator.get_state_dict(net)
        assert all(torch.equal(state[name], value) for name, value in want["weights"].items())
        assert (counter.count, schedule.scheduler.last_epoch) == (want["count"], 4)
        assert optimizer.steps == (4 if kind == "plain" else 2)
        assert want["draws"] == (random.random(), float(numpy.random.rand()), float(torch.rand(())))


def test_a_script_under_its_names_goes_on_from_what_fsdp_has_divided(folders) -> None:
    run_ranks(taken_over_under_its_names, world=1, args=(str(folders),), timeout_s=60, group=False)


def test_what_is_not_taken_over_is_said(folders) -> None:
    def work() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("paceline.checkpoint").addHandler(handler)
        accelerator, *_ = prepared({})
        accelerator.register_for_checkpointing(program.Counter())
        accelerator.load_state(folders / "ddp" / "state")
        return said

    said = run_ranks(work, world=1)[0]
    assert sum("data position" in text for text in said) == 1
    assert any("stepped 4 times in 2 optimizer steps" in text for text in said)


class Registered:
    """Keeps the state that it loads."""

    loaded: dict | None = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.loaded = state


def test_numpys_arrays_and_numbers_are_taken_over(folders, tmp_path) -> None:
    shutil.copytree(folders / "plain" / "state", tmp_path, dirs_exist_ok=True)
    state: dict[str, numpy.ndarray | numpy.generic] = {"mean": numpy.float64(0.5), "is_best": numpy.bool_(True)}
    for code in ("?", "i8", "u4", "f2", "f4", "f8", "c8"):
        state[code] = numpy.ones(3, code)
    torch.save(state, tmp_path / "custom_checkpoint_0.pkl")
    accelerator, *_ = prepared({})
    registered = Registered()
    accelerator.register_for_checkpointing(registered)
    accelerator.load_state(tmp_path)
    assert registered.loaded is not None and registered.loaded.keys() == state.keys()
    for name, value in state.items():
        loaded = registered.loaded[name]
        assert type(loaded) is type(value) and loaded.dtype == value.dtype and numpy.array_equal(loaded, value), name


def refused(folder: Path, code: str, fewer=False) -> str:
    accelerator, *_ = prepared({})
    if not fewer:
        accelerator.register_for_checkpointing(program.Counter())
    before = [p.detach().clone() for p in accelerator.run.prepared.models[0].module.parameters()]
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    assert caught.value.code == code
    after = accelerator.run.prepared.models[0].module.parameters()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return str(caught.value)


def test_refusals_touch_nothing(folders, tmp_path) -> None:
    plain = folders / "plain" / "state"
    assert "2 objects" not in refused(plain, "checkpoint-owners", fewer=True)
    local = tmp_path / "local"
    shutil.copytree(folders / "fsdp2-full" / "state", local)
    (local / "pytorch_model_fsdp.bin").rename(local / "pytorch_model_fsdp_rank0.bin")
    assert "LOCAL_STATE_DICT" in refused(local, "checkpoint-foreign")
    fewer = tmp_path / "fewer"
    shutil.copytree(plain, fewer)
    state = torch.load(fewer / "optimizer.bin")
    state["param_groups"][1]["params"].pop()
    torch.save(state, fewer / "optimizer.bin")
    assert "12 parameters, but 11" in refused(fewer, "checkpoint-groups")
    second = tmp_path / "second"
    shutil.copytree(plain, second)
    shutil.copyfile(second / "optimizer.bin", second / "optimizer_1.bin")
    assert "holds 2 optimizers" in refused(second, "checkpoint-owners")
    unsafe = tmp_path / "unsafe"
    shutil.copytree(plain, unsafe)
    torch.save({"scheduler": program.Counter()}, unsafe / "scheduler.bin")
    assert "folders_program.Counter" in refused(unsafe, "checkpoint-unsafe")


@pytest.mark.needs("lens")
@pytest.mark.parametrize("kind", ["plain", "torch", "ddp", "fsdp1-sharded", "fsdp2-sharded", "fsdp2-full"])
def test_weights_alone(kind, folders, tmp_path, capsys) -> None:
    want = torch.load(folders / kind / "want.pt", weights_only=True)["weights"]
    assert main(["checkpoint", "export", str(folders / kind / "state"), str(tmp_path), "--max-shard-size", "200B"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert written[-1] == str(tmp_path / "model.safetensors.index.json")
    found = {}
    for path in written[:-1]:
        found |= load_file(path)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], value) for name, value in want.items())


def test_divided_weights_are_merged(folders, tmp_path) -> None:
    want = torch.load(folders / "fsdp2-sharded" / "want.pt", weights_only=True)["weights"]
    divided = tmp_path / "divided"
    shutil.copytree(folders / "fsdp2-sharded" / "state" / "pytorch_model_fsdp_0", divided)

    def work() -> None:
        merge_fsdp_weights(divided, tmp_path / "safe")
        merge_fsdp_weights(str(divided), tmp_path / "torch", safe_serialization=False, remove_checkpoint_dir=True)
        with pytest.raises(CheckpointError, match="checkpoint-missing"):
            merge_fsdp_weights(divided, tmp_path / "none")

    run_ranks(work, world=1)
    for found in (
        load_file(tmp_path / "safe" / "model.safetensors"),
        torch.load(tmp_path / "torch" / "pytorch_model.bin"),
    ):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())
    assert not divided.exists()
