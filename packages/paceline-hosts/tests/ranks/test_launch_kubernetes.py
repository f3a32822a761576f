"""Pods as namespaces: launchers and scripts find their world from what JobSet, Job, TrainJob and PyTorchJob give to a pod."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from warm_python import executable

from paceline.cli import main as cli

pytest.importorskip("kubernetes", reason="needs the client: `make setup`")
pytest.importorskip("aiohttp", reason="needs aiohttp: `make setup`")
from kubernetes_api import ApiServer, until
from kubernetes_pods import Controllers, lacking

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacking()), reason=lacking())]
WHO = """
    import os, torch
    from paceline import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    world = accelerator.run.world
    place = f"local {world.local_rank}/{world.local_size} node {world.node}"
    print(f"rank {world.rank}/{world.size} {place}: {total.item():g}", flush=True)
"""
TRAIN = """
    import sys, time, torch
    from torch.utils.data import DataLoader, TensorDataset
    from paceline import Accelerator, Keep, set_seed
    accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], keep=Keep(last=2))
    set_seed(3)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4, shuffle=True))
    start = accelerator.resume()
    step = start.step
    for epoch in range(start.epoch, 2):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step} loss {loss.item().hex()}", flush=True)
            if step % 5 == 0:
                accelerator.save_state()
            if len(sys.argv) > 2:
                time.sleep(float(sys.argv[2]))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    accelerator.print(f"weights {weights.double().sum().item().hex()} after {step} steps", flush=True)
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    for name in [name for name in os.environ if name.startswith(("PACELINE", "SLURM", "PET_", "KUBE"))]:
        monkeypatch.delenv(name)
    groups = ("jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kubeflow.org/v1")
    with ApiServer(tmp_path, groups) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        monkeypatch.chdir(tmp_path)
        yield server


def launch(*words: str) -> int:
    return cli.main(["launch", "--on", "kubernetes", "--image", "i", "--nodes", "2", *words])


# TrainJob gives what our JobSet does, with another port; Job another name of pod 0.
@pytest.mark.parametrize(
    "kind",
    [
        "jobset",
        "pytorchjob",
        pytest.param("trainjob", marks=pytest.mark.long),
        pytest.param("job", marks=pytest.mark.long),
    ],
)
def test_the_launcher_in_a_pod_finds_its_world(
    api: ApiServer, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "who.py").write_text(dedent(WHO))
    encrypts = ("--tls", "yes") if kind == "jobset" else ()
    # An image without openssl, in whose place this one fails.
    openssl = tmp_path / "openssl"
    openssl.write_text("#!/bin/sh\nexit 1\n")
    openssl.chmod(0o755)
    with Controllers(api, tmp_path) as controllers:
        controllers.image["PATH"] = f"{tmp_path}:{controllers.image['PATH']}"
        assert launch("--procs", "2", "--cpu", "--kind", kind, *encrypts, "who.py") == 0
    out = capfd.readouterr().out
    found = sorted(re.findall(r"^(node\d): \[rank\d\]: (rank .*)$", out, re.MULTILINE))
    expected = [f"rank {rank}/4 local {rank % 2}/2 node {rank // 2}: 10" for rank in range(4)]
    assert found == [(f"node{rank // 2}", line) for rank, line in enumerate(expected)], out
    assert "2 nodes (" in out and api.left() == []


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_a_bare_script_in_a_pod_finds_its_world(api: ApiServer, tmp_path: Path, kind: str) -> None:
    (tmp_path / "who.py").write_text(dedent(WHO))
    with Controllers(api, tmp_path) as controllers:
        controllers.command = ["python3", "/paceline/script/who.py"]
        assert launch("--procs", "1", "--kind", kind, "who.py") == 0
    said = {pod.number: [line for line in pod.lines if line.startswith("rank")] for pod in controllers.pods}
    assert said == {n: [f"rank {n}/2 local 0/1 node {n}: 3"] for n in range(2)}


def test_a_lost_pod_restarts_its_group_which_resumes_exactly(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    undisturbed = subprocess.run(
        [executable(), "-m", "paceline", "launch", "--procs", "2", "--cpu", "--tee", "3", "train.py", str(tmp_path / "a")],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert undisturbed.returncode == 0, undisturbed.stderr

    def kill() -> None:
        until(
            lambda: any("step 8 " in line for pod in controllers.pods if pod.number == 1 for line in pod.lines),
            "step 8",
            90,
        )
        next(pod for pod in controllers.pods if pod.number == 1).kill()

    with Controllers(api, tmp_path) as controllers:
        thread = threading.Thread(target=kill)
        thread.start()
        words = ("--procs", "1", "--cpu", "--max-restarts", "1", "train.py", str(tmp_path / "b"), "0.1")
        assert launch(*words) == 0
        thread.join()
        assert (controllers.restarts, controllers.counted) == (1, 1)
    out = capfd.readouterr().out
    losses = dict(re.findall(r"\[rank0\]: step (\d+) loss (\S+)", undisturbed.stdout))
    again = re.findall(r"node0: \[rank0\]: step (\d+) loss (\S+)", out)
    assert len(losses) == 24 and {step for step, _ in again} == set(losses)
    assert all(losses[step] == loss for step, loss in again), "each loss, those of steps that were done twice too"
    (end,) = re.findall(r"weights .*", undisturbed.stdout)
    assert re.findall(r"weights .*", out) == [end, end], "`accelerator.print` writes once on each host"
    assert api.left() == []


def test_a_failing_rank_gives_its_traceback_and_its_exit_code(
    api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys\nfrom paceline import Accelerator\na = Accelerator(cpu=True)\n"
    (tmp_path / "fail.py").write_text(
        script + "a.wait_for_everyone()\nif a.process_index == 1:\n    sys.exit(9)\na.wait_for_everyone()\n"
    )
    with Controllers(api, tmp_path):
        assert launch("--procs", "1", "--cpu", "fail.py") == 9
    out, err = capfd.readouterr()
    assert "rank 1 failed with exit code 9" in out and "[kubernetes-failed]" in err
    assert api.left() == []


def test_an_image_without_paceline(api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "who.py").write_text(dedent(WHO))
    with Controllers(api, tmp_path) as controllers:
        # A Python of its own, which knows nothing of this environment's packages.
        controllers.image["PATH"] = f"{tmp_path / 'image'}:/usr/bin:/bin"
        (tmp_path / "image").mkdir()
        python = Path(
            os.path.realpath(
                Path(
                    subprocess.check_output(
                        [executable(), "-c", "import sys; print(sys.base_prefix)"], text=True
                    ).strip(),
                    "bin",
                    "python3",
                )
            )
        )
        (tmp_path / "image" / "python3").write_text(f'#!/bin/sh\nexec {python} -I -S "$@"\n')
        (tmp_path / "image" / "python3").chmod(0o755)
        assert launch("--procs", "1", "who.py") == 1
        until(lambda: api.left() == [], "an empty cluster")
    err = capfd.readouterr().err
    assert "[kubernetes-image]" in err and "this image has no paceline for" in err


def test_pods_that_are_deleted_save_first(api: ApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The launcher is process 1 of its container, where the system keeps signals from whoever has no handler."""
    (tmp_path / "train.py").write_text(dedent(TRAIN))

    def ask() -> None:
        until(lambda: any("step 6 " in line for pod in controllers.pods for line in pod.lines), "step 6", 90)
        os.kill(os.getpid(), signal.SIGTERM)

    with Controllers(api, tmp_path) as controllers:
        thread = threading.Thread(target=ask)
        thread.start()
        assert launch("--procs", "1", "--cpu", "train.py", str(tmp_path / "out"), "0.3") == 75
        thread.join()
        until(lambda: api.left() == [], "an empty cluster")
    assert [pod.code for pod in controllers.pods] == [75, 75]
    assert "all pods have saved and ended" in capfd.readouterr().err
    assert list((tmp_path / "out").rglob("*.json")), "a checkpoint"
