"""A store outside the training hosts: its address, and the process that speaks to it for this launcher."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from paceline.base import env as environment
from paceline.base.errors import ConfigError, LaunchError, Problem
from paceline.launch.rounds import Place
from paceline_hosts.membership.errors import other_version
from paceline_hosts.membership.witness import BadSignature, Record, RecordSigner, StoreRequest

KINDS = {"etcd": 2379, "etcds": 2379, "c10d": 29400}
_CONNECT_TIMEOUT_S = 10.0  # for the first answer of the store, when a launcher starts
_C10D_TIMEOUT_S = 30.0  # the same for c10d, whose client imports torch
_RETRY_S = 0.5
_STUCK_S = 15.0  # a client that has not answered for so long is started again; importing torch takes less
_LONGEST_ANSWER = 1 << 20
_TLS_OPTIONS = ("cacert", "cert", "key")  # the names of the etcd backend of torchrun


@dataclass(frozen=True)
class Endpoint:
    """Where a store is.

    Attributes:
        kind: "etcd" or "c10d".
        hosts: names and ports.
        key: the key of the record of this run.
        user, password: for a store that asks for them.
        tls: paths of `ca`, `cert` and `key`, "" for none; None without TLS.
    """

    kind: str
    hosts: tuple[tuple[str, int], ...]
    key: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """The name of the store in messages, without a password. It must be the same on all launchers."""
        scheme = "etcds" if self.tls is not None else self.kind
        places = []
        for host, port in sorted(self.hosts):
            shown_host = f"[{host}]" if ":" in host else host
            places.append(f"{shown_host}:{port}")
        return f"{scheme}://{','.join(places)}"[:255]

    @classmethod
    def of(cls, text: str, run: str, options: dict[str, str]) -> Endpoint:
        """Reads `etcd://[USER:PASSWORD@]HOST[:PORT][,HOST...]`, `etcds://...` or `c10d://HOST[:PORT]`.

        Args:
            text: the URL.
            run: the name of the run.
            options: the options of --rdzv-conf: cacert, cert and key for `etcds`.

        Raises:
            ConfigError: `launch-store`, all that is wrong at once.
        """
        scheme, _, rest = text.partition("://")
        problems = []
        if scheme not in KINDS:
            kinds = ", ".join(f"{kind}://" for kind in KINDS)
            problems.append(f"{scheme or text}:// is not a kind of store; use one of {kinds}")
        login, _, places = rest.rstrip("/").rpartition("@")
        hosts = []
        for place in places.split(","):
            try:
                parts = urlsplit(f"//{place}")
                port = parts.port
                if port is None:
                    port = KINDS.get(scheme, 0)
                hosts.append((parts.hostname or "", port))
            except ValueError:
                problems.append(f"{place} is not a host and port")
                continue
            if not parts.hostname or parts.path:
                problems.append(f"{place or 'nothing'!r} is not a host and port")
        if scheme == "c10d" and (login or len(hosts) > 1):
            problems.append("c10d:// has one host, and neither user nor password")
        user, _, password = login.partition(":")
        password = unquote(password) or str(environment.get("PACELINE_STORE_PASSWORD") or "")
        tls_options = [name for name in _TLS_OPTIONS if name in options]
        tls = None
        if scheme == "etcds":
            tls = {"ca": options.get("cacert", ""), "cert": options.get("cert", ""), "key": options.get("key", "")}
            for name in tls_options:
                if not os.access(options[name], os.R_OK):
                    problems.append(f"{name}={options[name]} cannot be read")
        elif tls_options:
            problems.append(f"{', '.join(tls_options)} (--rdzv-conf) needs TLS: etcds://")
        if problems:
            shown = re.sub(r"://[^@/]*@", "://...@", text)
            raise ConfigError(
                "launch-store",
                "the address of the store cannot be read.",
                why=[f"--rdzv-endpoint {shown}", *problems],
                fix="write `--rdzv-endpoint etcd://HOST:2379`, several hosts joined by commas, or c10d://HOST:29400",
            )
        kind = "c10d" if scheme == "c10d" else "etcd"
        return cls(kind, tuple(hosts), f"paceline/{run}", unquote(user), password if user else "", tls)

    @property
    def place(self) -> Place:
        """The first host of the store. It shows by which interface this host reaches the network."""
        return self.hosts[0]


class Answer(NamedTuple):
    """The answer of the store to one request.

    Attributes:
        key: the number of the request.
        value: the value that the store has; None for none.
        trouble: why the value could not be read; "" where it could.
        is_refused: whether asking again cannot help.
    """

    key: int
    value: str | None
    trouble: str
    is_refused: bool


class StoreLink:
    """The process that speaks to the store for this launcher (`store_client.py`), and the pipes to it.

    Attributes:
        endpoint: the store.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        # The session keeps Ctrl-C in the terminal from the process: it must not end before the launcher.
        command = [sys.executable, "-m", "paceline_hosts.network.store_client"]
        around = environment.snapshot()
        # The path of this package, because the interpreter alone might find another one, or none.
        paths = [str(Path(__file__).resolve().parents[3])]
        if around.get("PYTHONPATH"):
            paths.append(around["PYTHONPATH"])
        env = {**around, "PYTHONPATH": os.pathsep.join(paths)}
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=quiet,
            bufsize=0,
            start_new_session=True,
            env=env,
        )
        assert self._process.stdout is not None, "it is a pipe"
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self._unanswered_since: float | None = None
        self._write({**asdict(self.endpoint), "hosts": [list(host) for host in self.endpoint.hosts]})

    @property
    def is_open(self) -> bool:
        """Whether there is a process. It may have ended, which `receive` notices."""
        return self._process is not None

    def fileno(self) -> int:
        """A file descriptor that becomes readable when there is an answer."""
        assert self._process is not None and self._process.stdout is not None, "it has been started"
        return self._process.stdout.fileno()

    def _write(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None, "it has been started"
        with suppress(OSError):  # if the process has ended, `receive` notices it
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def send(self, request: StoreRequest) -> None:
        """Sends a request. Few requests are open at a time, so the pipe never fills."""
        if self._unanswered_since is None:
            self._unanswered_since = time.monotonic()
        self._write(asdict(request))

    @property
    def is_stuck(self) -> bool:
        """Whether the process has not answered for long: the client of torch waits for ever if the network is cut."""
        if self._unanswered_since is None:
            return False
        return time.monotonic() - self._unanswered_since > _STUCK_S

    def receive(self) -> tuple[list[Answer], bool]:
        """Returns the answers that have arrived, and whether the process still runs."""
        data = b""
        try:
            data = os.read(self.fileno(), 1 << 16)
        except BlockingIOError:
            return [], True
        *lines, self._rest = (self._rest + data).split(b"\n")
        answers = []
        for line in lines:
            message = json.loads(line)
            answers.append(
                Answer(int(message["key"]), message["value"], str(message["trouble"]), bool(message["refused"]))
            )
        if answers:
            self._unanswered_since = None
        is_there = data != b"" and len(self._rest) < _LONGEST_ANSWER
        return answers, is_there

    def first_record(self, signer: RecordSigner) -> Record | None:
        """Reads the record when a launcher starts, so that problems with the store are reported at once.

        Raises:
            LaunchError: `launch-store`, where it cannot be reached, does not let this launcher in, or holds something else;
                `launch-secret`, where the record was written with another secret.
        """
        begun = time.monotonic()
        answer_s = _C10D_TIMEOUT_S if self.endpoint.kind == "c10d" else _CONNECT_TIMEOUT_S
        trouble = f"no answer within {answer_s:g} s"
        for key in range(-1, -1000, -1):  # a `Witness` uses positive numbers
            self.send(StoreRequest(key))
            answers: list[Answer] = []
            is_there = True
            while not answers and is_there and time.monotonic() < begun + answer_s:
                select.select([self.fileno()], [], [], 0.1)
                answers, is_there = self.receive()
            if not is_there:
                raise LaunchError.of([self._problem("its client, a process of this host, has ended")])
            if not answers:
                break
            answer = answers[-1]
            trouble = answer.trouble
            if not trouble:
                return self._read(signer, answer.value)
            if answer.is_refused or time.monotonic() > begun + _CONNECT_TIMEOUT_S:
                break
            time.sleep(_RETRY_S)
        raise LaunchError.of([self._problem(trouble)])

    def _read(self, signer: RecordSigner, value: str | None) -> Record | None:
        if not value:
            return None
        try:
            return signer.verify(value)
        except BadSignature:
            raise LaunchError(
                "launch-secret",
                f"the store {self.endpoint.name} holds a run of this name that has another secret than this launcher.",
                why=f"the value of {self.endpoint.key!r} was not signed with the secret of this run",
                fix="set PACELINE_RUN_SECRET to the same value on every node, or name this run: --rdzv-id ANOTHER",
            ) from None
        except ValueError as error:
            raise LaunchError.of([other_version("another host", "another version", str(error))]) from None

    def _problem(self, trouble: str) -> Problem:
        return Problem(
            "launch-store",
            f"the store {self.endpoint.name} cannot be used.",
            f"--rdzv-endpoint: {trouble}",
            "start it, open its port in the firewall, or correct the address, user or password",
        )

    def restart(self) -> None:
        """Starts the process anew, where it has ended."""
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        self._process = None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.kill()
        process.wait()

    def leave_in_child(self) -> None:
        """In a forked process: closes this end, so that the client still ends with the launcher."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.returncode = 0  # it is not a child of the forked process, so Popen must not wait for it
            self._process = None
