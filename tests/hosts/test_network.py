"""The hosts themselves: what later tests take for granted."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts.network import Network, lacking, still_running, until

LACKING = ", ".join(lacking())
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no hosts on this machine: {LACKING} missing"),
]


def traces(network: Network) -> list[str]:
    """What of a network is left on the machine."""
    places = ("/run/netns", "/etc/netns", "/tmp")
    names = [f"{place}/{name}" for place in places if os.path.isdir(place) for name in os.listdir(place)]
    mounts = Path("/proc/self/mounts").read_text()
    return [name for name in names if network.prefix in name] + ["a mount"] * (network.prefix in mounts)


def devices() -> str:
    return subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, env={"PATH": "/usr/sbin:/sbin"}).stdout


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(2) as network:
        yield network


def test_hosts_have_names_addresses_and_processes_of_their_own(network: Network) -> None:
    for host in network.hosts:
        told = host.run("hostname; cat /proc/1/comm; ls /proc | grep -c '^[0-9]'").stdout.split()
        assert told[:2] == [host.name, "sshd"]
        assert int(told[2]) < 10
        assert host.address in host.run("ip -br addr").stdout
        assert host.run("getent hosts desk").stdout.split() == ["10.77.0.254", "desk"]
    assert network.hosts[0].run(f"ssh -F {network.ssh_config} node1 hostname").stdout == "node1\n"
    assert network.hosts[0].run("exit 7").returncode == 7
    assert network.prefix not in devices()


def test_a_command_outlives_a_cut_and_not_the_power(network: Network, tmp_path: Path) -> None:
    node = network.hosts[1]
    job = node.start("sh -c 'while sleep 0.1; do echo tick; done'", tmp_path / "log")
    until(lambda: "tick" in job.text(), "a first line")
    node.cut()
    seen = len(job.text())
    until(lambda: len(job.text()) > seen, "more lines, though nobody hears the host")
    assert any("sleep" in words for words in node.processes())
    node.heal()
    assert node.run("hostname").stdout == "node1\n"
    node.power_off()
    assert still_running(network.hosts) == {}
    assert job.wait() == 255
    assert node.run("true").returncode == 255
    node.power_on()
    assert node.run("hostname").stdout == "node1\n"


def test_what_a_silent_power_loss_leaves_open(network: Network, tmp_path: Path) -> None:
    node = network.hosts[1]
    job = node.start("sleep 100", tmp_path / "log")
    node.power_off(silently=True)
    assert job.ssh.poll() is None  # nobody has told the desk
    node.power_on()
    assert job.wait() == 255  # the host that came back knows of no such connection


def test_signals_and_exit_codes(network: Network, tmp_path: Path) -> None:
    job = network.hosts[0].start(
        "sh -c 'trap \"exit 75\" TERM; echo ready; while :; do sleep 0.1; done'", tmp_path / "log"
    )
    until(lambda: "ready" in job.text(), "ready")
    job.signal("TERM")
    assert job.wait() == 75


def test_a_slow_cable(network: Network) -> None:
    node, fetch = network.hosts[0], ("ssh", "-F", network.ssh_config, "node0", "head -c 1000000 /dev/zero")
    took = []
    for rate in ("4mbit", None):
        node.limit(rate)
        begun = time.monotonic()
        assert len(network.at_desk(*fetch).stdout) == 1_000_000
        took.append(time.monotonic() - begun)
    assert took[0] > 1.5  # 2 s at that rate, and what the bucket lets through at once
    assert took[1] < took[0]


def test_nothing_is_left(tmp_path: Path) -> None:
    before = devices()
    with pytest.raises(RuntimeError), Network(1) as network:
        network.hosts[0].start("sleep 100", tmp_path / "log")
        assert traces(network)
        raise RuntimeError("a test that fails")
    assert still_running(network.hosts) == {}
    assert traces(network) == []
    assert devices() == before
