"""FSDP2 on an accelerator: bf16 units, prefetch and offload train as one plain float32 process does, nearly."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import Accelerator


@pytest.fixture
def alone(monkeypatch):
    """A world of one process with a group of its own: FSDP2 needs one, and a test machine may have one device."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(29500 + os.getpid() % 1000))
    dist.init_process_group(device_id=torch.device("cuda", 0) if torch.cuda.is_available() else None)
    yield
    dist.destroy_process_group()


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def losses(model, optimizer, device, steps=5):
    found = []
    for _ in range(steps):
        loss = (model(torch.linspace(-1, 1, 512, device=device).view(8, 64)) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("offload", ["", "memory", "disk"], ids=["stays", "offloaded", "on disk"])
def test_units_on_the_device(alone, device, offload, tmp_path):
    """The pieces that `shard` puts together, on a mesh of one rank: width 1 is no plan, so `apply`'s parts are called."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    from paceline.parallel.data.averages import broadcast_values, tensors_of
    from paceline.parallel.data.fsdp import Units
    from paceline.parallel.data.shard import ShardOptions
    from paceline.parallel.divided_parameters import whole_parameters
    from paceline.parallel.strategy import Context
    from paceline.plan.facts import model_facts
    from paceline.plan.plan import Plan
    from paceline.world.collectives import Collectives
    from paceline.world.layout import Layout
    from paceline.world.mesh import mesh_of
    from paceline.world.world import World
    from paceline_large.offload.parameters_on_disk import ParametersOnDisk

    plain = net().to(device)
    model = copy.deepcopy(plain)
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), device)
    broadcast_values(tensors_of(model), lambda _: dist.group.WORLD)
    named = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=offload == "memory") if offload else OffloadPolicy(),
    }
    for block in model:
        fully_shard(block, **named)
    fully_shard(model, **named)
    world = World.detect()
    mesh = mesh_of(Layout(), world, device.type)
    collectives = Collectives(world, device=device)
    units = Units(model, Context(Plan(), mesh, collectives, device, model_facts(plain), options=ShardOptions()))
    if offload == "disk":
        ParametersOnDisk(model, tmp_path, lambda _: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with units.hold_gradients():
        model(torch.ones(8, 64, device=device)).float().sum().backward()
    units.finish_reduction()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    assert {p.device.type for p in model.parameters()} == {"cpu" if offload else device.type}
    assert losses(model, optimizer, device) == pytest.approx(want, abs=2e-2)
    with whole_parameters(model, writeback=False):
        assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_meta_model_is_made_on_the_device(device):
    accelerator = Accelerator()
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    model = accelerator.prepare(model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device.type}
    assert torch.isfinite(model(torch.randn(4, 16, device=device))).all()
