"""DeepSpeed's words for profiles."""

import os
import re

import torch
from torch import nn
from torch.nn import functional

from paceline.testing import run_ranks
from paceline_deepspeed import flops_profiler, profiling
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.pipe import PipelineModule
from paceline_deepspeed.timers import SynchronizedWallClockTimer, timed
from paceline_lens.observe.operations import ModulePart, Profile


def simple():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def test_a_model_has_the_numbers_that_people_know(capsys, tmp_path):
    found = flops_profiler.get_model_profile(simple(), (8, 1, 28, 28), top_modules=2)
    assert found == ("1.63 M", "813.06 KMACs", "101.77 K")
    shown = capsys.readouterr().out
    assert "fwd MACs per GPU:" in shown and "depth 1:" in shown
    flops_profiler.get_model_profile(simple(), args=[torch.randn(8, 784)], output_file=str(tmp_path / "profile.txt"))
    assert "813.06 KMACs = 100.0% MACs" in (tmp_path / "profile.txt").read_text()
    numbers = flops_profiler.get_model_profile(simple(), (8, 784), print_profile=False, as_string=False)
    assert numbers == (1_626_112, 813_056, 101_770)


def test_a_profiler_of_a_script_s_own(capsys):
    model = simple()
    profiler = flops_profiler.FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(8, 784)).sum().backward()
    profiler.stop_profile()
    model(torch.randn(8, 784))
    assert profiler.get_total_macs() == 813_056 and profiler.get_total_params(as_string=True) == "101.77 K"
    assert 0 < profiler.get_total_duration() < 60
    profiler.print_model_profile(profile_step=5, detailed=False)
    profiler.end_profile()
    assert "Profile Summary at step 5:" in capsys.readouterr().out


def test_a_recomputed_function_and_timers_are_told(capsys):
    x = torch.randn(4, 4, requires_grad=True)
    timed(torch.tanh)(x).sum().backward()
    timers = SynchronizedWallClockTimer()
    timers("load").start()
    timers("load").stop()
    assert timers("load").mean() >= 0
    timers.log(["load", "other"])
    lines = capsys.readouterr().out.splitlines()
    for line, word in zip(lines, ("fwd", "backward", "load"), strict=True):
        assert re.fullmatch(rf"time \(ms\) \| {word}: \d+\.\d\d", line)


def engine_run():
    lines = []
    profiling._say, kept = lines.append, profiling._say
    config = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True},
        "comms_logger": {"enabled": True},
        "memory_breakdown": True,
    }
    try:
        engine = initialize(model=simple(), config=config)[0]
        for _ in range(8):
            loss = functional.cross_entropy(engine(torch.randn(8, 784)), torch.randint(0, 10, (8,)))
            engine.backward(loss)
            engine.step()
        found = profiling.log_summary(show_straggler=True, return_dict=True)
        return lines, engine.get_wall_clock_timers(), found
    finally:
        profiling._say = kept


def test_an_engine_tells_as_deepspeed_does():
    (lines, timers, comms), (other, _, _) = run_ranks(engine_run, world=2)
    told = [line for line in lines if line.startswith("[Rank 0] time (ms) | ")]
    assert len(told) == 12 and other == []  # two micro-batches and their sum, four times
    assert re.sub(r"[\d.]+", "0", told[0].split("| ", 1)[1]) == (
        "fwd_microstep: 0 | bwd_microstep: 0 | bwd_inner_microstep: 0 | bwd_allreduce_microstep: 0 | step_microstep: 0"
    )
    assert set(timers) >= {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step", "fwd_microstep"}
    (profile,) = [line for line in lines if "Flops Profiler" in line]
    assert "Profile Summary at step 1:" in profile  # as the config counts
    order = [profile.index(f"\n{name}:") for name in (
        "world size", "data parallel size", "model parallel size", "batch size per GPU", "params per GPU",
        "params of model", "fwd MACs per GPU", "fwd flops per GPU", "fwd flops of model", "fwd latency",
        "fwd FLOPS per GPU", "bwd latency", "bwd FLOPS per GPU", "fwd+bwd FLOPS per GPU", "step latency",
        "iter latency", "FLOPS per GPU", "samples/second",
    )]  # fmt: skip
    assert order == sorted(order)
    # The large matrix travels alone; the other parameters are packed.
    for size in (4 * 784 * 128, 4 * (128 + 128 * 10 + 10)):
        for part in ("summary", "straggler_analysis"):
            assert comms[part]["all_reduce"][size]["count"] == 4, comms["summary"]["all_reduce"].keys()
    assert any("Comm. Op" in line and "Straggler(ms)" in line for line in lines)


def measured():
    """What a config says is what is measured, and nothing else."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "flops_profiler": {"enabled": True, "profile_step": 3, "top_modules": 2},
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "broadcast"]},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    profiles = initialize(model=nn.Linear(4, 4), config=config)[0].accelerator.profiles
    assert (profiles.wall_clock, profiles.memory) == (None, None)
    assert (profiles.flops.step, profiles.flops.top) == (4, 2)
    assert profiles.comms.ops == {"all_reduce", "broadcast"}
    clock = initialize(model=nn.Linear(4, 4), config={**config, "wall_clock_breakdown": True})[0].accelerator.profiles
    return clock.wall_clock.every


def test_the_profiles_are_those_of_the_config():
    assert run_ranks(measured, world=1) == [0]


def piped():
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True, "output_file": os.devnull},
    }
    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=functional.mse_loss)
    engine = initialize(model=model, config=config)[0]
    for _ in range(4):
        engine.train_batch(iter([(torch.randn(2, 4), torch.randn(2, 4))] * 2))
    return engine.accelerator.profiles.flops.profile, engine.events.timers.last


def test_a_pipeline_waits_too():
    for found, last in run_ranks(piped, world=2):
        assert found.pipeline_ms > 0 and last["pipe"] > 0
        assert found.total_ms >= found.forward_ms + found.backward_ms + found.pipeline_ms + found.step_ms
    profile = Profile(ModulePart("", "Net"), forward_ms=1.0, backward_ms=2.0, pipeline_ms=16.0, step_ms=1.0)
    told = dict(
        line.split(":", 1) for line in flops_profiler.profile_text(profile, samples=4).splitlines() if ":" in line
    )
    rows = {name: value.strip() for name, value in told.items()}
    assert (rows["pipe latency"], rows["iter latency"], rows["samples/second"]) == ("16 ms", "20 ms", "200.00")


def overflowing():
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "wall_clock_breakdown": True,
    }
    engine = initialize(model=nn.Linear(4, 4), config=config)[0]
    for number in range(6):
        engine.backward(engine(torch.randn(2, 4)).sum() * (float("inf") if number in (2, 3) else 1.0))
        engine.step()
    return engine.skipped_steps, engine.accelerator.profiles.wall_clock.last.step


def test_a_step_that_is_left_out_is_a_step_of_the_clock():
    assert run_ranks(overflowing, world=1) == [(2, 5)]  # the sixth ends with the seventh's beginning


def test_numbers_are_written_as_deepspeed_writes_them() -> None:
    from paceline_deepspeed import flops_profiler as profiler

    # Recorded from DeepSpeed 0.19.8.
    assert [profiler.number_to_string(num) for num in (0, 12, 12345, 1e6, 0.1, 1.5e-4)] == [
        "0 ", "12 ", "12.35 K", "1 M", "100 m", "150 u",
    ]  # fmt: skip
    assert [profiler.params_to_string(num) for num in (999, 2.5e9)] == ["999", "2.5 B"]
    assert profiler.number_to_string(5e6, "K") == "5000 K" and profiler.params_to_string(5e6, units="M") == "5 M"
    assert profiler.flops_to_string(1.23456e12, precision=3) == "1.235 TFLOPS"
    assert [profiler.duration_to_string(seconds) for seconds in (0, 1e-6, 0.5, 100)] == [
        "0 s",
        "1 us",
        "500 ms",
        "100 s",
    ]
