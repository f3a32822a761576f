"""The checks of `paceline doctor`, each on facts that are written here: they judge, and measure nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline_hosts.doctor.checks import (
    all_reduce,
    clocks,
    devices,
    hosts,
    interfaces,
    limits,
    links,
    names,
    ports,
    processors,
    shared_folder,
    shared_memory,
    versions,
)
from paceline_hosts.doctor.facts import (
    AllReduce,
    AllReduces,
    ClockFacts,
    ConnectionFacts,
    DeviceHealth,
    Devices,
    Examination,
    FolderUse,
    HostFacts,
    Interface,
    Limit,
    LinkFacts,
    LookupFacts,
    Network,
    Processors,
    Versions,
)
from paceline_hosts.doctor.finding import CHECKS, Finding

GIB = 1 << 30
HEALTHY_FOLDER = FolderUse("", "nfs4", 0.02, True, True, 0.003, 200e6, 300e6)


def host(number: int, **changes: object) -> HostFacts:
    """The facts of a healthy host, `node<number>`, with some changes."""
    cards = (
        Interface("lo", ("127.0.0.1",), True),
        Interface("eth0", (f"10.0.0.{number}",), True, 10_000),
        Interface("docker0", ("172.17.0.1",), True),
    )
    routes = tuple((f"node{other}", "eth0") for other in range(3) if other != number)
    facts = HostFacts(
        Versions("0.1.0", "3.11.7", "/venv/bin/python", "2.13.0+cpu", "", "", ("gloo",)),
        Network(f"node{number}", (f"10.0.0.{number}",), cards, routes),
        Processors(8, 8, None, None, 32 * GIB, "", (8,)),
        open_files=Limit(65536, 65536),
        locked_memory=Limit(-1, -1),
        processes=Limit(-1, -1),
        core_files=Limit(0, -1),
        shared_memory=(16 * GIB, 15 * GIB),
    )
    return replace(facts, **changes)


def cluster(count: int = 3, **changes: object) -> Examination:
    """A healthy cluster, with some changes."""
    examination_hosts = tuple(f"node{number}" for number in range(count))
    pairs = [(source, target) for source in examination_hosts for target in examination_hosts if source != target]
    uses = {name: replace(HEALTHY_FOLDER, won_race=name == "node0") for name in examination_hosts}
    examination = Examination(
        examination_hosts,
        {},
        {f"node{number}": host(number) for number in range(count)},
        {name: ClockFacts(0.001, 0.0005) for name in examination_hosts} if count > 1 else {},
        tuple(ConnectionFacts(source, target, f"10.0.0.{target[-1]}", 40000, "open") for source, target in pairs),
        tuple(LinkFacts(source, target, 1e-4, 1.1e9) for source, target in pairs),
        AllReduces("gloo", count, (AllReduce(1 << 20, 2e-3), AllReduce(16 << 20, 25e-3))) if count > 1 else None,
        "/shared",
        False,
        uses,
    )
    return replace(examination, **changes)


def with_host(number: int, count: int = 3, **changes: object) -> Examination:
    """A healthy cluster but for one host."""
    examination = cluster(count)
    return replace(examination, facts={**examination.facts, f"node{number}": host(number, **changes)})


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def summary(finding: Finding) -> tuple[str, str, str]:
    return finding.level, finding.code, finding.where


@pytest.mark.parametrize("count", [1, 2, 3])
def test_healthy_hosts_have_no_findings(count: int) -> None:
    findings = [finding for check in CHECKS for finding in check.judge(cluster(count))]
    assert {finding.level for finding in findings} == {"ok"}
    assert len(findings) == (12 if count > 1 else 8)  # nobody has looked a name up


def test_nobody_answers() -> None:
    """No check fails where there are no facts."""
    examination = Examination(("node0", "node1"), {"node0": "connecting: no answer", "node1": "connecting: refused"})
    findings = [finding for check in CHECKS for finding in check.judge(examination)]
    assert [summary(finding) for finding in findings] == [
        ("problem", "host-silent", "node0"),
        ("problem", "host-silent", "node1"),
    ]


def test_a_silent_host_and_one_without_the_directory() -> None:
    examination = replace(
        with_host(1, no_cwd="no such file or directory"), silent={"node2": "links: it did not answer"}
    )
    silent, missing = hosts.judge(examination)
    assert summary(silent) == ("problem", "host-silent", "node2")
    assert "--exclude node2" in silent.fix
    assert summary(missing) == ("problem", "host-directory", "node1")
    alone = Examination(("node0",), {"node0": "connecting: exit code 1"})
    assert "paceline env" in only(hosts.judge(alone)).fix


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (
            {"paceline": "0.0.9"},
            "paceline is 0.1.0 on node0, node2; 0.0.9 on node1",
            "install paceline 0.1.0 for /venv/bin/python",
        ),
        ({"torch": "2.12.1"}, "torch is 2.13.0+cpu on node0, node2; 2.12.1 on node1", "pip install torch==2.13.0"),
        ({"python": "3.12.1"}, "Python is 3.11 on node0, node2; 3.12 on node1", "install Python 3.11"),
        ({"nccl": "2.28.9"}, "NCCL is missing on node0, node2; 2.28.9 on node1", "--force-reinstall torch==2.13.0"),
    ],
)
def test_two_versions_in_one_job(changes: dict[str, str], what: str, fix: str) -> None:
    finding = only(versions.judge(with_host(1, versions=replace(host(1).versions, **changes))))
    assert summary(finding) == ("problem", "versions-differ", "node1")
    assert finding.what == what
    assert finding.fix.startswith("on node1: ") and fix in finding.fix


def test_another_patch_of_python_is_no_difference() -> None:
    changed = replace(host(1).versions, python="3.11.2")
    assert only(versions.judge(with_host(1, versions=changed))).level == "ok"


def test_a_torch_that_is_missing_without_gloo_or_untested() -> None:
    broken = replace(host(1).versions, torch="", torch_error="ImportError: libcudart.so.12: cannot open", backends=())
    finding = only(versions.judge(with_host(1, versions=broken)))
    assert summary(finding) == ("problem", "torch-missing", "node1")
    assert "libcudart.so.12" in finding.what
    without = replace(host(1).versions, backends=("mpi",))
    assert summary(only(versions.judge(with_host(1, versions=without)))) == ("problem", "gloo-missing", "node1")
    newer = replace(host(0).versions, torch="3.1.0")
    finding = only(versions.judge(with_host(0, count=1, versions=newer)))
    assert summary(finding) == ("warning", "torch-untested", "node0")


HEALTHY_DEVICE = DeviceHealth(0, "Synthetic H", 0, False, False, (), 345, 1980, 35, 16, 16, 0)


def gpus(*health: DeviceHealth, **changes: object) -> Devices:
    found = Devices("cuda", tuple(device.name for device in health), health=health)
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("changes", "expected", "fix"),
    [
        ({"uncorrected_errors": 3}, ("problem", "device-memory", "node1"), "--gpu-reset -i 1"),
        ({"repair_pending": True}, ("problem", "device-memory", "node1"), "--gpu-reset -i 1"),
        ({"repair_failed": True}, ("problem", "device-memory", "node1"), "--exclude node1:1"),
        ({"slowdowns": ("hw_thermal_slowdown",)}, ("warning", "device-slow", "node1"), "--exclude node1:1"),
        ({"link_width": 8}, ("warning", "device-link", "node1"), "--exclude node1:1"),
    ],
)
def test_devices_that_are_not_well(changes: dict[str, object], expected: tuple[str, ...], fix: str) -> None:
    healthy = gpus(HEALTHY_DEVICE, replace(HEALTHY_DEVICE, index=1))
    ill = gpus(HEALTHY_DEVICE, replace(HEALTHY_DEVICE, index=1, **changes))
    facts = {"node0": host(0, devices=healthy), "node1": host(1, devices=ill)}
    finding = only(devices.judge(cluster(2, facts=facts)))
    assert summary(finding) == expected
    assert "device 1 (Synthetic H)" in finding.what
    assert fix in finding.fix


def test_drivers_that_fail_and_devices_that_differ() -> None:
    finding = only(devices.judge(with_host(0, 1, devices=Devices(error="RuntimeError: no driver"))))
    assert summary(finding) == ("problem", "devices-fail", "node0")
    finding = only(devices.judge(with_host(0, 1, devices=Devices(health_error="nvidia-smi ended with 9: no driver"))))
    assert summary(finding) == ("problem", "device-tool-fails", "node0")
    finding = only(devices.judge(with_host(0, 1, devices=Devices(health=(HEALTHY_DEVICE,)))))
    assert summary(finding) == ("warning", "devices-hidden", "node0")
    two, one = gpus(HEALTHY_DEVICE, HEALTHY_DEVICE), gpus(HEALTHY_DEVICE)
    facts = {"node0": host(0, devices=two), "node1": host(1, devices=one)}
    finding = only(devices.judge(cluster(2, facts=facts)))
    assert summary(finding) == ("warning", "devices-differ", "all hosts")
    assert finding.what == "2 x Synthetic H on node0; 1 x Synthetic H on node1"
    assert "--procs 1" in finding.fix
    finding = only(devices.judge(with_host(1, 2, devices=two)))
    assert "leave out the hosts that have none" in finding.fix


def test_what_is_said_of_healthy_devices() -> None:
    assert "no accelerator" in only(devices.judge(cluster(1))).what
    apart = gpus(HEALTHY_DEVICE, HEALTHY_DEVICE, no_peer_access=((0, 1), (1, 0)))
    what = only(devices.judge(with_host(0, 1, devices=apart))).what
    assert what == "2 x Synthetic H on each host; no direct access between 0-1"
    unknown = Devices("xpu", ("Synthetic X",))
    assert "no tool that knows their health" in only(devices.judge(with_host(0, 1, devices=unknown))).what


def network(number: int = 1, **changes: object) -> Network:
    return replace(host(number).network, **changes)


def test_which_interface_gloo_takes() -> None:
    assert interfaces.gloo_choice(network()).names == ("eth0",)
    assert interfaces.gloo_choice(network(hostname_addresses=("127.0.1.1",))).names == ("lo",)
    assert interfaces.gloo_choice(network(hostname_addresses=())).names == ("lo",)
    assert interfaces.gloo_choice(network(gloo_variable="docker0")).names == ("docker0",)
    assert interfaces.gloo_choice(network(gloo_variable="eth0,ib0")).names == ()


def test_which_interface_nccl_takes() -> None:
    assert interfaces.nccl_choice(network()).names == ("eth0",)
    with_ib = (*network().interfaces, Interface("ib0", ("10.1.0.1",), True), Interface("ib1", ("10.2.0.1",), False))
    assert interfaces.nccl_choice(network(interfaces=with_ib)).names == ("ib0",)
    assert interfaces.nccl_choice(network(nccl_variable="docker")).names == ("docker0",)
    assert interfaces.nccl_choice(network(nccl_variable="=docker")).names == ()
    assert interfaces.nccl_choice(network(nccl_variable="^eth,docker")).names == ("lo",)
    only_docker = tuple(card for card in network().interfaces if card.name != "eth0")
    assert interfaces.nccl_choice(network(interfaces=only_docker)).names == ("lo",)
    assert interfaces.nccl_choice(network(interfaces=())).names == ()


def test_gloo_on_loopback() -> None:
    """Debian writes `127.0.1.1 node1` into /etc/hosts."""
    examination = with_host(1, network=network(hostname_addresses=("127.0.1.1",)))
    finding = only(interfaces.judge(examination))
    assert summary(finding) == ("problem", "interface-wrong", "node1")
    assert "node1 is 127.0.1.1 there" in finding.what
    assert finding.fix.startswith("`export GLOO_SOCKET_IFNAME=eth0`")


def test_gloo_on_loopback_where_hosts_name_their_interfaces_differently() -> None:
    cards = (Interface("lo", ("127.0.0.1",), True), Interface("ens3", ("10.0.0.1",), True))
    routes = (("node0", "ens3"), ("node2", "ens3"))
    examination = with_host(1, network=Network("node1", ("127.0.1.1",), cards, routes))
    finding = only(interfaces.judge(examination))
    assert finding.fix == r"on node1: `sudo sed -i '/\bnode1\b/d; $ a 10.0.0.1 node1' /etc/hosts`"


def test_variables_that_name_wrong_interfaces() -> None:
    finding = only(interfaces.judge(with_host(1, network=network(gloo_variable="ib7"))))
    assert summary(finding) == ("problem", "interface-missing", "node1")
    finding = only(interfaces.judge(with_host(1, network=network(gloo_variable="docker0"))))
    assert summary(finding) == ("warning", "interface-wrong", "node1")
    cuda = gpus(HEALTHY_DEVICE)
    finding = only(interfaces.judge(with_host(1, devices=cuda, network=network(nccl_variable="docker0"))))
    assert summary(finding) == ("warning", "interface-wrong", "node1")
    assert "export NCCL_SOCKET_IFNAME=eth0" in finding.fix
    # Without an accelerator nobody uses NCCL.
    assert only(interfaces.judge(with_host(1, network=network(nccl_variable="docker0")))).level == "ok"
    alone = with_host(0, 1, network=replace(network(0, routes=()), gloo_variable="ib7"))
    assert "unset GLOO_SOCKET_IFNAME" in only(interfaces.judge(alone)).fix
    # One host needs no way to others.
    assert only(interfaces.judge(with_host(0, 1, network=network(0, hostname_addresses=())))).level == "ok"


def test_slow_unknown_and_wrong_names() -> None:
    right = LookupFacts("node0", "node0", "10.0.0.0", 0.01)
    asked = LookupFacts("node0", "10.0.0.0", "", 6.0, finished=False)
    finding = only(names.judge(with_host(1, lookups=(right, asked))))
    assert summary(finding) == ("warning", "names-slow", "node1")
    assert "looking up 10.0.0.0 has no answer after 6 s" in finding.what
    lines = "'10.0.0.0 node0' '::ffff:10.0.0.0 node0.ipv4'"
    assert finding.fix == f"on node1: `printf '%s\\n' {lines} | sudo tee -a /etc/hosts`"
    slow = replace(asked, seconds=2.5, finished=True)
    assert "takes 2.5 s" in only(names.judge(with_host(1, lookups=(slow,)))).what
    unknown = (replace(right, answer=""), replace(asked, seconds=0.1, finished=True))
    finding = only(names.judge(with_host(1, lookups=unknown)))
    assert summary(finding) == ("warning", "names-unknown", "node1")
    wrong = (replace(right, answer="192.168.7.7"), unknown[1])
    finding = only(names.judge(with_host(1, lookups=wrong)))
    assert summary(finding) == ("warning", "names-wrong", "node1")
    assert "192.168.7.7" in finding.what
    assert only(names.judge(with_host(1, lookups=(right,)))).level == "ok"


def closed(outcome: str, *sources: str, **changes: object) -> Examination:
    examination = with_host(1, **changes)
    rows = []
    for row in examination.connections:
        is_closed = row.target == "node1" and row.source in sources
        rows.append(replace(row, outcome=outcome) if is_closed else row)
    return replace(examination, connections=tuple(rows))


@pytest.mark.parametrize(
    ("programs", "command"),
    [
        ((), "sudo iptables -I INPUT -s 10.0.0.0 -j ACCEPT"),
        (("ufw", "iptables"), "sudo ufw insert 1 allow from 10.0.0.0"),
        (
            ("firewall-cmd", "iptables"),
            "sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.0 && sudo firewall-cmd --reload",
        ),
    ],
)
def test_a_closed_port_names_the_pair(programs: tuple[str, ...], command: str) -> None:
    finding = only(ports.judge(closed("no answer", "node0", programs=programs)))
    assert summary(finding) == ("problem", "port-closed", "node0 -> node1")
    assert "a firewall drops the packets (port 40000)" in finding.what
    assert finding.fix == f"on node1: `{command}`"


def test_other_reasons_for_a_port_to_be_closed() -> None:
    finding = only(ports.judge(closed("refused", "node0", "node2")))
    assert finding.where == "node0, node2 -> node1"
    assert "-s 10.0.0.0 -j ACCEPT && sudo iptables -I INPUT -s 10.0.0.2" in finding.fix
    for outcome in ("no route", "other"):
        assert "--exclude node1" in only(ports.judge(closed(outcome, "node0"))).fix


def test_clocks() -> None:
    offsets = {"node0": ClockFacts(0.0, 0.001), "node1": ClockFacts(3.2, 0.002), "node2": ClockFacts(0.001, 0.001)}
    finding = only(clocks.judge(cluster(3, clocks=offsets)))
    assert summary(finding) == ("problem", "clock", "node1")
    assert finding.what == "its clock is 3.2 s ahead of the others (within 2 ms)"
    assert finding.fix == 'on node1: `sudo date -s "@$(ssh node0 date +%s.%N)"`'
    behind = replace(
        with_host(1, programs=("chronyc", "timedatectl")), clocks={**offsets, "node1": ClockFacts(-0.5, 0.1)}
    )
    finding = only(clocks.judge(behind))
    assert finding.level == "warning" and "behind" in finding.what
    assert finding.fix == "on node1: `sudo chronyc makestep`"
    # What a slow connection cannot tell is not blamed on the clock.
    vague = {**offsets, "node1": ClockFacts(0.5, 0.4)}
    assert only(clocks.judge(cluster(3, clocks=vague))).level == "ok"
    with_systemd = replace(with_host(1, programs=("timedatectl",)), clocks=offsets)
    assert "set-ntp true" in only(clocks.judge(with_systemd)).fix


def test_the_clock_of_the_starter_decides_between_two_hosts() -> None:
    offsets = {"node0": ClockFacts(-4.0, 0.001), "node1": ClockFacts(0.0, 0.001)}
    assert only(clocks.judge(cluster(2, clocks=offsets))).where == "node0"


def test_shared_memory() -> None:
    finding = only(shared_memory.judge(with_host(1, shared_memory=(64 << 20, 64 << 20))))
    assert summary(finding) == ("problem", "shared-memory", "node1")
    assert "mount -o remount,size=8g /dev/shm" in finding.fix
    finding = only(shared_memory.judge(with_host(1, shared_memory=(64 << 20, 64 << 20), in_container=True)))
    assert "--shm-size=8g" in finding.fix
    assert only(shared_memory.judge(with_host(1, shared_memory=(GIB // 2, GIB // 2)))).level == "warning"
    full = only(shared_memory.judge(with_host(1, shared_memory=(16 * GIB, 1 << 20))))
    assert full.level == "problem" and "rm /dev/shm/torch_*" in full.fix
    missing = only(shared_memory.judge(with_host(1, shared_memory=None)))
    assert missing.level == "problem" and "mount -t tmpfs" in missing.fix


def test_limits() -> None:
    finding = only(limits.judge(with_host(1, open_files=Limit(1024, 4096))))
    assert summary(finding) == ("warning", "limit-files", "node1")
    assert "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.d/paceline.conf" in finding.fix
    assert only(limits.judge(with_host(1, open_files=Limit(256, 4096)))).level == "problem"
    assert only(limits.judge(with_host(1, processes=Limit(1000, 1000)))).code == "limit-processes"
    rdma = with_host(1, has_rdma=True, locked_memory=Limit(65536, 65536))
    finding = only(limits.judge(rdma))
    assert summary(finding) == ("problem", "limit-memory", "node1")
    assert "64 KiB" in finding.what
    assert only(limits.judge(with_host(1, locked_memory=Limit(65536, 65536)))).level == "ok"
    assert only(limits.judge(with_host(0, 1, open_files=None, core_files=None))).level == "ok"


def test_processors() -> None:
    def judged(count: int = 1, devices: Devices | None = None, **changes: object) -> list[Finding]:
        changed = replace(host(0).processors, **changes)
        return processors.judge(with_host(0, count, processors=changed, devices=devices or Devices()))

    finding = only(judged(threads_variable="16"))
    assert summary(finding) == ("warning", "threads", "node0")
    assert "unset OMP_NUM_THREADS" in finding.fix
    finding = only(judged(quota=2.5))
    assert "pays for 2.5 of 8 cores" in finding.what and "OMP_NUM_THREADS=2" in finding.fix
    assert only(judged(quota=2.5, threads_variable="2")).level == "ok"
    finding = only(judged(count=2, cores=4))
    assert summary(finding) == ("warning", "cores-differ", "node0")
    two_nodes = gpus(HEALTHY_DEVICE, replace(HEALTHY_DEVICE, index=1, numa_node=1))
    finding = only(judged(devices=two_nodes))
    assert summary(finding) == ("warning", "numa", "node0") and "--bind-cores all" in finding.fix
    what = only(judged(numa_nodes=(4, 4), memory_limit=8 * GIB, threads_variable="4")).what
    assert what == "8 of 8 cores, 2 NUMA nodes, 8 GiB of memory, OMP_NUM_THREADS=4"


def folder(host: str = "node1", was_named: bool = False, **changes: object) -> list[Finding]:
    examination = cluster(3, folder_was_named=was_named)
    uses = {**examination.folder_uses, host: replace(examination.folder_uses[host], **changes)}
    return shared_folder.judge(replace(examination, folder_uses=uses))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"error": "permission denied: /shared/x"}, ("problem", "folder-fails", "node1")),
        ({"seen_after_s": None}, ("warning", "folder-not-shared", "node1")),
        ({"won_race": True}, ("problem", "folder-claim", "node0, node1, node2")),
        ({"renames": False}, ("problem", "folder-rename", "node1")),
        ({"seen_after_s": 2.5}, ("warning", "folder-late", "node1")),
        ({"write_bytes_per_s": 3e6}, ("warning", "folder-slow", "node1")),
        ({"fsync_s": 0.9}, ("warning", "folder-slow", "node1")),
    ],
)
def test_a_folder(changes: dict[str, object], expected: tuple[str, ...]) -> None:
    assert summary(only(folder(**changes))) == expected


def test_what_a_folder_means_depends_on_who_named_it() -> None:
    assert only(folder(was_named=True, seen_after_s=None)).level == "problem"
    assert "is shared, files are seen within 20 ms; writes 191 MiB/s" in only(folder()).what


def links_of(rates: dict[tuple[str, str], float], speed: int | None = 10_000, latency_s: float = 1e-4) -> Examination:
    """Links between three hosts; pairs that are not named carry 1.1e9 bytes a second."""
    examination = cluster(3)
    rows = [
        LinkFacts(row.source, row.target, latency_s, rates.get((row.source, row.target), row.bytes_per_s))
        for row in examination.links
    ]
    facts = {}
    for number, (name, row) in enumerate(examination.facts.items()):
        cards = tuple(
            replace(card, speed_mbit=speed if card.name == "eth0" else None) for card in row.network.interfaces
        )
        facts[name] = host(number, network=replace(row.network, interfaces=cards))
    return replace(examination, links=tuple(rows), facts=facts)


def test_the_slowest_link_is_named() -> None:
    of_node2 = {
        pair: 5.9e6 for pair in [("node0", "node2"), ("node2", "node0"), ("node1", "node2"), ("node2", "node1")]
    }
    finding = only(links.judge(links_of(of_node2)))
    assert summary(finding) == ("problem", "link-slow", "node2")
    assert "slowest link node0 -> node2: 47.2 Mbit/s" in finding.what
    assert "its interface says 10 Gbit/s" in finding.what
    assert "--exclude node2" in finding.fix and "ethtool eth0" in finding.fix
    finding = only(links.judge(links_of({("node1", "node2"): 0.2e9})))
    assert summary(finding) == ("warning", "link-slow", "node1 -> node2")


def test_links_that_are_all_slow() -> None:
    """They are alike, but not what their interfaces say; where these say nothing, nothing is known against them."""
    all_pairs = {(link.source, link.target): 11e6 for link in cluster(3).links}
    finding = only(links.judge(links_of(all_pairs)))
    assert finding.level == "problem"
    assert only(links.judge(links_of(all_pairs, speed=None))).level == "ok"
    assert only(links.judge(links_of(all_pairs, speed=100))).level == "ok"


def test_links_that_are_far() -> None:
    finding = only(links.judge(links_of({}, latency_s=0.03)))
    assert summary(finding)[:2] == ("warning", "link-far")
    assert "30 ms" in finding.what


def test_links_that_were_left_out_are_counted() -> None:
    few = replace(cluster(3), links=cluster(3).links[:2])
    assert only(links.judge(few)).what.endswith("; 2 of 6 links were measured, for lack of time")
    slow = links_of({("node1", "node2"): 0.2e9})
    slow = replace(slow, links=slow.links[2:])
    assert "4 of 6 links were measured" in only(links.judge(slow)).what


def test_all_reduces() -> None:
    fails = cluster(3, all_reduces=AllReduces("", 3, error="node1: DistBackendError: connection refused"))
    finding = only(all_reduce.judge(fails))
    assert summary(finding) == ("problem", "all-reduce-fails", "all hosts")
    assert "GLOO_SOCKET_IFNAME=eth0" in finding.fix
    slow = cluster(3, all_reduces=AllReduces("gloo", 3, (AllReduce(16 << 20, 4.0),)))
    finding = only(all_reduce.judge(slow))
    assert summary(finding) == ("warning", "all-reduce-slow", "all hosts")
    assert all_reduce.judge(cluster(3, all_reduces=AllReduces("gloo", 3))) == [], (
        "the host that sent no times is silent"
    )
    small = cluster(3, all_reduces=AllReduces("gloo", 3, (AllReduce(4096, 0.2),)))
    assert only(all_reduce.judge(small)).level == "ok"
    assert all_reduce.bus_bandwidth(AllReduces("gloo", 4, (AllReduce(1000, 0.5),))) == 3000
    devices = {f"node{number}": host(number, devices=gpus(HEALTHY_DEVICE)) for number in range(3)}
    assert "NCCL_SOCKET_IFNAME" in only(all_reduce.judge(replace(fails, facts=devices))).fix
    assert "NCCL_SOCKET_IFNAME" in only(all_reduce.judge(replace(slow, facts=devices))).fix


def test_each_code_is_on_the_page() -> None:
    """The table of docs/how-to/doctor.md has a row for each code, and no row for a code that is gone."""
    root = Path(__file__).parents[4]
    checks = root / "packages/paceline-hosts/src/paceline_hosts/doctor/checks"
    sources = "".join(path.read_text() for path in checks.glob("*.py"))
    used = set(re.findall(r'Finding\(\s*(?:"problem"|"warning"|level|"problem" if [^,]*),\s*"([a-z-]+)"', sources))
    assert len(used) >= 25
    table = (root / "docs/how-to/doctor.md").read_text().partition("## What is checked")[2]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == used
