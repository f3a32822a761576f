"""What a stranger tries after reading accelerate's documentation, asked of the real library (recorded) and of our names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from as_recorded import compare

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_surface.json").read_text(encoding="utf-8"))

# Questions that we mean to answer in another way, and why.
OTHERWISE = {
    "configs/an empty file": "the error is a ValueError that names the file",
    "constructors/a handler of no kind": "the error lists all problems of the arguments",
    "constructors/wrong deepspeed plugin": "DeepSpeed need not be installed",
    "loading/broken off": "a loop that was left by `break` has ended",
    "preparing/nothing": "nothing is given back for nothing",
    "preparing/wrapped forward": "the forward of a module stays in another place",
    "processes/on local main, called": "a missing function is a ValueError on an accelerator too",
    "processes/on main, called": "a missing function is a ValueError on an accelerator too",
    "processes/trigger": "the flag can be asked for before it was ever set",
    "saving/a model in a file's place": "there it is logged, and nothing is saved",
    "saving/an object as tensors": "the error is one of files",
    "saving/no name": "the error says how folders are named",
    "stepping/backward of a number": "the error says what a loss is",
    "stepping/clip one tensor": "there the rows of the tensor are clipped, which have no gradients",
    "utilities/availability": "False in place of None",
    "utilities/seed": "the seed is returned",
    "utilities/seed by device": "the seed is returned",
    "utilities/seed, deterministic": "the seed is returned",
    "utilities/wrong seed": "a ValueError that shows the value",
}


def served():
    """Runs the program where accelerate's names are served; in a process of its own, which may be changed."""
    import os
    import sys

    from paceline.compat import install

    os.environ["ACCELERATE_USE_CPU"] = "1"
    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import surface_program

    return json.loads(json.dumps(surface_program.everything()))


@pytest.fixture(scope="module")
def answers():
    """What is answered here."""
    return run_ranks(served, world=1, group=False, timeout_s=200)[0]


@pytest.mark.parametrize("topic", sorted(RECORDED))
def test_as_recorded(answers, topic: str) -> None:
    problems = []
    assert answers[topic].keys() == RECORDED[topic].keys()
    for question, expected in RECORDED[topic].items():
        where = f"{topic}/{question}"
        if where in OTHERWISE:
            continue
        try:
            compare(answers[topic][question], expected, where)
        except AssertionError as error:
            problems.append(str(error).split("\n")[0])
    assert not problems, "\n".join(problems)


def test_what_is_answered_in_another_way_is_asked() -> None:
    asked = {f"{topic}/{question}" for topic, questions in RECORDED.items() for question in questions}
    assert not OTHERWISE.keys() - asked


def test_a_model_that_transformers_has_divided_is_refused() -> None:
    import torch

    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model.tp_size = 2
    for prepare in (accelerator.prepare, accelerator.prepare_model):
        with pytest.raises(ValueError, match="--tp 2"):
            prepare(model)
    model.tp_size = 1
    assert accelerator.prepare(model) is model


def test_buffers_that_are_not_broadcast_under_ddp_are_not_under_zero_2_either() -> None:
    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.arguments import DistributedDataParallelKwargs
    from paceline_accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    # sentence-transformers asks for it, because its models run several times before a backward pass.
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    for strategy in ("replicate", "zero"):
        assert accelerator.plan.options[strategy] == {"broadcast_buffers": False}


def test_power_sgd_begins_where_accelerate_begins() -> None:
    from paceline_accelerate.arguments import DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(comm_hook="batched_power_sgd").options()
    assert options == {"comm_hook": "batched_power_sgd", "comm_state": {"start_powerSGD_iter": 1000}}
    said = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 4}
    assert DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=said).options()["comm_state"] == said
