"""`accelerate.test_utils`: what tests of other libraries take from it, and the scripts that it ships."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest
from warm_python import python3

import paceline_accelerate as table
from paceline.compat import install
from paceline.testing import run_ranks
from paceline_accelerate.test_utils import testing

SCRIPTS = ("test_ops", "test_script", "test_sync")


def run_cases(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.wasSuccessful(), result.errors + result.failures
    return result


def test_every_decorator_that_exists_skips_or_leaves_a_test() -> None:
    def example() -> None:
        pass

    for name in table.modules()["accelerate.test_utils.testing"]:
        if not name.startswith("require_") or name == "require_torch_min_version":
            continue
        decorated = getattr(testing, name)(example)
        is_skipped = getattr(decorated, "__unittest_skip__", False)
        assert is_skipped or decorated is example, name
        if is_skipped:
            assert decorated.__unittest_skip_why__.startswith("test requires"), name
    with pytest.raises(AttributeError):
        testing.require_nothing  # noqa: B018


def test_decorators_ask_for_the_library_the_device_and_the_release() -> None:
    def example() -> None:
        pass

    assert testing.require_transformers(example) is example
    assert testing.require_aim(example).__unittest_skip_why__ == "test requires aim"
    assert testing.require_tpu(example).__unittest_skip__
    assert testing.require_torch_min_version(example, version="1.0") is example
    assert testing.require_torch_min_version(version="99.0")(example).__unittest_skip__
    assert (testing.require_non_cpu(example) is example) == (testing.torch_device != "cpu")
    with mock.patch.dict(os.environ, {"RUN_SLOW": "yes"}):
        assert testing.slow(example) is example
    with mock.patch.dict(os.environ, {"RUN_SLOW": "perhaps"}), pytest.raises(ValueError, match="RUN_SLOW must be yes"):
        testing.slow(example)


def test_test_cases_begin_afresh() -> None:
    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.state import AcceleratorState, PartialState

    class States(testing.AccelerateTestCase):
        def test_state(self) -> None:
            Accelerator(cpu=True)

    class Folders(testing.TempDirTestCase):
        def test_first(self) -> None:
            assert list(self.tmpdir.iterdir()) == []
            (self.tmpdir / "folder").mkdir()

        test_second = test_first

    class Patched(testing.MockingTestCase):
        def test_patch(self) -> None:
            self.add_mocks(mock.patch.dict(os.environ, {"MOCKED": "1"}))
            assert os.environ["MOCKED"] == "1"

    run_cases(States)
    assert not AcceleratorState._shared_state and not PartialState._shared_state
    run_cases(Folders)
    assert not Folders.tmpdir.exists()
    run_cases(Patched)
    assert "MOCKED" not in os.environ


def test_expected_exceptions() -> None:
    with testing.assert_exception(ValueError, "part"):
        raise ValueError("a part of it")
    with pytest.raises(AssertionError, match="ran without issue"), testing.assert_exception(ValueError):
        pass
    with pytest.raises(AssertionError, match="but got"), testing.assert_exception(ValueError, "part"):
        raise ValueError("all")
    with pytest.raises(AssertionError, match="KeyError"), testing.assert_exception(ValueError):
        raise KeyError("a")


def test_commands_that_a_test_runs() -> None:
    fails = [sys.executable, "-c", "import sys; print('out'); print('why', file=sys.stderr); sys.exit(3)"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(RuntimeError, match=r"(?s)returncode 3.*why"):
        testing.execute_subprocess_async(fails)
    assert "Running:" in printed.getvalue() and "stdout: out" in printed.getvalue()
    ended = testing.execute_subprocess_async([sys.executable, "-c", "print(1)"], quiet=True, echo=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, ["1"], [])
    with pytest.raises(testing.SubprocessCallException, match=r"(?s)Command.*why"):
        testing.run_command(fails)
    assert testing.run_command([sys.executable, "-c", "print(5)"], return_stdout=True) == "5\n"
    words = testing.get_launch_command(num_processes=2, cpu=True, multi_gpu=False, main_process_port=None)
    assert words == ["accelerate", "launch", "--num_processes=2", "--cpu", "--multi_gpu=False"]
    assert testing.capture_call_output(print, "a", "b") == "a b\n"


def in_ranks() -> list[bool]:
    """Runs each script of the served library; whether equal and different tensors are told apart."""
    import torch

    install(["accelerate"])
    from accelerate import PartialState, test_utils
    from accelerate.state import AcceleratorState

    os.environ["ACCELERATE_USE_CPU"] = "1"
    for script in SCRIPTS:
        AcceleratorState._reset_state(True)
        getattr(test_utils, script).main()
    rank = torch.tensor([PartialState().process_index])
    return [test_utils.are_the_same_tensors(torch.ones(2)), test_utils.are_the_same_tensors(rank)]


@pytest.mark.parametrize("world", [1, 2])
def test_scripts_pass(world: int) -> None:
    answers = run_ranks(in_ranks, world=world, group=world > 1, timeout_s=60)
    assert answers == [[True, world == 1]] * world


def test_a_script_is_found_in_the_package_and_runs_by_its_path_and_name() -> None:
    path = testing.path_in_accelerate_package("test_utils", "scripts", "test_cli.py")
    environment = os.environ | {"PYTHONPATH": str(Path(table.__file__).parent / "for_children")}
    program = (
        "import inspect, os, runpy, accelerate.test_utils\n"
        "folder = os.path.dirname(inspect.getfile(accelerate.test_utils))\n"
        f"assert os.path.join(folder, 'scripts', 'test_cli.py') == {str(path)!r}\n"
        "runpy.run_module('accelerate.test_utils.scripts.test_cli', run_name='__main__')\n"
    )
    by_name = subprocess.run([python3(), "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert by_name.stdout.startswith("Successfully ran on"), by_name.stderr
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module("paceline_accelerate.test_utils.scripts.test_cli").main()
    assert printed.getvalue() == by_name.stdout


def test_what_needs_files_of_accelerates_repository_is_refused() -> None:
    why, fix = table.native_way("accelerate.test_utils.training.mocked_dataloaders")
    assert "repository" in why and "RegressionDataset" in fix
