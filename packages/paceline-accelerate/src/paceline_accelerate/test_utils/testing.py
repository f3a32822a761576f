"""`accelerate.test_utils.testing`: base classes of tests, decorators that skip a test, and functions that run commands.

The tests of libraries on top of accelerate take them from here; Paceline's own tests do not.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO
from unittest import mock

import torch

from paceline.base import env
from paceline_accelerate import available
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.operations import gather
from paceline_accelerate.state import AcceleratorState
from paceline_accelerate.surroundings import is_torch_version, str_to_bool

DEFAULT_LAUNCH_COMMAND = ["accelerate", "launch", "--num_processes=1", "--monitor_interval=0.1"]


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Returns the type of this host's devices, their number, and a function that returns the bytes allocated on one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu", 1, lambda: 0
    return accelerator.type, torch.accelerator.device_count(), torch.accelerator.memory_allocated


torch_device, device_count, memory_allocated_func = get_backend()


def parse_flag_from_env(key: str, default: bool = False) -> int | bool:
    """Returns the value of a yes/no variable; `default` if it is not set.

    Raises:
        ValueError: it is no yes/no word.
    """
    value = env.snapshot().get(key)
    if value is None:
        return default
    try:
        return str_to_bool(value)
    except ValueError as error:
        raise ValueError(f"If set, {key} must be yes or no, and it is {value!r}.") from error


# -- decorators ------------------------------------------------------------------------------------------------

_TRACKERS = ("wandb", "tensorboard", "trackio", "swanlab")


def _called(text: str, names: str) -> dict[str, str]:
    """Returns a text for each name, with the name in place of the braces."""
    return {name: text.format(name) for name in names.split()}


# For decorators that ask `is_*_available`: the name after `require_`, and what the reason of a skip calls it. These texts and
# those below are accelerate's.
_LIBRARIES = {
    **_called(
        "{}", "aim clearml comet_ml dvclive matplotlib mlflow pandas pippy swanlab tensorboard torchao trackio wandb"
    ),
    **_called("the {} library", "datasets schedulefree timm torchvision transformers triton"),
    "bnb": "the bitsandbytes library",
    "deepspeed": "DeepSpeed",
    "fp16": "FP16 support",
    "fp8": "FP8 support",
    "import_timer": "tuna interpreter",
    "mlu": "a MLU",
    "mps": "a `mps` backend support in `torch`",
    "musa": "a MUSA",
    "neuron": "Neuron Cores",
    "npu": "a NPU",
    "peft": "PEFT",
    "sdaa": "a SDAA",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
    "transformer_engine": "transformers engine",
    "transformer_engine_mxfp8": "transformers engine MXFP8 block scaling",
    "xpu": "a XPU",
}
# For the other decorators: a condition, which is asked when a test is decorated, and the reason of a skip. Three conditions
# always hold: FSDP2 and tensor parallel are in every release of torch that Paceline supports, and no device is one of XLA.
_CONDITIONS: dict[str, tuple[Callable[[], bool], str]] = {
    "cpu": (lambda: torch_device == "cpu", "test requires only a CPU"),
    "cuda": (lambda: _on("cuda"), "test requires a GPU"),
    "cuda_or_hpu": (lambda: _on("cuda", "hpu"), "test requires a GPU or HPU"),
    "cuda_or_xpu": (lambda: _on("cuda", "xpu"), "test requires a CUDA GPU or XPU"),
    "fsdp2": (lambda: True, ""),
    "huggingface_suite": (lambda: _installed("transformers") and _installed("datasets"),
                          "test requires the Hugging Face suite"),
    "multi_device": (lambda: device_count > 1, "test requires multiple hardware accelerators"),
    "multi_gpu": (lambda: _on("cuda") and device_count > 1, "test requires multiple GPUs"),
    "multi_gpu_or_xpu": (lambda: _on("cuda", "xpu") and device_count > 1, "test requires multiple GPUs or XPUs"),
    "multi_xpu": (lambda: _on("xpu") and device_count > 1, "test requires multiple XPUs"),
    "non_cpu": (lambda: torch_device != "cpu", "test requires a GPU"),
    "non_hpu": (lambda: torch_device != "hpu", "test requires a non-HPU"),
    "non_torch_xla": (lambda: True, ""),
    "non_xpu": (lambda: torch_device != "xpu", "test requires a non-XPU"),
    "single_device": (lambda: torch_device != "cpu" and device_count == 1, "test requires a single device accelerator"),
    "single_gpu": (lambda: _on("cuda") and device_count == 1, "test requires a GPU"),
    "single_xpu": (lambda: _on("xpu") and device_count == 1, "test requires a XPU"),
    "tp": (lambda: True, ""),
    "tpu": (lambda: False, "test requires TPU"),
    "trackers": (lambda: any(map(_installed, _TRACKERS)), "test requires at least one tracker to be installed"),
}  # fmt: skip


def _on(*devices: str) -> bool:
    """Whether this host's devices are of one of the types."""
    return torch_device in devices


def _installed(name: str) -> bool:
    """Returns the answer of `is_NAME_available` of `accelerate.utils`."""
    return bool(getattr(available, f"is_{name}_available")())


def __getattr__(name: str) -> Callable[[Any], Any]:
    """Makes a decorator `require_*` when it is first imported."""
    requirement = name.removeprefix("require_")
    if name == requirement:
        raise AttributeError(name)
    if requirement in _CONDITIONS:
        holds, reason = _CONDITIONS[requirement]
    elif requirement in _LIBRARIES:
        holds = functools.partial(_installed, requirement)
        reason = f"test requires {_LIBRARIES[requirement]}"
    else:
        raise AttributeError(name)

    def require(test_case: Any) -> Any:
        return unittest.skipUnless(holds(), reason)(test_case)

    require.__name__ = require.__qualname__ = name
    require.__doc__ = f"Skips a test where this does not hold: {reason}." if reason else "Leaves a test as it is."
    globals()[name] = require
    return require


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skips a test under an older torch; called without a test, it returns a decorator."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    is_new_enough = is_torch_version(">=", str(version))
    return unittest.skipUnless(is_new_enough, f"test requires torch version >= {version}")(test_case)


def skip(test_case: Any) -> Any:
    """Skips a test."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Any) -> Any:
    """Skips a test unless RUN_SLOW is set to yes."""
    return unittest.skipUnless(parse_flag_from_env("RUN_SLOW"), "test is slow")(test_case)


def run_first(test_case: Any) -> Any:
    """Marks a test as the first one, for the plug-in pytest-order."""
    import pytest

    return pytest.mark.order(1)(test_case)


# -- test cases ------------------------------------------------------------------------------------------------


class AccelerateTestCase(unittest.TestCase):
    """A test case whose tests each begin without an accelerator's state."""

    def tearDown(self) -> None:
        """Clears the states that an accelerator shares."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """A test case whose tests share the folder `tmpdir`; it is empty for each of them unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Creates the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Removes the folder."""
        if cls.tmpdir.exists():
            shutil.rmtree(cls.tmpdir)

    def setUp(self) -> None:
        """Empties the folder."""
        if not self.clear_on_setup:
            return
        for path in self.tmpdir.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


class MockingTestCase(unittest.TestCase):
    """A test case whose `setUp` may start patches with `add_mocks`; they are stopped when the test has ended."""

    def add_mocks(self, mocks: Any) -> None:
        """Starts one patch or a list of them."""
        self.mocks = mocks if isinstance(mocks, (list, tuple)) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fails unless the block raises an exception of this class, whose text contains `msg`."""
    try:
        yield
    except Exception as error:
        assert isinstance(error, exception_class), f"Expected exception of type {exception_class} but got {type(error)}"
        assert msg is None or msg in str(error), f"Expected message '{msg}' to be in exception but got '{error}'"
        return
    raise AssertionError(f"Expected exception of type {exception_class} but ran without issue.")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether all processes have the same values.

    Ranks: all must call; each gets the same answer.
    """
    local_row = tensor[None].clone().to(AcceleratorState().device)
    rows = gather(local_row).cpu()
    return all(torch.equal(row, rows[0]) for row in rows)


# -- commands --------------------------------------------------------------------------------------------------


class SubprocessCallException(Exception):
    """Raised by `run_command` when the command has failed."""


def run_command(command: list[str], return_stdout: bool = False, env: dict[str, str] | None = None) -> str | None:
    """Runs a command to its end; returns what it printed if `return_stdout`, else None.

    Raises:
        SubprocessCallException: the command failed; the text is what it printed.
    """
    words = [str(word) for word in command]
    finished = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    if finished.returncode:
        message = f"Command `{' '.join(words)}` failed with the following error:\n\n{finished.stdout}"
        raise SubprocessCallException(message)
    return finished.stdout if return_stdout else None


@dataclass
class _RunOutput:
    """The exit code of a command, and the lines that it printed."""

    returncode: int
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: list[str],
    env: dict[str, str] | None = None,
    stdin: IO[Any] | int | None = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _RunOutput:
    """Runs a command to its end, and prints its lines as they come.

    Args:
        cmd: the words of the command.
        env: its environment; None is that of this process.
        stdin: its standard input, as for `subprocess.Popen`.
        timeout: has no effect, as under accelerate, which also waits for the end of the command.
        quiet: whether the lines are not printed.
        echo: whether the command itself is printed first.

    Raises:
        RuntimeError: the command failed; the text has the lines of its standard error.
    """
    words = [str(word) for word in cmd]
    if echo:
        print("\nRunning: ", " ".join(words))
    process = subprocess.Popen(
        words,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        env=env,
    )
    assert process.stdout is not None and process.stderr is not None
    stdout_lines: list[str] = []
    stderr_lines: list[str] = []
    # Each stream has a thread that reads it, because the command would block as soon as the pipe of one of them is full.
    readers = [
        threading.Thread(target=_read, args=(process.stdout, stdout_lines, None if quiet else sys.stdout, "stdout:")),
        threading.Thread(target=_read, args=(process.stderr, stderr_lines, None if quiet else sys.stderr, "stderr:")),
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    returncode = process.wait()
    # As under accelerate, a command that a signal has ended (its code is negative) has not failed.
    if returncode > 0:
        text = "\n".join(stderr_lines)
        raise RuntimeError(
            f"'{' '.join(words)}' failed with returncode {returncode}\n\n"
            f"The combined stderr from workers follows:\n{text}"
        )
    return _RunOutput(returncode, stdout_lines, stderr_lines)


def _read(stream: IO[str], lines: list[str], copy_to: TextIO | None, label: str) -> None:
    """Adds the lines of a stream to a list, and prints each with a label to another stream if there is one."""
    for line in stream:
        text = line.rstrip()
        lines.append(text)
        if copy_to is not None:
            print(label, text, file=copy_to)
    stream.close()


def get_launch_command(**kwargs: Any) -> list[str]:
    """Returns the words of `accelerate launch` with flags: True is a flag without a value, and None leaves the flag out."""
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None:
            command.append(f"--{name}={value}")
    return command


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns what a call prints."""
    with mock.patch("sys.stdout", new_callable=io.StringIO) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


def path_in_accelerate_package(*components: str) -> Path:
    """Returns a path in the folder of this package, such as that of ("test_utils", "scripts", "test_script.py")."""
    return Path(__file__).resolve().parent.parent.joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Returns the number of this worker of pytest-xdist; 0 without it."""
    worker = env.snapshot().get("PYTEST_XDIST_WORKER", "gw0")
    return int(worker.removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Returns a port for the processes that this worker of pytest-xdist starts; no other worker gets the same."""
    return 29500 + pytest_xdist_worker_id()
