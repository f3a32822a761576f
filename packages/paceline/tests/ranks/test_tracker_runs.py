"""A run that goes on from its checkpoint goes on in the same runs of its trackers, on the main process alone."""

from __future__ import annotations

from pathlib import Path

from paceline.testing import run_ranks


def life(folder: str, order: str) -> list[str]:
    """What a tracker was told in one life of a run."""
    import torch

    from paceline import Accelerator

    class Numbered:
        name = "numbered"
        said: list[str]

        def __init__(self) -> None:
            self.said = []

        def run_id(self) -> str:
            return "r1"

        def resume(self, run_id: str) -> None:
            self.said.append(f"goes on with {run_id}")

        def start(self, run, config) -> None:
            self.said.append("start")

        def log(self, values, step=None) -> None:
            self.said.append("log")

        def finish(self, status="finished") -> None:
            self.said.append(status)

    tracker = Numbered()
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if order == "resumes":
        accelerator.resume()
    accelerator.init_trackers("digits")
    if order == "resumes late":
        accelerator.resume()
    accelerator.log({"loss": 1.0})
    if order == "begins":
        accelerator.save_state()
    accelerator.end_training()
    return tracker.said


def test_who_goes_on(tmp_path: Path) -> None:
    anew = ["start", "log", "finished"]
    # Where trackers begin before the script has resumed, nothing says that it will.
    lives = {"begins": anew, "resumes": ["goes on with r1", *anew], "resumes late": anew}
    for order, expected in lives.items():
        assert run_ranks(life, 2, args=(str(tmp_path), order), timeout_s=60) == [expected, []], order
