"""Tensor parallel on accelerators: needs two of them; the numbers are those of one."""

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch, torch.nn.functional as F
from torch import nn
from paceline import Accelerator

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        return x + self.fc2(self.drop(F.gelu(self.fc1(self.norm(x)))))

torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
whole = nn.Sequential(nn.Embedding(128, 64), MLP(), MLP(), nn.Linear(64, 128))
model = nn.Sequential(nn.Embedding(128, 64), MLP(), MLP(), nn.Linear(64, 128))
model.load_state_dict(whole.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
accelerator = Accelerator(plan={"tp": 2})
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.randint(0, 128, (4, 16), device=accelerator.device)
model.eval(), whole.to(accelerator.device).eval()
torch.testing.assert_close(model(tokens), whole(tokens), atol=1e-5, rtol=1e-5)
model.train()
for _ in range(3):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert accelerator.gather(loss.detach()).unique().numel() == 1  # peers drop alike where they must
accelerator.end_training()
"""


def test_two_devices_give_the_numbers_of_one(tmp_path):
    if torch.accelerator.device_count() < 2:
        pytest.skip("missing: a second accelerator")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "launch", "--procs", "2", str(path)]
    ended = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
