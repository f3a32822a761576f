"""Seconds from a host's loss to the next step of those that are left: torchrun and `paceline launch`, in one run.

python benchmarks/bench_hosts.py [--turns 1] [--faults off,silent,worker,returns] [--names "NAME;..."]

Three hosts of this machine (tests/hosts/network.py draws them) with one process each; both may go on with one to three.

    off       the host is switched off: its connections are closed
    silent    its cable is cut: nobody is told
    worker    one process is killed
    returns   the host that was switched off is there again: seconds until all three do a step

torchrun runs a plain DDP script, `paceline launch` the same model under `Accelerator`. "tuned" is what is known to help
torchrun: a store of its own for each round, keep-alives of a second, a shorter last call.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from hosts.network import Host, Network, lacking  # noqa: E402
from hosts.run import Run  # noqa: E402

ENVIRONMENT = "env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0"
TUNED = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
TIMEOUT_S = 10
PATIENCE_S = 150


def torchrun(folder: Path, tuned: bool) -> Callable[[Host], str]:
    own = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " if tuned else ""
    conf = f"--rdzv-conf {TUNED} " if tuned else ""
    return lambda host: (
        f"{ENVIRONMENT} {own}{sys.executable} -m torch.distributed.run --nnodes=1:3 --nproc-per-node=1 --max-restarts=3 "
        f"--rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=bench --local-addr={host.address} {conf}"
        f"{HERE / 'hosts' / 'train_ddp.py'} {folder} {TIMEOUT_S if tuned else 0}"
    )


def paceline(folder: Path) -> Callable[[Host], str]:
    script = HERE.parent / "tests" / "hosts" / "scripts" / "lossless.py"
    return lambda host: (
        f"{ENVIRONMENT} PACELINE_TIMEOUT_S={TIMEOUT_S} {sys.executable} -m paceline.cli.main launch --nodes 1:3 "
        f"--main-address node0 --max-restarts 3 {script} {folder}"
    )


STARTERS: dict[str, Callable[[Path], Callable[[Host], str]]] = {
    "torchrun": lambda folder: torchrun(folder, tuned=False),
    "torchrun, tuned": lambda folder: torchrun(folder, tuned=True),
    "paceline launch": paceline,
}


def measure(starter: Callable[[Path], Callable[[Host], str]], fault: str) -> float | str:
    """Seconds from the fault to the next step; a word where there was none."""
    with tempfile.TemporaryDirectory(prefix="bench-hosts-") as name, Network(3) as network:
        folder, (*stay, lost) = Path(name), network.hosts
        run = Run(folder, starter(folder))
        run.start(*network.hosts)
        run.steps(network.hosts, world=3, count=20, timeout_s=PATIENCE_S)
        begun = time.time()
        try:
            if fault == "worker":
                return run.steps(network.hosts, world=3, since=run.kill_worker(lost), timeout_s=PATIENCE_S)
            if fault == "silent":
                lost.cut()
            else:
                lost.power_off()
            took = run.steps(stay, world=2, since=begun, count=3, timeout_s=PATIENCE_S)
            if fault == "returns":
                lost.power_on()
                begun = time.time()
                run.start(lost)
                took = run.steps(network.hosts, world=3, since=begun, timeout_s=PATIENCE_S)
            return took
        except AssertionError as error:
            codes = [run.started[host.name].ssh.poll() for host in stay]
            print(str(error)[-3000:], file=sys.stderr)
            return "job lost" if any(codes) else f"none in {PATIENCE_S} s"


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--faults", default="off,silent,worker,returns")
    parser.add_argument("--names", default=";".join(STARTERS), help="joined by ;")
    options = parser.parse_args()
    if missing := lacking():
        print(f"not measured: {', '.join(missing)} missing (tests/hosts/install.sh installs, as root)")
        return 0
    print("| fault | " + " | ".join(names := options.names.split(";")) + " |\n|---|" + "---|" * len(names))
    for fault in options.faults.split(","):
        cells = []
        for name in names:
            told = [measure(STARTERS[name], fault) for _ in range(options.turns)]
            numbers = sorted(each for each in told if isinstance(each, float))
            words = [each for each in told if isinstance(each, str)]
            shown = [f"{statistics.median(numbers):.1f} ({numbers[0]:.1f}-{numbers[-1]:.1f})"] if numbers else []
            cells.append(", ".join([*shown, *words]))
        print(f"| {fault}, s | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
