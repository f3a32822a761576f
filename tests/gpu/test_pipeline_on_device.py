"""A pipeline on accelerators: stages on one device, and two ranks where there are two devices."""

import os
import subprocess
import sys

import pytest
import torch
from parity_models import GPT, loss_of

from paceline.plan.blocks import repeated_blocks
from paceline_large.pipeline.stages import EndOfStage, Stages, Visit


def test_stages_on_the_device_are_the_model(device):
    torch.manual_seed(0)
    whole = GPT().to(device)
    x = torch.randint(0, 24, (2, 8), device=device)
    hidden, outputs = None, {}
    for number in range(2):
        torch.manual_seed(0)
        model = GPT().to(device)
        stages = Stages(model, repeated_blocks(model), (0, 2), (number,), (), device)
        stages.outputs = outputs
        visit = Visit(number, hidden, {})
        with stages.entering(visit):
            try:
                hidden = model(x)
            except EndOfStage as leave:
                hidden = leave.hidden
        outputs |= visit.recorded
    torch.testing.assert_close(hidden, whole(x))
    loss_of(hidden, x).backward()


SCRIPT = """
import torch
from parity_models import GPT, loss_of
from paceline import Accelerator

torch.manual_seed(7)
accelerator = Accelerator(plan={"pp": COUNT}, options={"pipeline": {"schedule": "SCHEDULE"}})
model = GPT(tied=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4))
generator = torch.Generator().manual_seed(5)
for _ in range(3):
    tokens = torch.randint(0, 24, (8, 9), generator=generator).to(accelerator.device)
    loss = accelerator.forward_backward(model, (tokens[:, :-1], tokens[:, 1:]), loss_of)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.5f}")
accelerator.end_training()
"""


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="missing: two accelerators")
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
def test_two_devices_give_the_numbers_of_one(tmp_path, schedule):
    losses = []
    for count in (1, 2):
        script = tmp_path / f"train{count}.py"
        text = SCRIPT.replace("COUNT", str(count)).replace("SCHEDULE", schedule)
        script.write_text(text)
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "launch", "--procs", str(count), str(script)],
            capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": here},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.split("loss ")[1]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
