"""Offload on an accelerator: states in the host's memory, and the same numbers."""

import torch
from torch import nn

from paceline import Accelerator


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
    return accelerator, optimizer, torch.cat([p.detach().cpu().flatten() for p in net.parameters()])


def test_states_are_on_the_host_and_numbers_the_same(device):
    _, _, expected = trained()
    accelerator, optimizer, found = trained(offload="optimizer")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert {v.device.type for s in optimizer.state.values() for v in s.values() if v.dim()} == {"cpu"}
    assert all(p.device.type == device.type for group in optimizer.param_groups for p in group["params"])
    assert any(d.value == "yes" for d in accelerator.plan.decisions if d.field.endswith("offloaded"))


def test_states_are_loaded_back_to_the_host(device, tmp_path):
    accelerator, optimizer, _ = trained(offload="optimizer")
    accelerator.save_state(str(tmp_path / "c"))
    before = {n: v.clone() for n, v in next(iter(optimizer.state.values())).items()}
    accelerator.load_state(str(tmp_path / "c"))
    after = next(iter(optimizer.state.values()))
    assert all(torch.equal(before[name].cpu(), after[name].cpu()) for name in before)
