"""`notebook_launcher` from a real notebook and from a plain session."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch.distributed as dist
from warm_python import executable

from paceline.launch.worker import worker
from paceline.testing import run_ranks

SUM = """
    import torch

    def training_loop(greeting, fail=False):
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * scale
        dist.all_reduce(total)
        print(greeting, "from rank", dist.get_rank(), flush=True)
        if fail and dist.get_rank() == 1:
            raise ValueError("the cause")
        return {"total": total, "settings": os.environ.get("PACELINE_SETTINGS", "")}

    scale = 3
"""


def run_notebook(folder: Path, *cells: str, threads: str, errors: bool = False) -> list[str]:
    """Runs a notebook; gives the text that stands under each cell."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(dedent(cell)) for cell in cells])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client = nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", allow_errors=errors, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    return ["".join(_text(output) for output in cell.outputs) for cell in notebook.cells]


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return str(output.data.get("text/plain", ""))


@pytest.mark.filterwarnings("ignore")
def test_in_a_real_notebook(tmp_path: Path) -> None:
    use = "torch.randn(600, 600, requires_grad=True).square().sum().backward()  # OpenMP's threads have run"
    launch = "value = notebook_launcher(training_loop, ('hello',), num_processes=2, mixed_precision='bf16')\n"
    outside = "def uses_it():\n    return accelerator.num_processes\nnotebook_launcher(uses_it, num_processes=2)"
    _, _, shown, value, failed, _, refused = run_notebook(
        tmp_path,
        SUM,
        use + "\nfrom paceline import notebook_launcher",
        launch,
        "value",
        "notebook_launcher(training_loop, ('hello', True), num_processes=2)",
        "%matplotlib inline\nfrom paceline import Accelerator\naccelerator = Accelerator(cpu=True)",
        outside,
        threads="2",
        errors=True,
    )
    assert shown.startswith("Launching training on 2 CPU processes."), shown
    assert "hello from rank 0" in shown
    assert "hello from rank 1" in shown
    assert "tensor([6.])" in value
    assert "bf16" in value
    assert failed.count("ValueError: the cause") == 2  # with its traceback, and in the last line, which notebooks show
    assert 'raise ValueError("the cause")' in failed  # the line of the cell
    assert "rank 1 failed with exit code 1.  [rank-failed]" in failed
    assert "[launch-accelerator]" in refused
    assert "constructed in cell In[6], line 3: `accelerator = Accelerator(cpu=True)`" in refused


def session(folder: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "session.py").write_text(dedent(SUM) + dedent(text))
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    everything = {name: value for name, value in everything.items() if value}  # "" takes a variable out
    command = [executable(), "session.py"]
    return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, timeout=60)


def test_one_process_runs_here_and_may_return_anything(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        import os
        from paceline import notebook_launcher
        value = notebook_launcher(lambda: (os.getpid(), lambda: 0), mixed_precision="fp16")
        assert value[0] == os.getpid() and "PACELINE_SETTINGS" not in os.environ
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Launching training on CPU.\n"


def test_debug_launcher_restarts_and_prefixes(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        import os
        from paceline import debug_launcher, notebook_launcher
        assert debug_launcher(training_loop, ("hi",))["total"] == 6
        def twice():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
                os._exit(5)
            print("well", flush=True)
            return int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        assert notebook_launcher(twice, num_processes=2, max_restarts=1, log_line_prefix_template="<${rank}> ") == 1
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "<1> well" in done.stdout


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("notebook_launcher(training_loop, ('x',), num_processes=0)", "num_processes cannot be 0.  [config-value]"),
        ("notebook_launcher(print, mixed_precision='fp9')", "mixed_precision cannot be 'fp9'.  [config-value]"),
        ("notebook_launcher(print, use_port='abc', num_processes=2)", "use_port cannot be 'abc'.  [config-value]"),
        (
            "notebook_launcher(print, rdzv_endpoint='[::1]:b', num_processes=2)",
            "rdzv_endpoint cannot be 'b'.  [config-value]",
        ),
        ("notebook_launcher(lambda: __import__('threading').Lock(), num_processes=2)", "[launch-pickle]"),
        ("debug_launcher(lambda: debug_launcher(print))", "[launch-inside]"),
        ("notebook_launcher(training_loop, args=(1))", "write args=(1,)"),
        ("notebook_launcher(training_loop, args='hi', num_processes=2)", "[launch-arguments]"),
        ("notebook_launcher(print(), num_processes=2)", "without parentheses"),
    ],
)
def test_misuse(call: str, told: str, tmp_path: Path) -> None:
    done = session(tmp_path, f"from paceline import debug_launcher, notebook_launcher\n{call}\n")
    assert done.returncode == 1
    assert told in done.stderr


def test_processes_use_as_many_threads_as_they_like_after_threads_have_run_here(tmp_path: Path) -> None:
    """A forked copy of a process whose OpenMP threads have run waits for ever at its own first parallel region."""
    done = session(
        tmp_path,
        """
        from paceline import Accelerator, notebook_launcher
        torch.set_num_threads(2)
        torch.randn(600, 600).square().sum()
        def twice():
            torch.set_num_threads(2)
            return float(torch.ones(600, 600).square().sum())
        assert notebook_launcher(twice, num_processes=2) == 600 * 600
        accelerator = Accelerator(cpu=True)
        notebook_launcher(lambda: accelerator.num_processes, num_processes=2)
        """,
        OMP_NUM_THREADS="",
    )
    assert done.returncode == 1
    assert "[launch-accelerator]" in done.stderr
    assert "session.py:" in done.stderr and "`accelerator = Accelerator(cpu=True)`" in done.stderr


def test_ctrl_c_ends_the_processes_and_the_session(tmp_path: Path) -> None:
    text = """
    import os, pathlib, time
    from paceline import notebook_launcher
    def wait():
        pathlib.Path(os.environ["RANK"] + ".pid").write_text(str(os.getpid()))
        time.sleep(60)
    try:
        notebook_launcher(wait, num_processes=2)
    except KeyboardInterrupt:
        print("interrupted")
    """
    (tmp_path / "session.py").write_text(dedent(text))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen([executable(), "session.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert "interrupted" in running.communicate(timeout=20)[0]
    time.sleep(0.1)
    for path in tmp_path.glob("*.pid"):
        assert not Path(f"/proc/{path.read_text()}").exists()


def test_a_run_that_saves_when_it_is_asked_to_leave_says_so_by_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(
        dedent("""
        import time
        import torch
        from paceline import Accelerator, notebook_launcher


        def train():
            accelerator = Accelerator(cpu=True, project_dir="saved")
            model = torch.nn.Linear(2, 1)
            samples = torch.randn(100000, 2)
            loader = torch.utils.data.DataLoader(samples, batch_size=1)
            model, optimizer, loader = accelerator.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
            accelerator.resume()
            for step, batch in enumerate(loader):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02)  # what it computes until the signal comes is nothing to the test
                if step == 3:
                    accelerator.print("running", flush=True)


        notebook_launcher(train, num_processes=2)
        """)
    )
    session = subprocess.Popen(
        [executable(), str(script)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert session.stdout is not None
    while "running" not in (line := session.stdout.readline()):
        assert line, session.communicate()
    session.send_signal(signal.SIGTERM)
    _, errors = session.communicate(timeout=60)
    assert session.returncode == 75, errors
    assert list((tmp_path / "saved").rglob("manifest.json"))


def test_a_function_leaves_no_process_group_behind(tmp_path: Path) -> None:
    """Threads of a group that is still there can abort the process as Python ends."""

    def function() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def called() -> tuple[int, bool]:
        code = worker.call(function, str(tmp_path / "report"))
        return code, dist.is_initialized()

    assert run_ranks(called, world=1, group=False) == [(0, False)]


def test_a_function_that_failed_leaves_with_its_code_and_is_not_taken_apart(tmp_path: Path) -> None:
    """Threads of its process group can abort the process while the interpreter is taken apart."""
    done = session(
        tmp_path,
        """
        import atexit
        from paceline.launch.worker import worker
        class TakenApart:
            def __del__(self):
                print("taken apart")
        left = TakenApart()
        left_open = open("left.txt", "w")
        left_open.write("kept")
        atexit.register(print, "exit handler")
        worker.leave_after_failure(3)
        """,
    )
    assert (done.returncode, done.stdout) == (3, "exit handler\n"), done.stderr
    assert (tmp_path / "left.txt").read_text() == "kept"
