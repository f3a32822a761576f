"""Do threads fit the cores, are hosts alike, and are the devices spread over NUMA nodes?"""

from __future__ import annotations

from paceline_hosts.doctor.facts import Examination, HostFacts
from paceline_hosts.doctor.finding import Check, Finding, listed, where_all
from paceline_hosts.doctor.units import num_bytes


def judge(examination: Examination) -> list[Finding]:
    """Finds hosts with more threads than cores, hosts with fewer cores than others, and devices on several NUMA nodes."""
    findings: list[Finding] = []
    for host, facts in examination.facts.items():
        findings += _of_host(examination, host, facts)
    cores = {host: _usable_cores(facts) for host, facts in examination.facts.items()}
    if len(set(cores.values())) > 1:
        fewest = min(cores.values())
        slow = [host for host in cores if cores[host] == fewest]
        what = f"{fewest:g} cores, and up to {max(cores.values()):g} on the other hosts: all wait for the slowest"
        fix = f"start without them: `--exclude {'@'.join(slow)}`, or give each host as many slots as it has cores"
        findings.append(Finding("warning", "cores-differ", listed(slow), what, fix))
    if not findings and examination.facts:
        findings.append(Finding("ok", "processors", where_all(examination), _described(examination)))
    return findings


def _usable_cores(facts: HostFacts) -> float:
    processors = facts.processors
    return min(processors.cores, processors.quota or processors.cores)


def _of_host(examination: Examination, host: str, facts: HostFacts) -> list[Finding]:
    findings = []
    processors = facts.processors
    usable = _usable_cores(facts)
    threads = processors.threads_variable
    if threads.isdigit() and int(threads) > usable:
        what = f"OMP_NUM_THREADS={threads}, and a process may use {usable:g} cores"
        fix = "`unset OMP_NUM_THREADS`: `paceline launch` then divides the cores among the processes"
        findings.append(Finding("warning", "threads", host, what, fix))
    elif not threads and processors.quota is not None and processors.quota < processors.cores:
        what = f"the control group pays for {processors.quota:g} of {processors.cores} cores, and torch would start "
        what += f"{processors.cores} threads"
        fix = f"`export OMP_NUM_THREADS={max(int(processors.quota), 1)}`, divided by the processes of a host"
        findings.append(Finding("warning", "threads", host, what, fix))
    nodes = {health.numa_node for health in facts.devices.health if health.numa_node is not None}
    if len(nodes) > 1:
        what = f"the devices are attached to {len(nodes)} NUMA nodes: a process on the wrong one has a longer way"
        fix = "give each process cores of its own: `paceline launch --bind-cores all`"
        findings.append(Finding("warning", "numa", host, what, fix))
    return findings


def _described(examination: Examination) -> str:
    facts = next(iter(examination.facts.values()))
    processors = facts.processors
    parts = [f"{_usable_cores(facts):g} of {processors.all_cores} cores"]
    if len(processors.numa_nodes) > 1:
        parts.append(f"{len(processors.numa_nodes)} NUMA nodes")
    if processors.memory is not None:
        memory = min(processors.memory, processors.memory_limit or processors.memory)
        parts.append(f"{num_bytes(memory)} of memory")
    threads = processors.threads_variable
    parts.append(f"OMP_NUM_THREADS={threads}" if threads else "threads as `paceline launch` divides them")
    return ", ".join(parts)


CHECK = Check("processors", judge)
