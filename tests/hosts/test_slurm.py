"""`paceline launch --on slurm` on a real SLURM of three nodes: submitted, followed, put back, cancelled; nodes that fail.

Most ranks are shell scripts, which need no import of torch; at the end there are real training runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import page_reader
import pytest
from hosts.network import Host, Network, lacking, still_running, until
from hosts.run import Run
from hosts.slurm_cluster import Cluster
from hosts.slurm_cluster import lacking as lacking_slurm

import paceline
from paceline.world.detect.slurm import expand

LACKING = ", ".join(lacking() or lacking_slurm())
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no SLURM on hosts of this machine: {LACKING} missing"),
    pytest.mark.timeout(240),
]
PACELINE = (sys.executable, "-m", "paceline.cli.main", "launch")
ON = (*PACELINE, "--on", "slurm")
ROOT = Path(__file__).parents[2]
# A rank: says where it is, then does what its words say. Asked to end, it saves and leaves.
RANK = """
    #!/bin/sh
    echo "$SLURMD_NODENAME: rank $RANK of $WORLD_SIZE, restart ${SLURM_RESTART_COUNT:-0}, $*"
    case "$1" in
        fail) test "$RANK" != 3 || exit 7; sleep 60;;
        stay) trap 'echo "rank $RANK saves"; exit 75' TERM
              test "${SLURM_RESTART_COUNT:-0}" = 0 || exit 0
              while :; do sleep 0.1; done;;
    esac
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Network(3) as network, Cluster(network) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory, which all nodes share."""
    rank = tmp_path / "rank.sh"
    rank.write_text(dedent(RANK).lstrip())
    rank.chmod(0o755)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """No job may be in the queue after a test, and no process on a node."""
    yield
    if cluster.hang_up():
        # The test failed while it followed a job: the tests after it must not fail for that job.
        cluster.run("scancel", "--user=root")
    cluster.restore()
    until(lambda: cluster.queue() == [], lambda: f"an empty queue\n{cluster.report()}\n{left_on(cluster)}", 40)
    until(lambda: left_on(cluster) == {}, lambda: f"the end of {left_on(cluster)}", 15)


def left_on(cluster: Cluster) -> dict[str, list[str]]:
    left = {}
    for name, commands in still_running(cluster.network.hosts).items():
        others = [words for words in commands if not re.search(r"slurmd|munged", words)]
        if others:
            left[name] = others
    return left


def launch(cluster: Cluster, folder: Path, *words: object, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    """Runs a command in the working directory; no rank may look for accelerators, which takes an import of torch."""
    return cluster.run(*words, cwd=folder, env={"PACELINE_CPU": "1"}, timeout_s=timeout_s)


def ranks(text: str) -> list[str]:
    """What the ranks said first, in order of rank."""
    lines = re.findall(r"^\S+: \[rank\d+\]: (\S+: rank .+)$", text, re.MULTILINE)
    return sorted(lines, key=lambda line: int(line.split()[2]))


def world(*nodes: str, procs: int = 2, restart: int = 0, words: str = "") -> list[str]:
    size, lines = len(nodes) * procs, []
    for rank in range(size):
        lines.append(f"{nodes[rank // procs]}: rank {rank} of {size}, restart {restart}, {words}")
    return lines


def test_a_job_is_submitted_and_left_alone(cluster: Cluster, folder: Path) -> None:
    done = launch(cluster, folder, *ON, "--nodes", 2, "--procs", 2, "--time", 5, "--no-python", "./rank.sh", "a b")
    assert done.returncode == 0, done.stderr
    job = re.search(r"^job (\d+) is in the queue", done.stdout)
    assert job is not None, done.stdout
    log = folder / f"paceline-{job[1]}.log"
    assert f"follow it: tail -F {log}\ncancel it: scancel {job[1]}\n" in done.stdout
    cluster.wait_for_state(job[1], "COMPLETED")
    assert ranks(log.read_text()) == world("node0", "node1", words="a b")
    assert f"paceline: job {job[1]} of SLURM, on node0, node1: one launcher on each node." in log.read_text()
    # The secret is in no place that others could read: not in the script, not in a variable of the job.
    script = cluster.run("scontrol", "write", "batch_script", job[1], "-").stdout
    assert "--procs 2" in script
    assert not re.search(r"[0-9a-f]{64}", script)


def test_a_job_is_followed_and_its_exit_code_returned(cluster: Cluster, folder: Path) -> None:
    words = ("--nodes", 2, "--procs", 2, "--wait", "--no-python", "./rank.sh", "fail")
    done = launch(cluster, folder, *ON, *words)
    assert done.returncode == 7, done.stderr
    assert ranks(done.stdout) == world("node0", "node1", words="fail")
    assert done.stdout.count("rank 3 failed with exit code 7") == 2  # where it failed, and why the other node stopped
    assert done.stdout.count("[rank-failed]") == 1
    assert re.search(r"^paceline: job \d+: running on node\[0-1\]$", done.stderr, re.MULTILINE)


def test_a_batch_script_of_ones_own(cluster: Cluster, folder: Path) -> None:
    """It finds out by itself where it is, and how many processes were asked for."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{' '.join(PACELINE)} --no-python ./rank.sh\n")
    wanted = ("--nodes=2", "--ntasks-per-node=2", "--output=log", "--wait")
    done = launch(cluster, folder, "sbatch", *wanted, script)
    log = (folder / "log").read_text()
    assert done.returncode == 0, done.stderr + log
    assert ranks(log) == world("node0", "node1")
    assert log.count("one launcher on each node") == 1


def test_a_shell_with_an_allocation(cluster: Cluster, folder: Path) -> None:
    """Also for a part of its nodes; more than it has are refused."""
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    done = launch(cluster, folder, *salloc, *PACELINE, "--procs", 2, "--no-python", "./rank.sh")
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == world("node0", "node1")
    assert "of SLURM, on node0, node1: one launcher on each node" in done.stderr
    one = launch(cluster, folder, *salloc, *ON, "--nodes", 1, "--procs", 1, "--no-python", "./rank.sh")
    assert ranks(one.stdout) == world("node0", procs=1), one.stderr
    many = launch(cluster, folder, *salloc, *ON, "--nodes", 3, "--procs", 1, "--no-python", "./rank.sh")
    assert many.returncode == 1
    assert "3 nodes are requested, and job" in many.stderr
    assert "[slurm-nodes]" in many.stderr


@pytest.mark.skipif(shutil.which("script") is None, reason="there is no script(1), which makes a terminal")
def test_a_shell_that_is_a_step(cluster: Cluster, folder: Path) -> None:
    """Such a shell has all resources of its job; the launchers share them with it."""
    inside = f"{' '.join(PACELINE)} --procs 1 --no-python ./rank.sh; echo ended with $?"
    shell = f"srun --nodes=2 --ntasks-per-node=1 --label --pty bash -c '{inside}'"
    done = launch(cluster, folder, "script", "-qec", shell, "/dev/null")
    text = re.sub(r"^0: ", "", done.stdout.replace("\r", ""), flags=re.MULTILINE)  # the label
    assert ranks(text) == world("node0", "node1", procs=1), text
    assert "ended with 0" in text


def test_hosts_of_a_hostfile(cluster: Cluster, folder: Path) -> None:
    (folder / "hf").write_text("node2 slots=1\nnode1 slots=2\n")
    words = ("--hostfile", "hf", "--launcher", "slurm", "--no-python", "./rank.sh")
    done = launch(cluster, folder, *PACELINE, *words)
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in ranks(done.stdout)] == [
        "node2: rank 0 of 3",
        "node1: rank 1 of 3",
        "node1: rank 2 of 3",
    ]


def test_a_job_array(cluster: Cluster, folder: Path) -> None:
    """Each element is a run of its own, though both run on the same node at the same time."""
    words = ("--sbatch-args", "--array=3-4 --nodelist=node0", "--wait", "--no-python", "./rank.sh")
    done = launch(cluster, folder, *ON, "--nodes", 1, "--procs", 2, *words)
    assert done.returncode == 0, done.stderr
    for element in (3, 4):
        own = [
            line.removeprefix(f"{element}: ") for line in done.stdout.splitlines() if line.startswith(f"{element}: ")
        ]
        assert ranks("\n".join(own)) == world("node0"), done.stdout
    logs = sorted(path.name for path in folder.glob("paceline-*.log"))
    assert [re.sub(r"\d+_", "", name) for name in logs] == ["paceline-3.log", "paceline-4.log"]


def test_names_of_nodes(cluster: Cluster) -> None:
    for names in ("node[01-03,7]", "a[1-2]-b[08-10],login", "gpu7", "r[1-2]n[1,3-4]"):
        assert expand(names) == cluster.run("scontrol", "show", "hostnames", names).stdout.split()


BAD = {
    "partition": (("--partition", "gpus"), "invalid partition", "--partition"),
    "nodes": (("--nodes", "9"), "Node count specification invalid", "--nodes"),
    "cpus": (("--procs", "100"), "More processors requested than permitted", "--cpus-per-proc"),
    "gpus": (("--gpus-per-node", "8"), "Invalid generic resource (gres) specification", "GPUs"),
    "time": (("--partition", "short", "--time", "1:00:00"), "Requested time limit is invalid", "--time"),
}


def test_what_slurm_refuses(cluster: Cluster, folder: Path) -> None:
    for words, said, fix in BAD.values():
        done = launch(cluster, folder, *ON, "--procs", 1, *words, "--no-python", "./rank.sh")
        assert done.returncode == 1, done.stderr
        assert "[slurm-refused]" in done.stderr
        assert said in done.stderr
        assert f"why: {words[-2].removeprefix('--').replace('-', '_')}={words[-1]} ({words[-2]})" in done.stderr
        assert "why: partition all: 3 nodes, 4 CPUs each" in done.stderr
        assert fix in done.stderr.partition("fix:")[2]
        assert cluster.queue() == []
    done = launch(cluster, folder, *ON, "--procs", 1, "rnak.sh")
    assert "the script 'rnak.sh' cannot be run" in done.stderr
    assert "write rank.sh" in done.stderr


def test_a_job_that_would_never_start(folder: Path) -> None:
    """A SLURM that takes jobs over a partition's limits lets them wait for ever: the job is taken out again."""
    with Network(1) as network, Cluster(network, limits="NO") as lenient:
        words = ("--procs", 1, "--partition", "short", "--time", 10, "--no-python", "./rank.sh")
        done = launch(lenient, folder, *ON, *words)
        assert done.returncode == 1
        assert re.search("would never start: Partition(TimeLimit|Config)", done.stderr), done.stderr
        assert lenient.queue() == []


def test_no_controller(cluster: Cluster, folder: Path) -> None:
    config = (cluster.folder / "slurm.conf").read_text().replace("SlurmctldPort=6817", "SlurmctldPort=6899")
    (folder / "slurm.conf").write_text(config)
    env = {"SLURM_CONF": str(folder / "slurm.conf"), "PACELINE_CPU": "1"}
    done = cluster.run(*ON, "--procs", 1, "--no-python", "./rank.sh", cwd=folder, env=env)
    assert done.returncode == 1
    assert "[slurm-unreachable]" in done.stderr, done.stderr
    assert f"slurm.conf: {folder}/slurm.conf" in done.stderr
    assert "is DOWN" in done.stderr


def test_nodes_that_lack_something(cluster: Cluster, folder: Path) -> None:
    """One error names all of them, and no process starts anywhere."""
    node1 = cluster.network.hosts[1]
    version = Path(paceline.__file__).parent / "base" / "version.py"
    other = folder / "version.py"
    other.write_text(version.read_text().replace(f'"{paceline.__version__}"', '"0.0.7"'))
    assert node1.run(f"mount --bind {other} {version}").returncode == 0
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    try:
        done = launch(cluster, folder, *salloc, *PACELINE, "--procs", 1, "--no-python", "./rank.sh")
    finally:
        assert node1.run(f"umount {version}").returncode == 0
    assert done.returncode == 1
    assert "1 of 2 hosts cannot take part; nothing was started on any.  [launch-hosts]" in done.stderr, done.stderr
    assert f"why: node1: paceline is 0.0.7 there, and {paceline.__version__} here" in done.stderr
    assert "rank 0" not in done.stdout
    (folder / "empty").mkdir()
    bin_folder = Path(sys.executable).parent
    assert node1.run(f"mount --bind {folder}/empty {bin_folder}").returncode == 0
    try:
        done = launch(cluster, folder, *salloc, *PACELINE, "--procs", 1, "--no-python", "./rank.sh")
    finally:
        assert node1.run(f"umount {bin_folder}").returncode == 0
    assert done.returncode == 1
    assert f"why: node1: {sys.executable} cannot be run there (no such file or directory)" in done.stderr, done.stderr
    elsewhere = Path("/run") / cluster.network.prefix  # each host has a /run of its own
    elsewhere.mkdir()
    try:
        shutil.copy(folder / "rank.sh", elsewhere)
        done = launch(cluster, elsewhere, *salloc, *PACELINE, "--procs", 1, "--no-python", "./rank.sh")
        lost = launch(cluster, elsewhere, *ON, "--procs", 1, "--wait", "--no-python", "./rank.sh")
    finally:
        shutil.rmtree(elsewhere)
    for node in ("node0", "node1"):
        assert f"why: {node}: the working directory {elsewhere} is not there" in done.stderr
    assert lost.returncode == 1
    assert "[slurm-job]" in lost.stderr, lost.stderr
    assert f"log: {elsewhere}/paceline-" in lost.stderr
    assert "a folder that the nodes share" in lost.stderr


def started(cluster: Cluster, folder: Path, *words: object) -> tuple[subprocess.Popen[bytes], str, Path]:
    """A job of two nodes that is followed, and whose ranks run: the command, the job, and what it has shown."""
    shown = folder / "shown"
    command = (*ON, "--nodes", 2, "--procs", 1, "--wait", *words, "--no-python", "./rank.sh", "stay")
    follower = cluster.start(*command, log=shown, cwd=folder, env={"PACELINE_CPU": "1"})
    until(lambda: len(ranks(shown.read_text())) == 2, "two ranks", 40)
    job = re.search(r"^paceline: job (\d+):", shown.read_text(), re.MULTILINE)
    assert job is not None
    return follower, job[1], shown


def secrets_in_sight(cluster: Cluster) -> list[str]:
    """Command lines and variables of the cluster's processes that hold what may be a secret."""
    texts = []
    # Other tests run at the same time, and pods of Kubernetes do have their run's secret in a variable.
    of_this_cluster = f"SLURM_CONF={cluster.env['SLURM_CONF']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            variables = (process / "environ").read_bytes()
            if of_this_cluster in variables:
                texts.append(((process / "cmdline").read_bytes() + variables).decode(errors="replace"))
    assert any("rank.sh" in text for text in texts)
    return [secret for text in texts for secret in re.findall(r"[0-9a-f]{64}", text)]


def test_preempted(cluster: Cluster, folder: Path) -> None:
    """The job goes back into the queue, where it is on hold for a while: it is followed into its second life."""
    follower, job, shown = started(cluster, folder)
    assert secrets_in_sight(cluster) == []
    # On hold first: a reader of the follower's lines must learn what the job waits for.
    requeued = cluster.run("scontrol", "requeuehold", job)
    assert requeued.returncode == 0, f"{requeued.stderr}\n{cluster.report()}"
    released = f"it is on hold until you release it: scontrol release {job}"
    until(lambda: released in shown.read_text(), lambda: f"{released}: {shown.read_text()}\n{cluster.report()}", 40)
    let_go = cluster.run("scontrol", "release", job)
    assert let_go.returncode == 0, f"{let_go.stderr}\n{cluster.report()}"
    until(lambda: follower.poll() is not None, lambda: f"the end: {shown.read_text()}\n{cluster.report()}", 60)
    text = shown.read_text()
    assert follower.returncode == 0, text
    assert sorted(re.findall(r"rank \d saves", text)) == ["rank 0 saves", "rank 1 saves"]
    assert ranks(text)[1::2] == world("node0", "node1", procs=1, restart=1, words="stay"), text
    assert "(restart 1): one launcher on each node" in text


@pytest.mark.long
def test_the_time_limit(cluster: Cluster, folder: Path) -> None:
    """The warning reaches the launcher, the ranks save, and the launcher puts the job back."""
    follower, job, shown = started(cluster, folder, "--time", 1, "--warning-s", 50)
    assert follower.wait(90) == 0, shown.read_text()
    text = shown.read_text()
    assert sorted(re.findall(r"rank \d saves", text)) == ["rank 0 saves", "rank 1 saves"]
    assert f"paceline: job {job} is queued again (restart 1)" in text
    assert len(ranks(text)) == 4


def test_cancelled(cluster: Cluster, folder: Path) -> None:
    """By scancel, and by Ctrl-C: the ranks may save, and the job does not come back."""
    follower, job, shown = started(cluster, folder)
    assert cluster.run("scancel", job).returncode == 0
    assert follower.wait(40) == 1, shown.read_text()
    assert f"job {job} ended as CANCELLED" in shown.read_text()
    assert sorted(re.findall(r"rank \d saves", shown.read_text())) == ["rank 0 saves", "rank 1 saves"]
    follower, job, shown = started(cluster, folder)
    os.kill(follower.pid, signal.SIGINT)
    assert follower.wait(40) == 130, shown.read_text()
    assert f"cancelling job {job}" in shown.read_text()
    assert cluster.job(job)["JobState"] == "CANCELLED"


def node_of(cluster: Cluster, job: str, number: int) -> Host:
    """A node of a running job; the first one, number 0, runs its batch script."""
    name = expand(cluster.job(job)["NodeList"])[number]
    return next(host for host in cluster.network.hosts if host.name == name)


@pytest.mark.long
def test_a_node_fails(cluster: Cluster, folder: Path) -> None:
    """The others notice it, and the job goes on with another node."""
    follower, job, shown = started(cluster, folder)
    lost = node_of(cluster, job, 1)
    begun = time.monotonic()
    cluster.power_off(lost)
    until(lambda: "restart 1" in shown.read_text(), f"the job is put back: {shown.read_text()}", 60)
    print(f"put back after {time.monotonic() - begun:.1f} s")
    assert follower.wait(120) == 0, shown.read_text()
    print(f"at its end after {time.monotonic() - begun:.1f} s")
    text = shown.read_text()
    assert f"{lost.name}) was lost" in text, text
    again = [line for line in ranks(text) if "restart 1" in line]
    assert len(again) == 2, text
    assert not any(line.startswith(lost.name) for line in again), text


@pytest.mark.long
def test_a_node_fails_and_the_others_go_on(cluster: Cluster, folder: Path) -> None:
    """With a range of nodes the job goes on with those that are left."""
    shown = folder / "shown"
    command = (*ON, "--nodes", "1:2", "--procs", 1, "--wait", "--no-python", "./rank.sh", "stay")
    follower = cluster.start(*command, log=shown, cwd=folder, env={"PACELINE_CPU": "1"})
    until(lambda: len(ranks(shown.read_text())) == 2, "two ranks", 40)
    job = re.findall(r"^paceline: job (\d+):", shown.read_text(), re.MULTILINE)[0]
    lost = node_of(cluster, job, 1)
    cluster.power_off(lost)
    until(lambda: len(ranks(shown.read_text())) == 3, "a rank that goes on alone", 60)
    assert any(" of 1, restart 0" in line for line in ranks(shown.read_text()))
    time.sleep(15)  # SLURM has noticed meanwhile
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run("scancel", job)
    follower.wait(60)


def test_the_page(cluster: Cluster, folder: Path) -> None:
    """The commands of the how-to page, typed one after the other."""
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in page_reader.blocks(ROOT / "docs" / "how-to" / "slurm.md"):
        if block.title and block.language == "python":
            (folder / block.title).write_text(block.text)
        elif block.language == "bash" and block.skipped.endswith("it needs SLURM"):
            done = cluster.run("bash", "-euc", block.text, cwd=folder, env=path, timeout_s=120)
            assert done.returncode == 0, f"line {block.line}\n{done.stdout}\n{done.stderr}"
            print(done.stdout)
    until(lambda: cluster.queue() == [], "the end of the job array", 120)
    for log in folder.glob("paceline-*_?.log"):
        assert "2 processes, 24 steps" in log.read_text()
    log = (folder / "job.log").read_text()
    assert "node0: [rank0]: 4 processes, 12 steps" in log


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of each step of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    script = Path(__file__).parent / "scripts" / "lossless.py"
    words = [sys.executable, str(script), str(folder), "--steps", "2000", "--pause-s", "0", "--save-every", "9999"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {row.step: row.loss for row in Run(folder, str).rows()}


class Lossless:
    """A training run on two nodes, whose job goes back into the queue again and again."""

    def __init__(self, cluster: Cluster, folder: Path, *words: object) -> None:
        script, self.shown = Path(__file__).parent / "scripts" / "lossless.py", folder / "shown"
        self._run, self._folder, self._restarts = Run(folder, str), folder, -1
        command = (*ON, "--nodes", 2, "--procs", 1, "--wait", "--cpu", "--threads", 1, *words, script, folder)
        self._follower = cluster.start(*command, "--pause-s", 0.1, log=self.shown, cwd=folder)

    def goes_on(self) -> str:
        """Waits until 12 steps were done since the last restart, which must be a new one; returns the job's number."""
        self._restarts += 1

        def done() -> bool:
            begun = sorted({row.begun for row in self._run.rows() if row.rank == 0})
            if len(begun) <= self._restarts:
                return False
            return len([row for row in self._run.rows() if row.begun == begun[self._restarts]]) >= 12

        until(done, f"steps after restart {self._restarts}: {self.shown.read_text()[-3000:]}", 150)
        return re.findall(r"^paceline: job (\d+):", self.shown.read_text(), re.MULTILINE)[0]

    def ends_as(self, undisturbed: dict[int, float]) -> None:
        """Lets it end; each step must have the loss that it has in a run that nothing happens to."""
        (self._folder / "enough").touch()
        assert self._follower.wait(120) == 0, self.shown.read_text()
        rows = self._run.rows()
        assert max(row.step for row in rows) <= 2000, "the undisturbed run is too short"
        assert [row for row in rows if abs(row.loss - undisturbed[row.step]) > 3e-6 or row.batch != 12] == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_exact_resume(cluster: Cluster, folder: Path, undisturbed: dict[int, float]) -> None:
    """Requeued by hand, warned of the time limit, and with a node lost."""
    run = Lossless(cluster, folder, "--time", 2, "--warning-s", 85)
    job = run.goes_on()
    cluster.run("scontrol", "requeue", job)
    run.goes_on()
    warned = f"job {job} is queued again (restart 2)"
    until(lambda: warned in run.shown.read_text(), "the warning", 120)
    run.goes_on()
    cluster.power_off(node_of(cluster, job, 1))
    run.goes_on()
    run.ends_as(undisturbed)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_an_exact_resume_after_preemption_and_without_the_batch_host(
    cluster: Cluster, folder: Path, undisturbed: dict[int, float]
) -> None:
    """A job of a partition of higher priority takes the nodes for a while; then the node with the batch script is lost."""
    run = Lossless(cluster, folder)
    job = run.goes_on()
    urgent = ("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=urgent.log", "--wrap=sleep 3")
    assert cluster.run(*urgent, cwd=folder).returncode == 0
    run.goes_on()
    assert cluster.job(job)["Restarts"] == "1"
    lost = node_of(cluster, job, 0)
    begun = time.monotonic()
    cluster.power_off(lost)
    run.goes_on()
    print(f"steps on other nodes {time.monotonic() - begun:.1f} s after the loss of the batch host")
    assert lost.name not in expand(cluster.job(job)["NodeList"])
    run.ends_as(undisturbed)


def test_a_failing_rank(cluster: Cluster, folder: Path) -> None:
    """Its traceback is shown once, and the job ends with its exit code."""
    (folder / "train.py").write_text("import os\nassert os.environ['RANK'] != '1', 'the data of rank 1 is bad'\n")
    done = launch(cluster, folder, *ON, "--nodes", 2, "--procs", 1, "--wait", "train.py")
    assert done.returncode == 1
    assert done.stdout.count("AssertionError: the data of rank 1 is bad") == 1, done.stdout
    assert json.dumps(cluster.queue()) == "[]"
