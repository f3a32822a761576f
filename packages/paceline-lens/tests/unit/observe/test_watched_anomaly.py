"""An anomaly is a line of the journal of a watched run."""

import json

import torch
from torch import nn

from paceline import Accelerator


def test_a_line_of_the_journal(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path))
    accelerator = Accelerator(cpu=True, anomalies={"nan": "skip"})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((2, 2), torch.nan)).mean())
    optimizer.step()
    accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "anomaly"]
    assert line.pop("t") > 0
    assert line == {
        "kind": "anomaly", "step": 1, "what": "nan", "value": "nan", "limit": None, "action": "skip",
        "text": "Step 1: the loss is not a finite number on rank 0. The step is left out.",
    }  # fmt: skip
