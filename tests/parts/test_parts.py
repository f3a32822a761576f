"""Each part does with its dependencies alone; what needs a part that is absent ends with an error that names its extra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from warm_python import WarmPython

from paceline.base.parts import ADDED, PACKAGES

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from paceline import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, project_dir='run')
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
progress = accelerator.resume()
for step in range(progress.step, progress.step + 2):
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state()
accelerator.print(f"from step {progress.step}")
"""


# No part is among them, and none asks which parts there are.
WARM = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "paceline.accelerator")


class Environment:
    """A virtual environment with the packages of this one, but with the core of Paceline alone.

    Its commands are forks of one process that has torch imported (`warm_python`), unless they are to be `cold`.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        installed = {f"paceline_{extra}" for extra in ADDED} | {"paceline"}
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.name.removeprefix("_editable_impl_").partition("-")[0].partition(".")[0] not in installed:
                (packages / entry.name).symlink_to(entry)
        (packages / "parts.pth").write_text(install(["paceline"], packages).replace(os.pathsep, "\n"))
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE"))
        }
        (folder / "warm").mkdir()
        self.warm = WarmPython(folder / "warm", WARM, str(self.python), self.environment)

    def run(self, words: Sequence[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.start([str(self.warm.bin / "python3"), *words], cwd, **variables)

    def cold(self, words: Sequence[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.start([str(self.python), *words], cwd, **variables)

    def start(self, command: Sequence[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env={**self.environment, **variables}, capture_output=True, text=True,
            timeout=200, check=False,
        )  # fmt: skip


def install(parts: Sequence[str], folder: Path) -> str:
    """Puts the metadata of parts into a folder; returns what has to stand on the path besides."""
    for part in parts:
        metadata = Path(str(distribution(part)._path))  # type: ignore[attr-defined]
        (folder / metadata.name).symlink_to(metadata)
    return os.pathsep.join(str(ROOT / "packages" / part / "src") for part in parts)


def project_of(part: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / part / "pyproject.toml").read_text())["project"]


def with_those_that_they_need(parts: Sequence[str]) -> list[str]:
    needed = {"paceline", *parts}
    for part in parts:
        needed |= {name for name in project_of(part)["dependencies"] if name.startswith("paceline")}
    return sorted(needed)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    environment = Environment(tmp_path_factory.mktemp("core"))
    with environment.warm:
        yield environment


@pytest.fixture
def path_with(tmp_path: Path) -> Callable[[str], str]:
    """A `PYTHONPATH` on which a part is installed, with those that it needs."""

    def made(part: str) -> str:
        folder = tmp_path / "metadata"
        folder.mkdir()
        others = [name for name in with_those_that_they_need([part]) if name != "paceline"]
        return os.pathsep.join([install(others, folder), str(folder)])

    return made


def test_the_core_trains_saves_resumes_and_explains(core: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ways = (
        ["train.py"],
        ["-m", "paceline", "launch", "--cpu", "--procs", "2", "train.py"],
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
    )
    for number, words in enumerate(ways):
        start = core.cold if number == 0 else core.run
        done = start(words, tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        assert f"from step {2 * number}\n" in done.stdout
    done = core.run(["-m", "paceline", "explain", "--option", "replicate.bucket_cap_mb=8"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_core_trains_under_mpirun(core: Environment, tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    (tmp_path / "train.py").write_text(TRAIN)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, "--oversubscribe", "-np", "2", core.warm.executable, "train.py"]
    done = core.start(command, tmp_path, OMP_NUM_THREADS="1", **allowed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("from step 0\n") == 1  # two ranks, of which the first prints


def test_the_core_trains_as_tasks_of_srun(core: Environment, tmp_path: Path) -> None:
    """The variables that srun sets; `tests/hosts/test_slurm.py` has srun itself."""
    (tmp_path / "train.py").write_text(TRAIN)
    port = free_port()
    shared = {
        "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        tasks = []
        for rank in ("0", "1"):
            variables = {**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            tasks.append(pool.submit(core.run, ["train.py"], tmp_path, **variables))
    done = [task.result() for task in tasks]
    assert [task.returncode for task in done] == [0, 0], done[0].stderr + done[1].stderr
    assert [task.stdout for task in done] == ["from step 0\n", ""]


ONE_OF_TWO_TASKS = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost,other",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--nodes", "2"], {}),
        (["--nodes", "1:2", "--main-address", "localhost"], {}),
        (["--hostfile", "hosts"], {}),
        ([], ONE_OF_TWO_TASKS),
    ],
    ids=["nodes", "a range of nodes", "hostfile", "launcher as a task"],
)
def test_several_nodes_without_the_part_for_hosts(
    core: Environment, tmp_path: Path, flags: list[str], variables: dict[str, str]
) -> None:
    """The command that the error names installs the part; nothing starts, and nobody waits for another node."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    done = core.run(["-m", "paceline", "launch", "--cpu", "--procs", "2", *flags, "train.py"], tmp_path, **variables)
    assert done.returncode == 2 and "[part-missing]" in done.stderr, done.stderr
    assert f"pip install -e {ROOT / 'packages' / 'paceline-hosts'}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_one_of_several_nodes_is_shown_without_the_part_for_hosts(core: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = core.run(["-m", "paceline", "launch", "--cpu", "--nodes", "2", "--dry-run", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_of_deepspeed_starts_one_host(
    core: Environment, path_with: Callable[[str], str], tmp_path: Path
) -> None:
    """Its default launcher, pdsh, is not needed on one host. The part for hosts, which reads hostfiles, comes along."""
    path = path_with("paceline-deepspeed")
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    command = ["-m", "paceline", "deepspeed"]
    for flags in (["--num_gpus", "2"], ["--hostfile", "hosts", "--include", "localhost:0,1"]):
        done = core.run([*command, *flags, "train.py"], tmp_path, PACELINE_CPU="1", PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1"]
    done = core.run([*command, "--launcher", "pssh", "train.py"], tmp_path, PYTHONPATH=path)
    assert done.returncode == 2 and "[deepspeed-flag]" in done.stderr and "pdsh" in done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["verify", "train.py"], "lens"),
        (["plan", "train.py"], "lens"),
        (["checkpoint"], "lens"),
        (["checkpoint", "ls", "run"], "lens"),
        (["explain", "--option", "anomalies.nan=skip"], "lens"),
        (["launch", "--cpu", "--procs", "2", "--on-hang", "leave", "train.py"], "lens"),
        (["trackers", "run"], "lens"),
        (["doors", "status"], "doors"),
        (["store"], "hosts"),
        (["doctor"], "hosts"),
        (["deepspeed", "train.py"], "deepspeed"),
        (["launch", "--on", "slurm", "--procs", "2", "train.py"], "hosts"),
        (["launch", "--cpu", "--procs", "2", "--watch", "train.py"], "lens"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_an_absent_part_has_is_an_error_that_names_its_extra(
    core: Environment, tmp_path: Path, words: list[str], extra: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = core.run(["-m", "paceline", *words], tmp_path)
    assert done.returncode == 2 and "[part-missing]" in done.stderr, done.stderr
    assert f"the extra {extra}." in done.stderr and f"paceline-{extra}" in done.stderr


@pytest.mark.parametrize(
    ("flags", "adds"),
    [
        (["--procs", "2", "--tp", "2", "--option", "pipeline.schedule=gpipe"], "tensor"),
        (["--mixed-precision", "fp8"], "fp8"),
        (["--offload", "optimizer"], "offload"),
    ],
    ids=["an axis and an option", "a precision", "a setting"],
)
def test_what_the_part_for_large_models_adds(core: Environment, tmp_path: Path, flags: list[str], adds: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = core.run(["-m", "paceline", "launch", "--cpu", *flags, "train.py"], tmp_path)
    assert done.returncode != 0 and f"`pip install -e {ROOT / 'packages' / 'paceline-large'}` adds" in done.stderr
    assert adds in done.stderr


# Models of which planning knows by names alone that they balance experts, and have weights of few bits.
LARGE_MODELS = """
import torch
from paceline import Accelerator, PacelineError
from paceline.testing import run_ranks
from torch import nn

def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
    return gate_logits[0].softmax(-1).square().mean()

class Balanced(nn.Linear):
    def forward(self, x):
        return load_balancing_loss_func((super().forward(x),), 4)

class Config:
    router_aux_loss_coef = 0.01

    def __init__(self, output_router_logits):
        self.output_router_logits = output_router_logits

class Params4bit(nn.Parameter):
    pass

def work():
    accelerator = Accelerator(cpu=True)
    model = Balanced(4, 4)
    model.config = Config(False)
    accelerator.prepare(model)
    print([line for line in accelerator.plan.explain().splitlines() if "balance(Balanced) = of each rank" in line])
    balanced = Balanced(4, 4)
    balanced.config = Config(True)
    few_bits = nn.Linear(4, 1)
    few_bits.weight = Params4bit(torch.zeros(1, 4, dtype=torch.uint8), requires_grad=False)
    compressed = {"replicate": {"comm_hook": "bf16"}}
    for options, model in (({}, balanced), ({}, few_bits), (compressed, nn.Linear(4, 1))):
        try:
            Accelerator(cpu=True, options=options).prepare(model)
        except PacelineError as error:
            print(error.code, "packages/paceline-large" in str(error))

run_ranks(work, world=2)
"""


def test_models_that_need_the_part_for_large_models(core: Environment, tmp_path: Path) -> None:
    done = core.run(["-c", LARGE_MODELS], tmp_path, OMP_NUM_THREADS="1")
    assert done.stdout.count("part-missing True\n") == 2 * 3, done.stdout + done.stderr
    assert done.stdout.count("balance(Balanced) = of each rank") == 2, done.stdout


LOOKED_AT = """
from paceline import Accelerator, PacelineError

for arguments in ({"profile": "flops"}, {"anomalies": {"nan": "skip"}}, {"log_system": True}):
    try:
        Accelerator(cpu=True, **arguments)
    except PacelineError as error:
        print(error.code, "packages/paceline-lens" in str(error))
try:
    Accelerator(cpu=True, project_dir="s3://bucket/run").save_state()
except PacelineError as error:
    print(error.code, "packages/paceline-hosts" in str(error))
try:
    from paceline.optim import Muon
except PacelineError as error:
    print(error.code, "packages/paceline-large" in str(error))
try:
    import paceline.compat
    paceline.compat.install(["accelerate"])
except PacelineError as error:
    print(error.code, "packages/paceline-accelerate" in str(error))
"""


def test_what_a_script_asks_of_absent_parts(core: Environment, tmp_path: Path) -> None:
    done = core.run(["-c", LOOKED_AT], tmp_path)
    assert done.stdout.splitlines() == [
        *["part-missing True"] * 3,
        "checkpoint-store True",
        "part-missing True",
        "compat-library True",
    ], done.stderr


NEVER_COMES = """
import time
from paceline import Accelerator

accelerator = Accelerator(cpu=True)
if accelerator.is_main_process:
    accelerator.wait_for_everyone()
time.sleep(100)
"""


def test_a_rank_that_never_comes_is_an_error_that_names_who_would_tell(core: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NEVER_COMES)
    words = ["-m", "paceline", "launch", "--cpu", "--procs", "2", "--timeout-s", "3", "train.py"]
    done = core.run(words, tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode != 0 and "[collective-failed]" in done.stderr, done.stderr
    assert "packages/paceline-lens` adds reports of who waits for whom" in done.stderr


def test_a_library_that_no_part_serves_names_the_extra(core: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = core.run(["-m", "paceline", "launch", "--compat", "accelerate", "train.py"], tmp_path)
    assert done.returncode == 2 and "packages/paceline-accelerate" in done.stderr, done.stderr


def test_a_tracker_of_an_absent_part(core: Environment, tmp_path: Path) -> None:
    program = "from paceline import Accelerator; Accelerator(cpu=True, log_with='wandb').init_trackers('run')"
    done = core.run(["-c", program], tmp_path)
    assert done.returncode != 0 and "paceline-lens" in done.stderr, done.stderr


# Modules that need another part, which the README of their own names.
NEED_ANOTHER = {
    "paceline_accelerate": ("deepspeed_preparation", "deepspeed_wrappers"),
    "paceline_deepspeed": ("sampled_comet", "tuning"),
}
IMPORT_ALL = """
import importlib, pkgutil, sys
package, *left_out = sys.argv[1:]
root = importlib.import_module(package)
for module in pkgutil.walk_packages(root.__path__, package + "."):
    name = module.name.removeprefix(package + ".")
    if name.split(".")[-1] != "__main__" and "for_children" not in name and name not in left_out:
        importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in sys.modules if name.startswith("paceline_")})
"""


@pytest.mark.parametrize("extra", sorted(ADDED))
def test_each_part_is_imported_with_what_it_depends_on(
    core: Environment, path_with: Callable[[str], str], tmp_path: Path, extra: str
) -> None:
    package = f"paceline_{extra}"
    words = ["-c", IMPORT_ALL, package, *NEED_ANOTHER.get(package, ())]
    done = core.run(words, tmp_path, PYTHONPATH=path_with(f"paceline-{extra}"))
    assert done.returncode == 0, done.stderr
    allowed = {part.replace("-", "_") for part in with_those_that_they_need([f"paceline-{extra}"])}
    assert set(done.stdout.split()) <= allowed


def test_the_table_of_extras_is_what_the_parts_offer() -> None:
    for extra, groups in ADDED.items():
        offered = project_of(f"paceline-{extra}")["entry-points"]
        assert {group: sorted(offered[group]) for group in groups} == {
            group: sorted(names) for group, names in groups.items()
        }
    assert sorted(PACKAGES) == sorted({"paceline", *(f"paceline_{extra}" for extra in ADDED)})


def test_the_metadata_that_is_installed_is_that_of_the_checkout() -> None:
    """An entry point that was added after the installation is not found: `make setup` installs it."""
    for package in PACKAGES:
        part = package.replace("_", "-")
        project = tomllib.loads((ROOT / "packages" / part / "pyproject.toml").read_text())["project"]
        installed = {(point.group, point.name): point.value for point in distribution(part).entry_points}
        for group, points in project["entry-points"].items():
            for name, value in points.items():
                assert installed.get((group, name)) == value, f"{part}: {group} {name}: run make setup"


def test_one_version_for_all() -> None:
    from paceline.base.version import VERSION

    assert {distribution(package.replace("_", "-")).version for package in PACKAGES} == {VERSION}
    assert sys.version_info >= (3, 11)
