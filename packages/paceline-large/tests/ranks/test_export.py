"""A model is exported from any layout, and read into any: the files are those of one process, byte for byte."""

import os
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT, ConvNet
from safetensors.torch import load_file, save_file
from shared_ranks import run_ranks
from torch import nn

from paceline import Accelerator, testing
from paceline.base.errors import CheckpointError
from paceline.checkpoint.weights import export
from paceline.checkpoint.weights.divided import DividedModel
from paceline.world.layout import AXES

SINGLE = [
    {"replicate": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2},
    {"shard": 3},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
]
BOTH = [{"replicate": 2, "shard": 2}, {"tp": 2, "shard": 2}, {"pp": 2, "shard": 2}, {"pp": 2, "tp": 2}]
SIZE = "3KB"


def named(plan: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in plan.items())


def ranks_of(plan: dict) -> int:
    width = 1
    for axis in AXES:
        width *= plan.get(axis, 1)
    return width


def net(seed: int = 7) -> GPT:
    torch.manual_seed(seed)
    return GPT(tied=True, frozen=True, layers=3)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@cache
def of_one_process() -> tuple[dict[str, bytes], dict[str, bytes], dict[str, bytes]]:
    """The files of an export by one process: cut safetensors, one file, cut files of torch."""

    def work(folder: Path) -> None:
        accelerator = Accelerator(cpu=True)
        save_all(accelerator, accelerator.prepare(net()), folder)

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, world=1, args=(Path(folder),))
        return tuple(contents(Path(folder) / kind) for kind in ("cut", "one", "torch"))


def save_all(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    accelerator.save_model(model, folder / "cut", max_shard_size=SIZE)
    accelerator.save_model(model, folder / "one")
    accelerator.save_model(model, folder / "torch", max_shard_size=SIZE, safe_serialization=False)


@pytest.mark.parametrize("plan", [*SINGLE, *BOTH], ids=named)
def test_files_are_those_of_one_process_and_go_into_any_layout(plan, tmp_path) -> None:
    want = of_one_process()
    assert len(want[0]) > 3 and "model.safetensors.index.json" in want[0]

    def work() -> int:
        accelerator = Accelerator(cpu=True, plan=plan)
        model = accelerator.prepare(net())
        save_all(accelerator, model, tmp_path)
        other = accelerator.prepare(net(seed=8))
        for kind in ("cut", "one", "torch"):
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(2.0)
            accelerator.load_model(other, tmp_path / kind)
            accelerator.save_model(other, tmp_path / f"{kind}-again", max_shard_size=SIZE)
        return accelerator.process_index

    run_ranks(work, world=ranks_of(plan), timeout_s=60)
    for kind, files in zip(("cut", "one", "torch"), want, strict=True):
        assert contents(tmp_path / kind) == files, kind
        assert contents(tmp_path / f"{kind}-again") == want[0], kind


def divided(seed: int = 1) -> nn.Module:
    """Sizes that no number of ranks divides evenly; parameters in bfloat16, buffers in float32."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(1, 1, bias=False))
    net.to(torch.bfloat16)
    net[1].running_mean = torch.randn(5)
    return net


def test_rows_in_small_turns(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export, "TURN_BYTES", 64)
    monkeypatch.setattr(export, "LEAST_TURN_BYTES", 16)

    def work() -> None:
        accelerator = Accelerator(cpu=True, plan={"shard": 3})
        model = accelerator.prepare(divided())
        inner = accelerator.unwrap_model(model)
        inner[1].running_mean.add_(accelerator.process_index)  # ranks differ: the lowest one's counts
        accelerator.save_model(model, tmp_path, "100B")

    testing.run_ranks(work, world=3)
    want = {name: tensor for name, tensor in divided().state_dict().items()}
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_no_rank_is_given_more_than_a_turn(tmp_path, monkeypatch) -> None:
    """One matrix of 4 MB, cut along either dim, in turns of 256 KB: bytes that come to a rank at once are counted."""
    monkeypatch.setattr(export, "TURN_BYTES", 1 << 18)

    def work() -> tuple[int, int]:
        accelerator = Accelerator(cpu=True, plan={"shard": 2})
        net = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(2)))
        model = accelerator.prepare(net)
        sizes, rounds = [], 0
        fetch = DividedModel.fetch

        def counted(self, wanted):
            nonlocal rounds
            rounds += 1
            found = fetch(self, wanted)
            sizes.append(sum(tensor.nbytes for tensor in found))
            return found

        DividedModel.fetch = counted
        accelerator.save_model(model, tmp_path)
        DividedModel.fetch = fetch
        return max(sizes), rounds

    (first, rounds), (second, _) = testing.run_ranks(work, world=2)
    assert 0 < first <= 1 << 18 and second == 0  # one file: one writer
    assert rounds == pytest.approx(8e6 / (1 << 18), rel=0.1)


def test_two_thousand_small_tensors_take_few_rounds(tmp_path) -> None:
    def work() -> int:
        accelerator = Accelerator(cpu=True, plan={"shard": 2, "zero": 1})
        model = accelerator.prepare(nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in range(2000)]))
        calls = 0
        fetch = DividedModel.fetch

        def counted(self, wanted):
            nonlocal calls
            calls += 1
            return fetch(self, wanted)

        DividedModel.fetch = counted
        accelerator.save_model(model, tmp_path)
        DividedModel.fetch = fetch
        return calls

    assert run_ranks(work, world=2) == [1, 1]
    assert float(load_file(tmp_path / "model.safetensors")["1999"].sum()) == 3 * 1999


def test_a_disk_that_fills_up_on_one_rank_ends_all_alike(tmp_path) -> None:
    save_file({"old": torch.ones(2)}, tmp_path / "model.safetensors")
    before = contents(tmp_path)

    def work() -> str:
        import resource

        accelerator = Accelerator(cpu=True, plan={"shard": 2})
        model = accelerator.prepare(nn.Sequential(*(nn.Linear(200, 200) for _ in range(4))))
        if accelerator.process_index == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(CheckpointError) as caught:
            accelerator.save_model(model, tmp_path, "200KB")
        accelerator.wait_for_everyone()
        return caught.value.code

    assert run_ranks(work, world=2) == ["checkpoint-disk-full"] * 2
    assert contents(tmp_path) == before
    os.remove(tmp_path / "model.safetensors")


@pytest.mark.parametrize("plan", [{"shard": 2}, {"pp": 2}], ids=named)
def test_another_model_is_refused_on_all_ranks_and_nothing_is_touched(plan, tmp_path) -> None:
    torch.manual_seed(3)
    state = GPT(layers=2).state_dict()
    wrong = {name.replace("norm1", "norm_1"): tensor for name, tensor in state.items()}
    wrong["head.weight"] = torch.zeros(24, 15)
    save_file(wrong, tmp_path / "model.safetensors")

    def work() -> tuple[str, bool]:
        accelerator = Accelerator(cpu=True, plan=plan)
        torch.manual_seed(4)
        model = accelerator.prepare(GPT(layers=2))
        before = accelerator.get_state_dict(model)
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_model(model, tmp_path)
        after = accelerator.get_state_dict(model)
        return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)

    texts, untouched = zip(*run_ranks(work, world=2), strict=True)
    assert all(untouched) and texts[0] == texts[1]
    assert "4 missing in the checkpoint" in texts[0] and "closest: blocks.0.norm_1.weight" in texts[0]
    assert "head.weight: (24, 15) there, (24, 16) here" in texts[0]


def test_batch_statistics_go_along(tmp_path) -> None:
    def work() -> bool:
        accelerator = Accelerator(cpu=True, plan={"shard": 2})
        model = accelerator.prepare(ConvNet())
        accelerator.unwrap_model(model).stages[0][1].running_var.fill_(3.0)
        accelerator.save_model(model, tmp_path)
        other = accelerator.prepare(ConvNet())
        accelerator.load_model(other, tmp_path)
        return bool((accelerator.unwrap_model(other).stages[0][1].running_var == 3.0).all())

    assert all(run_ranks(work, world=2))
