"""A model is exported from any layout, and read into any: the files are those of one process, byte for byte."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT
from torch import nn

from paceline import Accelerator
from paceline.testing import run_ranks
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

    import tempfile

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
