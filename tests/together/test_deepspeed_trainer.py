"""`transformers.Trainer` with a DeepSpeed config, on the names of accelerate and DeepSpeed that we serve, as recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launched
import pytest

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "deepspeed_trainer.py"
RECORDED = json.loads((HERE / "reference" / "recorded_deepspeed.json").read_text(encoding="utf-8"))["trainer"]
sys.path.insert(0, str(PROGRAM.parent))
from deepspeed_cases import CASES  # noqa: E402 - found by the line above


def train(folder: Path, size: int, options: dict, *flags: str) -> list[dict]:
    """What rank 0 ends with, twice: from the start, and from the checkpoint half way."""
    words = launched.launch("accelerate,deepspeed", size, PROGRAM, *flags)
    launched.run([*words, str(folder), json.dumps(options)], folder, warm=["warm_deepspeed"])
    return json.loads((folder / "rank_0.json").read_text(encoding="utf-8"))


def assert_same_numbers(found: list[dict], recorded: dict) -> None:
    """The whole run and the resumed one end with the numbers of another run."""
    for run in found:
        for name in ("losses", "norms", "rates"):
            assert run[name] == pytest.approx(recorded[name], abs=2e-5), name
        assert run["evaluation"] == pytest.approx(recorded["evaluation"], abs=2e-5)
        assert run["processes"] == recorded["processes"]
        assert (run["type"], run["engine"]) == ("DistributedType.DEEPSPEED", "DeepSpeedEngine")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["stage 3, accumulation, their scheduler", "stage 1, their optimizer"])
def test_as_the_real_one(tmp_path: Path, name: str) -> None:
    found = train(tmp_path, 1, CASES[name])
    assert_same_numbers(found, RECORDED[name][0])
    assert set(RECORDED[name][0]["saved"]) <= set(found[0]["saved"])


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """The same run on two processes without DeepSpeed. The real one cannot evaluate with it on two CPU processes."""
    return train(tmp_path_factory.mktemp("replicas"), 2, {"resumes": False})[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["stage 0", "stage 2", "stage 3, not whole"])
def test_two_processes_have_the_numbers_of_replicas(tmp_path: Path, replicas, name: str) -> None:
    found = train(tmp_path, 2, CASES[name])
    assert_same_numbers(found, replicas)
    # The divided checkpoint lies in the place of half the weights, where the config does not ask for whole ones.
    assert ("model.safetensors" in found[0]["saved"]) == (name != "stage 3, not whole")
    assert ("latest" in found[0]["saved"]) == (name == "stage 3, not whole")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_launcher_says_it(tmp_path: Path) -> None:
    """`--use_deepspeed --zero_stage 2` in place of a config of TrainingArguments."""
    found = train(tmp_path, 1, {"resumes": False}, "--use_deepspeed", "--zero_stage", "2")
    assert_same_numbers(found, RECORDED["stage 2"][0])
