"""A door that is installed serves every process of an environment; accelerate's commands run through it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import paceline

PROGRAM = """
import importlib.metadata as metadata, importlib.util, multiprocessing, subprocess, sys


def child(queue):
    from accelerate.utils import set_seed
    queue.put(set_seed.__module__)


if __name__ == "__main__":
    assert importlib.util.find_spec("accelerate") is not None
    import accelerate
    assert "torch" not in sys.modules, "importing it is cheap"
    print(accelerate.__version__, metadata.version("accelerate"), metadata.packages_distributions()["accelerate"])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get(timeout=60), flush=True)
    process.join()
    other = "import deepspeed; from accelerate.utils import str_to_bool; print(deepspeed.__version__)"
    subprocess.run([sys.executable, "-I", "-c", other], check=True)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment that has paceline as an editable installation, and this one's packages behind it."""
    folder = tmp_path_factory.mktemp("environment") / "with a blank"
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    sources = [str(source) for source in Path(paceline.__file__).parents[3].glob("*/src")]
    (packages / "_paceline.pth").write_text("\n".join([*sources, sysconfig.get_path("purelib")]) + "\n")
    metadata = packages / "paceline-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0.1.0\n")
    return folder


def run(environment: Path, *words: str, status: int = 0) -> str:
    """Runs a command of the environment; returns what it printed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE"))}
    command = [str(environment / "bin" / words[0]), *words[1:]]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**variables, "HF_HOME": str(environment)},
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_process_is_served_and_nothing_stays(environment: Path, tmp_path: Path) -> None:
    def tree() -> dict[str, bytes | None]:
        return {str(path): path.read_bytes() if path.is_file() else None for path in environment.rglob("*")}

    before = tree()
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    assert "[door-real]" not in run(
        environment, "python", "-m", "paceline", "doors", "install", "accelerate", "deepspeed"
    )
    try:
        lines = run(environment, "python", str(script)).splitlines()
        assert lines == ["1.15.0 1.15.0+paceline ['accelerate']", "paceline.data.seed", "0.19.8"]
        script.write_text(
            "import accelerate, os; print(os.environ['ACCELERATE_MIXED_PRECISION'], os.environ['WORLD_SIZE'])"
        )
        words = ["launch", "--num_processes", "2", "--cpu", "--mixed_precision", "bf16", str(script)]
        assert run(environment, "accelerate", *words).count("bf16 2") == 2
        assert "unknown model" not in run(environment, "accelerate", "env")
        module = ["-m", "accelerate.commands.launch"]
        refused = run(environment, "python", *module, "--use_megatron_lm", str(script), status=2)
        assert "use_megatron_lm is not supported" in refused
        assert "command" in run(
            environment, "python", "-m", "accelerate.commands.accelerate_cli", "tpu-config", status=1
        )
        assert "--num_gpus" in run(environment, "deepspeed", "--help")
    finally:
        run(environment, "python", "-m", "paceline", "doors", "remove")
    assert tree() == before
    run(environment, "python", "-c", "import importlib.util as u; assert u.find_spec('accelerate') is None")
    assert sys.executable  # this environment was not touched
