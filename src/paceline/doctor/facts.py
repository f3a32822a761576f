"""What is known of hosts after they were examined: facts and measurements without a judgement.

A host sends its facts as JSON; `base/json_fields.py` reads them into these classes, whose fields are the schema.
`paceline doctor --json` prints them under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Versions:
    """What a host runs.

    Attributes:
        paceline, python: their versions.
        executable: the Python.
        torch: its version; "" where it cannot be imported.
        torch_error: why it cannot be imported.
        nccl: version of the NCCL that torch was built with; "" for none.
        backends: of torch.distributed, such as "gloo".
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
    """What a vendor's tool says of one device; None for what it does not say.

    Attributes:
        index: its number.
        name: its product name.
        uncorrected_errors: memory errors that ECC could not correct since the driver was loaded.
        repair_pending: rows or pages of memory that are replaced at the next reset.
        repair_failed: the memory could not be repaired.
        slowdowns: why its clock is held down at this moment, other than that it has nothing to do.
        clock_mhz, max_clock_mhz: of its processors.
        temperature_c: in degrees Celsius.
        link_width, max_link_width: lanes of its PCIe link.
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
    """Accelerators of a host.

    Attributes:
        kind: as torch calls it, such as "cuda"; "" for none.
        names: of each device that torch finds.
        error: why torch could not look.
        no_peer_access: pairs of devices that cannot read each other's memory.
        health: what the vendor's tool says of each device that is plugged in, whether torch finds it or not.
        health_error: why that tool did not answer; "" where there is none, or it did.
    """

    kind: str = ""
    names: tuple[str, ...] = ()
    error: str = ""
    no_peer_access: tuple[tuple[int, int], ...] = ()
    health: tuple[DeviceHealth, ...] = ()
    health_error: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface, in the order of the system's list.

    Attributes:
        name: such as "eth0".
        addresses: its IPv4 address, and its IPv6 addresses.
        is_up: whether it can be used.
        speed_mbit: the rate that its link has agreed on; None where the system does not know.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    speed_mbit: int | None = None


@dataclass(frozen=True)
class Network:
    """How a host is connected.

    Attributes:
        hostname: its own name.
        hostname_addresses: the addresses that its own name has here; empty where it has none.
        interfaces: all of them.
        routes: by which interface it goes to each other host: (host, interface).
        gloo_variable, nccl_variable: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; "" where they are not set.
    """

    hostname: str
    hostname_addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    routes: tuple[tuple[str, str], ...] = ()
    gloo_variable: str = ""
    nccl_variable: str = ""


@dataclass(frozen=True)
class Lookup:
    """One question to the resolver of names.

    Attributes:
        host: whom it is about.
        question: a name, or an address.
        answer: the first address, or the name; "" for none.
        seconds: how long it took.
        finished: whether there was an answer of any kind before we stopped waiting.
    """

    host: str
    question: str
    answer: str
    seconds: float
    finished: bool = True


@dataclass(frozen=True)
class Limit:
    """A limit of the system for processes: the one that counts, and the highest that the user may set; -1 for none."""

    soft: int
    hard: int


@dataclass(frozen=True)
class Processors:
    """Cores, memory and threads.

    Attributes:
        cores: cores that a process may use.
        all_cores: cores of the machine.
        quota: cores that the control group pays for; None for no limit.
        memory_limit: bytes that the control group allows; None for no limit.
        memory: bytes of the machine.
        threads_variable: OMP_NUM_THREADS; "" where it is not set.
        numa_nodes: cores of each NUMA node that a process may use.
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
    """What a host says of itself.

    Attributes:
        versions, devices, network, processors: see there.
        lookups: names and addresses of the other hosts.
        limits: open files, locked memory, processes, core files: by the names of `ulimit`'s manual.
        shared_memory: bytes of /dev/shm, and bytes free; None where there is none.
        programs: which of the programs that a fix may name are installed.
        in_container: whether it looks like the inside of a container.
        has_rdma: whether it has adapters for RDMA (InfiniBand, RoCE).
        no_cwd: why the working directory of a run cannot be entered here; "" where it can.
    """

    versions: Versions
    network: Network
    processors: Processors
    lookups: tuple[Lookup, ...] = ()
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
class Connection:
    """Whether one host reaches a port of another.

    Attributes:
        source, target: the hosts.
        address: the address that answered, else the one that should have.
        port: the port, at which the other host listened.
        outcome: "no answer" where packets are lost on the way, "other" where somebody else answered.
    """

    source: str
    target: str
    address: str
    port: int
    outcome: Outcome


@dataclass(frozen=True)
class Clock:
    """How far a host's clock is ahead of the clock where the command runs, in seconds; the truth is within `bound_s` of it."""

    offset_s: float
    bound_s: float


@dataclass(frozen=True)
class Link:
    """One direction between two hosts, measured with one TCP connection.

    Attributes:
        source, target: the hosts.
        latency_s: half of the median round trip.
        bytes_per_s: what arrived.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of so many bytes by all processes, and the median of the seconds that it took."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class AllReduces:
    """All-reduces by size.

    Attributes:
        backend: such as "gloo".
        processes: how many took part.
        times: by size.
        error: why there are none.
    """

    backend: str
    processes: int
    times: tuple[AllReduce, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class FolderUse:
    """What one host could do in the shared folder.

    Attributes:
        error: what failed, with the system's reason; "" for nothing.
        file_system: its type, such as "nfs4".
        seen_after_s: seconds until the first host's file was there; None where it was not in time.
        lock_excludes: whether the lock that the first host held was respected here; None where it was not tried.
        won_race: whether this host's exclusive link was the one that succeeded.
        renames: whether a file was replaced by renaming another onto it.
        fsync_s: seconds of writing and syncing one small file.
        write_bytes_per_s, read_bytes_per_s: of a file of 16 MB; what is read was written by another host, if there is one.
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
    """All that was collected.

    Attributes:
        hosts: all that were to be examined, in their order.
        silent: of hosts that did not answer: at which step, and why.
        facts, clocks: by host.
        connections: each ordered pair.
        links: each direction that was measured.
        all_reduces: None where there is one process.
        folder: its path.
        folder_was_named: whether the user named it.
        folder_uses: by host.
    """

    hosts: tuple[str, ...]
    silent: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, HostFacts] = field(default_factory=dict)
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    connections: tuple[Connection, ...] = ()
    links: tuple[Link, ...] = ()
    all_reduces: AllReduces | None = None
    folder: str = ""
    folder_was_named: bool = False
    folder_uses: Mapping[str, FolderUse] = field(default_factory=dict)
