"""Seconds from the command to the first step in two pods: `paceline launch`, and torchrun in the same TrainJob.

python benchmarks/launchers/kubernetes.py [--turns 5] [--procs 2]

The API server and the controllers are those of the tests (tests/kubernetes_api.py, tests/kubernetes_pods.py), and the pods are
namespaces of this machine. Both begin with `paceline launch --on kubernetes`, which makes the TrainJob. The pods of the peer
run torchrun, as those of a TrainJob do, with the variables of the cluster. A real cluster adds its queue and its images.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))
from kubernetes_api import ApiServer  # noqa: E402
from kubernetes_pods import Controllers, lacking  # noqa: E402

SCRIPT = HERE / "first_step.py"


def seconds_to_first_step(folder: Path, procs: int, torchrun: bool) -> float:
    """Starts the script once in two pods.

    Args:
        folder: an empty one, for this turn.
        procs: processes in each pod.
        torchrun: whether the pods run torchrun.
    """
    file = folder / "first"
    command = [sys.executable, "-m", "paceline", "launch", "--on", "kubernetes", "--kind", "trainjob", "--image", "i"]
    command += ["--nodes", "2", "--procs", str(procs), str(SCRIPT), str(file)]
    with ApiServer(folder, ("trainer.kubeflow.org/v1alpha1",)) as api, Controllers(api, folder) as controllers:
        if torchrun:
            controllers.command = ["python3", "-m", "torch.distributed.run", str(SCRIPT), str(file)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "PET_", "KUBE"))}
        begun = time.time()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**clean, "KUBECONFIG": api.kubeconfig},
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return float(file.read_text()) - begun


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--procs", type=int, default=2)
    args = parser.parse_args()
    if lacking():
        sys.exit(f"no pods on this machine: {lacking()}")
    seconds: dict[str, list[float]] = {"torchrun in the pods": [], "paceline launch": []}
    for turn in range(args.turns + 1):
        for name, taken in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                value = seconds_to_first_step(Path(folder), args.procs, name.startswith("torchrun"))
            if turn:  # the first turn reads files from the disk
                taken.append(value)
    for name, taken in seconds.items():
        row = ", ".join(f"{value:.1f}" for value in sorted(taken))
        print(f"{name:28} median {statistics.median(taken):5.1f} s   ({row})")
    pairs = [ours / peer for peer, ours in zip(*seconds.values(), strict=True)]
    print(f"ratio of the turns: median {statistics.median(pairs):.2f}")


if __name__ == "__main__":
    main()
