"""Commands of `warm_python.py` are ordinary processes to whoever starts them, and do not see each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes_pods import lacking
from warm_python import WarmPython

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="forks behind file descriptors of processes"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> WarmPython:
    """A server that imports the least that it can."""
    with WarmPython(tmp_path_factory.mktemp("warm"), modules=("numpy",)) as warm:
        yield warm


def run(
    python: WarmPython, script: str, folder: Path, *words: str, **options: object
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    command = [python.executable, "script.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, **options)  # type: ignore[call-overload]


def test_a_command_has_its_own_words_streams_folder_and_variables(python: WarmPython, tmp_path: Path) -> None:
    script = "import os, sys; print(sys.argv, sys.stdin.read(), os.getcwd(), os.environ.get('MINE'), __name__)"
    done = run(python, script, tmp_path, "1", "two words", input="typed", env={**os.environ, "MINE": "yes"})
    assert done.stdout == f"['script.py', '1', 'two words'] typed {tmp_path} yes __main__\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_exit_codes_and_tracebacks_are_those_of_python(python: WarmPython, tmp_path: Path) -> None:
    assert run(python, "raise SystemExit(7)", tmp_path).returncode == 7
    told = run(python, "import sys; sys.exit('no data')", tmp_path)
    assert (told.returncode, told.stderr) == (1, "no data\n")
    failed = run(python, "1 / 0", tmp_path)
    assert failed.returncode == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_what_is_to_happen_at_the_end_happens(python: WarmPython, tmp_path: Path) -> None:
    script = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""
    assert run(python, script, tmp_path).stdout == "thread\nat exit\n"


def test_commands_do_not_see_each_other(python: WarmPython, tmp_path: Path) -> None:
    script = """
import numpy, os, random, sys
print(os.environ.get("LEFT"), hasattr(numpy, "left"), random.random(), numpy.random.rand())
os.environ["LEFT"] = numpy.left = "behind"
"""
    first, second = (run(python, script, tmp_path).stdout.split() for _ in range(2))
    assert first[:2] == second[:2] == ["None", "False"]
    assert first[2] != second[2] and first[3] != second[3]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_a_command_ends_it(signum: int, python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; print('runs', flush=True); time.sleep(30)")
    with subprocess.Popen([python.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "runs\n"
        command.send_signal(signum)
        assert command.wait(10) == -signum
        assert command.stdout.read() == ""  # its own end of the pipe is closed too: the fork has ended


def test_other_words_are_for_an_ordinary_interpreter(python: WarmPython) -> None:
    command = [python.executable, "-c", "import sys; print(sys.executable)"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{sys.executable}\n"


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_a_command_runs_in_the_namespaces_of_its_caller(python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, socket, sys; print(socket.gethostname(), os.getppid()); sys.exit(7)"
    )
    boot = f"hostname elsewhere; {python.executable} script.py; echo $?; exec {python.bin}/python3 -c 'print(1 + 1)'"
    words = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", boot]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("elsewhere 0\n7\n2\n", "")
