"""Big models through accelerate's names: what the real library gave, and what it should have given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import python3

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_big_models.json").read_text(encoding="utf-8"))

# Where we give something else on purpose: path in the results -> what we give (None: only that it differs), and why.
ON_PURPOSE = {
    # There, parameters that were tied within `init_empty_weights` come apart, and a device map counts them twice.
    "empty_weights/tied": True,
    # There, buffers of a module on "disk" that are not offloaded are not read from the checkpoint at all.
    "loading/half disk/devices/b.running_mean": "cpu torch.bfloat16",
    "loading/half disk/devices/b.running_var": "cpu torch.bfloat16",
    # There, `strict` accepts a checkpoint in which weights are missing.
    "loading/less.bin None cpu strict/returned": "error: ValueError",
    "loading/less.bin None strict/returned": "error: RuntimeError",
    "loading/less.bin meta cpu strict/returned": "error: ValueError",
    "loading/less.bin meta strict/returned": "error: RuntimeError",
    # There, safetensors are asked for a device "disk" where all of a model goes to it.
    "loading/whole disk/returned": None,
    "loading/whole disk files": None,
    "loaded_and_dispatched/sequential": None,
    "loaded_and_dispatched/whole disk": None,
}


def served(name: str, *arguments: str):
    """A function of the program, in a process where accelerate's names are served."""
    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import big_models_program

    return getattr(big_models_program, name)(*arguments)


@pytest.fixture(scope="module")
def results():
    return run_ranks(served, world=1, args=("main",), group=False, timeout_s=100)[0]


def differences(found, expected, where: str):
    """Path, what we give and what was recorded, of all that differs."""
    if where in ON_PURPOSE:
        wanted = ON_PURPOSE[where]
        return [] if found != expected and wanted in (None, found) else [(where, found, wanted)]
    if isinstance(found, dict) and isinstance(expected, dict):
        lists = [
            differences(found.get(key), expected.get(key), f"{where}/{key}") for key in found.keys() | expected.keys()
        ]
        return [difference for each in lists for difference in each]
    return [] if found == expected else [(where, found, expected)]


@pytest.mark.parametrize("case", sorted(RECORDED.keys() - {"version"}))
def test_as_recorded(results, case: str) -> None:
    assert not differences(results[case], RECORDED[case], case)


def test_a_folder_that_accelerate_offloaded_to() -> None:
    expected = run_ranks(served, world=1, args=("expected_output",), group=False)[0]
    outputs = run_ranks(
        served, world=1, args=("folder_of_the_other", str(REFERENCE / "big_models_offload")), group=False
    )
    assert outputs == [expected]


def test_all_of_the_module_names_do_something() -> None:
    """None of the names of these modules is a stand-in."""
    program = (
        "from paceline.compat import install; install(['accelerate']); import importlib\n"
        "from paceline_doors.absent import _Absence\n"
        "for name in ('big_modeling', 'hooks', 'utils.modeling', 'utils.offload'):\n"
        "    module = importlib.import_module('accelerate.' + name)\n"
        "    print(name, [each for each in dir(module) if isinstance(getattr(module, each), _Absence)])\n"
    )
    ended = subprocess.run([python3(), "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert [line.partition(" ")[2] for line in ended.stdout.splitlines()] == ["[]"] * 4


def device_maps():
    """The program of transformers' models, in a process where accelerate's names are served."""
    from paceline.compat import install

    install(["accelerate"])
    # Another test of this process may have imported transformers when there was no accelerate; it remembers that.
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).parent / "programs"))
    import device_maps as program

    return program.everything()


@pytest.mark.slow
def test_transformers_loads_generates_and_saves_by_device_maps() -> None:
    results = run_ranks(device_maps, world=1, group=False, timeout_s=120)[0]
    for name, (right, device_map, on_meta) in results.items():
        assert right == [True, True, True], name
        assert (on_meta > 0) == ("disk" in device_map.values()), name
    assert results["spread"][2] == 24, "two blocks of twelve tensors each"
    assert "disk" in results["auto with little memory"][1].values()
