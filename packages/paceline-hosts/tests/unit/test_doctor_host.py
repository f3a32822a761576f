"""What `paceline doctor` collects on a host: readers of the system's texts, links over loopback, a folder, a name server."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest
from free_ports import free_port

from paceline_hosts.doctor.facts import LinkFacts
from paceline_hosts.doctor.host import links, network, nvidia, system
from paceline_hosts.doctor.host.folder import NUM_BYTES, FolderProbe, file_system

TOKEN = "0123456789abcdef" * 2

# Synthetic: written by hand after the form of `nvidia-smi -q -x`, for two devices of one driver and one of an older.
NVIDIA = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>570.0</driver_version>
  <attached_gpus>3</attached_gpus>
  <gpu id="00000000:1B:00.0">
    <product_name>Synthetic H</product_name>
    <pci>
      <pci_bus_id>00000000:1B:00.0</pci_bus_id>
      <pci_gpu_link_info><link_widths>
        <max_link_width>16x</max_link_width><current_link_width>16x</current_link_width>
      </link_widths></pci_gpu_link_info>
    </pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
    </clocks_event_reasons>
    <temperature><gpu_temp>31 C</gpu_temp></temperature>
    <ecc_errors><volatile>
      <sram_correctable>4</sram_correctable>
      <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <dram_uncorrectable>0</dram_uncorrectable>
      <sram_threshold_exceeded_uncorrectable>7</sram_threshold_exceeded_uncorrectable>
    </volatile></ecc_errors>
    <remapped_rows>
      <remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <clocks><sm_clock>345 MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
  </gpu>
  <gpu id="00000000:9A:00.0">
    <product_name>Synthetic H</product_name>
    <pci><pci_gpu_link_info><link_widths>
      <max_link_width>16x</max_link_width><current_link_width>8x</current_link_width>
    </link_widths></pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_errors><volatile><dram_uncorrectable>2</dram_uncorrectable></volatile></ecc_errors>
    <remapped_rows>
      <remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
  </gpu>
  <gpu id="00000000:9B:00.0">
    <product_name>Synthetic V</product_name>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_sw_power_cap>Active</clocks_throttle_reason_sw_power_cap>
      <clocks_throttle_reason_hw_power_brake_slowdown>Active</clocks_throttle_reason_hw_power_brake_slowdown>
    </clocks_throttle_reasons>
    <ecc_errors><volatile><dram_uncorrectable>N/A</dram_uncorrectable></volatile></ecc_errors>
    <remapped_rows>N/A</remapped_rows>
    <retired_pages><pending_blacklist>No</pending_blacklist></retired_pages>
  </gpu>
</nvidia_smi_log>
"""


def test_nvidia_smi(tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("1\n")
    (tmp_path / "0000:9a:00.0").mkdir()
    (tmp_path / "0000:9a:00.0" / "numa_node").write_text("-1\n")  # a machine with one node
    healthy, ill, old = nvidia.parse(NVIDIA, tmp_path)
    assert (healthy.index, healthy.name, healthy.uncorrected_errors) == (0, "Synthetic H", 0)
    assert (healthy.repair_pending, healthy.repair_failed, healthy.slowdowns) == (False, False, ())
    assert (healthy.clock_mhz, healthy.max_clock_mhz, healthy.temperature_c) == (345, 1980, 31)
    assert (healthy.link_width, healthy.max_link_width, healthy.numa_node) == (16, 16, 1)
    assert (ill.index, ill.uncorrected_errors, ill.repair_pending, ill.link_width) == (1, 2, True, 8)
    assert (ill.slowdowns, ill.numa_node) == (("hw_thermal_slowdown",), None)
    assert (old.uncorrected_errors, old.repair_pending, old.repair_failed) == (None, False, None)
    assert old.slowdowns == ("hw_power_brake_slowdown",)
    with pytest.raises(ElementTree.ParseError):
        nvidia.parse("NVIDIA-SMI has failed")


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Puts an `nvidia-smi` of ours on PATH."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_an_nvidia_smi_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "echo 'Unable to determine the device handle'; exit 15")
    assert nvidia.device_health() == ((), "nvidia-smi ended with 15: Unable to determine the device handle")
    program(tmp_path, monkeypatch, "echo no XML")
    assert "cannot be read" in nvidia.device_health()[1]
    program(tmp_path, monkeypatch, f"cat <<'END'\n{NVIDIA}END")
    assert [row.name for row in nvidia.device_health()[0]] == ["Synthetic H", "Synthetic H", "Synthetic V"]
    monkeypatch.setattr(nvidia, "_TIMEOUT_S", 0.2)
    program(tmp_path, monkeypatch, "exec sleep 5")
    assert nvidia.device_health() == ((), "nvidia-smi did not answer within 0.2 s")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia.device_health() == ((), "")


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    """The tightest limit counts, of this group and of those above it."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "pod" / "run").mkdir(parents=True)
    own.write_text("0::/pod/run\n")
    (root / "pod" / "cpu.max").write_text("250000 100000\n")
    (root / "pod" / "run" / "cpu.max").write_text("max 100000\n")
    (root / "pod" / "run" / "memory.max").write_text("1073741824\n")
    (root / "pod" / "memory.max").write_text("max\n")
    assert system.quota(root, own) == 2.5
    assert system.memory_limit(root, own) == 1 << 30


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    for controller in ("cpu", "memory"):
        (root / controller / "job").mkdir(parents=True)
    own.write_text("4:memory:/job\n1:cpu:/job\n")
    (root / "cpu" / "job" / "cpu.cfs_quota_us").write_text("150000\n")
    (root / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    (root / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (root / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (root / "memory" / "job" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert system.quota(root, own) == 1.5
    assert system.memory_limit(root, own) is None
    assert system.quota(root, tmp_path / "missing") is None


def test_numa_nodes(tmp_path: Path) -> None:
    for number, cores in enumerate(("0-3,8-11", "4-7")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert system.numa_nodes(tmp_path, ()) == (8, 4)
    assert system.numa_nodes(tmp_path, (0, 1, 4)) == (2, 1)
    assert system.core_list("") == set()


def test_this_host() -> None:
    assert system.processors().cores >= 1
    assert set(system.limits()) == {"open_files", "locked_memory", "processes", "core_files"}
    assert system.shared_memory("/nowhere") is None
    loopback = next(card for card in network.interfaces() if card.name == "lo")
    assert "127.0.0.1" in loopback.addresses and loopback.is_up
    assert all(not address.startswith("127.") for address in network.reachable_at([]))


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*words: object) -> tuple[str, str]:
        time.sleep(1.0)
        return "late", ""

    monkeypatch.setattr(socket, "getnameinfo", slow)
    begun = time.monotonic()
    rows = network.lookups({"node1": ("localhost", "127.0.0.1")}, timeout_s=0.2)
    assert time.monotonic() - begun < 0.9
    assert [(row.question, row.finished) for row in rows] == [
        ("localhost", True),
        ("127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
    ]
    time.sleep(0.9)  # the threads end


def test_ports_and_a_link_over_loopback() -> None:
    with closing(links.LinkListener(TOKEN)) as listener:
        closed_port = free_port()
        peers = {
            "open": (["127.0.0.1"], listener.port),
            "second address": (["255.255.255.255", "127.0.0.1"], listener.port),
            "refused": (["127.0.0.1"], closed_port),
            "unknown": ([], listener.port),
        }
        rows = {row.target: row for row in links.connections("here", peers, TOKEN)}
        assert {target: row.outcome for target, row in rows.items()} == {
            "open": "open",
            "second address": "open",
            "refused": "refused",
            "unknown": "no route",
        }
        assert rows["second address"].address == "127.0.0.1"
        # A listener of another examination takes the connection, and closes it.
        other = links.connections("here", {"other": (["127.0.0.1"], listener.port)}, TOKEN[::-1])
        assert other[0].outcome == "other"
        link = links.measure("here", "there", "127.0.0.1", listener.port, TOKEN, 0.1)
        assert isinstance(link, LinkFacts)
        assert link.latency_s > 0 and link.bytes_per_s > 0


def test_the_rate_of_a_stream() -> None:
    """The first quarter of the time is left out: TCP has not found its rate yet."""
    slow_start = [(0.0, 10), (0.1, 10), (0.25, 10)]
    steady = [(0.5, 100), (0.75, 100), (1.0, 100)]
    assert links.rate([*slow_start, *steady]) == 400.0
    assert links.rate([(0.0, 100)]) == 0.0


def test_a_folder_of_one_host(tmp_path: Path) -> None:
    probe = FolderProbe(str(tmp_path), TOKEN, 0)
    probe.look()
    assert probe.make() == ""
    use = probe.use()
    assert (use.error, use.won_race, use.renames) == ("", True, True)
    assert use.seen_after_s is not None and use.fsync_s is not None
    assert (use.write_bytes_per_s or 0) > 0
    assert probe.read(0) > 0
    assert probe.read(7) == 0.0
    assert (tmp_path / f".paceline-doctor-{TOKEN[:16]}" / "host0").stat().st_size == NUM_BYTES
    second = FolderProbe(str(tmp_path), TOKEN, 1)
    assert second.use().won_race is False
    assert second.clean() == "" and probe.clean() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = FolderProbe(str(tmp_path / "missing"), TOKEN, 0)
    assert probe.make().startswith("no such file or directory: ")
    monkeypatch.setattr("paceline_hosts.doctor.host.folder.SEEN_S", 0.05)
    assert probe.use().seen_after_s is None
    assert probe.clean() == ""


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    inner = tmp_path / "my data" / "run"
    inner.mkdir(parents=True)
    escaped = str(tmp_path / "my data").replace(" ", "\\040")
    mounts.write_text(
        f"/dev/root / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw,vers=4.2 0 0\ntmpfs /nowhere tmpfs rw 0 0\n"
    )
    assert file_system(str(inner), mounts) == "nfs4"
    assert file_system(str(tmp_path), mounts) == "ext4"
    assert file_system(str(tmp_path), tmp_path / "none") == ""
