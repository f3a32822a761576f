"""`paceline plan` as people type it: real scripts, rehearsed; and memory that really does not suffice."""

import json
import subprocess

import pytest
from warm_python import executable

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import Accelerator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

accelerator = Accelerator(log_with="jsonl", project_dir="logs")
accelerator.init_trackers("run")
model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = TensorDataset(torch.randn(64, 256), torch.randint(10, (64,)))
loader = DataLoader(data, batch_size=int(sys.argv[1]) if sys.argv[1:] else 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.save_state("first")
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss:.3f}", loss.item(), float(loss), loss.detach().numpy())
    accelerator.log({"loss": loss.item()})
    if accelerator.gather_for_metrics(loss.detach()).mean().item() > 5:
        raise RuntimeError("a loss that nobody computed")
print("a rehearsal must never come here", len(loader) / 0)
"""
PARAMETERS = 4 * (256 * 2 + 256 * 1024 + 1024 + 1024 * 256 + 256) + 256 * 10 + 10


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def plan(folder, *words, code=0):
    done = subprocess.run(
        [executable(), "-m", "paceline", "plan", *words], capture_output=True, text=True, timeout=120, cwd=folder
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code != 2 else done.stderr


def test_the_report_of_a_sharded_run_and_nothing_is_written(folder):
    # Batch norms have a group of their own, which a rehearsal's backend forms without any options.
    (folder / "train.py").write_text(SCRIPT.replace("nn.LayerNorm(256)", "nn.BatchNorm1d(256)"))
    text = plan(folder, "--procs", "4", "--nodes", "2", "--shard", "8", "--device", "h200-141GB", "train.py", "8")
    assert text.startswith("plan: shard 8, precision no")
    assert "batch_norm.statistics = synced" in text
    assert "shard = 8  <- command line (--shard)" in text
    assert "memory of rank 0, the first of 8 processes" in text and "fits in the 141.0 GiB" in text
    assert "allgather  " in text and "across nodes" in text
    assert "loss" not in text
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_bytes_are_those_of_the_textbook(folder):
    found = json.loads(plan(folder, "--procs", "4", "--shard", "4", "--zero", "1", "--json", "train.py"))
    largest = found["largest"]
    assert found["rehearsed"] and found["layout"]["shard"] == 4 and "zero" in found["strategies"]
    assert largest["parameters"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert largest["optimizer"] == pytest.approx(8 * PARAMETERS / 4, rel=0.05)
    assert largest["gradients"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert found["flops"] == pytest.approx(6 * 4 * PARAMETERS, rel=0.1)  # four rows of a batch


@pytest.mark.needs("large")
@pytest.mark.parametrize(("procs", "offload", "divided"), [(4, "all", 0), (1, "all", 0), (4, "optimizer=disk:/a", 1)])
def test_what_waits_on_the_host_is_not_on_the_device(folder, procs, offload, divided):
    words = ["--procs", str(procs), "--zero", "3", "--device", "a100", "--offload", offload, "--json", "train.py"]
    largest = json.loads(plan(folder, *words))["largest"]
    assert largest["parameters"] == pytest.approx(divided * PARAMETERS, rel=0.01)
    assert largest["optimizer"] < 1000  # the numbers of steps, which the script's optimizer makes on its device
    assert largest["other"] < PARAMETERS / 2  # a foreach step would take as much memory as the shards
    # One unit's are on the device as they are reduced.
    assert largest["gradients"] <= PARAMETERS * (1.01 if divided else 2 / procs)


def test_states_in_8_bits_are_counted_as_they_are(folder):
    pytest.importorskip("torchao", reason="torchao is not installed")
    script = SCRIPT.replace("torch.optim.AdamW(model.parameters(), 1e-3)", "adamw8bit(model.parameters())")
    (folder / "train.py").write_text("from paceline.optim import adamw8bit\n" + script)
    found = json.loads(plan(folder, "--procs", "2", "--shard", "2", "--zero", "1", "--json", "train.py"))
    assert found["rehearsed"]
    # Two codes a parameter, and a scale of 4 bytes for each 256 of them.
    assert found["largest"]["optimizer"] == pytest.approx(2 * (1 + 4 / 256) * PARAMETERS / 2, rel=0.02)


def test_auto_takes_the_cheapest_plan_that_fits_and_says_why_not_another(folder):
    big = SCRIPT.replace("1024", "65536").replace("range(4)", "range(8)")
    (folder / "big.py").write_text(big)
    text = plan(folder, "--procs", "8", "--device", "a100-4GB", "big.py", code=1)
    assert "DOES NOT FIT" in text and "fits instead: --shard 8 --zero 1  (" in text
    found = json.loads(plan(folder, "--procs", "8", "--device", "a100-4GB", "--shard", "auto", "--json", "big.py"))
    assert found["chosen"] == {"replicate": 1, "shard": 8, "zero": 1} and found["fits"]
    (rejected,) = found["rejected"]
    assert rejected["settings"]["replicate"] == 8 and rejected["reason"].startswith("needs 4.0 GiB a rank, 3.8 GiB")


def test_what_cannot_be_planned_is_said(folder):
    assert "[plan-device]" in plan(folder, "--procs", "2", "--shard", "auto", "train.py", code=2)
    assert "`paceline plan` needs a script" in plan(folder, "--procs", "2", code=2)
    (folder / "empty.py").write_text("import nothing_of_this_name\n")
    done = subprocess.run(
        [executable(), "-m", "paceline", "plan", "empty.py", "--shard", "2", "--json"],
        capture_output=True, text=True, timeout=60, cwd=folder,
    )  # fmt: skip
    assert "`--shard 2` and `--json`: what stands after the script is for the script" in done.stderr
    assert done.returncode == 1 and "[plan-rehearsal]" in done.stderr and "nothing_of_this_name" in done.stderr
    done = subprocess.run(
        [executable(), "-m", "paceline", "plan", "--procs", "2", "--shard", "3", "train.py"],
        capture_output=True, text=True, timeout=60, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 1 and "[plan-size]" in done.stderr


def test_a_script_that_stops_short_is_planned_by_formulas(folder):
    (folder / "short.py").write_text(SCRIPT.split("for x, y")[0] + "raise ValueError('no data today')\n")
    text = plan(folder, "--procs", "2", "--shard", "2", "short.py")
    assert "by formulas alone" in text and "ValueError: no data today" in text and "short.py:" in text


@pytest.mark.needs("large")
def test_float8_on_a_device_computes_the_rest_in_16_bits(folder):
    words = ("--procs", "2", "--mixed-precision", "fp8", "train.py")
    assert "options.fp8.dtype = float32" in plan(folder, *words)
    assert "options.fp8.dtype = bf16" in plan(folder, "--device", "h100-80GB", *words)


@pytest.mark.needs("large")
def test_a_pipeline_is_rehearsed_and_drawn(folder):
    loop = "    accelerator.forward_backward(model, (x, y), nn.functional.cross_entropy)\n    optimizer.step()\n"
    (folder / "pipe.py").write_text(SCRIPT.split("    loss = ")[0] + loop)
    text = plan(folder, "--procs", "2", "--pp", "2", "--draw", "pipe.py")
    assert "at the peak" in text and "rank 0  F0 F1" in text
    assert "no forecast of its time on this machine: there is no calibration" in text


def test_memory_that_really_does_not_suffice(tmp_path):
    (tmp_path / "oom.py").write_text("""
import resource
import torch
from torch import nn
from paceline import Accelerator

accelerator = Accelerator(cpu=True)
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 130 * 2**20,) * 2)
for _ in range(2):
    accelerator.backward(model(torch.randn(4, 2048)).sum())
    optimizer.step()
    optimizer.zero_grad()
""")
    done = subprocess.run([executable(), "oom.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert "[out-of-memory]" in done.stderr and "DefaultCPUAllocator: can't allocate memory" in done.stderr
    assert "parameters 64.0 MiB, gradients 64.0 MiB, optimizer 128.1 MiB" in done.stderr
    assert "launch with `--procs 2 --shard 2" in done.stderr
