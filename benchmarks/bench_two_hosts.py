"""Two hosts and a store on a third: seconds from the silent loss of either to the next step of the other, torchrun beside it.

python benchmarks/bench_two_hosts.py [--turns 1] [--names "NAME;..."]

Hosts are of this machine (tests/hosts/network.py draws them), with one process each; both ways may go on with one or two hosts
(`--nodes 1:2`). The first or the second is cut off without a sign, from the store too. torchrun has a c10d store on the third
host (`paceline store`, which is torch's TCPStore), with `is_host=0`; "tuned" adds short keep-alives and a store for each round.
"""

from __future__ import annotations

import argparse
import shutil
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
from hosts.test_store_off_hosts import PORTS, store_on  # noqa: E402

ENVIRONMENT = "env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0"
TUNED = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
TIMEOUT_S = 10
PATIENCE_S = 120


def torchrun(folder: Path, kind: str, tuned: bool) -> Callable[[Host], str]:
    own = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " if tuned else ""
    conf = f"is_host=0,{TUNED}" if tuned else "is_host=0"
    return lambda host: (
        f"{ENVIRONMENT} {own}{sys.executable} -m torch.distributed.run --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 "
        f"--rdzv-backend={kind} --rdzv-endpoint=node2:{PORTS[kind]} --rdzv-id=bench --local-addr={host.address} "
        f"--rdzv-conf {conf} {HERE / 'hosts' / 'train_ddp.py'} {folder} {TIMEOUT_S}"
    )


def paceline(folder: Path, kind: str) -> Callable[[Host], str]:
    script = HERE.parent / "tests" / "hosts" / "scripts" / "lossless.py"
    return lambda host: (
        f"{ENVIRONMENT} PACELINE_TIMEOUT_S={TIMEOUT_S} {sys.executable} -m paceline.cli.main launch --nodes 1:2 "
        f"--rdzv-endpoint {kind}://node2:{PORTS[kind]} --rdzv-conf last_call_timeout=20 --max-restarts 3 {script} {folder}"
    )


WAYS: dict[str, tuple[str, Callable[[Path], Callable[[Host], str]]]] = {
    "torchrun, c10d": ("c10d", lambda folder: torchrun(folder, "c10d", tuned=False)),
    "torchrun, c10d, tuned": ("c10d", lambda folder: torchrun(folder, "c10d", tuned=True)),
    "paceline, c10d": ("c10d", lambda folder: paceline(folder, "c10d")),
    "paceline, etcd": ("etcd", lambda folder: paceline(folder, "etcd")),
}


def measure(name: str, number: int) -> float | str:
    """Seconds from the loss of a host to the other's next step; a word where there was none."""
    kind, starter = WAYS[name]
    with tempfile.TemporaryDirectory(prefix="bench-two-") as place, Network(3) as network:
        folder, (*pair, third) = Path(place), network.hosts
        store_on(third, kind, folder)
        run = Run(folder, starter(folder))
        run.wait_for(lambda: third.run(f"ss -Hltn | grep {PORTS[kind]}").stdout, "the store", 30)
        run.start(*pair)
        run.steps(pair, world=2, count=20, timeout_s=PATIENCE_S)
        begun = time.time()
        pair[number].cut()
        try:
            return run.steps([pair[1 - number]], world=1, since=begun, count=3, timeout_s=PATIENCE_S)
        except AssertionError as error:
            print(str(error)[-2000:], file=sys.stderr)
            code = run.started[pair[1 - number].name].ssh.poll()
            return f"none in {PATIENCE_S} s" if code is None else "job lost"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--names", default=";".join(WAYS), help="joined by ;")
    options = parser.parse_args()
    missing = [*lacking(), *([] if shutil.which("etcd") else ["etcd"])]
    if missing:
        print(f"not measured: {', '.join(missing)} missing (tests/hosts/install.sh installs, as root)")
        return 0
    print("| | first host lost, s | second host lost, s |\n|---|---|---|")
    for name in options.names.split(";"):
        cells = []
        for number in (0, 1):
            results = [measure(name, number) for _ in range(options.turns)]
            numbers = sorted(result for result in results if isinstance(result, float))
            words = [result for result in results if isinstance(result, str)]
            shown = [f"{statistics.median(numbers):.1f} ({numbers[0]:.1f}-{numbers[-1]:.1f})"] if numbers else []
            cells.append(", ".join([*shown, *words]))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
