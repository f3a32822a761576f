"""One command starts a run on several hosts, over ssh and mpirun; each host has an sshd and processes of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
from hosts.network import Network, _env, lacking, paceline, still_running, until

LACKING = ", ".join(lacking())
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no hosts on this machine: {LACKING} missing"),
    pytest.mark.timeout(180),
]
WORLD = """
    import os, signal, socket, sys, time
    rank, folder = int(os.environ["RANK"]), os.path.dirname(os.path.abspath(__file__))
    def say(line):
        os.write(1, (line + "\\n").encode())
    say(f"{socket.gethostname()} {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']} {sys.argv[1:]}")
    if "collective" in sys.argv:
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        say(f"total {int(total)} TOKEN={os.environ.get('TOKEN')}")
        dist.destroy_process_group()
    if "fail" in sys.argv and rank == 3:
        raise ValueError("the data of rank 3 is bad")
    if "stay" in sys.argv or "fail" in sys.argv:
        def save(*_):
            open(f"{folder}/saved-{rank}", "w").close()
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        say("ready")
        time.sleep(100)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


@pytest.fixture
def folder(tmp_path: Path, network: Network) -> Path:
    """A working directory that all hosts share; nothing may run on any host after the test."""
    (tmp_path / "train.py").write_text(dedent(WORLD))
    (tmp_path / "hf").write_text("node0 slots=2\nnode1 slots=2\nnode2 slots=2\n")
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_is_left(network: Network) -> Iterator[None]:
    yield
    until(lambda: still_running(network.hosts) == {}, f"the end of {still_running(network.hosts)}", 10)


def at_desk(network: Network, folder: Path, words: str, **env: str) -> subprocess.CompletedProcess[str]:
    told = " ".join(f"{name}={value}" for name, value in {"OMP_NUM_THREADS": "1", **env}.items())
    return network.at_desk("sh", "-c", f"cd {folder}; {told} {paceline()} {words}", timeout_s=90)


def command_lines() -> list[str]:
    """What `ps` shows of this machine, the hosts' processes included."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


def marked(text: str) -> list[str]:
    return sorted(text.splitlines())


def expected(*places: str, args: str) -> list[str]:
    """What the ranks say first: "node1:0/2" for the first of two processes of node1."""
    lines = []
    for rank, place in enumerate(places):
        host, local, of = re.fullmatch(r"(\w+):(\d)/(\d)", place).groups()  # type: ignore[union-attr]
        lines.append(f"{host}: [rank{rank}]: {host} {local} of {of} {args}")
    return lines


ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("openmpi", marks=pytest.mark.long)])
def test_a_world_of_four(launcher: str, network: Network, folder: Path) -> None:
    needed = {"ssh": "ssh", "openmpi": "mpirun"}[launcher]
    if shutil.which(needed) is None:
        pytest.skip(f"there is no {needed}")
    (folder / ".deepspeed_env").write_text("TOKEN='a b'\n")
    ssh = f"-F {network.ssh_config}"
    more = f"'--mca plm_rsh_args \"{ssh}\"'" if launcher == "openmpi" else f"'{ssh}'"
    words = f"launch --hostfile hf --nodes 2 --launcher {launcher} --launcher-args {more} train.py collective"
    done = at_desk(network, folder, words, **ROOT)
    assert done.returncode == 0, done.stderr
    told = marked(done.stdout)
    first = expected("node0:0/2", "node0:1/2", "node1:0/2", "node1:1/2", args="['collective']")
    assert [line for line in told if "total" not in line] == first
    assert [line.split("]: ")[1] for line in told if "total" in line] == ["total 4 TOKEN=a b"] * 4
    assert "node1: paceline: round 1: 2 nodes (node0, node1), 4 processes" in done.stderr


def test_deepspeeds_flags_and_some_slots(network: Network, folder: Path) -> None:
    words = f"deepspeed -H hf --include node2@node0:1 --launcher_args '-F {network.ssh_config}' train.py --x"
    done = at_desk(network, folder, words)
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"--local_rank=\d', '", "", line) for line in marked(done.stdout)]
    assert lines == expected("node0:0/1", "node2:0/2", "node2:1/2", args="['--x']")
    assert "'--local_rank=1', '--x'" in marked(done.stdout)[-1]


def test_hosts_that_cannot_take_part(network: Network, folder: Path) -> None:
    """Each for another reason: all are named in one error, and nothing was started anywhere."""
    stranger = (network.folder / "user_key.pub").read_text().split()[1]  # some key, but not that of a host
    (folder / "known").write_text(f"10.77.0.2 ssh-ed25519 {stranger}\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "other_key")], check=True)
    own = network.ssh_config.read_text()
    (folder / "config").write_text(
        f"""
        Host changed
          HostName 10.77.0.2
          UserKnownHostsFile {folder}/known
        Host unknown-key
          HostName 10.77.0.2
          UserKnownHostsFile /dev/null
          StrictHostKeyChecking yes
        Host port
          HostName node1
          Port 2222
        Host denied
          HostName node1
          IdentityFile {folder}/other_key
          IdentitiesOnly yes
          UserKnownHostsFile {network.folder}/known_hosts
          User root
        Host away
          HostName 10.77.0.99
        """
        + own.replace("Host *", "Host * !denied")
    )
    names = ["node0", "changed", "unknown-key", "port", "denied", "away", "nowhere.invalid"]
    (folder / "hf").write_text("".join(f"{name} slots=1\n" for name in names))
    done = at_desk(network, folder, f"launch --hostfile hf --launcher-args '-F {folder}/config' train.py")
    assert done.returncode == 1
    assert "6 of 7 hosts cannot take part; nothing was started on any.  [launch-hosts]" in done.stderr, done.stderr
    for line in (
        "changed: its host key has changed",
        "unknown-key: its host key is not known",
        "port: it refuses connections",
        "denied: permission denied",
        "away: it cannot be reached",
        "nowhere.invalid: there is no host of that name",
        "--exclude changed@unknown-key@port@denied@away@nowhere.invalid",
    ):
        assert line in done.stderr, done.stderr
    assert "node0:" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("openmpi", marks=pytest.mark.long)])
def test_a_host_that_lacks_the_folder_and_one_that_lacks_the_script(
    launcher: str, network: Network, folder: Path
) -> None:
    if launcher == "openmpi" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    _, node1, node2 = network.hosts
    work = folder / "work"
    work.mkdir()
    shutil.copy(folder / "train.py", work)
    node1.run(f"mount -t tmpfs none {work}")  # in that host's own view
    node2.run(f"mount -t tmpfs none {folder}")
    try:
        ssh = f"-F {network.ssh_config}"
        more = f'--mca plm_rsh_args "{ssh}"' if launcher == "openmpi" else ssh
        words = f"launch --hostfile ../hf --launcher {launcher} --launcher-args '{more}' train.py"
        done = at_desk(network, work, words, **ROOT)
        assert done.returncode == 1
        assert "2 of 3 hosts cannot take part" in done.stderr, done.stderr
        assert "node1: the script 'train.py' cannot be run (there is no such file" in done.stderr
        assert f"node2: the working directory {work} is not there" in done.stderr
    finally:
        node1.run(f"umount {work}")
        node2.run(f"umount {folder}")


def test_no_python_there_and_a_wrong_port(network: Network, folder: Path) -> None:
    node1 = network.hosts[1]
    node1.run(f"mount --bind /dev/null {os.path.realpath(sys.executable)}")
    try:
        words = f"launch --hostfile hf --launcher-args '-F {network.ssh_config}' train.py"
        done = at_desk(network, folder, words)
    finally:
        node1.run(f"umount {os.path.realpath(sys.executable)}")
    assert done.returncode == 1
    assert "1 of 3 hosts" in done.stderr, done.stderr
    assert "node1: " in done.stderr
    done = at_desk(network, folder, words.replace("--hostfile", "--ssh-port 2222 --hostfile"))
    assert "3 of 3 hosts" in done.stderr
    assert "node2: it refuses connections at port 2222" in done.stderr


def test_a_rank_fails_on_one_host(network: Network, folder: Path) -> None:
    words = f"launch --hostfile hf --nodes 2 --launcher-args '-F {network.ssh_config}'"
    done = at_desk(network, folder, f"{words} train.py fail")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the data of rank 3 is bad") == 1, done.stderr
    assert "node1: Traceback" in done.stderr
    assert "node1: paceline.LaunchError: rank 3 failed with exit code 1.  [rank-failed]" in done.stderr
    assert "node0: paceline: stopped, because node 1 (node1)" in done.stderr or "rank 3" in done.stderr
    assert still_running(network.hosts) == {}


def start(network: Network, folder: Path, words: str) -> subprocess.Popen[bytes]:
    """Starts at the desk, and waits until all four processes are ready."""
    log = (folder / "log").open("wb")
    command = ["ip", "netns", "exec", network.switch, *paceline().split(), *words.split(), "--launcher-args"]
    command += [f"-F {network.ssh_config}", "train.py", "stay"]
    env = {**_env(), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    network.clients.append(job)
    log.close()
    until(lambda: (folder / "log").read_text().count("ready") == 4, "four processes")
    return job


def test_the_launcher_is_killed(network: Network, folder: Path) -> None:
    """Nobody is left to say anything, yet no process outlives it; they were asked, and had the time to save."""
    job = start(network, folder, "launch --hostfile hf --nodes 2")
    assert len(network.hosts[0].processes()) > 2
    job.kill()
    job.wait()
    until(lambda: still_running(network.hosts) == {}, "the end of all processes", 20)
    assert sorted(path.name for path in folder.glob("saved-*")) == [f"saved-{rank}" for rank in range(4)]


@pytest.mark.parametrize(("name", "code"), [("TERM", 75), pytest.param("INT", 130, marks=pytest.mark.long)])
def test_a_signal(name: str, code: int, network: Network, folder: Path) -> None:
    job = start(network, folder, "launch --hostfile hf --nodes 2")
    assert not [line for line in command_lines() if '"secret"' in line]  # the orders, which hold the run's secret
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert job.wait(30) == code, (folder / "log").read_text()
    assert still_running(network.hosts) == {}
    if name == "TERM":
        assert len(list(folder.glob("saved-*"))) == 4


@pytest.mark.parametrize("silently", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_host_is_lost_on_the_way(silently: bool, network: Network, folder: Path) -> None:
    job = start(network, folder, "launch --hostfile hf --nodes 2")
    node1 = network.hosts[1]
    node1.power_off(silently=silently)
    try:
        assert job.wait(90) != 0
        assert still_running(network.hosts) == {}
        if not silently:
            assert "the connection to node1 was lost.  [launch-host-lost]" in (folder / "log").read_text()
    finally:
        node1.power_on()


@pytest.mark.long
def test_from_one_of_the_hosts(network: Network, folder: Path) -> None:
    """Which needs no ssh to itself, and is known to the others under another address than 127.0.0.1."""
    words = f"cd {folder}; OMP_NUM_THREADS=1 {paceline()} launch --hostfile hf --nodes 2"
    done = network.hosts[0].run(f"{words} --launcher-args '-F {network.ssh_config}' train.py collective")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "total 4" in line]


def test_without_ssh(network: Network, folder: Path) -> None:
    """As under Kubernetes: the same command on each host, with its number."""
    words = "deepspeed --hostfile hf --num_nodes 2 --no_ssh --master_addr node0 --master_port 29555"
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_text("of this test alone")
    environment = f"env -C {folder} OMP_NUM_THREADS=1 PACELINE_RUN_SECRET_FILE=secret"
    jobs = [
        host.start(
            f"{environment} {paceline()} {words} --node_rank {rank} train.py collective",
            folder / f"{host.name}.log",
        )
        for rank, host in enumerate(network.hosts[:2])
    ]
    assert [job.wait() for job in jobs] == [0, 0], [job.text() for job in jobs]
    assert [job.text().count("total 4") for job in jobs] == [2, 2]
    assert "'--local_rank=1', 'collective'" in jobs[1].text()


STANDS = """
    import time, torch
    from paceline import Accelerator

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4000
        def __getitem__(self, index):
            if accelerator.process_index == 2 and index > 60:
                time.sleep(600)
            return torch.ones(4)

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
"""


@pytest.mark.long
def test_hosts_with_folders_of_their_own_have_one_record_and_one_report(network: Network, folder: Path) -> None:
    (folder / "stands.py").write_text(dedent(STANDS))
    (folder / "hf").write_text("node0 slots=1\nnode1 slots=1\nnode2 slots=1\n")
    # /run is a file system of its own on each of these hosts.
    words = "--watch-dir /run/watched --watch --stuck-after 5 --on-hang leave stands.py"
    done = at_desk(network, folder, f"launch --hostfile hf --launcher-args '-F {network.ssh_config}' {words}")
    assert done.stderr.count("no rank has made progress for") >= 1, done.stderr
    assert done.stderr.count("all stacks: ") == 1, done.stderr
    assert re.search(r"rank 2 on node2: at \S+:\d+ in __getitem__: time.sleep\(600\)", done.stderr), done.stderr
    assert "2 ranks (0-1): in backward at " in done.stderr, done.stderr
    names = network.hosts[0].run("ls /run/watched").stdout.split()
    assert [name.partition(".")[0] for name in names if name.startswith("rank-")] == [f"rank-0000{n}" for n in range(3)]
    assert "report.html" in names and "stacks-1.txt" in names
    assert "report.html" not in network.hosts[2].run("ls /run/watched").stdout
    shown = network.hosts[0].run(f"{paceline()} watch --text --once /run/watched").stdout
    assert "3 processes started on 3 hosts" in shown, shown
