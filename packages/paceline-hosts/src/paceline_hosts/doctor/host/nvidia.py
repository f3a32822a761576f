"""Reads memory errors, clocks and links of NVIDIA's devices from the output of `nvidia-smi -q -x`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

from paceline_hosts.doctor.facts import DeviceHealth

_TIMEOUT_S = 15.0  # without its daemon, nvidia-smi initialises each device first
# Reasons for a low clock that are no sign of a defect: the device is idle, its clock was set by somebody, or it has reached
# the power limit, as it does under full load.
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "sync_boost", "display_clocks_setting")


def device_health() -> tuple[tuple[DeviceHealth, ...], str]:
    """Returns what `nvidia-smi` reports about each device, and why it did not answer; "" if it did or is not installed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-x"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        return (), ""
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return (), f"nvidia-smi cannot be run ({error.strerror})"
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split())
        return (), f"nvidia-smi ended with {done.returncode}: {output[:200]}"
    try:
        return parse(done.stdout), ""
    except ElementTree.ParseError as error:
        return (), f"what nvidia-smi wrote cannot be read ({error})"


def parse(text: str, root: Path = Path("/sys/bus/pci/devices")) -> tuple[DeviceHealth, ...]:
    """Reads the output of `nvidia-smi -q -x`; values that a device or an older driver does not report are None.

    Args:
        text: the XML.
        root: the system's folder of devices, which has their NUMA nodes.

    Raises:
        xml.etree.ElementTree.ParseError: the text is not XML.
    """
    devices = []
    for index, gpu in enumerate(ElementTree.fromstring(text).findall("gpu")):
        bus = gpu.findtext("pci/pci_bus_id") or gpu.get("id") or ""
        devices.append(
            DeviceHealth(
                index,
                (gpu.findtext("product_name") or "unnamed").strip(),
                uncorrected_errors=_uncorrected_errors(gpu),
                repair_pending=_repair_pending(gpu),
                repair_failed=_yes(gpu.findtext("remapped_rows/remapped_row_failure")),
                slowdowns=_slowdowns(gpu),
                clock_mhz=_number(gpu.findtext("clocks/sm_clock")),
                max_clock_mhz=_number(gpu.findtext("max_clocks/sm_clock")),
                temperature_c=_number(gpu.findtext("temperature/gpu_temp")),
                link_width=_number(gpu.findtext("pci/pci_gpu_link_info/link_widths/current_link_width")),
                max_link_width=_number(gpu.findtext("pci/pci_gpu_link_info/link_widths/max_link_width")),
                numa_node=_numa_node(root, bus),
            )
        )
    return tuple(devices)


def _uncorrected_errors(gpu: ElementTree.Element) -> int | None:
    total = None
    for row in gpu.findall("ecc_errors/volatile/*"):
        # "dram_uncorrectable", "sram_uncorrectable_parity", ...; drivers of older devices have nested counts, left unread.
        if "uncorrectable" in row.tag and "threshold" not in row.tag:
            count = _number(row.text)
            if count is not None:
                total = (total or 0) + count
    return total


def _repair_pending(gpu: ElementTree.Element) -> bool | None:
    paths = (
        "remapped_rows/remapped_row_pending",
        "retired_pages/pending_retirement",
        "retired_pages/pending_blacklist",  # as older drivers call it
    )
    answers = {_yes(gpu.findtext(path)) for path in paths}
    if True in answers:
        return True
    return False if False in answers else None


def _slowdowns(gpu: ElementTree.Element) -> tuple[str, ...]:
    """Returns the active reasons for a low clock, by their names without the prefix, which depends on the driver."""
    reasons = []
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for row in gpu.findall(f"{group}/*"):
            name = re.sub("^clocks_(event|throttle)_reasons?_", "", row.tag)
            if (row.text or "").strip() == "Active" and name not in _HARMLESS:
                reasons.append(name)
    return tuple(reasons)


def _number(text: str | None) -> int | None:
    """Returns the number at the beginning of a text such as "1980 MHz" or "16x"; None for "N/A" and similar texts."""
    match = re.match(r"\s*(\d+)", text or "")
    return int(match.group(1)) if match else None


def _yes(text: str | None) -> bool | None:
    word = (text or "").strip().lower()
    return {"yes": True, "no": False}.get(word)


def _numa_node(root: Path, bus: str) -> int | None:
    """Returns the NUMA node of a device; None if the system does not say."""
    # nvidia-smi writes the domain of a PCI bus with 8 digits, and the system's folder has 4.
    name = bus.strip().lower()
    domain, _, rest = name.partition(":")
    try:
        node = int((root / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
