"""States and parameters on disk: the bits of those in memory, under every plan, saved and resumed as any other; a full disk
loses nothing."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import GPT, loss_of
from torch import Tensor, nn

from paceline import Accelerator
from paceline.base.errors import PacelineError, PrepareError, TrainError
from paceline.optim import Lamb, Lion
from paceline.planner.estimate import Need, estimate
from paceline.testing import run_ranks
from paceline.world.sharded import local

DATA_PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    "zero1": {"shard": 2, "zero": 1},
    "zero2": {"shard": 2, "zero": 2},
    "shard": {"shard": 2},
    "parameters": {"shard": 2},
    "alone": {},
}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "Lion": lambda parameters: Lion(parameters, lr=1e-3),
}


def on_disk(folder: Path, name: str = "") -> dict[str, Any]:
    what = "all" if name == "parameters" else "optimizer"
    # Parts so small that the model has several, and one matrix is larger than a part. One unit has no rows on rank 1.
    options = {"offload": {"part_mb": 0.02}, "shard": {"wrap": ["Linear"]}}
    return {"offload": f"{what}=disk:{folder}", "options": options}


class Run:
    def __init__(self, plan: dict[str, Any], kind: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, plan=plan)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 66), nn.Tanh(), nn.Linear(66, 1))
        halves = [list(net[:2].parameters()), list(net[2:].parameters())]
        groups = [{"params": halves[0]}, {"params": halves[1], "weight_decay": 0.1}]
        self.model, self.optimizer = self.accelerator.prepare(net, OPTIMIZERS[kind](groups))
        self.hooks: list[int] = []
        self.optimizer.register_step_pre_hook(lambda optimizer, *_: self.hooks.append(len(optimizer.param_groups)))

    def train(self, *numbers: int) -> Run:
        layout = self.accelerator.plan.layout
        for number in numbers:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
            x = x.chunk(layout.width)[layout.data_index(self.accelerator.process_index)]
            self.accelerator.backward((self.model(x) - x.sum(1, keepdim=True)).square().mean())
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weights(self) -> list[Tensor]:
        return [torch.as_tensor(value).clone() for value in self.accelerator.get_state_dict(self.model).values()]


def bytes_in_memory(run: Run) -> int:
    """Returns the bytes of a rank's parameters and states that are in no file."""
    values = [local(parameter) for parameter in run.model.parameters()]
    for state in run.optimizer.state.values():
        values += [local(value) for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return sum(value.nbytes for value in values if not mapped(value))


def forecast(run: Run) -> int:
    need = replace(Need.of(run.accelerator.run.situation()), states=3.0)  # of AdamW with amsgrad
    rest = estimate(run.accelerator.plan, need)
    return rest.parameters + rest.optimizer


def mapped(parameter: Tensor) -> bool:
    """Returns whether a tensor lies in a file without a name."""
    address = local(parameter).untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return line.endswith("(deleted)")
    return False


def test_the_bits_of_states_in_memory_and_a_resume_at_another_width(tmp_path) -> None:
    def work() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
        outcome = {}
        for name, plan in DATA_PLANS.items():
            if not plan:
                continue
            offload = "all" if name == "parameters" else "optimizer"
            run = Run({**plan, "offload": offload}).train(*range(4))
            assert bytes_in_memory(run) == pytest.approx(forecast(run), rel=0.02), name
            expected = run.weights()
            run = Run({**plan, **on_disk(tmp_path / "disk", name)}).train(0, 1)
            run.accelerator.save_state(str(tmp_path / name))
            outcome[name] = expected, run.train(2, 3).weights()
            assert bytes_in_memory(run) == pytest.approx(forecast(run), rel=0.02), name
            assert {mapped(parameter) for parameter in run.model.parameters()} <= {name == "parameters"}
        # The room for parameters is reserved in `prepare`.
        reserve = os.posix_fallocate

        def reserve_a_probe_alone(descriptor: int, start: int, num_bytes: int) -> None:
            if num_bytes < 2**20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reserve(descriptor, start, num_bytes)

        os.posix_fallocate = reserve_a_probe_alone
        with pytest.raises(TrainError) as caught:
            Run({"shard": 2, **on_disk(tmp_path / "disk", "parameters")})
        os.posix_fallocate = reserve
        assert caught.value.code == "offload-disk"
        return outcome

    def resumed(disk: dict[str, Any]) -> dict[str, list[Tensor]]:
        outcome = {}
        for name in DATA_PLANS.keys() - {"alone"}:
            run = Run(disk)
            run.accelerator.load_state(str(tmp_path / name))
            outcome[name] = run.train(2, 3).weights()
            if disk.get("zero") == 3:
                assert all(map(mapped, run.model.parameters()))
            run.accelerator.end_training()
        return outcome

    for name, (expected, weights) in run_ranks(work, 2, timeout_s=200)[0].items():
        assert all(map(torch.equal, expected, weights)), name
    from_disk, in_memory = resumed(on_disk(tmp_path / "disk")), resumed({})
    # One process has parameters on disk as several do.
    with_parameters = resumed({"zero": 3, **on_disk(tmp_path / "disk", "parameters")})
    for name, weights in in_memory.items():
        assert all(map(torch.equal, weights, from_disk[name])), name
        assert all(map(torch.equal, weights, with_parameters[name])), name
    assert not list((tmp_path / "disk").iterdir())


def beside_another_axis(folder: Path, axis: str) -> None:
    def weights(more: dict[str, Any]) -> tuple[list[Tensor], set[bool]]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, plan={"shard": 2, axis: 2, "zero": 3, **more})
        model = GPT(layers=2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        layout = accelerator.plan.layout
        for step in range(2):
            tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(step))
            tokens = tokens.chunk(layout.width)[layout.data_index(accelerator.process_index)]
            accelerator.forward_backward(model, (tokens, tokens.roll(1, 1)), loss_of)
            optimizer.step()
            optimizer.zero_grad()
        return list(accelerator.get_state_dict(model).values()), set(map(mapped, model.parameters()))

    expected, _ = weights({})
    for what in ("all", "optimizer"):
        found, are_mapped = weights({"offload": f"{what}=disk:{folder}", "options": {"offload": {"part_mb": 0.02}}})
        assert all(map(torch.equal, expected, found)), what
        assert are_mapped == {what == "all"}


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_the_bits_of_memory_where_another_axis_divides_the_model_too(axis: str, tmp_path: Path) -> None:
    run_ranks(beside_another_axis, 4, args=(tmp_path, axis), timeout_s=200)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_elementwise_optimizers(kind, tmp_path) -> None:
    run = Run(on_disk(tmp_path), kind).train(*range(3))
    assert all(map(torch.equal, run.weights(), Run({}, kind).train(*range(3)).weights()))
    # A step in parts is one step to hooks, with all groups.
    assert run.hooks == [2, 2, 2]
    fields = [decision.field for decision in run.accelerator.plan.decisions]
    assert {"offload.disk", f"optimizer.{type(run.optimizer.optimizer).__name__}.on_disk"} <= set(fields)


def test_a_disk_that_is_full_in_mid_step_loses_nothing(tmp_path, monkeypatch) -> None:
    run = Run(on_disk(tmp_path / "disk")).train(0)
    run = Run(on_disk(tmp_path / "disk"))
    reserve, calls = os.posix_fallocate, []

    def reserve_until_full(*args: int) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*args)

    monkeypatch.setattr(os, "posix_fallocate", reserve_until_full)
    with pytest.raises(TrainError) as caught:
        run.train(0)
    assert caught.value.code == "offload-disk" and len(calls) > 3
    # The step is whole: it can be saved, and is the one that a run in memory has taken.
    run.optimizer.zero_grad()
    run.accelerator.save_state(str(tmp_path / "saved"))
    monkeypatch.undo()
    expected = Run({}).train(0, 1, 2).weights()
    assert all(map(torch.equal, run.train(1, 2).weights(), expected))  # room was made
    again = Run(on_disk(tmp_path / "other"))
    again.accelerator.load_state(str(tmp_path / "saved"))
    assert all(map(torch.equal, again.train(1, 2).weights(), expected))


class Counting(torch.optim.AdamW):
    elementwise = True


@pytest.mark.parametrize("make", [Lamb, torch.optim.Adafactor, Counting])
def test_others_are_refused_before_the_first_step(make, tmp_path) -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(PacelineError) as caught:
        Accelerator(cpu=True, plan=on_disk(tmp_path)).prepare(net, make(net.parameters()))
    assert caught.value.code == "offload-elementwise"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB, of which 16 are for trying out how fast it is."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# Of 4 Mi elements: 16 MiB of parameters.
WIDE = 2048


def wide(folder: Path, what: str, kind: str, more: dict[str, Any]) -> str:
    """Returns the code of the error of `prepare`, or "" if a step was taken."""
    gc.collect()  # files without names end with the tensors of the run before
    accelerator = Accelerator(cpu=True, plan={"offload": f"{what}=disk:{folder}", **more})
    net = nn.Linear(WIDE, WIDE, bias=False)
    try:
        model, optimizer = accelerator.prepare(net, OPTIMIZERS[kind](net.parameters()))
        accelerator.backward(model(torch.ones(2, WIDE)).sum())
        optimizer.step()
    except PrepareError as error:
        return error.code
    finally:
        accelerator.end_training()
    return ""


def test_the_forecast_is_compared_with_the_free_room_in_prepare(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(2**20))
    # AdamW with amsgrad keeps 48 MiB, which is more than there is; momentum 16 MiB, and plain SGD none.
    assert wide(small_disk, "optimizer", "AdamW", {}) == "offload-room"
    assert len(list(small_disk.iterdir())) == 1
    for kind in ("momentum", "plain", "Adagrad", "Lion"):
        assert wide(small_disk, "optimizer", kind, {}) == "", kind
    # 32 MiB of states fit, and beside 16 MiB of parameters they do not.
    assert wide(small_disk, "optimizer", "fused", {}) == ""
    assert wide(small_disk, "all", "fused", {"zero": 3}) == "offload-room"


def test_the_ranks_of_a_host_share_its_disk(small_disk: Path) -> None:
    """Each rank's states fit, and those of both do not; divided, they do again."""
    twice = run_ranks(wide, 2, args=(small_disk, "optimizer", "fused", {"replicate": 2}))
    assert twice == ["offload-room"] * 2
    for zero in (1, 3):
        assert run_ranks(wide, 2, args=(small_disk, "optimizer", "fused", {"shard": 2, "zero": zero})) == [""] * 2


def test_states_of_several_optimizers_are_added(small_disk: Path) -> None:
    accelerator = Accelerator(cpu=True, plan={"offload": f"optimizer=disk:{small_disk}"})
    nets = [nn.Linear(WIDE, WIDE // 2, bias=False) for _ in range(4)]
    pairs = [accelerator.prepare(net, OPTIMIZERS["fused"](net.parameters())) for net in nets[:2]]
    model, optimizer = pairs[0]  # what has a file is not counted twice
    accelerator.backward(model(torch.ones(2, WIDE)).sum())
    optimizer.step()
    assert accelerator.prepare(nets[2], OPTIMIZERS["momentum"](nets[2].parameters()))
    with pytest.raises(PacelineError) as caught:
        accelerator.prepare(nets[3], OPTIMIZERS["fused"](nets[3].parameters()))
    assert caught.value.code == "offload-room"


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PacelineError) as caught:
        Run(on_disk(tmp_path / "file"))
    assert caught.value.code == "offload-disk"
