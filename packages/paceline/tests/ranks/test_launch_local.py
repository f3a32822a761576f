"""`paceline launch` on one host, from outside: scripts, failures, signals, restarts, and nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_python import executable, python3

LAUNCH = ("-m", "paceline.cli.main", "launch")
ALL_REDUCE = """
    import sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("total", int(total), sys.argv[1:], flush=True)
    dist.destroy_process_group()
"""
PIDS = """
    import os, pathlib
    pathlib.Path(os.environ["RANK"] + ".pid").write_text(str(os.getpid()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Writes a script of the test's."""

    def write(*parts: str, name: str = "train.py") -> Path:
        from textwrap import dedent

        path = tmp_path / name
        path.write_text("".join(dedent(part) for part in parts))
        return path

    return write


def clean() -> dict[str, str]:
    """The environment without what would reach into a launch; unbuffered output would mix the ranks' lines."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def launch(*words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [executable(), *LAUNCH, *(str(word) for word in words)]
    environ = {**clean(), **env}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, errors="backslashreplace", timeout=60
    )


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launcher that the test will end: by a signal, which its client passes on, or by SIGKILL.

    A SIGKILL is for the launcher alone, and would end all that it has started if it reached its client: then a fresh process.
    It looks for no accelerators, which takes an import of torch.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*words: object, killed: bool = False, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable if killed else executable(), *LAUNCH, *(str(word) for word in words)]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env={**clean(), "PACELINE_CPU": "1", **env}, stdout=pipe, stderr=pipe, text=True
            )
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def await_files(folder: Path, *names: str, timeout_s: float = 60) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all((folder / name).is_file() and (folder / name).read_text() for name in names):
            return [int((folder / name).read_text()) for name in names]
        time.sleep(0.02)
    raise AssertionError(f"{names} did not appear: {sorted(folder.iterdir())}")


def gone(pids: list[int], timeout_s: float) -> bool:
    """Whether all have ended; a zombie that nobody has waited for has."""
    deadline = time.monotonic() + timeout_s
    while any(runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_processes_and_the_arguments_of_the_script(script: Callable[..., Path], tmp_path: Path) -> None:
    done = launch("--procs", 2, script(ALL_REDUCE), "--lr", "3", "--procs", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 2 ['--lr', '3', '--procs', '9']") == 2


def test_processes_that_do_not_work_together_are_told(script: Callable[..., Path], tmp_path: Path) -> None:
    alone = "import torch; print(torch.ones(2).sum().item(), flush=True)"
    ended = launch("--procs", 2, script(alone), cwd=tmp_path)
    assert ended.returncode == 0 and ended.stdout == "2.0\n" * 2
    assert ended.stderr.count("did not work together") == 1
    moved = f"import os\nos.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\n{alone}"
    script(moved)
    ended = launch("--procs", 2, "train.py", cwd=tmp_path)
    assert ended.returncode == 0 and ended.stderr.count("did not work together") == 1
    for divided in (ALL_REDUCE, f"import os, torch\nos.environ['RANK']\n{alone}"):
        ended = launch("--procs", 2, script(divided), cwd=tmp_path)
        assert ended.returncode == 0 and "did not work together" not in ended.stderr


@pytest.mark.parametrize("start", ["paceline", "torchrun", "torch.distributed.launch", "variables"])
def test_world_is_found_under_every_launcher(start: str, script: Callable[..., Path], tmp_path: Path) -> None:
    path = script(
        """
        import os
        from paceline.world.world import World
        w = World.detect()
        # One write: torchrun starts Python unbuffered, where a print is several, and those of two processes mix.
        os.write(1, f"{w.rank} {w.size} {w.local_rank} {w.local_size} {w.nodes} {w.source}\\n".encode())
        """
    )
    if start == "paceline":
        out = launch("-n", 2, path, cwd=tmp_path).stdout
    elif start == "variables":
        out = ""
        for rank in "01":
            env = {**clean(), "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
            out += subprocess.run([sys.executable, path], env=env, capture_output=True, text=True).stdout
    else:
        module = "torch.distributed.run" if start == "torchrun" else "torch.distributed.launch"
        more = ["--use_env"] if start != "torchrun" else []
        command = [executable(), "-m", module, "--nproc-per-node", "2", "--master-port", "0"]
        command += [*more, str(path)]
        out = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=60).stdout
    assert sorted(out.splitlines()) == ["0 2 0 2 1 torchrun", "1 2 1 2 1 torchrun"]


EXEC = """
from paceline.launch.job import Job, Target
from paceline.launch.launchers.local import LAUNCHER
import sys
print(LAUNCHER.submit(LAUNCHER.render(Job(Target("script", sys.argv[1]), 2, start="exec"))).wait())
"""


def begun(start: str, name: str, folder: Path, cold: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on 2 processes, forked or (as where there are accelerators) fresh.

    Those that are forked by a `cold` launcher end as Python always does.
    """
    python = sys.executable if cold else python3()
    words = [*LAUNCH, "-n", "2"] if start == "fork" else ["-c", EXEC]
    command = [python, *words, name]
    return subprocess.run(command, cwd=folder, env={**clean(), **env}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_the_script_is_main_as_under_python(start: str, script: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 41\n")
    path = script(
        """
        import atexit, os, pickle, sys
        import beside
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return index * index

        if __name__ == "__main__":
            assert os.path.isabs(__file__) and os.path.basename(__file__) == sys.argv[0] == "train.py"
            assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
            assert type(pickle.loads(pickle.dumps(Squares()))) is Squares
            assert __spec__ is None and sys.modules["__main__"].Squares is Squares
            rows = [int(x) for x in DataLoader(Squares(), batch_size=None, num_workers=1)]
            spawned = [int(x) for x in DataLoader(Squares(), batch_size=None, num_workers=1,
                                                  multiprocessing_context="spawn")]
            left_open = open(f"{os.environ['RANK']}.txt", "w")
            left_open.write("kept")  # plain Python writes this out at its end
            atexit.register(print, "exit handler", flush=True)
            print(rows == spawned == [0, 1, 4, 9], flush=True)
        """
    )
    done = begun(start, "train.py", tmp_path, cold=True)
    assert path.is_file()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == done.stdout.count("exit handler") == 2
    assert (tmp_path / "0.txt").read_text() == (tmp_path / "1.txt").read_text() == "kept"


def test_module_and_program(script: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script("import sys; print(__name__, __package__, sys.argv[1:], flush=True)", name="package/__main__.py")
    done = launch("-n", 1, "-m", "package", "--x", cwd=tmp_path)
    assert done.stdout == "__main__ package ['--x']\n", done.stderr
    done = launch("-n", 2, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE", cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"], done.stderr


TALKATIVE = """
    import argparse, os, pathlib, sys, time, warnings

    warnings.warn("on every rank")
    if os.environ["RANK"] == "1":
        warnings.warn("on rank 1 alone")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("three times")
    pathlib.Path("rank" + os.environ["RANK"]).touch()
    while len(list(pathlib.Path().glob("rank*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # else the first rank that leaves ends the others before they have warned
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr")
    parser.parse_args(sys.argv[1:] or ["--lr", "1", "--zero", "2", "--more"])
    print("the script goes on")
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_what_all_ranks_say_alike_is_shown_once(start: str, script: Callable[..., Path], tmp_path: Path) -> None:
    script(TALKATIVE)
    done = begun(start, "train.py", tmp_path)
    warned = [line.partition("UserWarning: ")[2] for line in done.stderr.splitlines() if "UserWarning" in line]
    assert sorted(warned) == ["on every rank", "on rank 1 alone", *["three times"] * 3]
    assert done.stderr.count("train.py: error: unrecognized arguments: --zero 2 --more") == 1
    assert done.stderr.count("usage: train.py") == 1
    assert "the script goes on" not in done.stdout


def test_a_flag_of_the_launcher_behind_the_script(script: Callable[..., Path], tmp_path: Path) -> None:
    done = launch(script(TALKATIVE), "--lr", "2", "--procs", "2", "--more", cwd=tmp_path)
    assert done.returncode == 2
    assert f"write it before the script: `paceline launch --procs 2 {tmp_path}/train.py`" in done.stderr
    assert f"as in `paceline launch --procs 2 {tmp_path}/train.py --lr 2 --more`" in done.stderr
    assert "\n  unrecognized arguments: --procs 2 --more\n" in done.stderr
    line = next(number for number, text in enumerate(TALKATIVE.splitlines()) if "parse_args(" in text)
    assert f"SystemExit: 2 ({tmp_path}/train.py:{line + 1})" in done.stderr  # the script's line, not argparse's


def test_the_help_of_a_script_is_shown_once(script: Callable[..., Path], tmp_path: Path) -> None:
    words = ("-n", 3, "--nodes", 2, "--main-address", "nowhere.invalid", "--tee", "2:3", "--ranks", "1")
    done = launch(*words, script(TALKATIVE), "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("usage: train.py") == 1, done.stderr


def test_the_output_of_some_ranks(tmp_path: Path) -> None:
    program = ("--cpu", "--no-python", "sh", "-c", "echo $RANK; echo err $RANK >&2")
    one = launch("-n", 3, "--ranks", "1", *program, cwd=tmp_path)
    assert (one.stdout, one.stderr) == ("1\n", "err 1\n")
    some = launch("-n", 3, "--ranks", "0,2-2", *program, cwd=tmp_path)
    assert sorted(some.stdout.splitlines()) == ["[rank0]: 0", "[rank2]: 2"]
    logged = launch("-n", 3, "--ranks", "0", "--log-dir", "logs", *program, cwd=tmp_path)
    assert logged.stdout == "[rank0]: 0\n"
    files = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert files == {
        f"rank{n}.{kind}": f"{said}{n}\n" for n in range(3) for kind, said in (("out", ""), ("err", "err "))
    }


def test_random_numbers_differ_between_ranks_as_between_fresh_processes(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    path = script("import numpy, random; print(random.random(), numpy.random.rand(), flush=True)")
    first, second = launch("-n", 2, path, cwd=tmp_path).stdout.splitlines()
    assert first.split()[0] != second.split()[0]
    assert first.split()[1] != second.split()[1]


def test_forked_processes_compute_with_the_threads_that_were_asked_for(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    path = script("import torch; print(torch.get_num_threads(), flush=True)")
    for threads in (1, 2):
        done = launch("-n", 2, "--threads", threads, path, cwd=tmp_path, OMP_NUM_THREADS="")
        assert done.stdout == f"{threads}\n" * 2, done.stderr


def test_the_first_failing_rank_is_reported_once(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))
        """
    )
    done = launch("-n", 2, path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):"), done.stderr
    assert done.stderr.count("Traceback") == 1
    trace, _, report = done.stderr.partition("paceline.LaunchError: ")
    assert trace.rstrip().endswith("ValueError: the cause")
    assert "worker.py" not in trace
    assert report.startswith("rank 1 failed with exit code 1.  [rank-failed]")


@pytest.mark.parametrize(
    ("act", "code", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
        ("os.abort()", 134, "rank 1 was ended by SIGABRT"),
        # A crash leaves Python's stacks, once the script has ended too, and says how to learn more.
        ("__import__('ctypes').string_at(0)", 139, 'in string_at\n  File "{script}", line 3 in <module>'),
        ("__import__('atexit').register(__import__('ctypes').string_at, 0); sys.exit()", 139, "in string_at\n"),
        ("sys.exit(7)", 7, "rank 1 failed with exit code 7"),
        ("sys.exit('in words')", 1, "in words"),
        ("os._exit(9)", 9, "rank 1 failed with exit code 9"),
        ("1 +", 1, "SyntaxError"),
    ],
)
def test_every_way_to_fail(act: str, code: int, told: str, script: Callable[..., Path], tmp_path: Path) -> None:
    # The other rank sleeps for longer than `launch` waits, so the run ends only if that rank is ended.
    path = script(f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {act}\ntime.sleep(600)\n")
    done = launch("-n", 2, path, cwd=tmp_path)
    assert (done.returncode, told.format(script=path) in done.stderr) == (code, True), done.stderr
    assert done.stderr.count("Fatal Python error: ") == (code in (134, 139))


def test_a_failed_rank_that_cannot_end_is_ended(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nraise KeyError(1)\n"
    )
    done = launch("-n", 1, path, cwd=tmp_path)
    assert done.returncode == 1
    assert "KeyError: 1" in done.stderr


def test_restarts_get_a_fresh_store(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script(
        """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt < 2 and dist.get_rank() == attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
        print("finished in attempt", attempt, flush=True)
        """
    )
    done = launch("-n", 2, "--max-restarts", 2, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished in attempt 2\n" * 2
    assert "(restart 1 of 2)" in done.stderr
    assert "(restart 2 of 2)" in done.stderr
    path = script(
        """
        class TakenApart:
            def __del__(self):
                print("taken apart", flush=True)
        left = TakenApart()
        raise SystemExit(3)
        """
    )
    done = launch("-n", 2, "--max-restarts", 1, path, cwd=tmp_path)
    # All that start again wait for those that failed, so these do not finalize the interpreter.
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("[rank-failed]") == 2  # one for each attempt


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_within_seconds(
    signum: int, code: int, script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = script(PIDS, "import time; time.sleep(60)")
    launcher = begin("-n", 2, path)
    pids = await_files(tmp_path, "0.pid", "1.pid")
    launcher.send_signal(signum)
    assert launcher.wait(10) == code
    assert gone(pids, 0)
    assert "Traceback" not in launcher.communicate()[1]


def test_sigterm_lets_a_script_save(
    script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = script(
        """
        import pathlib, os, signal, sys, time
        def save(*_):
            time.sleep(1)
            pathlib.Path("saved").write_text("1")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        """,
        PIDS,
        "time.sleep(60)",
    )
    launcher = begin("-n", 1, path)
    await_files(tmp_path, "0.pid")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(10) == 143
    assert (tmp_path / "saved").is_file()


def test_sigusr1_is_passed_on(
    script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = script(
        "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))", PIDS, "time.sleep(60)"
    )
    launcher = begin("-n", 2, path)
    await_files(tmp_path, "0.pid", "1.pid")
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(10) == 0


FAMILY = """
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"])
    pathlib.Path(os.environ["RANK"] + ".child").write_text(str(child.pid))
"""


@pytest.mark.parametrize("end", ["kill the launcher", "interrupt", "a rank fails", "the script ends"])
def test_nobody_is_left_behind(
    end: str, script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    last = {"a rank fails": "raise SystemExit(int(os.environ['RANK']))", "the script ends": "child.returncode = 0"}
    path = script(PIDS, FAMILY, "import time, os\n", last.get(end, "time.sleep(60)"))
    (tmp_path / "tmp").mkdir()
    killed = end == "kill the launcher"
    launcher = begin("-n", 2, path, killed=killed, TMPDIR=str(tmp_path / "tmp"))
    pids = await_files(tmp_path, "0.pid", "1.pid", "0.child", "1.child")
    if end == "kill the launcher":
        launcher.kill()
    elif end == "interrupt":
        launcher.send_signal(signal.SIGINT)
    launcher.wait(15)
    assert gone(pids, 6), [pid for pid in pids if runs(pid)]
    deadline = time.monotonic() + 5
    while list((tmp_path / "tmp").glob("paceline-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list((tmp_path / "tmp").glob("paceline-*"))


def test_output_goes_to_files_and_marked_to_the_terminal(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script("import sys; print('out'); print('err', file=sys.stderr)")
    done = launch("-n", 2, "--log-dir", "logs", path, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[rank0]: out", "[rank1]: out"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank0.err", "rank0.out", "rank1.err", "rank1.out"]
    assert (tmp_path / "logs" / "rank1.err").read_text() == "err\n"
    done = launch("-n", 2, "--log-dir", "quiet", "--tee", "0:1", path, cwd=tmp_path)
    assert done.stdout == "[rank0]: out\n"
    assert (tmp_path / "quiet" / "rank1.out").read_text() == "out\n"
    path = script(r"import sys; sys.stdout.buffer.write(b'\xff \xc3\xa9\n')")  # no UTF-8, and letters that ASCII lacks
    done = launch("-n", 2, "--tee", "3", path, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert sorted(done.stdout.splitlines()) == ["[rank0]: \\xff é", "[rank1]: \\xff é"], done.stderr


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_lines_of_two_ranks_are_not_joined(start: str, script: Callable[..., Path], tmp_path: Path) -> None:
    script("""
        import os
        for number in range(3000):
            print("<" + os.environ["RANK"], "x" * 40 + ">")
    """)
    # Python looks at the variable when it starts.
    done = begun(start, "train.py", tmp_path, cold=True, PYTHONUNBUFFERED="1")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("Outcome")]  # of the launcher
    assert sorted(lines) == [f"<{rank} {'x' * 40}>" for rank in (0, 1) for _ in range(3000)]


def test_a_port_in_use_is_told_before_anything_starts(script: Callable[..., Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = launch("-n", 2, "--main-port", taken.getsockname()[1], script(PIDS), cwd=tmp_path)
    assert done.returncode == 1
    assert "[launch-port]" in done.stderr
    assert not list(tmp_path.glob("*.pid"))


def test_settings_reach_the_script_with_their_sources(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script("import os; print(os.environ['PACELINE_SETTINGS'], os.environ['OMP_NUM_THREADS'], flush=True)")
    done = launch("--mixed-precision", "bf16", "--cpu", "--threads", 3, path, cwd=tmp_path)
    settings, threads = done.stdout.rsplit(" ", 1)
    assert json.loads(settings)["mixed_precision"] == ["bf16", "command line", "--mixed-precision"]
    assert int(threads) == 3
    assert "1 process" in done.stderr


def test_dry_run_starts_nothing(script: Callable[..., Path], tmp_path: Path) -> None:
    done = launch("-n", 2, "--dry-run", "--mixed-precision", "bf16", script(PIDS), "--lr", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("train.py --lr 1", "WORLD_SIZE=2", "rank  local rank", "mixed_precision", "--mixed-precision"):
        assert part in done.stdout
    assert not list(tmp_path.glob("*.pid"))


@pytest.mark.needs("accelerate")
def test_names_of_another_library_are_served(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script("import accelerate; print(accelerate.Accelerator.__mro__[1].__module__.split('.')[0], flush=True)")
    done = launch("-n", 2, "--cpu", "--compat", "accelerate", path, cwd=tmp_path)
    assert done.stdout == "paceline_accelerate\n" * 2, done.stderr


def test_fresh_processes_report_failures_too(script: Callable[..., Path], tmp_path: Path) -> None:
    script("import os, time\nif os.environ['RANK'] == '1': raise ValueError('the cause')\ntime.sleep(60)\n")
    done = begun("exec", "train.py", tmp_path)
    assert "failure=Failure(rank=1" in done.stdout, done.stderr
    assert "ValueError: the cause" in done.stdout
    assert "worker.py" not in done.stdout


ASKED = """
    import os, signal, sys, time
    def save(*_):
        time.sleep(0.3)
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
"""


def test_processes_that_saved_and_left_have_not_failed(
    script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    launcher = begin("-n", 2, "--max-restarts", 3, script(ASKED, PIDS, "time.sleep(60)"))
    await_files(tmp_path, "0.pid", "1.pid")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) == 75
    told = launcher.communicate()[1]
    assert "all processes have saved and ended" in told
    assert "starting all processes again" not in told
    done = launch("-n", 2, "--max-restarts", 3, script("raise SystemExit(75)"), cwd=tmp_path)
    assert done.returncode == 75
    assert "all processes have saved and ended" in done.stderr
    assert "LaunchError" not in done.stderr


def test_ctrl_c_leaves_time_to_save_and_a_second_one_does_not(
    script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """A run that can resume notes the signal, and may take longer to save than an ordinary script has to end."""
    noting = """
    import signal, sys, time
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    """
    path = script(noting, PIDS, "while len(asked) < 2: time.sleep(0.1)\n", "time.sleep(0.3)\n", "sys.exit(75)")
    launcher = begin("-n", 1, path)
    await_files(tmp_path, "0.pid")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 130
    output = launcher.communicate()[1]
    assert "processes have 30 s to save (--grace-s); Ctrl-C again ends them at once" in output
    assert "all processes have saved and ended" in output
    (tmp_path / "0.pid").unlink()
    path = script(noting, PIDS, "time.sleep(60)")
    launcher = begin("-n", 1, path)
    await_files(tmp_path, "0.pid")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(5) == 130
    assert "rank 0 had not ended after a second signal: killed, without a save" in launcher.communicate()[1]


def test_a_second_signal_waits_no_longer_and_grace_has_an_end(
    script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = script("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", PIDS, "import time; time.sleep(90)")
    launcher = begin("-n", 2, "--grace-s", 60, path)
    pids = await_files(tmp_path, "0.pid", "1.pid")
    launcher.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) == 143
    assert gone(pids, 0)
    for name in ("0.pid", "1.pid"):
        (tmp_path / name).unlink()
    launcher = begin("-n", 2, "--grace-s", 0.5, path)
    await_files(tmp_path, "0.pid", "1.pid")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) == 143
    assert "ranks 0, 1 had not ended after 0.5 s (--grace-s): killed, without a save" in launcher.communicate()[1]


def test_one_that_stays_where_others_have_left_is_no_failure_of_another_node(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    path = script("import os, sys, time; sys.exit(75) if os.environ['RANK'] == '0' else time.sleep(60)")
    done = launch("-n", 2, "--grace-s", 0.3, path, cwd=tmp_path)
    assert done.returncode == 1
    assert "some processes did not leave within 0.3 s after others had saved" in done.stderr
    assert "another node" not in done.stderr


def test_a_process_that_hangs_is_ended_and_all_start_again(script: Callable[..., Path], tmp_path: Path) -> None:
    path = script(
        """
        import os, signal, torch, torch.distributed as dist
        from datetime import timedelta
        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        dist.all_reduce(torch.ones(1))
        if attempt == "0" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
        print("finished in", attempt, flush=True)
        """
    )
    done = launch("-n", 2, "--max-restarts", 1, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished in 1\n" * 2
    assert "rank 0 failed" in done.stderr


def test_a_frozen_process_is_found_where_its_peers_would_wait_for_ever(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    path = script(
        """
        import os, signal, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif attempt == "0":
            time.sleep(0.5)
            dist.distributed_c10d._get_default_store().compare_set("a", "b", "c")  # rank 0 keeps the store
        dist.barrier()  # gloo fails where one rank leaves before the other has connected
        os.write(1, f"finished in {attempt}\\n".encode())
        """
    )
    done = launch("-n", 2, "--max-restarts", 1, "--timeout-s", 2, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished in 1\n" * 2
    assert "stopped by a signal for more than 2 s, and therefore killed" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("start", ["fork", "exec", "program"])
def test_processes_end_with_their_launcher_though_nobody_is_left_to_end_them(
    start: str, script: Callable[..., Path], begin: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = script(PIDS, "import time; time.sleep(60)")
    (tmp_path / "tmp").mkdir()
    if start == "exec":
        command = [sys.executable, "-c", EXEC, str(path)]
        launcher = subprocess.Popen(command, cwd=tmp_path, env={**clean(), "TMPDIR": str(tmp_path / "tmp")})
    elif start == "program":
        launcher = begin("-n", 2, "--no-python", sys.executable, path, killed=True, TMPDIR=str(tmp_path / "tmp"))
    else:
        launcher = begin("-n", 2, path, killed=True, TMPDIR=str(tmp_path / "tmp"))
    pids = await_files(tmp_path, "0.pid", "1.pid")
    (reaper,) = (pid for pid in children(launcher.pid) if "reaper.py" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(reaper, signal.SIGKILL)
    launcher.kill()
    launcher.wait(15)
    assert gone(pids, 6), [pid for pid in pids if runs(pid)]


def children(parent: int) -> list[int]:
    stats = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/stat")}
    found = []
    for pid, path in stats.items():
        try:
            if int(path.read_text().rpartition(") ")[2].split()[1]) == parent:
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
