"""A rank is killed in the same job under `paceline launch` and under torchrun: when training goes on, and what is lost.

    python benchmarks/bench_recovery.py [--procs 2] [--rounds 1] [--jobs paceline,torchrun] [--compile] [--torchft PYTHON]

All sides run at the same time, so that they see the same load, and save every 4 steps; the last rank is killed by SIGKILL
after 10 steps, once. Each process appends its steps to one file. torchrun's job is DDP with `torch.save` by rank 0, and
begins where the newest checkpoint says. Seconds by the clock depend on the load of the machine, CPU seconds less. A main
thread is asleep while it neither runs nor waits for a core: as it waits for a file or for another rank.

`--torchft` adds torchft, of an environment that has it: each rank is a replica of its own, the others go on without the
one that was killed, and its new process gets the weights from one of them. Nothing is saved. Once with torchft's own
timeouts, and once ("short") with a second for each.

The job `stays` shows what processes would need that stay: nobody is killed, but all ranks of Paceline's job fail in that step,
leave their group, and begin the job again in the same process. `--compile` compiles the model of all jobs; the cache of
the compiler's files is empty when a job begins.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SAVE_EVERY, KILL_AT, STEPS, ROWS = 4, 10, 16, 64
COMPILE = "BENCH_RECOVERY_COMPILE"
_life = [1]  # which pass of a process that stays


class Struck(Exception):
    """Ends the first pass of a process that stays."""


def note(folder: Path, event: str, **values: Any) -> None:
    """Appends one line."""
    line = {
        "event": event,
        "t": time.time(),
        "cpu": time.process_time(),
        "asleep": asleep(),
        "pid": f"{os.getpid()}, {_life[0]}",
        **values,
    }
    with (folder / "lines").open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def asleep() -> float:
    """Returns a clock of the seconds in which the main thread neither ran nor waited for a core."""
    ran, queued, _ = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
    return time.monotonic() - (int(ran) + int(queued)) / 1e9


def model_and_optimizer() -> tuple[Any, Any]:
    """Makes the same in every job. The first optimizer of a process imports the front of torch's compiler."""
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), *layers, torch.nn.Linear(64, 1))
    if os.environ.get(COMPILE):
        model.compile()
    return model, torch.optim.AdamW(model.parameters())


def strike(folder: Path, step: int, rank: int, ranks: int, done: int | None = None) -> None:
    """Kills this process if it is the one, the first time. `done`: steps of all ranks together, if not all that were done."""
    struck = folder / "struck"
    if (step if done is None else done) >= KILL_AT and rank == ranks - 1 and not struck.exists():
        struck.write_text(str(step))
        note(folder, "strikes", step=step, ranks=ranks)
        os.kill(os.getpid(), signal.SIGKILL)


def by_paceline(folder: Path, fails: bool = False) -> None:
    """The job with `resume` and `save_state`. `fails`: all ranks raise `Struck` where one would be killed."""
    import torch
    from torch.utils.data import DataLoader

    from paceline import Accelerator

    note(folder, "imported")
    accelerator = Accelerator(cpu=True, split_batches=True, project_dir=folder)
    note(folder, "grouped")
    model, optimizer = model_and_optimizer()
    note(folder, "made")
    loader = DataLoader(torch.randn(ROWS * STEPS, 4), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    note(folder, "prepared")
    step = accelerator.resume().step
    note(folder, "restored")
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        if not fails:
            strike(folder, step, accelerator.process_index, accelerator.num_processes)
        elif step >= KILL_AT:
            if accelerator.process_index == 0:
                note(folder, "strikes", step=step, ranks=accelerator.num_processes)
            raise Struck
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(folder, "step", step=step)
        if step % SAVE_EVERY == 0:
            accelerator.save_state()


def by_staying(folder: Path) -> None:
    """Paceline's job twice in the same process; the first time all ranks fail."""
    import torch.distributed as dist

    try:
        by_paceline(folder, fails=True)
    except Struck:
        dist.barrier()
        (folder / "struck").touch()  # nobody is killed
        dist.destroy_process_group()
    _life[0] = 2
    note(folder, "begins")
    by_paceline(folder)


def by_torch(folder: Path) -> None:
    """The job with DDP."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    note(folder, "imported")
    dist.init_process_group("gloo")
    note(folder, "grouped")
    model, optimizer = model_and_optimizer()
    note(folder, "made")
    rows = torch.randn(ROWS * STEPS, 4)
    whole = torch.nn.parallel.DistributedDataParallel(model)
    note(folder, "prepared")
    step, newest = 0, folder / "newest.pt"
    if newest.exists():
        step, weights, states = torch.load(newest)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
    note(folder, "restored")
    loader = DataLoader(rows, ROWS // dist.get_world_size(), sampler=DistributedSampler(rows, shuffle=False))
    for number, batch in enumerate(loader):
        if number < step:
            continue
        whole(batch).square().mean().backward()
        strike(folder, step, dist.get_rank(), dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(folder, "step", step=step)
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save((step, model.state_dict(), optimizer.state_dict()), folder / "written.pt")
            (folder / "written.pt").replace(newest)
    dist.destroy_process_group()


def by_torchft(folder: Path) -> None:
    """The job in replicas that may come and go. `RANK` is the number of this one, whose rows depend on who takes part."""
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    note(folder, "imported")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note(folder, "grouped")  # that comes with the first step
    model, inner = model_and_optimizer()
    note(folder, "made")
    rows = torch.randn(ROWS * STEPS, 4)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        note(folder, "restored")

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        # A step ends when all have voted on it, so that a replica that is restored takes part at once.
        use_async_quorum=False,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        replica_id=f"replica {rank}",
    )
    whole, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    note(folder, "prepared")
    # No replica waits for others: the kill counts steps that all have done together, and all end some steps after the new
    # process has come.
    together, end, struck = 0, 2**31, folder / "struck"
    while manager.current_step() < end:
        optimizer.zero_grad()
        step, place, number = manager.current_step(), manager.participating_rank(), manager.num_participants()
        if end == 2**31 and number == ranks and struck.exists() and step > int(struck.read_text()) + 1:
            end = step + SAVE_EVERY
        together += number == ranks
        begin = step % STEPS * ROWS
        whole(rows[begin : begin + ROWS][place::number]).square().mean().backward()
        strike(folder, step, rank, ranks, together)
        optimizer.step()
        note(folder, "step" if manager.current_step() > step else "dropped", step=step + 1, ranks=number)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads wait for a lighthouse that may have ended


def supervise(folder: Path, procs: int, timeouts: list[str]) -> int:
    """Starts a lighthouse and the replicas, and a replica again that was killed; returns the first other exit code."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    binary = str(Path(sys.executable).parent / "torchft_lighthouse")
    lighthouse = subprocess.Popen([binary, "--min_replicas", "1", "--bind", f"[::]:{port}", *timeouts])
    words = [sys.executable, __file__, "--job", "torchft", "--folder", str(folder)]
    shared = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "WORLD_SIZE": str(procs)}

    def start(rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, env={**shared, "RANK": str(rank)})

    running = {rank: start(rank) for rank in range(procs)}
    codes = []
    try:
        while running:
            time.sleep(0.05)
            for rank, process in list(running.items()):
                code = process.poll()
                if code == -signal.SIGKILL:
                    running[rank] = start(rank)
                elif code is not None:
                    codes.append(code)
                    del running[rank]
    finally:
        lighthouse.kill()
        for process in running.values():
            process.kill()
    return next(filter(None, codes), 0)


def commands(procs: int, wanted: list[str], torchft: str = "") -> dict[str, list[str]]:
    """The commands by their names; the script and its words follow."""
    python = sys.executable
    torchrun = ["torch.distributed.run", "--nproc-per-node", str(procs), "--max-restarts", "3"]
    found = {
        "paceline": [python, "-m", "paceline", "launch", "--cpu", "--procs", str(procs), "--max-restarts", "3"],
        "torchrun": [python, "-m", *torchrun, "--monitor-interval", "0.1"],
    }
    found["stays"] = found["paceline"]
    found = {name: found[name] for name in wanted}
    if torchft:
        supervised = [torchft, __file__, "--procs", str(procs), "--supervise"]
        found["torchft"] = [*supervised, ""]
        found["torchft, short"] = [*supervised, "--heartbeat_timeout_ms 1000 --join_timeout_ms 1000"]
    return found


PHASES = ("begins", "imported", "grouped", "made", "prepared", "restored", "step")


def measured(jobs: dict[str, list[str]], limit_s: float) -> dict[str, dict[str, float]]:
    """Runs the jobs side by side to their ends, and returns the figures of each."""
    with tempfile.TemporaryDirectory() as text:
        running = {}
        for name, command in jobs.items():
            folder = Path(text) / name
            folder.mkdir()
            words = [*command, "--folder", str(folder)]
            if "--supervise" not in command:
                words = [*command, __file__, "--job", name, "--folder", str(folder)]
            # A pipe that nobody reads would stop a job that prints much, as torchft does.
            with (folder / "output").open("w") as output:
                env = {**os.environ, "TMPDIR": str(folder)}
                running[name] = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env)
        rows = {}
        try:
            for name, job in running.items():
                if job.wait(limit_s):
                    raise RuntimeError(f"{name}: {(Path(text) / name / 'output').read_text()[-2000:]}")
                lines = (Path(text) / name / "lines").read_text().splitlines()
                rows[name] = figures([json.loads(line) for line in lines])
        finally:
            for job in running.values():
                job.terminate()
                job.wait()
    return rows


def figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the figures of one job: those of a phase are the mean of its new processes."""
    strike = next(line for line in lines if line["event"] == "strikes")
    struck = strike["t"]
    begun = [line for line in lines if line["event"] == "begins" and line["t"] > struck]
    steps = [line for line in lines if line["event"] == "step"]
    # Some of torchrun's new processes fail before their first step, and are started once more.
    new_ones = {line["pid"] for line in begun} & {line["pid"] for line in steps}
    after = [line for line in steps if line["pid"] in new_ones]
    # A rank that was not struck may end the step in which the other one was.
    done = max(line["step"] for line in steps if line["pid"] not in new_ones and line["step"] <= strike["step"] + 1)
    by_others = [line for line in steps if line["t"] > struck and line["step"] > done]
    resumed = min(line["step"] for line in by_others + after) - 1
    dropped = [line for line in lines if line["event"] == "dropped"]
    found = {
        "killed to the script of a new process, s": min(line["t"] for line in begun) - struck,
        "killed to the first step of a new process, s": min(line["t"] for line in after) - struck,
        "killed to the first new step of any, s": min(line["t"] for line in by_others) - struck,
        "steps without all ranks": len(
            {line["step"] for line in by_others if line.get("ranks", 2**31) < strike["ranks"]}
        ),
    }
    first = {(line["pid"], line["event"]): line for line in reversed(lines)}
    for start, end in pairwise(PHASES):
        for unit, what in (("t", "by the clock"), ("cpu", "of CPU"), ("asleep", "asleep")):
            spans = [first[pid, end][unit] - first[pid, start][unit] for pid in new_ones]
            found[f"{start} to {end}, s {what}"] = sum(spans) / len(spans)
    found["samples computed twice"] = max(0, done - resumed) * ROWS + sum(ROWS // line["ranks"] for line in dropped)
    return found


def main() -> None:
    """Prints the table, or runs one process of a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    # torchrun's new ranks once waited for each other for ever, in the constructor of gloo's group.
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds for a job")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--jobs", default="paceline,torchrun", help="some of paceline, torchrun and stays")
    parser.add_argument("--torchft", default="", help="the Python of an environment with torchft")
    parser.add_argument("--job", default="")
    parser.add_argument("--supervise", default=None)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.job:
        note(options.folder, "begins")
        ways = {"paceline": by_paceline, "stays": by_staying, "torchrun": by_torch, "torchft": by_torchft}
        ways[options.job](options.folder)
        return
    if options.supervise is not None:
        raise SystemExit(supervise(options.folder, options.procs, options.supervise.split()))
    found: dict[str, dict[str, list[float]]] = {}
    if options.compile:
        os.environ[COMPILE] = "1"
    jobs = commands(options.procs, options.jobs.split(","), options.torchft)
    for _ in range(options.rounds):
        for name, row in measured(jobs, options.limit_s).items():
            for what, value in row.items():
                found.setdefault(what, {}).setdefault(name, []).append(value)
    print(f"| what | {' | '.join(jobs)} |\n|---|{'---|' * len(jobs)}")
    for what, by_name in found.items():
        cells = (" ".join(f"{value:.2f}" for value in by_name[name]) for name in jobs)
        print(f"| {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
