"""`paceline doctor` on hosts with faults of their own: each is found, named, and gone when its fix was typed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts.local_slurm import local_slurm
from hosts.network import Host, Network, lacking, paceline, still_running, until

LACKING = ", ".join(lacking())
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no hosts on this machine: {LACKING} missing"),
    pytest.mark.timeout(180),
]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NEEDS_FAKETIME = pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
NEEDS_IPTABLES = pytest.mark.skipif(
    shutil.which("iptables", path="/usr/sbin:/sbin:/usr/bin") is None, reason="iptables is not installed"
)
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network
        until(lambda: still_running(network.hosts) == {}, f"the end of {still_running(network.hosts)}", 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\nnode2 slots=1\n")
    return tmp_path


def run(
    network: Network, folder: Path, words: str = "", start: Callable[[], str] = paceline
) -> subprocess.CompletedProcess[str]:
    command = f"cd {folder}; OMP_NUM_THREADS=1 {start()} doctor --hostfile hosts {words}"
    return network.at_desk("sh", "-c", f"{command} --launcher-args '-F {network.ssh_config}'", timeout_s=120)


def cold() -> str:
    """Starts an interpreter on each host, which preloads and imports what lies there."""
    return f"{sys.executable} -m paceline.cli.main"


def findings(
    network: Network, folder: Path, words: str = "", start: Callable[[], str] = paceline
) -> dict[str, dict[str, Any]]:
    """The findings by code, and the whole report under ""."""
    done = run(network, folder, f"--json {words}", start)
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    return {"": report, **{finding["code"]: finding for finding in report["findings"]}}


def type_fix(host: Host, finding: dict[str, Any]) -> None:
    """Types the command of a fix on the host that it names."""
    match = re.fullmatch(rf"on {host.name}: `(.*)`", finding["fix"])
    assert match, finding["fix"]
    done = host.run(match[1].replace("sudo ", ""))  # the test is root, and sudo may not be installed
    assert done.returncode == 0, done.stderr


def write(network: Network, host: Host, name: str, text: str) -> None:
    """Changes one of the host's own files in /etc, in place, since it is mounted there."""
    path = Path("/etc/netns", host.namespace, name)
    with path.open("r+") as file:
        file.truncate()
        file.write(text)


def other_file(host: Host, original: Path, changed: Path, old: str, new: str) -> None:
    """Puts a changed copy of a file in its place, on one host alone."""
    text = original.read_text()
    assert old in text, original
    changed.write_text(text.replace(old, new))
    done = host.run(f"mount --bind {changed} {original}")
    assert done.returncode == 0, done.stderr


@NEEDS_FAKETIME
def test_four_faults_at_once(network: Network, folder: Path) -> None:
    """A slow cable, a clock that is ahead, another torch, a folder that one host does not share."""
    import torch.version

    _, node1, node2 = network.hosts
    node1.power_off()
    node1.power_on(LD_PRELOAD=str(FAKETIME), FAKETIME="+5s", FAKETIME_DONT_FAKE_MONOTONIC="1")
    node2.power_off()
    node2.power_on(PYTHONDONTWRITEBYTECODE="1")
    node2.limit("50mbit")
    own = str(torch.version.__version__)
    other_file(node2, Path(torch.version.__file__), folder / "version.py", f"'{own}'", "'2.12.1+other'")
    shared = folder / "checkpoints"
    shared.mkdir()
    assert node2.run(f"mount -t tmpfs none {shared}").returncode == 0

    found = findings(network, folder, f"--folder {shared}", cold)

    link = found["link-slow"]
    assert (link["level"], link["where"]) == ("problem", "node2")
    measured = re.search(r"slowest link (node\d) -> (node\d): ([\d.]+) Mbit/s", link["what"])
    assert measured and "node2" in measured.groups() and 20 < float(measured[3]) < 60, link["what"]
    assert "--exclude node2" in link["fix"]

    clock = found["clock"]
    assert (clock["level"], clock["where"]) == ("problem", "node1")
    ahead = re.search(r"its clock is ([\d.]+) s ahead", clock["what"])
    assert ahead and abs(float(ahead[1]) - 5) < 0.2, clock["what"]

    versions = found["versions-differ"]
    assert (versions["level"], versions["where"]) == ("problem", "node2")
    assert "2.12.1+other on node2" in versions["what"] and f"{own} on node0, node1" in versions["what"]

    unshared = found["folder-not-shared"]
    assert (unshared["level"], unshared["where"]) == ("problem", "node2")
    assert list(shared.iterdir()) == []  # nothing is left behind
    assert found[""]["facts"]["all_reduces"]["backend"] == "gloo"


@NEEDS_IPTABLES
def test_a_firewall_a_dead_name_server_and_a_host_that_is_off(network: Network, folder: Path) -> None:
    """Packets of one ordered pair are dropped, a name server is dead, a host is off: nothing hangs, and all are named."""
    _, node1, node2 = network.hosts
    node2.power_off(silently=True)
    rule = "INPUT -s 10.77.0.1 -p tcp --syn --dport 1024:65535 -j DROP"
    assert node1.run(f"/usr/sbin/iptables -A {rule}").returncode == 0
    write(network, node1, "nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: dns\n")
    write(network, node1, "resolv.conf", "nameserver 10.77.0.99\n")
    begun = time.monotonic()
    found = findings(network, folder)
    assert time.monotonic() - begun < 60
    closed = found["port-closed"]
    assert (closed["level"], closed["where"]) == ("problem", "node0 -> node1")
    assert "gets no answer" in closed["what"]
    silent = found["host-silent"]
    assert (silent["level"], silent["where"]) == ("problem", "node2")
    assert "--exclude node2" in silent["fix"]
    assert found[""]["facts"]["all_reduces"] is None  # it would have waited for the closed port

    assert (found["names-slow"]["level"], found["names-slow"]["where"]) == ("warning", "node1")

    type_fix(node1, closed)
    rows = findings(network, folder, "--exclude node2")
    assert "port-closed" not in rows
    assert rows["ports"]["what"] == "each host reaches a free port of each other one (2 pairs)"


@pytest.mark.long
def test_healthy_hosts(network: Network, folder: Path) -> None:
    done = run(network, folder)
    assert done.returncode == 0, done.stdout
    assert "node0, node1, node2" in done.stdout and "bandwidth from the host of a row" in done.stdout
    seconds = re.search(r"no problems, .*, 3 hosts, ([\d.]+) s\n", done.stdout)
    assert seconds and float(seconds[1]) < 60, done.stdout
    assert "s  all-reduce" in done.stderr


@pytest.mark.long
def test_fixes_of_names(network: Network, folder: Path) -> None:
    """The fix of a dead name server works when it is typed, in the form in which torch's store asks, too."""
    node0, node1, _ = network.hosts
    for host in (node0, node1):
        write(network, host, "nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n")
        write(network, host, "resolv.conf", "nameserver 10.77.0.99\n")
    write(network, node0, "hosts", "127.0.0.1 localhost\n10.77.0.1 node0\n")
    # node1 knows node0 in both forms of its address, so that it waits for no name server.
    known_to_node1 = "10.77.0.1 node0\n::ffff:10.77.0.1 node0.ipv4\n"
    write(network, node1, "hosts", f"127.0.0.1 localhost\n127.0.1.1 node1\n{known_to_node1}")
    (folder / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    found = findings(network, folder)
    assert found["names-slow"]["where"] == "node0"
    # Debian gives a host's own name an address of loopback, where gloo would listen.
    assert (found["interface-wrong"]["level"], found["interface-wrong"]["where"]) == ("problem", "node1")
    assert "export GLOO_SOCKET_IFNAME=eth0" in found["interface-wrong"]["fix"]
    type_fix(node0, found["names-slow"])
    command = f"cd {folder}; export GLOO_SOCKET_IFNAME=eth0; {paceline()} doctor --hostfile hosts --json"
    done = network.at_desk("sh", "-c", f"{command} --launcher-args '-F {network.ssh_config}'", timeout_s=120)
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert not codes & {"names-slow", "interface-wrong", "all-reduce-fails"}, done.stdout


@pytest.mark.long
def test_another_paceline(network: Network, folder: Path) -> None:
    from paceline.base import version

    node1 = network.hosts[1]
    node1.power_off()
    node1.power_on(PYTHONDONTWRITEBYTECODE="1")
    own = f'VERSION = "{version.VERSION}"'
    other_file(node1, Path(version.__file__), folder / "version.py", own, 'VERSION = "0.0.9"')
    found = findings(network, folder, "--include node0@node1", cold)
    assert (found["versions-differ"]["level"], found["versions-differ"]["where"]) == ("problem", "node1")
    assert f"install paceline {version.VERSION} for" in found["versions-differ"]["fix"]


@pytest.mark.long
def test_an_allocation_of_slurm(tmp_path: Path) -> None:
    """Inside an allocation the command finds its hosts itself, and reaches them by srun."""
    command = ["salloc", "-N", "2", "-n", "2", *paceline().split(), "doctor", "--json"]
    with local_slurm(tmp_path / "slurm", nodes=2, cpus=2) as env:
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    assert report["hosts"] == ["n1", "n2"]
    codes = {finding["code"]: finding for finding in report["findings"]}
    assert codes["hosts"]["what"] == "2 hosts answer: n1, n2"
    assert codes["shared-folder"]["level"] == "ok"
    assert len(report["facts"]["connections"]) == 2
