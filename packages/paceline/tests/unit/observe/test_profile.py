"""`profile`: names for activities, a schedule, and one trace file a rank."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.base.errors import ConfigError
from paceline.observe.profile import profile


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of every profiler
def test_it_records_and_writes_a_trace_file(tmp_path):
    with profile(activities=["cpu"], record_shapes=True, output_trace_dir=tmp_path / "traces", rank=3) as prof:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert any(event.key == "aten::mm" for event in prof.key_averages())
    assert json.loads((tmp_path / "traces" / "profile_3.json").read_text())["traceEvents"]


# torch's own note that a cycle forgets the one before; as an error it would break off inside the profiler.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_schedule_calls_back_at_each_cycle():
    ready = []
    schedule = {"wait": 1, "warmup": 1, "active": 1, "repeat": 2}
    with profile(activities=["cpu"], schedule_option=schedule, on_trace_ready=ready.append) as prof:
        for _ in range(7):
            torch.ones(2).sum()
            prof.step()
    assert len(ready) == 2


def test_an_activity_that_is_not_here():
    with pytest.raises(ConfigError, match=r"activities=\['cpu'\]") as caught, profile(activities=["cpu", "abacus"]):
        pass
    assert caught.value.code == "profile-activity"
