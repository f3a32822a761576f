"""Seconds from the command to the first step on two hosts, Paceline's command and the peer's in turns.

python benchmarks/launchers/two_hosts.py {ssh,slurm} [--turns 5] [--procs 2]

Hosts are of this machine (tests/hosts/network.py). Both commands start the same DDP script.

    ssh     ssh to each host at the same time with torchrun and the first host's address, as people write it by hand, and
            `paceline launch --hostfile`, both from the first host
    slurm   `srun torchrun` and `paceline launch --on slurm` within an allocation of a real SLURM that is there already.
            torchrun finds its first host as its documentation says, by `scontrol show hostnames`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
from hosts import slurm_cluster  # noqa: E402
from hosts.network import Network, lacking  # noqa: E402

SCRIPT = HERE / "first_step.py"
PYTHON = sys.executable
# Runs a command that writes the time of its first step to a file; returns when it was begun.
Run = Callable[[str, Path], float]


@contextmanager
def over_ssh(folder: Path, procs: int) -> Iterator[tuple[dict[str, str], Run]]:
    """Two hosts with an sshd each: the commands, with FILE for the file, and what runs them."""
    with Network(2) as network:
        first = network.hosts[0]
        (folder / "hosts").write_text("".join(f"{host.name} slots={procs}\n" for host in network.hosts))
        environment = "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0"
        torchrun = []
        for rank, host in enumerate(network.hosts):
            launch = f"torch.distributed.run --nnodes=2 --nproc-per-node={procs} --node-rank={rank}"
            launch += f" --master-addr={first.address} --master-port=29500"
            remote = f"cd {folder} && {environment} {PYTHON} -m {launch} {SCRIPT} FILE"
            torchrun.append(f"ssh -F {network.ssh_config} {host.name} '{remote}'")
        paceline = (
            f"{environment} {PYTHON} -m paceline launch --hostfile hosts --launcher-args '-F {network.ssh_config}'"
        )

        def run(command: str, file: Path) -> float:
            begun = time.time()
            done = first.run(f"cd {folder} && {command}", timeout_s=300)
            if not file.exists():
                raise RuntimeError(f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
            return begun

        commands = {
            "ssh and torchrun": f"{' & '.join(torchrun)} & wait",
            "paceline launch --hostfile": f"{paceline} {SCRIPT} FILE",
        }
        yield commands, run


@contextmanager
def in_slurm(folder: Path, procs: int) -> Iterator[tuple[dict[str, str], Run]]:
    """A SLURM with two nodes: the commands, with FILE for the file, and what runs them."""
    with Network(2) as network, slurm_cluster.Cluster(network) as cluster:
        allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={procs}", "bash", "-c"]

        def run(command: str, file: Path) -> float:
            # The time is taken within the allocation: waiting for nodes is the scheduler's matter.
            done = cluster.run(*allocation, f"date +%s.%N; {command}", cwd=str(folder), timeout_s=300)
            if done.returncode:
                raise RuntimeError(f"{command}: {done.stderr[-3000:]}")
            return float(done.stdout.split()[0])

        torchrun = f"{PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node={procs} --rdzv-backend=c10d"
        torchrun += " --rdzv-id=$SLURM_JOB_ID"
        torchrun += " --rdzv-endpoint=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1):29500"
        commands = {
            "srun torchrun": f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 {torchrun} {SCRIPT} FILE",
            "paceline launch --on slurm": f"{PYTHON} -m paceline launch --on slurm --procs {procs} {SCRIPT} FILE",
        }
        yield commands, run


PLACES = {"ssh": over_ssh, "slurm": in_slurm}


def measure(place: str, turns: int, procs: int) -> dict[str, list[float]]:
    """Seconds to the first step, by command.

    Args:
        place: "ssh" or "slurm".
        turns: how often each command is run.
        procs: processes on each of the two hosts.
    """
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, PLACES[place](Path(folder), procs) as (commands, run):
        for turn in range(turns + 1):
            for name, command in commands.items():
                file = Path(folder, f"{name.split()[0]}-{turn}")
                begun = run(command.replace("FILE", str(file)), file)
                if turn:  # the first turn reads files from the disk
                    seconds.setdefault(name, []).append(float(file.read_text()) - begun)
                time.sleep(1)
    return seconds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--procs", type=int, default=2)
    args = parser.parse_args()
    missing = lacking()
    if args.place == "slurm":
        missing = [*missing, *slurm_cluster.lacking()]
    if missing:
        sys.exit(f"no hosts on this machine: {', '.join(missing)} missing")
    for name, taken in measure(args.place, args.turns, args.procs).items():
        row = ", ".join(f"{value:.1f}" for value in sorted(taken))
        print(f"{name:28} median {statistics.median(taken):5.1f} s   ({row})")


if __name__ == "__main__":
    main()
