"""`Accelerator` on an accelerator: everything is there, and the numbers are those of the CPU."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, TrainError

ROWS = 22  # the last batch of 4 holds two


def data(batch=4, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, **options)


def prepared(cpu=None, dropout=0.0, **settings):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=cpu, **settings)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, data(), schedule)


def train(accelerator, model, optimizer, loader, schedule, epochs=3):
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).pow(2).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def test_everything_is_on_the_device(device):
    accelerator, model, optimizer, loader, schedule = prepared()
    assert accelerator.device.type == device.type
    train(accelerator, model, optimizer, loader, schedule, epochs=1)
    assert {p.device.type for p in model.parameters()} == {device.type}
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert {moment.device.type for moment in moments} == {device.type}
    assert {x.device.type for x, _ in loader} == {device.type}
    assert Accelerator(cpu=True).device.type == "cpu"


def test_an_optimizer_that_has_trained_on_the_cpu_goes_on_here(device):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 8, device=accelerator.device)).sum())
    optimizer.step()
    assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {device.type}


@pytest.mark.parametrize("steps", [1, 3])
def test_the_numbers_of_the_cpu(steps):
    here = prepared(gradient_accumulation_steps=steps)
    there = prepared(cpu=True, gradient_accumulation_steps=steps)
    torch.testing.assert_close(train(*here), train(*there), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weights(here[1]), weights(there[1]), atol=1e-4, rtol=1e-3)


def test_token_losses_give_the_numbers_of_the_cpu():
    def run(cpu):
        accelerator, model, optimizer, loader, _ = prepared(cpu=cpu, gradient_accumulation_steps=2)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).pow(2).sum(), num_items=len(x))
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    torch.testing.assert_close(run(None), run(True), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision, device):
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        pytest.skip("missing: an accelerator that computes in bf16")
    accelerator, model, optimizer, loader, schedule = prepared(mixed_precision=precision)
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    losses = train(accelerator, model, optimizer, loader, schedule, epochs=10)
    assert set(seen) == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    output = model(next(iter(loader))[0])
    assert output.dtype == torch.float32
    with accelerator.autocast():
        assert (output @ output.T).dtype == seen[0]
    assert sum(losses[-6:]) < sum(losses[:6])


def test_an_overflow_skips_the_step_and_the_schedule():
    accelerator, model, optimizer, loader, schedule = prepared(mixed_precision="fp16", scaler={"init_scale": 2.0**40})
    before = weights(model)
    x, y = next(iter(loader))
    accelerator.backward((model(x) - y).pow(2).mean())
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(weights(model), before)
    assert schedule.scheduler.last_epoch == 0
    accelerator.backward(model(x).mean() * float("nan"))
    with pytest.raises(TrainError) as caught:
        optimizer.step()
    assert caught.value.code == "fp16-loss"
    assert torch.equal(weights(model), before)


def test_values_are_gathered_where_they_are(device):
    accelerator, _, _, loader, _ = prepared()
    got = []
    for _, y in loader:
        tree = accelerator.gather_for_metrics({"y": y, "mean": y.mean(), "flags": [y > 0], "rows": ["text"] * len(y)})
        assert tree["y"].device.type == device.type
        assert tree["flags"][0].dtype == torch.bool
        assert len(tree["mean"]) == 1
        got.append(tree["y"])
    assert torch.equal(torch.cat(got).cpu(), data(ROWS).dataset.tensors[1])
    one = torch.ones((), device=accelerator.device)
    assert accelerator.gather(one).shape == (1,)
    assert accelerator.reduce({"a": one}, "mean")["a"].device.type == device.type
    assert accelerator.pad_across_processes(y).shape == y.shape


def test_a_resume_goes_on_exactly_with_dropout(tmp_path):
    whole = prepared(dropout=0.5)
    train(*whole, epochs=1)
    whole[0].save_state(tmp_path / "saved")
    losses = train(*whole, epochs=2)
    again = prepared(dropout=0.5)
    torch.manual_seed(5)
    again[0].load_state(tmp_path / "saved")
    assert train(*again, epochs=2) == losses
    torch.testing.assert_close(weights(again[1]), weights(whole[1]), atol=0, rtol=0)


@pytest.mark.parametrize("first", ["device", "cpu"])
def test_checkpoints_travel_between_device_and_cpu(first, tmp_path):
    saver, loader = (prepared(cpu=cpu) for cpu in ((None, True) if first == "device" else (True, None)))
    train(*saver, epochs=1)
    saver[0].save_state(tmp_path / "saved")
    saver[0].save_model(saver[1], tmp_path / "model")
    loader[0].load_state(tmp_path / "saved")
    assert torch.equal(weights(saver[1]), weights(loader[1]))
    assert {p.device.type for p in loader[1].parameters()} == {loader[0].device.type}
    torch.testing.assert_close(train(*loader, epochs=1), train(*saver, epochs=1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 1, "pin_memory": True}])
def test_batches_of_any_nesting_are_copied_ahead(options, device):
    rows = [{"x": torch.full((256,), float(i)), "more": [torch.tensor(i), f"text {i}"]} for i in range(10)]
    accelerator = Accelerator(non_blocking=True)
    loader = accelerator.prepare(DataLoader(rows, 4, **options))
    for epoch in range(3):
        first = 0
        for batch in loader:
            torch.mm(torch.rand(1024, 1024, device=device), torch.rand(1024, 1024, device=device))  # keeps it busy
            assert batch["x"].device.type == batch["more"][0].device.type == device.type
            assert batch["x"].mean(1).tolist() == [float(first + i) for i in range(len(batch["x"]))]
            assert batch["more"][1][0] == f"text {first}"
            first += len(batch["x"])
            if epoch == 1:
                break
        assert first == (4 if epoch == 1 else 10)


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_step_never_waits_for_the_device(precision, device):
    if device.type != "cuda":
        pytest.skip("missing: CUDA, whose runtime tells of each wait")
    accelerator, model, optimizer, loader, schedule = prepared(mixed_precision=precision)
    (x, y), *_ = list(loader)
    for number in range(3):
        with accelerator.accumulate(model), no_waiting():
            accelerator.backward((model(x) - y).pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert optimizer.steps == number + 1


def test_forgetting_what_was_prepared_frees_memory(device):
    if device.type != "cuda":
        pytest.skip("missing: CUDA, which counts its memory")
    accelerator = Accelerator()
    before = torch.cuda.memory_allocated()
    model = accelerator.prepare(nn.Linear(1024, 1024))
    assert torch.cuda.memory_allocated() >= before + 4 * 1024 * 1024
    del model
    accelerator.free_memory()
    assert torch.cuda.memory_allocated() == before


SCRIPT = """
import json, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import Accelerator

torch.manual_seed(0)
accelerator = Accelerator()
x = torch.randn(22, 8, generator=torch.Generator().manual_seed(1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
rows = []
for epoch in range(2):
    for x, y in loader:
        loss = (model(x) - y).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        rows.append(len(accelerator.gather_for_metrics(y)))
accelerator.save_state("saved")
accelerator.load_state("saved")
state = accelerator.get_state_dict(model)
devices = accelerator.gather_for_metrics([str(accelerator.device)])
accelerator.print(json.dumps([devices, rows, torch.cat([v.cpu().flatten() for v in state.values()]).tolist()]))
accelerator.end_training()
"""


def launched(folder, *words):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline.cli.main", "launch", *words, "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_launched_processes_train_as_one_on_the_cpu(tmp_path, device):
    procs = 2 if torch.accelerator.device_count() >= 2 else 1
    devices, rows, trained = launched(tmp_path, "--procs", str(procs))
    assert len(devices) == procs
    assert all(each.startswith(device.type) for each in devices)
    _, rows_of_one, one = launched(tmp_path, "--procs", "1", "--cpu")
    assert rows == rows_of_one == [4, 4, 4, 4, 4, 2] * 2
    torch.testing.assert_close(trained, one, atol=1e-4, rtol=1e-3)


def test_ranks_on_devices_of_their_own(tmp_path):
    if torch.accelerator.device_count() < 2:
        pytest.skip(f"missing: a second accelerator (this machine shows {torch.accelerator.device_count()})")
    devices, rows, _ = launched(tmp_path, "--procs", "2")
    assert len(set(devices)) == 2
    assert rows == [4, 4, 4, 4, 4, 2] * 2
