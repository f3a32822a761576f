"""`RunIds` stores which run each tracker writes, so that a run that is started again continues the same ones.

runs/digits/trackers.json      {"version": 1, "launched": "a1b2", "ids": {"mlflow": "6f0c...", "wandb": "x7k2p1qd"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.base import env
from paceline.base.files import replace_text
from paceline.base.log import logger

VERSION = 1


class RunIds:
    """The file with the ids of one run.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trackers.json"

    def earlier(self, *, goes_on: bool) -> dict[str, str]:
        """Returns the ids of the runs that this process continues, by the name of the tracker.

        Args:
            goes_on: whether training continues from a checkpoint. Processes that `paceline launch` has started again continue
                their runs in any case.
        """
        if not self.path.exists():
            return {}
        record = json.loads(self.path.read_text(encoding="utf-8"))
        if record.get("version") != VERSION:
            logger("observe").warning("%s is of another version: trackers begin new runs.", self.path)
            return {}
        launched = _launched()
        is_same_launch = launched != "" and record["launched"] == launched
        if not (goes_on or is_same_launch):
            return {}
        return dict(record["ids"])

    def write(self, ids: Mapping[str, str]) -> None:
        """Stores the ids of this process's runs in addition to those of the same launch. The file is replaced as a whole."""
        all_ids = {**self.earlier(goes_on=False), **ids}
        record = {"version": VERSION, "launched": _launched(), "ids": all_ids}
        replace_text(self.path, json.dumps(record, indent=1) + "\n")


def _launched() -> str:
    """Returns the name that the launcher gave this run; "" without a launcher."""
    return str(env.get("PACELINE_RUN"))
