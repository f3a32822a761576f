"""One host's part of a run that was started from another one: what `ssh`, `pdsh`, `mpirun` and `srun` start there.

    starter              --orders-->  survey: what is missing here?   (imports torch meanwhile)
                         <--ready---
                         --listen-->  node 0: a port    --reach-->  the others: which of its addresses answers?
                         ---go----->  fork: the launcher of this node, as `paceline launch` would be
                         <--lines---  its output, marked with the host's name
                         --signal-->  passed on
    end of input, or silence          the starter is gone: all of this host is asked to end, then made to

With `pdsh`, which passes no input on, the orders are kept in a file that only this user can read until the host is
started. mpirun and srun bring them in a variable, and end their processes themselves.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import PacelineError
from paceline.base.temporary import temporary_folder
from paceline.base.version import VERSION
from paceline.launch import host
from paceline.launch.launcher import LAUNCHERS, Target
from paceline.launch.orders import VARIABLE, Orders, python_version
from paceline.launch.signals import Signals, kill_with_parent

MARK = "\x01paceline "  # before a line that is an answer, and neither a shell's greeting nor a script's output
_SILENCE_S = 60.0  # the starter gives a sign of life every few seconds
_CONNECT_S = 3.0
_LATE_S = 15.0  # how much longer than its grace period a launcher may take
Place = tuple[str, int]


class Talk:
    """Questions on standard input, answers on standard output."""

    def __init__(self) -> None:
        self._rest = b""

    def ask(self) -> dict[str, Any]:
        """The next message; ends this process where there is none."""
        while b"\n" not in self._rest:
            data = os.read(0, 1 << 16)
            if not data:
                sys.exit(1)
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line)) if line else self.ask()

    def hear(self) -> list[dict[str, Any]] | None:
        """What has come, without waiting for a whole message; None at the end of the input."""
        data = os.read(0, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    @staticmethod
    def answer(**message: Any) -> None:
        """Answers."""
        os.write(1, (MARK + json.dumps(message) + "\n").encode())


def survey(message: dict[str, Any], node: int) -> list[str]:
    """Goes to the working directory, takes over the environment, and says what is missing here for the orders.

    Args:
        message: the orders, perhaps of another version.
        node: which host this is.
    """
    mine, theirs = VERSION, message["version"]
    if mine != theirs:
        return [f"paceline is {mine} there, and {theirs} here"]
    if python_version() != message["python"]:
        return [f"Python is {python_version()} there, and {message['python']} here"]
    orders = Orders.of(message)
    try:
        os.chdir(orders.cwd)
    except OSError as error:
        return [f"the working directory {orders.cwd} is not there ({(error.strerror or '').lower()})"]
    environment.export(dict(orders.env))
    launch, slots = orders.told.launch, orders.hosts[node].ids
    kind = "program" if launch.no_python else "module" if launch.module else "script"
    wrong = host.unusable(Target(kind, orders.script))
    found = [f"{wrong.what.rstrip('.')} ({wrong.why})"] if wrong is not None else []
    if orders.told.run.cpu:
        return found
    devices = host.accelerators()
    if devices.count and max(slots) >= devices.count:
        found.append(f"slots {','.join(map(str, slots))} are asked for, and there are {devices.count} devices")
    return found


def addresses(towards: list[str]) -> list[str]:
    """Under which addresses this host may be reached: as the starter reached it, and as it goes to the others."""
    found = environment.snapshot().get("SSH_CONNECTION", "").split()[2:3]
    for other in towards:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in other else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((other, 9))  # sends nothing: the system only chooses the way
                found.append(str(probe.getsockname()[0]))
    with suppress(OSError, UnicodeError):  # a host's name may be longer than a part of a DNS name
        found += [str(row[4][0]) for row in socket.getaddrinfo(host.name(), None, type=socket.SOCK_STREAM)]
    return [each for each in dict.fromkeys(found) if not each.startswith("127.") and each != "::1"]


def reachable(candidates: list[str], port: int) -> list[str]:
    """Which of node 0's addresses answer."""
    found = []
    for address in candidates:
        with suppress(OSError, UnicodeError), socket.create_connection((address, port), _CONNECT_S):
            found.append(address)
    return found


def converse() -> int:
    """Answers the starter, then runs what it ordered."""
    talk = Talk()
    first = talk.ask()
    message, node = first["orders"], first["node"]
    try:
        problems = survey(message, node)
    except PacelineError as error:
        problems = [str(error)]
    talk.answer(problems=problems, address=next(iter(addresses([])), ""))
    listener: socket.socket | None = None
    while True:
        said = talk.ask()
        if "listen" in said:
            problem = ""
            try:
                listener = host.hold_port(said["listen"])
                listener.listen(128)
            except OSError as error:
                problem = f"port {said['listen']} cannot be used there ({(error.strerror or '').lower()})"
            port = listener.getsockname()[1] if listener is not None else 0
            talk.answer(port=port, addresses=addresses(said["towards"]), problem=problem)
        elif "reach" in said:
            talk.answer(reached=reachable(*said["reach"]))
        else:
            break
    if listener is not None:
        listener.close()
    if "keep" in said:
        keep(said["keep"], {"orders": message, "node": node, "place": said["place"]})
        talk.answer(kept=True)
        return 0
    return run(Orders.of(message), node, said["go"], talk)


def keep(name: str, kept: dict[str, Any]) -> None:
    """Keeps orders in a file of this user alone."""
    path = Path(temporary_folder(), name)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(kept, file)


def run_kept(name: str) -> int:
    """Runs orders that were kept."""
    path = Path(temporary_folder(), name)
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return 1  # asked a second time: the first one has taken them
    path.unlink()
    survey(kept["orders"], kept["node"])
    place = kept["place"]
    return run(Orders.of(kept["orders"]), kept["node"], place and (place[0], place[1]), Talk())


def survey_by_variable() -> int:
    """Says what is missing here, where a batch system has started this for a first look."""
    carried = json.loads(environment.snapshot()[VARIABLE])
    message, node = carried["orders"], _node(carried)
    Talk.answer(node=node, problems=survey(message, node), addresses=addresses([]))
    return 0


def run_by_variable() -> int:
    """Runs orders where a batch system has started this."""
    kill_with_parent(os.getppid())
    carried = json.loads(environment.snapshot()[VARIABLE])
    environment.export({VARIABLE: None})
    message, place, node = carried["orders"], carried["place"], _node(carried)
    survey(message, node)
    return run(Orders.of(message), node, place and (place[0], place[1]), None)


def _node(carried: dict[str, Any]) -> int:
    """Which of the hosts this is: as the launcher says, else as SLURM names it, else by the number that mpirun or srun gave."""
    if carried["node"] is not None:
        return int(carried["node"])
    env = environment.snapshot()
    names = [each["host"] for each in carried["orders"]["hosts"]]
    own = env.get("SLURMD_NODENAME", "")
    number = env.get("OMPI_COMM_WORLD_RANK") or env.get("SLURM_PROCID") or "0"
    return names.index(own) if own in names else int(number)


def run(orders: Orders, node: int, place: Place | None, talk: Talk | None) -> int:
    """Runs this host's part to its end, in a process of its own that is watched by this one; returns its exit code.

    A forked process, be it the launcher or one of its workers, comes back from here too, at its own end.
    """
    out, err = os.pipe(), os.pipe()
    watch = Watch(out[0], err[0], f"{orders.hosts[node].host}: ".encode(), talk, orders.told.launch.grace_s)
    mine = os.getpid()
    child = os.fork()
    if child == 0:
        kill_with_parent(mine)
        os.setpgid(0, 0)  # mpirun and srun signal whole groups: it is to get each signal once, through this one
        watch.leave()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for number, (read, write) in ((1, out), (2, err)):
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        return _launch(orders, node, place)
    os.close(out[1])
    os.close(err[1])
    return watch.until_end_of(child)


def _launch(orders: Orders, node: int, place: Place | None) -> int:
    """What `paceline launch` does on this host."""
    from paceline.launch.job import job_of
    from paceline.launch.report import describe

    try:
        told = orders.on(node, place)
        job, notices = job_of(told, orders.script, orders.args, environment.snapshot())
        for notice in notices if node == 0 else ():  # hosts are alike: once is enough
            print(f"paceline: {notice}", file=sys.stderr, flush=True)
        everything = dict.fromkeys(range(job.procs), 3)
        target = replace(job.target, local_rank=orders.local_rank)
        job = replace(job, tee=job.tee or everything, target=target, secret=orders.secret)
        local = LAUNCHERS.get("local")
        outcome = local.submit(local.render(job)).wait()
    except PacelineError as error:
        print(f"paceline.{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    if outcome.in_worker:
        return int(outcome.exit_code)
    if outcome.elsewhere:  # it is told, and counted, where it happened
        print(f"paceline: stopped, as {outcome.elsewhere}", file=sys.stderr, flush=True)
        return 0
    if outcome.failure is not None:
        print(describe(outcome, job), file=sys.stderr, flush=True)
    return int(outcome.exit_code)


class Watch:
    """Watches a launcher: passes its output on, and what it is told by the starter.

    Args:
        out, err: what it reads the launcher's output from.
        mark: stands before each line.
        talk: the connection to the starter; None where whoever started this process looks after it by signals.
        grace_s: seconds that the launcher gives its processes.
    """

    def __init__(self, out: int, err: int, mark: bytes, talk: Talk | None, grace_s: float) -> None:
        self._pipes = {out: 1, err: 2}
        self._parts = {out: b"", err: b""}
        self._mark, self._talk, self._grace_s = mark, talk, grace_s
        self._child = 0
        self._signals = Signals(lambda number: self._send(number))
        self._signals.enter()
        self._heard = time.monotonic()
        self._kill_at = float("inf")

    def leave(self) -> None:
        """In the forked process: drops what is this one's."""
        self._signals.leave()

    def until_end_of(self, child: int) -> int:
        """Waits for its end; returns its exit code, as a shell counts."""
        self._child = child
        passed = 0
        status: int | None = None
        beats = False
        while status is None or self._pipes:
            inputs = [*self._pipes, self._signals.read, *([0] if self._talk else [])]
            for each in select.select(inputs, [], [], 0.5)[0]:
                if each in self._pipes:
                    self._copy(each)
                elif each == 0:
                    beats = self._listen() or beats
                else:
                    os.read(each, 64)
            for number in self._signals.ending[passed:]:
                passed += 1
                self._send(number)
            if self._talk is not None and beats and time.monotonic() - self._heard > _SILENCE_S:
                self._lose(f"nothing was heard from where the run was started for {_SILENCE_S:g} s")
            if status is None:
                pid, found = os.waitpid(child, os.WNOHANG)
                status = found if pid else None
                if status is None and time.monotonic() > self._kill_at:
                    self._send(signal.SIGKILL)
        self._signals.leave()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _listen(self) -> bool:
        """Does what the starter says; whether it gives signs of life."""
        assert self._talk is not None, "somebody is listened to"
        said = self._talk.hear()
        self._heard = time.monotonic()
        if said is None:
            self._lose("the connection to where the run was started has ended")
            return False
        for message in said:
            self._send(message["signal"])
        return True

    def _lose(self, why: str) -> None:
        """Nobody is left who would hear more: all here is asked to end, and made to."""
        self._talk = None
        self._write(2, self._mark + f"paceline: {why}: ending all on this host\n".encode())
        self._send(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_s + _LATE_S

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _copy(self, pipe: int) -> None:
        """Passes whole lines on; at the end what is left."""
        data = os.read(pipe, 1 << 16)
        lines = (self._parts[pipe] + data).splitlines(keepends=True)
        self._parts[pipe] = lines.pop() if data and lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            lines[-1] += b"\n"
        self._write(self._pipes[pipe], b"".join(self._mark + line for line in lines))
        if not data:
            os.close(pipe)
            del self._pipes[pipe]

    @staticmethod
    def _write(number: int, data: bytes) -> None:
        with suppress(BrokenPipeError):  # nobody is there to read, and the run may still have to save
            while data:
                data = data[os.write(number, data) :]


def main(words: list[str]) -> int:
    """Runs what the words say: nothing for a conversation, else how the orders come."""
    if words[:1] == ["kept"]:
        return run_kept(words[1])
    if words == ["survey"]:
        return survey_by_variable()
    if words == ["run"]:
        return run_by_variable()
    return converse()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
