"""Seconds from the command to the first step on two plain hosts: ssh with torchrun, and `paceline launch --hostfile`.

python benchmarks/launchers/ssh.py [--turns 5] [--procs 2]

Hosts of this machine with an sshd each (tests/hosts/network.py). Both start the same DDP script, in turns, from the first host.
The peer is what people write by hand: an ssh to each host at the same time, with torchrun and the first host's address.
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

TORCHRUN = (
    "ssh -F {ssh} {{host}} 'cd {folder} && GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 {python} -m torch.distributed.run "
    "--nnodes=2 --nproc-per-node={procs} --node-rank={{rank}} --master-addr={address} --master-port=29500 {script} {file}'"
)
PACELINE = (
    "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 {python} -m paceline launch --hostfile hosts "
    "--launcher-args '-F {ssh}' {script} {file}"
)


def measure(turns: int, procs: int = 2) -> dict[str, list[float]]:
    """Seconds to the first step, by command.

    Args:
        turns: how often each command is run.
        procs: processes on each of the two hosts.
    """
    seconds: dict[str, list[float]] = {"ssh and torchrun": [], "paceline launch --hostfile": []}
    with tempfile.TemporaryDirectory() as folder, Network(2) as network:
        Path(folder, "hosts").write_text("".join(f"{host.name} slots={procs}\n" for host in network.hosts))
        for turn in range(turns + 1):
            for name in seconds:
                file = Path(folder, f"{name.split()[0]}-{turn}")
                values = {
                    "ssh": network.ssh_config,
                    "folder": folder,
                    "python": sys.executable,
                    "procs": procs,
                    "address": network.hosts[0].address,
                    "script": HERE / "first_step.py",
                    "file": file,
                }
                command = PACELINE.format(**values)
                if name != "paceline launch --hostfile":
                    template = TORCHRUN.format(**values)
                    lines = [template.format(host=host.name, rank=rank) for rank, host in enumerate(network.hosts)]
                    command = " & ".join(lines) + " & wait"
                begun = time.time()
                done = network.hosts[0].run(f"cd {folder} && {command}", timeout_s=300)
                if not file.exists():
                    raise RuntimeError(f"{name}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
                if turn:  # the first turn reads files from the disk
                    seconds[name].append(float(file.read_text()) - begun)
                time.sleep(1)
    return seconds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--procs", type=int, default=2)
    args = parser.parse_args()
    missing = lacking()
    if missing:
        sys.exit(f"no hosts on this machine: {', '.join(missing)} missing")
    for name, taken in measure(args.turns, args.procs).items():
        row = ", ".join(f"{value:.1f}" for value in sorted(taken))
        print(f"{name:28} median {statistics.median(taken):5.1f} s   ({row})")


if __name__ == "__main__":
    main()
