"""Devices are found through torch.accelerator alone: a pretended one stands for every vendor's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.base.devices import DEVICES, device_type
from paceline.base.errors import WorldError
from paceline.testing import worlds
from paceline.world import device as devices


@pytest.fixture
def accelerator(monkeypatch):
    """Pretends that this host has `count` accelerators of a kind."""

    def pretend(kind: str, count: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        return chosen

    return pretend


# Types that this build of torch knows; others are tested with the simulated device (tests/gpu/test_names_of_devices.py).
@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_each_local_rank_takes_its_own(accelerator, kind: str) -> None:
    chosen = accelerator(kind, 4)
    found = [devices.detect(world) for world in worlds(8, local_size=4)]
    assert [str(device) for device in found] == [f"{kind}:{number}" for number in (0, 1, 2, 3) * 2]
    for device in found:
        devices.select(device)
    assert chosen == [0, 1, 2, 3] * 2


def test_apples_has_no_number(accelerator) -> None:
    chosen = accelerator("mps", 1)
    device = devices.detect(worlds(1)[0])
    devices.select(device)
    assert str(device) == "mps" and chosen == []


def test_a_process_that_sees_one_device_takes_it(accelerator) -> None:
    accelerator("cuda", 1)  # as a batch system shows each process its own
    assert [str(devices.detect(world)) for world in worlds(2)] == ["cuda:0", "cuda:0"]


def test_an_index_can_be_chosen(accelerator) -> None:
    accelerator("cuda", 4)
    assert devices.detect(worlds(1)[0], index=2) == torch.device("cuda", 2)


def test_cpu_is_forced(accelerator) -> None:
    chosen = accelerator("cuda", 4)
    device = devices.detect(worlds(1)[0], cpu=True)
    devices.select(device)
    assert device == torch.device("cpu") and chosen == []


def test_too_few_devices(accelerator) -> None:
    accelerator("cuda", 2)
    with pytest.raises(WorldError, match="process 3 needs cuda:3, but this host shows 2") as caught:
        devices.detect(worlds(4)[3])
    assert caught.value.code == "device-missing"
    with pytest.raises(WorldError, match="device-missing"):
        devices.detect(worlds(1)[0], index=7)


def test_backends(monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert devices.default_backend(torch.device("cpu")) == "gloo"
    assert devices.default_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    # torch knows none for it, but tests with an imaginary group register one.
    monkeypatch.delitem(dist.Backend.default_device_backend_map, "hpu", raising=False)
    for kind in ("xpu", "hpu"):
        assert devices.default_backend(torch.device(kind, 0)) == f"cpu:gloo,{kind}:{device_type(kind).backend}"
    assert devices.default_backend(torch.device("cuda", 1), "gloo") == "gloo"
    assert devices.default_backend(torch.device("cpu"), "mpi") == "cpu:mpi"
    assert devices.default_backend(torch.device("cuda", 1), "cpu:gloo,cuda:ucc") == "cpu:gloo,cuda:ucc"


def test_a_backend_that_torch_lacks() -> None:
    with pytest.raises(WorldError, match="no communication backend 'nccle'") as caught:
        devices.default_backend(torch.device("cpu"), "nccle")
    assert caught.value.code == "backend-missing"


def test_the_page_has_a_line_for_each_row() -> None:
    page = (Path(__file__).parents[5] / "docs" / "concepts" / "devices.md").read_text(encoding="utf-8")
    for key, row in DEVICES.items():
        if key in ("cpu", "meta"):
            continue
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {key} |")]
        cells = [cell.strip().strip("`") for cell in line.split("|")[2:-1]]
        assert cells == [row.name, row.visible, row.backend, row.package or "torch"]


def test_a_type_without_a_row_has_its_name() -> None:
    assert device_type("abc").title == "ABC" and device_type("abc").is_numbered and not device_type("abc").visible
