"""What runs measure of themselves, under every plan, on real processes."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import torch
from parity_models import GPT
from shared_ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, ConfigError
from paceline.parallel.strategy import STRATEGIES
from paceline_lens.observe import tap
from paceline_lens.observe.phases import PhaseListener, follow_phases

list(STRATEGIES)  # imported here, not by each rank of each test

STEPS, MICRO = 4, 2
FORWARD = 1_228_800  # of the whole model, for a step of one rank


def measured(plan, **more):
    """A loop of its own, which never calls `accumulate`."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, plan=plan, profile={"wall-clock": {"every": 0}, "flops": {}, "comms": {}, "memory": {}}
    )
    accelerator.gradients.weighs_by_samples = False
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    piped = accelerator.plan.layout.pp > 1
    accelerator.profiles.comms.reset()  # what `prepare` sent
    for _ in range(STEPS):
        for micro in range(MICRO):
            accelerator.gradients.sync = last = micro == MICRO - 1
            tokens = torch.randint(0, 24, (4, 8))
            with contextlib.nullcontext() if last or piped else accelerator.no_sync():
                accelerator.forward_backward(
                    model, (tokens, tokens), lambda out, to: functional.cross_entropy(out.flatten(0, 1), to.flatten())
                )
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    profiles = accelerator.profiles
    profiles.tell = lambda text: None
    profiles.finish()
    found = profiles.summary(straggler=True), profiles.wall_clock.last, profiles.text(), tap.installed()
    accelerator.end_training()
    return found


@pytest.mark.parametrize(
    "plan, ops",
    [
        ({}, {"all_reduce"}),
        ({"zero": 1, "shard": 2}, {"all_reduce", "send", "recv"}),
        ({"zero": 2, "shard": 2}, {"send", "recv"}),
        ({"zero": 3, "shard": 2}, {"send", "recv"}),
        ({"shard": 2, "zero": 3, "recompute": "blocks"}, {"send", "recv"}),
        pytest.param({"tp": 2}, {"all_reduce"}, marks=pytest.mark.needs("large")),
        pytest.param({"pp": 2}, {"send", "recv"}, marks=pytest.mark.needs("large")),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_every_plan_is_measured(plan, ops):
    results = run_ranks(measured, world=2, args=(plan,))
    for summary, last, text, left in results:
        flops, comms = summary["flops"], summary["comms"]
        assert not left and "straggler" not in text
        assert flops["parameters"] == sum(each.numel() for each in GPT().parameters())
        # Along tp and pp two ranks compute one copy of the model; otherwise each computes its own.
        divided = bool({"tp", "pp"} & set(plan))
        assert (flops["copy"], flops["everywhere"]) == (FORWARD, FORWARD if divided else 2 * FORWARD)
        assert (flops["step"], flops["micro_batches"]) == (2, MICRO)
        assert bool(flops["recomputed"]) == ("recompute" in plan)
        assert flops["model"]["calls"] == MICRO or "pp" in plan
        assert ops <= set(comms)
        assert last.total_ms == pytest.approx(sum(last.phases.values()))
        assert {"forward", "backward", "reduce", "clip", "step"} <= set(last.phases)
        assert len(last.micro_batches) == MICRO
        assert summary["memory"]["peak"] >= 0 and summary["memory"]["predicted"]["parameters"] > 0
        for sizes in comms.values():
            for size, one in sizes.items():
                assert one["count"] > 0 and one["total_ms"] > 0 and 0 <= one["straggler_ms"] <= one["total_ms"]
                assert size >= 0 and one["mean_ms"] <= one["total_ms"]
    assert sum(each[0]["flops"]["forward"] for each in results) == results[0][0]["flops"]["everywhere"]


def test_counts_and_sizes_are_those_that_were_sent():
    def work():
        accelerator = Accelerator(cpu=True, profile=["comms"])
        comms = accelerator.profiles.comms
        model = nn.Linear(50, 20, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(5):
            accelerator.backward(model(torch.ones(2, 50)).sum())
            optimizer.step()
            optimizer.zero_grad()
        reduced = comms.to_dict()["all_reduce"][4 * (50 * 20 + 1)]  # the only gradient, and the vote on it
        comms.reset()
        group = torch.distributed.group.WORLD
        mine, whole = torch.ones(3), torch.empty(6)
        torch.distributed.all_gather([whole[:3], whole[3:]], mine)
        torch.distributed.all_to_all_single(whole, whole.clone())
        for _ in range(3):
            torch.distributed.broadcast(mine, 0)
        torch.distributed.barrier()
        work = torch.distributed.isend(mine, 1) if accelerator.process_index == 0 else torch.distributed.irecv(mine, 0)
        work.wait()
        total = torch.distributed._functional_collectives.all_reduce(mine, "sum", group) + 0
        counts = {(one.op, one.size_bytes): one.count for one in comms.summary()}
        are_complete = all(one.mean_ms > 0 for one in comms.summary())
        accelerator.profiles.tell = lambda text: None
        accelerator.end_training()
        return reduced["count"], reduced["ranks"], counts, are_complete, total.tolist()

    for rank, (count, ranks, counts, are_complete, total) in enumerate(run_ranks(work, world=2)):
        assert (count, ranks, are_complete, total) == (5, 2, True, [2.0] * 3)
        assert counts == {
            ("all_gather", 12): 1,
            ("all_reduce", 12): 1,
            ("all_to_all_single", 24): 1,
            ("barrier", 0): 1,
            ("broadcast", 12): 3,
            ("recv" if rank else "send", 12): 1,
        }


def test_a_loop_with_accumulate_and_a_loader_is_told_and_written(tmp_path):
    def work(folder, profile):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, profile=profile, project_dir=folder)
        lines = []
        accelerator.profiles.tell = lines.append
        rows = torch.randn(48, 6)
        model, parts = nn.Linear(6, 1), DataLoader(TensorDataset(rows), 4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), parts)
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        values = accelerator.profiles.values()
        accelerator.end_training()
        last = accelerator.profiles.wall_clock.last
        return lines, [set(each) for each in last.micro_batches], values

    folder = str(tmp_path)
    (lines, micro, values), (other, _, _) = run_ranks(work, world=2, args=(folder, "wall-clock,memory"))
    assert len(lines) == 3 and lines[0].startswith("step 1: ") and other == []
    assert [{"data", "forward", "backward"} <= each for each in micro] == [True, True]
    assert values["profile/step_total_ms"] > 0 and values["profile/peak_bytes"] > 0
    written = [json.loads(line) for line in (tmp_path / "profile.jsonl").read_text().splitlines()]
    assert [each["profile"] for each in written] == ["wall-clock", "memory"]
    assert written[0]["steps"] == 3


def test_a_rank_that_waits_for_gradients_under_replicate_is_in_reduce(tmp_path):
    def work(reached):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        phases, is_main = follow_phases(accelerator.run), accelerator.is_main_process
        seen = []

        class Names(PhaseListener):
            def to(self, phase):
                seen.append(phase)
                if phase == "reduce" and step == 1 and is_main:
                    reached.touch()

        def last_to_come(gradient):
            """Rank 1 ends its backward pass once rank 0 says that it waits for it."""
            end = time.monotonic() + 30
            while step == 1 and not is_main and not reached.exists() and time.monotonic() < end:
                time.sleep(0.005)

        phases.listeners.append(Names())
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):  # noqa: B007  (`step` is read by the functions above)
            seen.clear()
            hidden = model[0].register_forward_hook(lambda *call: call[-1].register_hook(last_to_come) and None)
            accelerator.backward(model(torch.ones(2, 4)).sum())
            hidden.remove()
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
        return seen[:6], reached.exists()

    expected = ["forward", "rest", "backward", "rest", "reduce", "rest"], True
    assert run_ranks(work, world=2, args=(tmp_path / "reached",)) == [expected] * 2


def test_off_nothing_is_installed():
    def work():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        # One is that of the strategy, which averages gradients.
        hooks = len(model._forward_hooks)
        found = (
            accelerator.profiles,
            tap.installed(),
            accelerator.run.events.phase.is_followed,
            hooks,
        )
        accelerator.end_training()
        return found

    assert run_ranks(work, world=2) == [(None, False, False, 1)] * 2


def test_options_that_no_profile_takes():
    with pytest.raises(ConfigError, match="no option called 'flops_stp'") as error:
        Accelerator(cpu=True, profile={"flops": {"stp": 3}})
    assert error.value.code == "profile-options"
    with pytest.raises(ConfigError, match="profile"):
        Accelerator(cpu=True, profile="everything")


def test_options_from_the_command_line(monkeypatch):
    monkeypatch.setenv("PACELINE_OPTIONS", "{profile: {flops_step: 3, comms_ops: 'all_reduce,send'}}")
    accelerator = Accelerator(cpu=True, profile="flops,comms")
    try:
        assert accelerator.profiles.flops.step == 3
        assert accelerator.profiles.comms.ops == {"all_reduce", "send"}
        accelerator.prepare(nn.Linear(2, 2))
        assert "no effect" not in accelerator.plan.explain()
    finally:
        accelerator.profiles.tell = lambda text: None
        accelerator.end_training()
