"""From the command to the first optimizer step through each launcher, beside the peer's own way in the same run.

python benchmarks/bench_launchers.py ray [--turns 5]     # ray: in an environment with `ray[train]`, on a cluster of its own

The same training runs on both sides: two processes, each on a node of its own, gloo, DDP. Each rank writes when its first
step is done; the latest counts. A launcher is one function of `LAUNCHERS`: it makes what it needs, and gives two commands.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from timing import Result, pairs

SCRIPT = """
import os, sys, time
import torch

from paceline import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.randn(8, 64)).square().mean())
optimizer.step()
open(f"{sys.argv[1]}/step{accelerator.process_index}", "w").write(str(time.time()))
"""


@dataclass(frozen=True)
class Commands:
    """What one launcher is compared with.

    Attributes:
        ours, peer: words that take the folder for the times as a last argument.
        peer_name: what to call the peer.
        env: variables for both.
        cwd: where both are started.
    """

    ours: list[str]
    peer: list[str]
    peer_name: str
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)


TORCH_TRAINER = """
import sys, time
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def loop(config):
    import torch
    from ray import train
    from ray.train.torch import prepare_model

    model = prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    rank = train.get_context().get_world_rank()
    open(f"{config['folder']}/step{rank}", "w").write(str(time.time()))


placed = ScalingConfig(num_workers=2, use_gpu=False, placement_strategy="STRICT_SPREAD")
TorchTrainer(loop, train_loop_config={"folder": sys.argv[1]}, scaling_config=placed).fit()
"""


@contextmanager
def ray(folder: Path) -> Iterator[Commands]:
    """Ray Train's TorchTrainer, on a cluster of two nodes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from ray_cluster import RayCluster

    (folder / "trainer.py").write_text(TORCH_TRAINER)
    with RayCluster() as cluster:
        for _ in range(2):
            cluster.add(num_cpus=2)
        words = ["-m", "paceline", "launch", "--on", "ray", "--nodes", "2", "--procs", "1", "train.py"]
        yield Commands(
            [sys.executable, *words], [sys.executable, "trainer.py"], "TorchTrainer", folder, cluster.environment
        )


LAUNCHERS: dict[str, Callable[[Path], object]] = {"ray": ray}


def first_step_s(words: list[str], commands: Commands) -> float:
    """Seconds from the command to the end of the last rank's first step."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.time()
        done = subprocess.run(
            [*words, folder], env=commands.env or None, cwd=commands.cwd, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        times = [float(path.read_text()) for path in Path(folder).glob("step*")]
    assert len(times) == 2, "each of two ranks has done a step"
    return max(times) - begun


def measured(name: str, turns: int) -> tuple[str, Result]:
    """The peer's name, and both times."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "train.py").write_text(SCRIPT)
        with LAUNCHERS[name](folder) as commands:  # type: ignore[attr-defined]
            result = pairs(
                lambda: first_step_s(commands.ours, commands), lambda: first_step_s(commands.peer, commands), turns
            )
            return commands.peer_name, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launchers", nargs="*", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| launcher | Paceline | peer | ratio (quartiles) | must reach |\n| --- | --- | --- | --- | --- |")
    for name in args.launchers:
        peer, result = measured(name, args.turns)
        print(result.row(f"{name}: command to first step, 2 nodes", peer, "<= 1.00"))


if __name__ == "__main__":
    main()
