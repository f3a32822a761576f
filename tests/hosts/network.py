"""Several hosts on one machine, as real as namespaces make them: own addresses, own processes, own sshd.

    desk   10.77.0.254  (where `Host.run` calls ssh from)
      |
    [ switch ]   a bridge in a namespace of its own: the machine's own network is not touched
      |port0      |port1      |port2        cut() takes the host's port down: no packet passes, nobody is told
      |           |           |             limit() slows the cable in both directions
    eth0        eth0        eth0
    node0       node1       node2           a network, process, mount and host-name namespace each
    10.77.0.1   10.77.0.2   10.77.0.3       process 1 is the host's sshd: power_off() kills it, and all of the host with it

The hosts share the machine's files, as a cluster shares a folder over NFS; `/run`, `/etc/hosts`, `/etc/resolv.conf` and
`/etc/nsswitch.conf` are each host's own. Names are looked up in files alone: with a name server that does not answer,
torch's store asks it for the name of each client, and a job takes 20 seconds more to come up.

Needs root, and what `tests/hosts/install.sh` installs; `lacking()` says what is missing.

    with Network(3) as network:
        node0, node1, node2 = network.hosts
        print(node0.run("hostname").stdout)
        job = node1.start("python train.py", log=folder / "node1.log")
        node2.power_off()
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import warm_python

DESK = "10.77.0.254"
NEEDED = ("ip", "tc", "unshare", "sshd", "ssh", "ssh-keygen")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_SSHD = """
    Port 22
    ListenAddress {address}
    HostKey {folder}/host_key
    AuthorizedKeysFile {folder}/user_key.pub
    PidFile none
    StrictModes no
    UsePAM no
    PermitRootLogin prohibit-password
    PrintMotd no
    MaxStartups 100
    MaxSessions 100
    SetEnv HOME={folder}/home{variables}
"""
_SSH = """
    Host *
      User root
      IdentityFile {folder}/user_key
      IdentitiesOnly yes
      UserKnownHostsFile {folder}/known_hosts
      GlobalKnownHostsFile /dev/null
      BatchMode yes
      ConnectTimeout 5
      LogLevel ERROR
"""


def lacking() -> list[str]:
    """What this machine lacks for hosts of its own; empty where it has everything."""
    missing = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        return missing
    words = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "a0"]
    tried = subprocess.run(
        [*words, "type", "veth", "peer", "name", "a1"], env=_env(), capture_output=True, text=True, timeout=30
    )
    return [f"namespaces ({tried.stderr.strip()})"] if tried.returncode else []


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _do(*words: object) -> str:
    """Runs a command of this machine; an error of it is raised with what it said."""
    done = subprocess.run([str(word) for word in words], env=_env(), capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{shlex.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def paceline() -> str:
    """Words of a shell that start `paceline`, also on a host, without its imports."""
    return f"{warm_python.executable()} -m paceline.cli.main"


def until(true: Callable[[], object], what: str | Callable[[], str], timeout_s: float = 30) -> float:
    """Waits until `true()`; returns the seconds that it took. What is awaited may be a function, called at the failure."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)
    return time.monotonic() - begun


class Started:
    """A command that runs on a host; its output goes to a file, so that it is there when the host is not.

    Attributes:
        host: where it runs.
        log: the file.
        ssh: the client that waits for its end.
    """

    def __init__(self, host: Host, log: Path, ssh: subprocess.Popen[bytes]) -> None:
        self.host, self.log, self.ssh = host, log, ssh

    @property
    def pid(self) -> int:
        """Its process number on its host."""
        return int(self.log.with_suffix(".pid").read_text())

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, name: str) -> None:
        """Sends it a signal, such as "TERM", over ssh."""
        done = self.host.run(f"kill -{name} {self.pid}")
        assert done.returncode == 0, done.stderr

    def wait(self, timeout_s: float = 60) -> int:
        """Its exit code; 255 where ssh lost the host."""
        return self.ssh.wait(timeout_s)


class Host:
    """One host; made by `Network`.

    Attributes:
        name: its host name.
        address: its IP address.
        folder: the network's keys and configurations.
    """

    def __init__(self, network: Network, number: int) -> None:
        self._network, self._port = network, f"port{number}"
        self.name, self.address = f"node{number}", f"10.77.0.{number + 1}"
        self.namespace = f"{network.prefix}-{self.name}"
        self._power: subprocess.Popen[bytes] | None = None
        self._inside = ""  # the process namespace, to know the host's processes by

    def run(self, command: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Runs a shell command here, over ssh from the desk, and waits for it."""
        return self._network.at_desk("ssh", "-F", self._network.ssh_config, self.name, command, timeout_s=timeout_s)

    def start(self, command: str, log: Path) -> Started:
        """Starts a shell command here, over ssh from the desk; its output goes to `log`."""
        pid = log.with_suffix(".pid")
        remote = f"exec >{shlex.quote(str(log))} 2>&1 </dev/null; echo $$ >{shlex.quote(str(pid))}; exec {command}"
        words = ["ip", "netns", "exec", self._network.switch, "ssh", "-F", self._network.ssh_config, self.name]
        words.append(f"sh -c {shlex.quote(remote)}")
        quiet = subprocess.DEVNULL
        ssh = subprocess.Popen([str(w) for w in words], env=_env(), stdin=quiet, stdout=quiet, stderr=quiet)
        self._network.clients.append(ssh)
        until(lambda: ssh.poll() is not None or (pid.exists() and pid.read_text().endswith("\n")), f"start {command}")
        return Started(self, log, ssh)

    def processes(self) -> list[str]:
        """Command lines of all that runs here, sshd's own left out; asks the machine, so that a cut link is no obstacle."""
        return [words for words in self._running() if not words.startswith(("sshd", "/usr/sbin/sshd"))]

    def power_on(self, **variables: str) -> None:
        """Starts the host, with nothing but an sshd; its cable is plugged in.

        Args:
            variables: what all its programs find in their environment.
        """
        assert self._power is None, f"{self.name} is on"
        config = self._network.folder / f"{self.name}.sshd"
        more = "".join(f" {name}={value}" for name, value in variables.items())
        config.write_text(_SSHD.format(address=self.address, folder=self._network.folder, variables=more))
        boot = f"echo {self.name} >/proc/sys/kernel/hostname; mount -t tmpfs run /run; mkdir /run/sshd; "
        boot += f"exec {shutil.which('sshd', path=_PATH)} -D -e -f {shlex.quote(str(config))}"
        words = ["ip", "netns", "exec", self.namespace, "unshare", "--pid", "--fork", "--kill-child=SIGKILL"]
        log = self._network.folder / f"{self.name}.log"
        with log.open("wb") as out:
            command = [*words, "--mount-proc", "--uts", "sh", "-c", boot]
            self._power = subprocess.Popen(command, env=_env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.heal()
        listening = lambda: "Server listening" in log.read_text() or self._power.poll() is not None  # noqa: E731
        until(listening, f"{self.name}'s sshd")
        if self._power.poll() is not None:
            raise OSError(f"{self.name} does not come up: {log.read_text()}")
        self._inside = os.readlink(f"/proc/{self._power.pid}/ns/pid_for_children")

    def power_off(self, silently: bool = False) -> None:
        """Ends all of the host's processes at once.

        Args:
            silently: as a power loss does it: nobody gets another packet. Otherwise the kernel lives for the moment that
                it takes to close the connections, as in a crash of all processes, or a machine that is being shut down.
        """
        if self._power is None:
            return
        if silently:
            self.cut()
        self._power.kill()
        self._power.wait()
        self._power = None
        until(lambda: not self._running(), f"the end of {self.name}'s processes")
        self._inside = ""  # the system gives the number of an ended namespace to a new one

    def cut(self) -> None:
        """Unplugs the cable at the switch: packets are lost and nobody is told; connections stay as they are."""
        _do("ip", "-n", self._network.switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        """Plugs the cable in again."""
        _do("ip", "-n", self._network.switch, "link", "set", self._port, "up")

    def limit(self, rate: str | None) -> None:
        """Limits the cable in both directions, "100mbit" for example; None takes the limit away."""
        for namespace, device in ((self.namespace, "eth0"), (self._network.switch, self._port)):
            words = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root"]
            _do(*words, *(["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"] if rate else ["pfifo"]))

    def _running(self) -> list[str]:
        """Command lines of all processes in this host's namespace; one that has ended has none."""
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if os.readlink(f"{entry.path}/ns/pid") == self._inside:
                        found.append(
                            Path(entry.path, "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
                        )
                except OSError:
                    continue  # it has ended meanwhile
        return [words for words in found if words]


class Network:
    """Hosts at one switch, from `with` to the end of it; all that was made is taken away then, whatever happened.

    Args:
        count: how many hosts.

    Attributes:
        hosts: node0, node1, ...
        folder: keys, configurations and the sshds' logs.
        switch: namespace of the switch and the desk.
        ssh_config: configuration file with which ssh (and pdsh, rsync, ...) reaches the hosts by name, from any of them.
    """

    def __init__(self, count: int) -> None:
        self.prefix = f"paceline-{secrets.token_hex(3)}"
        self.switch = f"{self.prefix}-switch"
        self.hosts = [Host(self, number) for number in range(count)]
        self.clients: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
            stack.callback(shutil.rmtree, self.folder)
            self.ssh_config = self.folder / "ssh_config"
            (self.folder / "home").mkdir()  # nobody's start-up files: they take longer than what is run
            self._keys()
            self._namespace(stack, self.switch)
            switch = ("ip", "-n", self.switch)
            _do(*switch, "link", "add", "name", "desk", "type", "bridge")
            _do(*switch, "addr", "add", f"{DESK}/24", "dev", "desk")
            for device in ("lo", "desk"):
                _do(*switch, "link", "set", device, "up")
            for number, host in enumerate(self.hosts):
                self._namespace(stack, host.namespace)
                port, there = f"port{number}", ("ip", "-n", host.namespace)
                _do(
                    *switch,
                    "link",
                    "add",
                    "name",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    host.namespace,
                )
                _do(*switch, "link", "set", port, "master", "desk")
                _do(*there, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _do(*there, "link", "set", device, "up")
                _do(*there, "route", "add", "default", "via", DESK)  # some libraries take the default route's device
                stack.callback(host.power_off)
                host.power_on()
            stack.callback(self._hang_up)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def at_desk(self, *words: object, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Runs a program at the desk, where all hosts can be reached, and waits for it."""
        command = ["ip", "netns", "exec", self.switch, *map(str, words)]
        quiet = subprocess.DEVNULL
        return subprocess.run(command, env=_env(), stdin=quiet, capture_output=True, text=True, timeout=timeout_s)

    def _keys(self) -> None:
        for name in ("host_key", "user_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", self.folder / name)
        key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        names = ",".join(f"{host.name},{host.address}" for host in self.hosts)
        (self.folder / "known_hosts").write_text(f"{names} {key}\n")
        self.ssh_config.write_text(_SSH.format(folder=self.folder))

    def _namespace(self, stack: ExitStack, name: str) -> None:
        """A network namespace with files of its own; `ip netns exec` puts those in the place of the machine's."""
        own = Path("/etc/netns") / name
        if not own.parent.exists():
            own.parent.mkdir()
            stack.callback(_remove_if_empty, own.parent)
        own.mkdir()
        stack.callback(shutil.rmtree, own)
        lines = ["127.0.0.1 localhost", f"{DESK} desk", *(f"{host.address} {host.name}" for host in self.hosts)]
        (own / "hosts").write_text("\n".join(lines) + "\n")
        (own / "resolv.conf").write_text("")
        (own / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        _do("ip", "netns", "add", name)
        stack.callback(_do, "ip", "netns", "del", name)

    def _hang_up(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def still_running(hosts: Iterable[Host]) -> dict[str, list[str]]:
    """What runs on hosts where nothing should; empty where nothing does."""
    return {host.name: found for host in hosts if (found := host.processes())}
