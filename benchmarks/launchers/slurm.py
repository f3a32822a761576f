"""Seconds from the command to the first step on two nodes of SLURM: `srun torchrun` and `paceline launch --on slurm`.

python benchmarks/launchers/slurm.py [--turns 5] [--procs 2]

A real SLURM on hosts of this machine (tests/hosts/slurm_cluster.py). Both start the same DDP script within an allocation that
is there already, in turns. torchrun finds its first host as its documentation says, by `scontrol show hostnames`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
from hosts.network import Network, lacking  # noqa: E402
from hosts.slurm_cluster import Cluster  # noqa: E402
from hosts.slurm_cluster import lacking as lacking_slurm  # noqa: E402

TORCHRUN = (
    "srun --ntasks-per-node=1 --kill-on-bad-exit=1 {python} -m torch.distributed.run --nnodes=2 --nproc-per-node={procs} "
    "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID "
    "--rdzv-endpoint=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1):29500 {script} {file}"
)
PACELINE = "{python} -m paceline launch --on slurm --procs {procs} {script} {file}"
COMMANDS = {"srun torchrun": TORCHRUN, "paceline launch --on slurm": PACELINE}


def measure(turns: int, procs: int = 2) -> dict[str, list[float]]:
    """Seconds to the first step, by command.

    Args:
        turns: how often each command is run.
        procs: processes on each of the two nodes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder, Network(2) as network, Cluster(network) as cluster:
        for turn in range(turns + 1):
            for name, template in COMMANDS.items():
                file = Path(folder, f"{name.split()[0]}-{turn}")
                command = template.format(python=sys.executable, procs=procs, script=HERE / "first_step.py", file=file)
                # The time is taken within the allocation: waiting for nodes is the scheduler's matter.
                timed = f"date +%s.%N; {command}"
                words = (
                    "salloc",
                    "--quiet",
                    "--nodes=2",
                    "--ntasks-per-node=1",
                    f"--cpus-per-task={procs}",
                    "bash",
                    "-c",
                )
                done = cluster.run(*words, timed, cwd=folder, timeout_s=300)
                if done.returncode:
                    raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
                if turn:  # the first turn reads files from the disk
                    seconds[name].append(float(file.read_text()) - float(done.stdout.split()[0]))
                time.sleep(1)
    return seconds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--procs", type=int, default=2)
    args = parser.parse_args()
    missing = lacking() or lacking_slurm()
    if missing:
        sys.exit(f"no SLURM on hosts of this machine: {', '.join(missing)} missing")
    for name, taken in measure(args.turns, args.procs).items():
        row = ", ".join(f"{value:.1f}" for value in sorted(taken))
        print(f"{name:28} median {statistics.median(taken):5.1f} s   ({row})")


if __name__ == "__main__":
    main()
