"""`accelerate.test_utils.testing`: test cases, decorators that skip a test, and commands that a test runs."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO
from unittest import mock

import torch

from paceline.base import env
from paceline.compat.accelerate import available
from paceline.compat.accelerate.gradient_state import GradientState
from paceline.compat.accelerate.operations import gather
from paceline.compat.accelerate.state import AcceleratorState
from paceline.compat.accelerate.surroundings import is_torch_version, str_to_bool

DEFAULT_LAUNCH_COMMAND = ["accelerate", "launch", "--num_processes=1", "--monitor_interval=0.1"]


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """The type of this host's devices, how many there are, and a function that tells how many bytes are allocated on one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "cpu", 1, lambda: 0
    return accelerator.type, torch.accelerator.device_count(), torch.accelerator.memory_allocated


torch_device, device_count, memory_allocated_func = get_backend()


def parse_flag_from_env(key: str, default: bool = False) -> int | bool:
    """A variable of the environment as a truth value; `default` where it is not set.

    Raises:
        ValueError: for a value that is no truth value.
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
# Where a decorator asks for one thing: its name after `require_`, and how the reason of a skip calls that thing.
_LIBRARIES = {
    "aim": "aim",
    "bnb": "the bitsandbytes library",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "datasets": "the datasets library",
    "deepspeed": "DeepSpeed",
    "dvclive": "dvclive",
    "fp16": "FP16 support",
    "fp8": "FP8 support",
    "import_timer": "tuna interpreter",
    "matplotlib": "matplotlib",
    "mlflow": "mlflow",
    "mlu": "a MLU",
    "mps": "a `mps` backend support in `torch`",
    "musa": "a MUSA",
    "neuron": "Neuron Cores",
    "npu": "a NPU",
    "pandas": "pandas",
    "peft": "PEFT",
    "pippy": "pippy",
    "schedulefree": "the schedulefree library",
    "sdaa": "a SDAA",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "timm": "the timm library",
    "torchao": "torchao",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
    "torchvision": "the torchvision library",
    "trackio": "trackio",
    "transformer_engine": "transformers engine",
    "transformer_engine_mxfp8": "transformers engine MXFP8 block scaling",
    "transformers": "the transformers library",
    "triton": "the triton library",
    "wandb": "wandb",
    "xpu": "a XPU",
}
# The others: what must hold, and the reason of a skip. They are asked when a test is decorated.
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
    """What `is_NAME_available` of `accelerate.utils` answers."""
    return getattr(available, f"is_{name}_available")()


def __getattr__(name: str) -> Callable[[Any], Any]:
    """The decorators `require_*`."""
    what = name.removeprefix("require_")
    if name == what or (what not in _LIBRARIES and what not in _CONDITIONS):
        raise AttributeError(name)
    if what in _CONDITIONS:
        holds, reason = _CONDITIONS[what]
    else:
        holds, reason = functools.partial(_installed, what), f"test requires {_LIBRARIES[what]}"

    def require(test_case: Any) -> Any:
        return unittest.skipUnless(holds(), reason)(test_case)

    require.__name__ = require.__qualname__ = name
    require.__doc__ = f"Skips a test where this does not hold: {reason}." if reason else "Leaves a test as it is."
    globals()[name] = require
    return require


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skips a test under an older torch; without a test, it returns a decorator."""
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
    """Each test begins without an accelerator's state."""

    def tearDown(self) -> None:
        """Forgets the states."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """Its tests share the folder `tmpdir`, which each one finds empty unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Makes the folder."""
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
    """Its patches are started by `add_mocks`, in `setUp`, and stopped when a test has ended."""

    def add_mocks(self, mocks: Any) -> None:
        """Starts one patch or a list of them."""
        self.mocks = mocks if isinstance(mocks, (list, tuple)) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fails unless the block raises this class itself, with `msg` in its text."""
    try:
        yield
    except Exception as error:
        expected_kind = f"Expected exception of type {exception_class} but got {type(error)}"
        assert isinstance(error, exception_class), expected_kind
        assert msg is None or msg in str(error), f"Expected message '{msg}' to be in exception but got '{error}'"
        return
    raise AssertionError(f"Expected exception of type {exception_class} but ran without issue.")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Whether each process has the same values.

    Ranks: all must call; each gets the same answer.
    """
    mine = tensor[None].clone().to(AcceleratorState().device)
    everywhere = gather(mine).cpu()
    return all(torch.equal(other, mine[0].cpu()) for other in everywhere)


# -- commands --------------------------------------------------------------------------------------------------


class SubprocessCallException(Exception):
    """A command that `run_command` ran has failed."""


def run_command(command: list[str], return_stdout: bool = False, env: dict[str, str] | None = None) -> str | None:
    """Runs a command to its end; returns what it printed, if `return_stdout`.

    Raises:
        SubprocessCallException: with what the command printed, where it failed.
    """
    ended = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        check=False,
    )
    if ended.returncode:
        words = " ".join(str(word) for word in command)
        raise SubprocessCallException(f"Command `{words}` failed with the following error:\n\n{ended.stdout}")
    return ended.stdout if return_stdout else None


class _RunOutput:
    """How a command has ended, and the lines that it printed."""

    def __init__(self, returncode: int, stdout: list[str], stderr: list[str]) -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


def execute_subprocess_async(
    cmd: list[str],
    env: dict[str, str] | None = None,
    stdin: IO[Any] | int | None = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _RunOutput:
    """Runs a command to its end and shows its lines meanwhile.

    Args:
        timeout: has no effect, as under accelerate, which waits for the end of the command too.
        quiet: whether the lines are not shown.
        echo: whether the command itself is shown first.

    Raises:
        RuntimeError: with the lines of standard error, where the command failed.
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
    printed: list[str] = []
    errors: list[str] = []
    # Each stream is read by a thread: a command stands still when nobody empties one of them.
    readers = [
        threading.Thread(target=_read, args=(process.stdout, printed, None if quiet else sys.stdout, "stdout:")),
        threading.Thread(target=_read, args=(process.stderr, errors, None if quiet else sys.stderr, "stderr:")),
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    returncode = process.wait()
    if returncode > 0:
        lines = "\n".join(errors)
        raise RuntimeError(
            f"'{' '.join(words)}' failed with returncode {returncode}\n\n"
            f"The combined stderr from workers follows:\n{lines}"
        )
    return _RunOutput(returncode, printed, errors)


def _read(stream: IO[str], lines: list[str], shown_on: TextIO | None, label: str) -> None:
    for line in stream:
        text = line.rstrip()
        lines.append(text)
        if shown_on is not None:
            print(label, text, file=shown_on)
    stream.close()


def get_launch_command(**kwargs: Any) -> list[str]:
    """The words of `accelerate launch` with its flags: True is a flag without a value; None and nothing else is left out."""
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None:
            command.append(f"--{name}={value}")
    return command


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call prints."""
    with mock.patch("sys.stdout", new_callable=io.StringIO) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


def path_in_accelerate_package(*components: str) -> Path:
    """A path in the folder of the package that serves accelerate, such as ("test_utils", "scripts", "test_script.py")."""
    return Path(__file__).resolve().parent.parent.joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """The number of this worker of pytest-xdist; 0 without it."""
    return int(re.sub(r"^gw", "", env.snapshot().get("PYTEST_XDIST_WORKER", "gw0")))


def get_torch_dist_unique_port() -> int:
    """A port for the processes that this worker of pytest-xdist starts."""
    return 29500 + pytest_xdist_worker_id()
