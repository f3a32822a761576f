"""What is imported once, before processes are forked."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.base.lazy import fast_imports
from paceline.launch.job import Job, Target
from paceline.launch.script_libraries import FRONT, needed_by

OURS = "paceline.accelerator"


@pytest.mark.needs("accelerate", "deepspeed")
def test_what_scripts_for_a_library_need_is_imported() -> None:
    program = (
        "import sys; from paceline.launch.launchers.local import import_for_scripts\n"
        "from paceline.launch.job import Job, Target; from paceline.launch.script_libraries import needed_by\n"
        "door = 'paceline_deepspeed.initialize'; target = Target('module', 'train')\n"
        "import_for_scripts(needed_by(Job(target), forked=False))\n"
        "assert 'torch' in sys.modules and door not in sys.modules\n"
        "import_for_scripts(needed_by(Job(target, compat='accelerate,deepspeed'), forked=False))\n"
        "assert door in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import torch.distributed", []),
        ("import torch; torch.optim.SGD", [FRONT]),
        ("import paceline", [OURS]),
        ("from paceline import Accelerator; optimizer = 0", [FRONT, OURS]),
        # Read when the compiler is imported, so not before the script has set it.
        ("import os, paceline; os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'; optimizer = 0", []),
        ("import os, paceline; os.environ['TORCH_COMPILE_DISABLE'] = '1'; optimizer = 0", []),
    ],
)
def test_a_script_says_what_several_processes_need(text: str, modules: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    job = Job(Target("script", str(script)), 2)
    assert needed_by(job, forked=True) == modules
    assert needed_by(job, forked=False) == []


def test_a_module_and_a_script_that_it_runs_say_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    script = tmp_path / "folder" / "train.py"
    script.write_text("import paceline")
    for target in (Target("module", "folder.train"), Target("module", "runs", ("--quick", "folder/train.py", "no.py"))):
        assert needed_by(Job(target, 2), forked=True) == [OURS]
    script.write_text("import paceline; print('TORCH_COMPILE_DISABLE')")
    assert needed_by(Job(Target("module", "folder.train"), 2), forked=True) == []
    assert needed_by(Job(Target("function", "train"), 2), forked=True) == []


@pytest.mark.parametrize(("restarts", "nodes"), [(1, 1), (0, 2)])
def test_what_starts_again_begins_with_a_checkpoint(restarts: int, nodes: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    job = Job(Target("script", str(script)), 2, max_restarts=restarts, nodes=nodes)
    script.write_text("import paceline")
    assert needed_by(job, forked=True) == [OURS, "paceline.checkpoint.checkpointer"]
    script.write_text("import torch")
    assert needed_by(job, forked=True) == []


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("forked", [False, True])
def test_a_script_for_a_library_sets_variables_of_the_compiler_in_time(forked: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    job = Job(Target("script", str(script)), compat="accelerate")
    script.write_text("import accelerate")
    assert FRONT in needed_by(job, forked=forked)
    script.write_text("import os; os.environ['TORCHDYNAMO_VERBOSE'] = '1'; import accelerate")
    assert needed_by(job, forked=forked) == []


def test_collection_goes_on_afterwards() -> None:
    with fast_imports():
        assert not gc.isenabled()
        with fast_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
