"""Defines the facts and measurements that an examination collects. They contain no judgement; the checks judge them.

A host sends its facts as JSON, and `base/json_fields.py` reads them into these classes, whose fields are the schema.
`paceline doctor --json` prints them under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Versions:
    """Lists the versions of the software on a host.

    Attributes:
        paceline, python: their versions.
        executable: path of the Python interpreter.
        torch: version of torch; "" if it cannot be imported.
        torch_error: why torch cannot be imported.
        nccl: version of the NCCL that torch was built with; "" for none.
        backends: the available backends of torch.distributed, such as "gloo".
    """

    paceline: str
    python: str
    executable: str
    torch: str = ""
    torch_error: str = ""
    nccl: str = ""
    backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceHealth:
    """Holds what the vendor's tool reports about one device; None for what it does not report.

    Attributes:
        index: number of the device.
        name: its product name.
        uncorrected_errors: memory errors that ECC could not correct since the driver was loaded.
        repair_pending: rows or pages of memory that are replaced at the next reset.
        repair_failed: the memory could not be repaired.
        slowdowns: why its clock is reduced at this moment; that it is idle does not count.
        clock_mhz, max_clock_mhz: the present and the highest clock rate of its processors.
        temperature_c: its temperature in degrees Celsius.
        link_width, max_link_width: the used and the possible number of lanes of its PCIe link.
        numa_node: the NUMA node that it is attached to.
    """

    index: int
    name: str
    uncorrected_errors: int | None = None
    repair_pending: bool | None = None
    repair_failed: bool | None = None
    slowdowns: tuple[str, ...] = ()
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    temperature_c: int | None = None
    link_width: int | None = None
    max_link_width: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True)
class Devices:
    """Lists the accelerators of a host.

    Attributes:
        kind: torch's name of the device type, such as "cuda"; "" for none.
        names: product names of the devices that torch finds.
        error: why torch could not look for devices.
        no_peer_access: pairs of devices that cannot read each other's memory.
        health: the vendor's report on each device in the host, whether torch finds the device or not.
        health_error: why the vendor's tool did not answer; "" if it did, or if it is not installed.
    """

    kind: str = ""
    names: tuple[str, ...] = ()
    error: str = ""
    no_peer_access: tuple[tuple[int, int], ...] = ()
    health: tuple[DeviceHealth, ...] = ()
    health_error: str = ""


@dataclass(frozen=True)
class Interface:
    """Describes one network interface.

    Attributes:
        name: its name, such as "eth0".
        addresses: its IPv4 address, and its IPv6 addresses.
        is_up: whether it can be used.
        speed_mbit: the negotiated rate of its link in Mbit/s; None if the system does not know it.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    speed_mbit: int | None = None


@dataclass(frozen=True)
class Network:
    """Describes how a host is connected.

    Attributes:
        hostname: the name that the host has for itself.
        hostname_addresses: the addresses that this name has on the host itself; empty if it has none.
        interfaces: all network interfaces, in the order of the system's list.
        routes: the interface by which the host reaches each other host, as pairs (host, interface).
        gloo_variable, nccl_variable: values of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; "" if they are not set.
    """

    hostname: str
    hostname_addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    routes: tuple[tuple[str, str], ...] = ()
    gloo_variable: str = ""
    nccl_variable: str = ""


@dataclass(frozen=True)
class LookupFacts:
    """Holds one question to the name resolver (DNS, /etc/hosts), and its answer.

    Attributes:
        host: the host that the question is about.
        question: a name, or an address.
        answer: the first address of the name, or the name of the address; "" for none.
        seconds: how long the answer took.
        finished: whether any answer, also a negative one, came before the time limit.
    """

    host: str
    question: str
    answer: str
    seconds: float
    finished: bool = True


@dataclass(frozen=True)
class Limit:
    """Holds a limit of the system for processes (`ulimit`); -1 means that there is no limit.

    Attributes:
        soft: the limit that applies.
        hard: the highest limit that the user may set.
    """

    soft: int
    hard: int


@dataclass(frozen=True)
class Processors:
    """Describes the cores, the memory and the threads of a host.

    Attributes:
        cores: number of cores that a process may use.
        all_cores: number of cores of the machine.
        quota: CPU time that the control group allows, in cores; None for no limit.
        memory_limit: bytes of memory that the control group allows; None for no limit.
        memory: bytes of memory of the machine.
        threads_variable: value of OMP_NUM_THREADS; "" if it is not set.
        numa_nodes: for each NUMA node, the number of its cores that a process may use.
    """

    cores: int
    all_cores: int
    quota: float | None = None
    memory_limit: int | None = None
    memory: int | None = None
    threads_variable: str = ""
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """Holds the facts that a host reports about itself.

    Attributes:
        versions, devices, network, processors: see the classes of these fields.
        lookups: questions to the name resolver about the other hosts.
        open_files, locked_memory, processes, core_files: limits for processes, with the names of `ulimit`'s manual; None
            if the system does not have such a limit.
        shared_memory: size of /dev/shm and its free space, in bytes; None if there is no /dev/shm.
        programs: the installed programs, among those that a fix may name.
        in_container: whether the host seems to be a container.
        has_rdma: whether it has adapters for RDMA (InfiniBand, RoCE).
        no_cwd: why the working directory of a run cannot be entered on this host; "" if it can.
    """

    versions: Versions
    network: Network
    processors: Processors
    lookups: tuple[LookupFacts, ...] = ()
    devices: Devices = Devices()
    open_files: Limit | None = None
    locked_memory: Limit | None = None
    processes: Limit | None = None
    core_files: Limit | None = None
    shared_memory: tuple[int, int] | None = None
    programs: tuple[str, ...] = ()
    in_container: bool = False
    has_rdma: bool = False
    no_cwd: str = ""


Outcome = Literal["open", "refused", "no answer", "no route", "other"]


@dataclass(frozen=True)
class ConnectionFacts:
    """Holds whether one host reaches a port of another.

    Attributes:
        source, target: the host that connects, and the host that listens.
        address: the address that answered; if none did, the one that was most likely to.
        port: the port at which the target listened.
        outcome: "no answer" if packets are lost on the way, "other" if another program answered at the port.
    """

    source: str
    target: str
    address: str
    port: int
    outcome: Outcome


@dataclass(frozen=True)
class ClockFacts:
    """Compares a host's clock with the clock where the command runs.

    Attributes:
        offset_s: how far the host's clock is ahead, in seconds.
        bound_s: the largest possible error of `offset_s`, in seconds.
    """

    offset_s: float
    bound_s: float


@dataclass(frozen=True)
class LinkFacts:
    """Holds the speed of one direction between two hosts, measured with one TCP connection.

    Attributes:
        source, target: the host that sends, and the host that receives.
        latency_s: half of the median round trip time, in seconds.
        bytes_per_s: bandwidth, as the receiver has counted it.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class AllReduce:
    """Holds the size of an all-reduce by all processes in bytes, and the median of its times in seconds."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class AllReduces:
    """Holds the times of all-reduces of several sizes.

    Attributes:
        backend: backend of torch.distributed, such as "gloo".
        processes: number of processes that took part.
        times: one entry for each size.
        error: why there are no times; "" if there are.
    """

    backend: str
    processes: int
    times: tuple[AllReduce, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class FolderUse:
    """Holds what one host could do in the shared folder.

    Attributes:
        error: what failed, with the system's reason; "" if nothing failed.
        file_system: type of the file system, such as "nfs4".
        seen_after_s: seconds until this host saw the first host's file; None if it did not see it in time.
        lock_excludes: whether the lock of the first host kept this host from locking; None if it was not tried.
        won_race: whether this host was the one that created the exclusive link.
        renames: whether renaming a file onto another one replaced it.
        fsync_s: seconds to write and sync one small file.
        write_bytes_per_s, read_bytes_per_s: speed with a file of 16 MiB. The file that is read was written by another host,
            if there is one.
    """

    error: str = ""
    file_system: str = ""
    seen_after_s: float | None = None
    lock_excludes: bool | None = None
    won_race: bool = False
    renames: bool = False
    fsync_s: float | None = None
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Examination:
    """Holds all that an examination has collected.

    Attributes:
        hosts: names of all hosts that were to be examined, in their order.
        silent: host that did not answer -> the step at which it was silent, and why.
        facts, clocks: host -> its facts, and its clock.
        connections: one entry for each ordered pair of hosts.
        links: one entry for each direction that was measured.
        all_reduces: times of all-reduces; None if they were not measured.
        folder: path of the shared folder.
        folder_was_named: whether the user named the folder.
        folder_uses: host -> what it could do in the folder.
    """

    hosts: tuple[str, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, HostFacts] = field(default_factory=dict)
    clocks: Mapping[str, ClockFacts] = field(default_factory=dict)
    connections: tuple[ConnectionFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    all_reduces: AllReduces | None = None
    folder: str = ""
    folder_was_named: bool = False
    folder_uses: Mapping[str, FolderUse] = field(default_factory=dict)
