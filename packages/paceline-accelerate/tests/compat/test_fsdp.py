"""A program for accelerate's FSDP gives the numbers of the real one, from a config file and from a plugin, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import executable

from paceline.base import env
from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_fsdp.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(*plugins):
    """Trains under each plugin; in a process of its own, where accelerate's names are served."""
    program = served()
    from accelerate.utils import FullyShardedDataParallelPlugin

    return [program.main(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin)) for plugin in plugins]


def served():
    """The program, in a process where accelerate's names are served."""
    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import fsdp_program

    return fsdp_program


def saved_and_loaded(folder: str):
    """What comes back from each of the ways to save a divided model."""
    program = served()
    import torch
    from accelerate import Accelerator
    from accelerate.utils import (
        FullyShardedDataParallelPlugin,
        load_fsdp_model,
        model_has_dtensor,
        save_fsdp_model,
        set_seed,
    )

    set_seed(3)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = program.Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    plugin = accelerator.state.fsdp_plugin
    plugin.set_state_dict_type("FULL_STATE_DICT")
    ids = torch.arange(12).reshape(2, 6) % 11

    def step():
        accelerator.backward(model(ids).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.get_state_dict(model)["head.weight"]

    step()
    accelerator.save_state(f"{folder}/state")
    save_fsdp_model(plugin, accelerator, model, f"{folder}/model")
    went_on = step()
    step()
    load_fsdp_model(plugin, accelerator, model, f"{folder}/model")
    weights = accelerator.get_state_dict(model)["head.weight"]
    accelerator.load_state(f"{folder}/state")
    same = torch.equal(weights, accelerator.get_state_dict(model)["head.weight"])
    return model_has_dtensor(model), accelerator.is_fsdp2, same, torch.equal(step(), went_on)


def assert_recorded(found: dict) -> None:
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(RECORDED[key], abs=2e-6), key
    for name, value in RECORDED["sums"].items():
        assert found["sums"][name] == pytest.approx(value, abs=2e-5), name


def test_a_config_file_of_accelerates() -> None:
    command = ["-m", "paceline", "launch", "--compat", "accelerate", "--config", "fsdp.yaml", "fsdp_program.py"]
    variables = {**env.snapshot(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([executable(), *command], cwd=REFERENCE, env=variables, capture_output=True, text=True,
                          timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["type"] == "DistributedType.FSDP"
    assert_recorded(found)
    assert done.stderr.count("fsdp_cpu_ram_efficient_loading (fsdp.yaml:9)") == 1


def test_one_process_divides_nothing_and_gives_the_same() -> None:
    [[found]] = run_ranks(trained, world=1, args=({"fsdp_version": 2},), group=False, timeout_s=60)
    assert found["type"] == "DistributedType.NO"
    assert_recorded(found)


def test_plugins() -> None:
    plugins = (
        {"fsdp_version": 2, "reshard_after_forward": False, "activation_checkpointing": True, "cpu_offload": True},
        {"sharding_strategy": "SHARD_GRAD_OP"},
    )
    for found in run_ranks(trained, world=2, args=plugins, timeout_s=60)[0]:
        assert found["type"] == "DistributedType.FSDP"
        assert_recorded(found)


def test_saving_and_loading(tmp_path: Path) -> None:
    for found in run_ranks(saved_and_loaded, world=2, args=(str(tmp_path),), timeout_s=60):
        assert found == (True, True, True, True)
