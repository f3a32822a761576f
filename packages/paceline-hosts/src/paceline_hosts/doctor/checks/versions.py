"""Do all hosts run the same versions, and is torch there with gloo?"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.base.version import TORCH_NEWEST
from paceline.world import torch_version
from paceline_hosts.doctor.facts import Examination, Versions
from paceline_hosts.doctor.finding import Check, Finding, listed, on, where_all


def _compared(versions: Versions) -> dict[str, str]:
    """Returns the versions that all hosts must have in common."""
    # The third number of Python's version does not matter: it changes nothing that hosts send to each other.
    major, minor, *_ = versions.python.split(".")
    return {
        "paceline": versions.paceline,
        "Python": f"{major}.{minor}",
        "torch": versions.torch,
        "NCCL": versions.nccl or "missing",
    }


def judge(examination: Examination) -> list[Finding]:
    """Finds versions that differ, a torch that is missing or lacks gloo, and, as a warning, a torch that was not tested."""
    findings: list[Finding] = []
    usable: dict[str, Versions] = {}
    for host, facts in examination.facts.items():
        versions = facts.versions
        if versions.torch:
            usable[host] = versions
            if "gloo" not in versions.backends:
                fix = on(host, examination, f"{versions.executable} -m pip install --force-reinstall torch")
                findings.append(Finding("problem", "gloo-missing", host, "its torch has no gloo", fix))
        else:
            what = f"torch cannot be used: {versions.torch_error}"
            fix = on(host, examination, f"{versions.executable} -m pip install --force-reinstall torch")
            findings.append(Finding("problem", "torch-missing", host, what, fix))
    for name in ("paceline", "Python", "torch", "NCCL"):
        findings += _difference(usable, name)
    findings += _untested(examination, usable)
    if usable and not findings:
        versions = next(iter(usable.values()))
        nccl = f"NCCL {versions.nccl}" if versions.nccl else "no NCCL"
        what = f"paceline {versions.paceline}, Python {versions.python}, torch {versions.torch}, gloo, {nccl}"
        findings.append(Finding("ok", "versions", where_all(examination), what))
    return findings


def _difference(usable: Mapping[str, Versions], name: str) -> list[Finding]:
    """Finds several versions of one package. The version that most hosts have counts as the right one."""
    hosts_by_version: dict[str, list[str]] = {}
    for host, versions in usable.items():
        hosts_by_version.setdefault(_compared(versions)[name], []).append(host)
    if len(hosts_by_version) < 2:
        return []
    # `max` returns the first of equal ones, so with two hosts the version of the first one counts as right.
    right = max(hosts_by_version, key=lambda version: len(hosts_by_version[version]))
    parts = []
    wrong = []
    for version, hosts in hosts_by_version.items():
        parts.append(f"{version} on {listed(hosts)}")
        if version != right:
            wrong += hosts
    executable = usable[wrong[0]].executable
    public = right.partition("+")[0]
    if name == "Python":
        fix = f"on {listed(wrong)}: install Python {right}, and paceline for it, at {executable}"
    elif name == "NCCL":
        torch = usable[hosts_by_version[right][0]].torch.partition("+")[0]
        fix = f"on {listed(wrong)}: `{executable} -m pip install --force-reinstall torch=={torch}`"
    elif name == "torch":
        fix = f"on {listed(wrong)}: `{executable} -m pip install torch=={public}`"
    else:
        # No package index has paceline, so pip cannot install it by name.
        fix = f"on {listed(wrong)}: install paceline {public} for {executable}, from the folder that the others have it from"
    what = f"{name} is {'; '.join(parts)}"
    return [Finding("problem", "versions-differ", listed(wrong), what, fix)]


def _untested(examination: Examination, usable: Mapping[str, Versions]) -> list[Finding]:
    hosts = [host for host, versions in usable.items() if torch_version.compare(versions.torch) != "tested"]
    if not hosts:
        return []
    versions = usable[hosts[0]]
    what = f"torch {versions.torch} is not one of those that were tested with: {torch_version.range_text()}"
    wanted = f"torch=={'.'.join(map(str, TORCH_NEWEST))}.*"
    fix = f"`{versions.executable} -m pip install '{wanted}'`"
    return [Finding("warning", "torch-untested", listed(hosts), what, fix)]


CHECK = Check("versions", judge)
