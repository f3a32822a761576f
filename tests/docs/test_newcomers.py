"""Five people in their first hour: each does a task by what the pages say, and nothing else.

The commands are those of the pages (a test says so); the scripts are those that the pages show, with their small changes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from page_reader import blocks
from warm_python import executable

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PLAIN_CNN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.randn(96, 1, 8, 8)
labels = (images.mean((1, 2, 3)) > 0).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=32)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
"""


def page_block(page: str, title: str) -> str:
    """The text of a file that a page shows."""
    (text,) = [block.text for block in blocks(DOCS / page) if block.title == title][:1]
    return text


def run(folder: Path, *words: str, code: int | None = 0) -> str:
    """What a command prints, on both streams."""
    done = subprocess.run(
        [executable(), "-m", "paceline", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def fix_of(text: str) -> str:
    """The last fix of an error, which is what people read."""
    return re.findall(r"^\s+fix: (.*)$", text, re.MULTILINE)[-1]


def test_a_student_runs_a_small_network_on_two_processes(tmp_path: Path) -> None:
    """`README.md`: the five lines of the diff, and the same losses on two processes."""
    (tmp_path / "before.py").write_text(PLAIN_CNN)
    changed = PLAIN_CNN.replace("import torch\n", "import torch\nfrom paceline import Accelerator\n", 1)
    changed = changed.replace(
        "torch.manual_seed(0)\n",
        "torch.manual_seed(0)\naccelerator = Accelerator(cpu=True, split_batches=True)\n",
    )
    changed = changed.replace(
        "for epoch", "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\nfor epoch"
    ).replace("loss.backward()", "accelerator.backward(loss)")
    printed = """accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss, 'mean').item():.4f}")"""
    changed = re.sub(r"print\(f.*", printed, changed)
    (tmp_path / "train.py").write_text(changed)
    before = subprocess.run([executable(), "before.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    after = run(tmp_path, "launch", "--procs", "2", "train.py")
    numbers = re.compile(r"epoch \d: loss \d\.\d{4}")
    assert numbers.findall(after) == numbers.findall(before.stdout) and len(numbers.findall(after)) == 2


def test_a_student_types_the_flags_of_another_launcher(tmp_path: Path) -> None:
    """What the error says is typed, and works."""
    (tmp_path / "train.py").write_text("from paceline import Accelerator\nprint(Accelerator(cpu=True).plan.layout)\n")
    error = run(tmp_path, "launch", "--nproc", "2", "--fsdp", "train.py", code=2)
    typed = fix_of(error).partition("`paceline ")[2].rstrip("`").split()
    assert "shard 2" in run(tmp_path, *typed)


def test_an_engineer_with_hosts_looks_before_a_job_waits_in_the_queue(tmp_path: Path) -> None:
    """`how-to/which-launcher.md`: its row for SLURM, with `--dry-run`, requests GPUs."""
    (tmp_path / "train.py").write_text(page_block("how-to/which-launcher.md", "train.py"))
    rows = (DOCS / "how-to" / "which-launcher.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| SLURM \| `paceline (launch .*?)` \|", rows, re.MULTILINE)
    words = row.split()
    script = run(tmp_path, *words[:-1], "--dry-run", words[-1])
    assert "#SBATCH --gpus-per-node=8" in script and "no GPU is requested" not in script
    forgotten = run(tmp_path, "launch", "--on", "slurm", "--nodes", "2", "--procs", "8", "--dry-run", "train.py")
    assert "no GPU is requested" in forgotten and "--gpus-per-node" not in forgotten


def test_a_researcher_whose_run_stops_reads_the_last_line(tmp_path: Path) -> None:
    """`how-to/anomalies.md`: a NaN ends the run, and its last line says what can be done."""
    shown = [block.text for block in blocks(DOCS / "how-to" / "anomalies.md") if "broken sample" in block.text]
    script = shown[0].replace('"nan": "skip"', '"nan": "stop"')
    assert script != shown[0]
    (tmp_path / "train.py").write_text(script)
    printed = run(tmp_path, "launch", "--procs", "2", "train.py", code=65)
    last = printed.strip().splitlines()[-1]
    assert last.strip().startswith("fix: ") and "resume from the last checkpoint" in last


def test_a_contributor_finds_the_commands_that_the_page_names() -> None:
    """`CONTRIBUTING.md`: each command of its table is an entry of the Makefile."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    entries = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"^\| `make ([a-z-]+)", page, re.MULTILINE))
    assert {"check", "test", "docs"} <= named <= entries and "quickstart" in entries


def test_a_notebook_user_starts_two_processes_under_another_name(tmp_path: Path) -> None:
    """`tutorial/notebook.md`: a function, started by `notebook_launcher`; a wrong name is told with the right one."""
    cell = (
        "from paceline import Accelerator, notebook_launcher\n\n\n"
        "def train():\n    return Accelerator(cpu=True).num_processes\n\n\n"
        "if __name__ == '__main__':\n    print('processes:', notebook_launcher(train, NAME))\n"
    )
    (tmp_path / "cell.py").write_text(cell.replace("NAME", "nprocs=2"))
    done = subprocess.run([executable(), "cell.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert "argument-unknown" in done.stderr
    (tmp_path / "cell.py").write_text(cell.replace("NAME", fix_of(done.stderr).removeprefix("write ")))
    done = subprocess.run([executable(), "cell.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert "processes: 2" in done.stdout, done.stderr
