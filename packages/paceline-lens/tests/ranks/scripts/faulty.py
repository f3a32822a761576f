"""A small run that meets the faults it is told of, and writes down every loss.

`faulty.py CASE.json`: the case holds the folder, the faults, and what else the loop does.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline import Accelerator, Keep
from paceline.testing import Fault, arm, damage

_CAPABILITY_VERSION, _WRITE_ANYWHERE = 0x20080522, 1 << 1
SAMPLES, BATCH, EPOCHS, WIDTH, SAVE_EVERY = 118, 12, 2, 16, 3  # ten batches an epoch, the last one not full


class Samples(Dataset):
    """Made where they are asked for, so that loader workers have something to do."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1)


class Count:
    """Batches done: a registered object."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict) -> None:
        self.batches = state["batches"]


def note(path: Path, text: str) -> None:
    """Adds a line at once: whoever is killed afterwards has written it whole."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(number, f"{text}\n".encode())
    os.close(number)


def children(pid: int) -> dict[int, str]:
    """Processes that a process started, with their command lines."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            words = (each / "cmdline").read_bytes().decode().replace("\0", " ")
        except (OSError, IndexError):
            continue
        if parent == pid:
            found[int(each.name)] = words
    return found


class Run:
    """The faults of one case.

    Attributes:
        folder: where losses and struck faults are noted.
        project: where checkpoints go.
    """

    def __init__(self, case: dict) -> None:
        self.case, self.folder = case, Path(case["folder"])
        self.disk = self.folder / "disk"
        self.project = self.disk if case["disk_bytes"] else self.folder / "run"
        self.faults, self.acts = [], []
        for number, row in enumerate(case["faults"]):
            once = str(self.folder / f"struck{number}")
            if "do" in row:
                self.acts.append((once, row))
            else:
                self.faults.append(Fault(**{"once": once, **row}))
        arm(*self.faults)

    def at(self, step: int) -> None:
        """Whatever goes wrong at this step."""
        for once, row in self.acts:
            mine = row.get("rank", 0) == int(os.environ["RANK"])
            if row["step"] == step and mine and not os.path.exists(once):
                Path(once).touch()
                getattr(self, row["do"])(**row.get("with", {}))
        for fault in self.faults:
            fault.at(step)

    def damage(self, how: str) -> None:
        """Damages the newest checkpoint."""
        newest = max((self.project / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name[11:]))
        note(self.folder / "damaged", f"{newest.name} {damage(newest, how)}")

    def fill(self) -> None:
        """Leaves no room on the disk."""
        with (self.disk / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                return

    def forbid(self) -> None:
        """This process may write there no more; root may otherwise write anywhere."""
        (self.project / "checkpoints").chmod(0o555)
        libc, head = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        held = (ctypes.c_uint32 * 6)()
        if libc.capget(head, held) == 0:
            held[0] &= ~_WRITE_ANYWHERE
            libc.capset(head, held)

    def obstruct(self) -> None:
        """A file lies where the checkpoints should."""
        (self.project / "checkpoints").rename(self.project / "away")
        (self.project / "checkpoints").touch()

    def mend(self) -> None:
        """What somebody would do before starting again."""
        if int(os.environ["RANK"]) == 0 and (self.project / "checkpoints").is_dir():
            (self.project / "checkpoints").chmod(0o755)
            (self.disk / "ballast").unlink(missing_ok=True)
        if (self.project / "away").exists() and int(os.environ["RANK"]) == 0:
            (self.project / "checkpoints").unlink()
            (self.project / "away").rename(self.project / "checkpoints")

    def kill_reaper(self) -> None:
        """The process that looks after the workers' end is killed."""
        for pid, words in children(os.getppid()).items():
            if "reaper" in words:
                os.kill(pid, signal.SIGKILL)

    def kill_loader_worker(self) -> None:
        """One of the processes that read the data is killed."""
        os.kill(min(children(os.getpid())), signal.SIGKILL)


def main() -> None:
    """Trains, from wherever the run stands."""
    case = json.loads(Path(sys.argv[1]).read_text())
    run = Run(case)
    run.mend()
    accelerator = Accelerator(
        cpu=True,
        split_batches=True,
        project_dir=run.project,
        keep=Keep(last=case["keep"]),
        gradient_accumulation_steps=case["accumulate"],
    )
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(case["dropout"]), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=case["workers"])
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    count = Count()
    accelerator.register_for_checkpointing(count)
    start = accelerator.resume()
    if accelerator.is_main_process:
        note(run.folder / "starts", f"{accelerator.num_processes} {count.batches} {start.step} {start.path or '-'}")
    for _ in range(start.epoch, EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                run.at(count.batches)
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            shares = accelerator.reduce(torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)))]), "sum")
            if accelerator.is_main_process:
                note(run.folder / "losses", f"{count.batches} {(shares[0] / shares[1]).item().hex()}")
            count.batches += 1
            if count.batches % SAVE_EVERY == 0:
                accelerator.save_state(background=case["background"])
    accelerator.wait_for_save()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.save(weights, run.folder / "final.pt")
        if case["disk_bytes"]:
            subprocess.run(["cp", "-r", run.disk, run.folder / "run"], check=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
