"""accelerate's trackers: the calls that they make in the libraries, as recorded, and which of them a run can have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_trackers.json").read_text(encoding="utf-8"))


def served_calls():
    """The recorded program where accelerate's names are served; the libraries are stand-ins that take every call."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import trackers_program

    return json.loads(json.dumps(trackers_program.run_all()))


@pytest.fixture(scope="module")
def found():
    return run_ranks(served_calls, world=1, group=False, timeout_s=60)[0]


@pytest.mark.needs("lens")
@pytest.mark.parametrize("library", sorted(RECORDED))
def test_the_library_gets_the_calls_that_accelerate_makes(found, library: str) -> None:
    assert found[library] == RECORDED[library]


def choices(folder: str) -> dict[str, object]:
    """What `log_with` gives, in a process that may be changed."""
    import os
    from pathlib import Path

    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.arguments import ProjectConfiguration
    from paceline_accelerate.tracking import (
        LOGGER_TYPE_TO_CLASS,
        GeneralTracker,
        TensorBoardTracker,
        filter_trackers,
        get_available_trackers,
        register_tracker_class,
    )

    os.chdir(folder)
    results: dict[str, object] = {}

    def code_of(work) -> str:
        with pytest.raises(ValueError, match=r"\[") as caught:
            work()
        return str(caught.value.code)

    calls: list[list[object]] = []

    class Mine(GeneralTracker):
        name, tracker, requires_logging_directory = "mine", None, False
        said = calls

        def __init__(self, run_name: str, **kwargs) -> None:
            super().__init__()
            self.said.append([run_name, kwargs])

        def log(self, values, step=None, **kwargs) -> None:
            self.said.append([dict(values), step, kwargs])

    results["no folder"] = code_of(lambda: Accelerator(cpu=True, log_with="tensorboard"))
    results["unknown"] = code_of(lambda: Accelerator(cpu=True, log_with="nope"))
    results["not installed"] = code_of(lambda: Accelerator(cpu=True, log_with="wandb"))
    results["no class"] = code_of(lambda: register_tracker_class(object))
    results["nothing written"] = sorted(os.listdir("."))
    register_tracker_class(Mine)
    results["registered"] = LOGGER_TYPE_TO_CLASS["mine"] is Mine
    accelerator = Accelerator(
        cpu=True,
        log_with=["mine", "tensorboard", "tensorboard"],
        project_config=ProjectConfiguration(logging_dir="logs"),
    )
    results["log_with"] = [str(name) for name in accelerator.log_with]
    accelerator.init_trackers("run", {"lr": 0.1}, {"mine": {"tag": 1}})
    accelerator.log({"loss": 0.5}, step=2, log_kwargs={"mine": {"split": "train"}})
    results["said"] = Mine.said
    board = accelerator.get_tracker("tensorboard")
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    mine = accelerator.get_tracker("mine")
    results["kinds"] = [type(board) is TensorBoardTracker, type(mine) is Mine, type(writer).__name__]
    results["count"] = len(accelerator.trackers)
    accelerator.trackers = [mine]
    accelerator.log({"loss": 0.25})
    results["assigned"] = [accelerator.trackers == [mine], Mine.said.pop()]
    accelerator.trackers.insert(0, board)
    accelerator.end_training()
    files = sorted(path.name for path in Path("logs/run").rglob("*") if path.is_file())
    results["files"] = [name.partition(".tfevents")[0] for name in files]
    results["filtered"] = [str(name) for name in filter_trackers(["wandb", "tensorboard", "tensorboard"], "logs")]
    results["available"] = [str(name) for name in get_available_trackers()]
    return results


@pytest.mark.needs("lens")
def test_what_a_run_can_have(tmp_path: Path) -> None:
    found = run_ranks(choices, 1, args=(str(tmp_path),), timeout_s=60)[0]
    assert found == {
        "no folder": "tracker-folder",
        "unknown": "tracker-unknown",
        "not installed": "tracker-missing",
        "no class": "tracker-shape",
        "nothing written": [],
        "registered": True,
        "log_with": ["mine", "tensorboard"],
        "said": [["run", {"tag": 1}], [{"loss": 0.5}, 2, {"split": "train"}]],
        "kinds": [True, True, "SummaryWriter"],
        "count": 2,
        "assigned": [True, [{"loss": 0.25}, None, {}]],
        "files": ["events.out", "hparams.yml"],
        "filtered": ["tensorboard"],
        "available": ["tensorboard"],
    }


def test_members_of_the_enumeration_are_names() -> None:
    from paceline_accelerate.errors import TrackerChoiceError
    from paceline_accelerate.kinds import LoggerType
    from paceline_accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    assert filter_trackers(LoggerType.ALL, "logs") == filter_trackers("all", "logs")
    every_member = [LoggerType(name) for name in LOGGER_TYPE_TO_CLASS if name in LoggerType]
    assert filter_trackers(every_member, "logs") == filter_trackers("all", "logs"), (
        "those without a package are left out"
    )
    with pytest.raises(TrackerChoiceError, match="requires a `logging_dir`"):
        filter_trackers(LoggerType.TENSORBOARD)
