"""Are the accelerators there, alike on all hosts, and in good health?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_hosts.doctor.facts import DeviceHealth, Devices, Examination
from paceline_hosts.doctor.finding import Check, Finding, leave_out, listed, on, where_all


def judge(examination: Examination) -> list[Finding]:
    """Finds memory errors and failing drivers, and, as warnings, devices that are slowed down, hidden or missing."""
    findings: list[Finding] = []
    for host, facts in examination.facts.items():
        if facts.versions.torch:
            findings += _of_host(examination, host, facts.devices)
    findings += _differences(examination)
    if not findings and examination.facts:
        findings.append(Finding("ok", "devices", where_all(examination), _described(examination)))
    return findings


def _of_host(examination: Examination, host: str, devices: Devices) -> Iterator[Finding]:
    if devices.error:
        fix = on(host, examination, "sudo reboot")
        yield Finding("problem", "devices-fail", host, f"torch cannot use the accelerators: {devices.error}", fix)
    if devices.health_error:
        fix = on(host, examination, "sudo reboot")
        yield Finding("problem", "device-tool-fails", host, f"{devices.health_error}", fix)
    if devices.health and not devices.names and not devices.error:
        executable = examination.facts[host].versions.executable
        fix = on(
            host,
            examination,
            f"{executable} -m pip install --force-reinstall --index-url=https://download.pytorch.org/whl/cu128 torch",
        )
        what = f"torch finds no accelerator, and nvidia-smi lists {len(devices.health)}"
        yield Finding("warning", "devices-hidden", host, what, fix)
    for health in devices.health:
        yield from _of_device(examination, host, health)


def _of_device(examination: Examination, host: str, health: DeviceHealth) -> Iterator[Finding]:
    what = f"device {health.index} ({health.name})"
    without = leave_out(f"{host}:{health.index}")
    reset = on(host, examination, f"sudo nvidia-smi --gpu-reset -i {health.index}")
    if health.repair_failed:
        yield Finding("problem", "device-memory", host, f"{what}: its memory could not be repaired", without)
    elif health.uncorrected_errors:
        count = health.uncorrected_errors
        yield Finding(
            "problem", "device-memory", host, f"{what}: {count} memory errors that ECC did not correct", reset
        )
    elif health.repair_pending:
        yield Finding("problem", "device-memory", host, f"{what}: a repair of its memory waits for a reset", reset)
    if health.slowdowns:
        clock = f"{health.clock_mhz} of {health.max_clock_mhz} MHz, {health.temperature_c} degrees Celsius"
        reasons = ", ".join(health.slowdowns)
        yield Finding("warning", "device-slow", host, f"{what}: it is slowed down ({reasons}): {clock}", without)
    if health.link_width and health.max_link_width and health.link_width < health.max_link_width:
        lanes = f"{health.link_width} of {health.max_link_width} lanes of its PCIe link are in use"
        yield Finding("warning", "device-link", host, f"{what}: {lanes}", without)


def _differences(examination: Examination) -> list[Finding]:
    """Finds hosts whose devices differ in type or in number."""
    hosts_by_devices: dict[tuple[str, ...], list[str]] = {}
    for host, facts in examination.facts.items():
        if facts.versions.torch:
            hosts_by_devices.setdefault(facts.devices.names, []).append(host)
    if len(hosts_by_devices) < 2:
        return []
    parts = [f"{_counted(names)} on {listed(hosts)}" for names, hosts in hosts_by_devices.items()]
    fewest = min(len(names) for names in hosts_by_devices)
    fix = f"use as many on each host: `--procs {fewest}`" if fewest else "leave out the hosts that have none: --exclude"
    return [Finding("warning", "devices-differ", where_all(examination), "; ".join(parts), fix)]


def _counted(names: tuple[str, ...]) -> str:
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return " and ".join(kinds) or "no accelerator"


def _described(examination: Examination) -> str:
    devices = next(iter(examination.facts.values())).devices
    if not devices.names:
        return "no accelerator: runs use the CPU, and NCCL is not needed"
    parts = [f"{_counted(devices.names)} on each host"]
    if devices.no_peer_access:
        pairs = listed(f"{first}-{other}" for first, other in devices.no_peer_access if first < other)
        parts.append(f"no direct access between {pairs}")
    if not devices.health:
        parts.append("no tool that knows their health")
    return "; ".join(parts)


CHECK = Check("devices", judge)
