"""Offload on an accelerator: states in the host's memory, and the same numbers."""

import torch
from torch import nn

from paceline import Accelerator
from paceline.precision.scaler import LossScaler
from paceline.world.collectives import Collectives
from paceline.world.world import World


def trained(**plan):
    torch.manual_seed(0)
    accelerator = Accelerator(plan=plan)
    net = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).to(accelerator.device)
    for _ in range(5):
        accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer, torch.cat([p.detach().cpu().flatten() for p in net.parameters()])


def test_states_are_on_the_host_and_numbers_the_same(device):
    *_, expected = trained()
    accelerator, _, optimizer, found = trained(offload="optimizer")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert {v.device.type for s in optimizer.state.values() for v in s.values() if v.dim()} == {"cpu"}
    assert all(p.device.type == device.type for group in optimizer.param_groups for p in group["params"])
    assert any(d.value == "yes" for d in accelerator.plan.decisions if d.field.endswith("offloaded"))


def test_states_are_loaded_back_to_the_host(device, tmp_path):
    accelerator, model, optimizer, _ = trained(offload="optimizer")
    accelerator.save_state(str(tmp_path / "c"))
    before = {n: v.clone() for n, v in next(iter(optimizer.state.values())).items()}
    accelerator.load_state(str(tmp_path / "c"))
    after = next(iter(optimizer.state.values()))
    assert all(torch.equal(before[name].cpu(), after[name]) for name in before)
    accelerator.backward(model(torch.ones(1, 8, device=device)).sum())
    optimizer.step()


def test_gradients_on_the_host_and_on_the_device_have_one_scaler(device, monkeypatch):
    """As FSDP2 leaves them, which offloads all parameters but those without dimensions."""
    plain = torch.amp.GradScaler._unscale_grads_
    places = []

    def unscale(self, optimizer, inv_scale, found_inf, allow_fp16):
        places.append((inv_scale.device.type, found_inf.device.type))
        return plain(self, optimizer, inv_scale, found_inf, allow_fp16)

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", unscale)
    on_host = nn.Parameter(torch.ones(3))
    on_device = nn.Parameter(torch.ones((), device=device))
    optimizer = torch.optim.SGD([on_host, on_device], lr=1.0)
    collectives = Collectives(World(), device=device)
    scaler = LossScaler(device, collectives, lambda: True, init_scale=4.0)
    for gradient, skipped in ((4.0, False), (float("inf"), True)):
        scaler.refresh()
        scaler.scale(torch.ones((), device=device))
        on_host.grad = torch.full_like(on_host, gradient)
        on_device.grad = torch.full_like(on_device, 4.0)
        assert scaler.step(optimizer) == skipped
    # The copies to the host have ended before a kernel there reads them: torch itself does not wait.
    assert places == [("cpu", "cpu")] * 2
    assert on_host.tolist() == [0.0] * 3 and on_device.item() == 0.0
