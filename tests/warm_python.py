"""A Python that has imported torch: each command runs in a fork of it, and so without the seconds of those imports.

    python = executable()
    subprocess.run([python, "train.py", "--epochs", "1"], cwd=..., env=..., capture_output=True)
    subprocess.run([python, "-m", "paceline", "launch", "--procs", "2", "train.py"])

Whoever starts such a command sees an ordinary process: its standard streams, working directory, environment, exit code
and signals are those of the command. In truth it is a small client (`warm_client.py`). It hands all of these over a
socket to the server (`_serve`), which forks and becomes the script. No command can see what another one did: the server
itself runs nothing but the imports. `sys.executable` of a command is this Python too.

Start a command cold (`sys.executable`) where a test looks at the process itself: its children, what it imports, or what
becomes of them when it is killed. A SIGKILL to the client kills all processes of the command's group.

A command that starts in namespaces of its own (on a host of `hosts/network.py`) runs in those: its process numbers, network
and mounts are that host's, and switching the host off ends it. Its parent is process 0 there.

What begins neither with a script nor with `-m` (or `python3 -c`) is left to an ordinary interpreter. Linux only: elsewhere
`executable` is the ordinary interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import marshal
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from warm_client import MESSAGE_BYTES, STREAMS

# What most commands import. `torch._dynamo` comes with any optimizer of torch, and the last ones with `paceline launch`.
_USUAL = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "paceline.accelerator",
    "paceline.checkpoint.checkpointer",
    "warm_strategies",
    "paceline.cli.launch",
    "paceline_accelerate.engines",
    "paceline.launch.job",
    "paceline.launch.make_job",
    "paceline_lens.watch.registry",
)
# The tests of a part run without those that it does not depend on.
MODULES = tuple(module for module in _USUAL if find_spec(module.partition(".")[0]) is not None)
_HERE = Path(__file__).resolve()
_NAMESPACES = ("net", "uts", "pid", "mnt")
_SHARED_FOLDER = "WARM_PYTHON_FOLDER"  # of the server that the workers of a run share
_START_S = 120.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class WarmPython:
    """A server in a fresh interpreter, from the beginning of a `with` to its end, or from `start` to `close`.

    Args:
        folder: for its socket; its path must be short (a socket's is at most 107 bytes).
        modules: what it imports.
        python: the interpreter, whose packages commands find.
        environment: of the server itself; that of this process if left out.
        starter: the `executable` of another server of the same interpreter, which has some of the modules already.

    Attributes:
        bin: a folder for the front of `PATH`, with the commands `python`, `python3` and `paceline`.
        executable: the path of that `python`.
    """

    def __init__(
        self,
        folder: Path,
        modules: tuple[str, ...] = MODULES,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        starter: str = "",
    ) -> None:
        self.bin = folder / "bin"
        self.executable = str(self.bin / "python")
        self._socket = folder / "socket"
        self._modules = modules
        self._python = python
        self._environment = environment
        self._starter = starter or python
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start().wait()

    def start(self) -> Self:
        """Starts the server, which imports its modules while others go on."""
        client = f"{self._python} -I -S {_HERE.with_name('warm_client.py')} {self._socket}"
        self.bin.mkdir()
        # A worker, and an agent that is attached, end with their parent, which must therefore be the launcher itself.
        cold = f'"-m paceline.launch.worker"*|*" attached ") exec {self._python} "$@";;'
        warm = f'"-m "*|"-u -m "*|"-u "[!-]*|[!-]*) exec {client} "$@";;'
        self._write("python", f'case "$* " in {cold} {warm} *) exec {self._python} "$@";; esac')
        # What containers begin with. Under the other name `-c` is cold, because `multiprocessing` starts its children so.
        self._write("python3", f'case "$1" in -c) exec {client} "$@";; *) exec {self.executable} "$@";; esac')
        self._write("paceline", f'exec {client} -m paceline "$@"')
        command = [self._starter, str(_HERE), str(self._socket), self.executable, *self._modules]
        # A session of its own: Ctrl-C is for those who started the commands, and they pass it on.
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, env=self._environment, start_new_session=True)
        return self

    def wait(self) -> Self:
        """Waits until the server, which any process may have started, takes commands.

        Raises:
            RuntimeError: the server has ended, or takes none after two minutes.
        """
        until = time.monotonic() + _START_S
        while not self._socket.exists():
            if time.monotonic() > until or (self._server is not None and self._server.poll() is not None):
                raise RuntimeError(
                    "the server of warm_python.py takes no commands; if it has ended, its error stands above"
                )
            time.sleep(0.02)
        return self

    def _write(self, name: str, line: str) -> None:
        script = self.bin / name
        script.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        script.chmod(0o755)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server, and the commands that still run."""
        assert self._server is not None
        # The end of its standard input is what ends it, so that it also ends where this process is killed.
        self._server.communicate()


@cache
def executable(*more: str) -> str:
    """The `python` of a server for all tests of this process: started at the first call, and ended with the process.

    The workers of pytest-xdist share that of `share_between_workers` instead.

    Args:
        more: modules that it imports beside the usual ones. Each set of them has a server of its own in each worker.
    """
    if not sys.platform.startswith("linux"):
        return sys.executable
    shared = os.environ.get(_SHARED_FOLDER)
    starter = WarmPython(Path(shared)).wait().executable if shared is not None else ""
    if starter and not more:
        return starter
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    python = WarmPython(folder, (*MODULES, *more), starter=starter)
    atexit.register(python.close)
    return python.start().wait().executable


def python3() -> str:
    """As `executable`, for `-c PROGRAM`: under the other name that is cold."""
    return str(Path(executable()).with_name("python3"))


def share_between_workers() -> ExitStack:
    """Called by the process that forks the workers of a run: all of them will use one server.

    Returns what ends the server, and the commands that still run. They also end where this process is killed.
    """
    exits = ExitStack()
    if sys.platform.startswith("linux"):
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="warm-"))
        exits.callback(WarmPython(Path(folder)).start().close)
        os.environ[_SHARED_FOLDER] = folder
        exits.callback(os.environ.pop, _SHARED_FOLDER)
    return exits


# -- the server ----------------------------------------------------------------------------------------------------


def _serve(address: str, executable: str, modules: list[str]) -> list[str]:
    """Forks for each command until its standard input ends. It returns in a fork, with the words of that command."""
    for module in modules:
        importlib.import_module(module)
    sys.executable = executable
    # What torch's libraries of operators free at the end of a process ends with it anyhow (60 ms in each fork).
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # A command in other namespaces is a grandchild, whose parent ends at once: the server becomes its parent.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()  # no collection in a fork touches, and so copies, what all of them share
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{address}-new")
    listener.listen()
    os.rename(f"{address}-new", address)  # from now on it takes commands
    # By the file descriptor that becomes readable at the end of the command: its pid, and who waits for it.
    commands: dict[int, tuple[int, socket.socket]] = {}
    while True:
        connections = {connection: end for end, (_, connection) in commands.items()}
        ready, _, _ = select.select([0, listener, *commands, *connections], [], [])
        if 0 in ready:
            for pid, _ in commands.values():
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, len(STREAMS))
            pid = _fork_beside(connection)
            if pid == 0:
                # The client knows the process by its number in the namespace of both.
                connection.send(str(os.getpid()).encode())
                for other in (listener, connection, *connections):
                    other.close()
                for end in commands:
                    os.close(end)
                request = marshal.loads(message)
                _settle(request, streams)
                words = request["words"]
                if words[0] == "-u":
                    del words[0]
                    sys.stdout.reconfigure(write_through=True)
                return words
            for stream in streams:
                os.close(stream)
            if pid is None:
                connection.close()
            else:
                commands[os.pidfd_open(pid)] = (pid, connection)
        for end in set(ready) & commands.keys():
            pid, connection = commands.pop(end)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # whoever waited has just been killed
                connection.send(str(code).encode())
            connection.close()
            os.close(end)
        for connection in ready:
            # Nobody sends twice: whoever waited has been killed, and the command goes with it.
            if connections.get(connection) in commands:
                os.killpg(commands[connections[connection]][0], signal.SIGKILL)


def _fork_beside(connection: socket.socket) -> int | None:
    """Forks into the namespaces of the client.

    Returns the number of the child, as this process sees it; 0 in the child; None if the client's host has just been
    switched off.
    """
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        others = [kind for kind in _NAMESPACES if _namespace(client, kind) != _namespace("self", kind)]
    except FileNotFoundError:
        return None
    if not others:
        return os.fork()
    read, write = os.pipe()
    between = os.fork()
    if not between:
        os.close(read)
        return _fork_into(client, others, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        number = pipe.read()
    os.waitpid(between, 0)
    return int(number) if number else None


def _namespace(process: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{process}/ns/{kind}")


def _fork_into(client: int, kinds: list[str], write: int) -> int:
    """Enters namespaces of the client and forks: a process's own namespace of processes is that of its children alone.

    Returns 0 in the child. This process writes the child's number into the pipe `write`, and ends.
    """
    try:
        # All are opened first: once one is entered, `/proc` may be another.
        entrances = [os.open(f"/proc/{client}/ns/{kind}", os.O_RDONLY) for kind in kinds]
        root = os.open(f"/proc/{client}/root", os.O_RDONLY)
        for entrance in entrances:
            if ctypes.CDLL(None, use_errno=True).setns(entrance, 0):
                raise OSError(ctypes.get_errno(), f"setns of {kinds}")
            os.close(entrance)
        os.fchdir(root)
        os.chroot(".")
        os.close(root)
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    return 0


def _settle(request: dict[str, Any], streams: list[int]) -> None:
    """In a fork: its session, streams, folder, environment, paths and what a library read from the environment."""
    os.setsid()  # it can be ended with all that it starts
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "torch" in sys.modules:
        from paceline.torch_internals.forks import renew_threads

        threads = os.environ.get("OMP_NUM_THREADS", "")
        renew_threads(int(threads) if threads.isdigit() else None)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in a fresh process; Python's own `random` does so by itself


def _become(words: list[str]) -> NoReturn:
    """Runs a script or module as `python WORDS` would, and ends this process.

    It ends as Python does, but for taking all modules apart at last: of those that were imported before the fork that
    would copy every page of memory (0.35 s for torch's).
    """
    from paceline.launch.job import Target
    from paceline.launch.worker.worker import become

    kind, name, *arguments = words if words[0] in ("-m", "-c") else ["script", *words]
    code: object = None
    try:
        if kind == "-c":
            sys.argv = ["-c", *arguments]
            sys.path[0] = ""
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
        else:
            become(Target("module" if kind == "-m" else kind, name, tuple(arguments)))
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # waits for threads, as at every end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _become(_serve(sys.argv[1], sys.argv[2], sys.argv[3:]))
