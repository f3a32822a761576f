"""What one process has recorded of a run, as JSON: a header, and events in the order in which they happened.

    {"kind": "initial",  "weights": {name: sketch}}                     before `prepare` has touched the models
    {"kind": "prepared", "random": {...}}                               after it; "random" as of a step
    {"kind": "batch",    "rows": [digest], "real": n}                   a prepared loader has given a batch
    {"kind": "forward",  "rows": [digest], "training": b, "grad": b, "stream": digest}
    {"kind": "backward", "loss": x, "scaled": x, "items": n,           the loss as the script gave it, and as it counts;
                         "draws": [generator]}                          what the forward pass has drawn from
    {"kind": "step",     "optimizer": n, "rates": [x], "gradients": {name: sketch}, "weights": ..., "buffers": ...,
                         "random": {"torch": digest, "numpy": digest, "python": digest}}
    {"kind": "logged",   "values": {name: x}, "step": n}
    {"kind": "gathered", "how": name, "num_rows": n}

A sketch is a short list of numbers that stands for a tensor (see `sketch.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class Recording:
    """One process' part of a run.

    Attributes:
        rank: of the process.
        data_index, width: which share of each batch it read, of how many.
        accumulate: micro-batches in a step, as the settings say.
        declared: whether the loop says where its micro-batches are.
        random_layers: modules that draw random numbers in training.
        batch_norms: modules that keep statistics of batches; `batch_norm_statistics` is what the plan does with them.
        samplers: classes of the samplers of loaders that the script iterates without having prepared them.
        trainable: trainable parameters of prepared models.
        dtype: in which most of the first model is computed, such as "float32".
        bare: whether the script has constructed no `Accelerator`.
        events: what happened, in order.
    """

    rank: int = 0
    data_index: int = 0
    width: int = 1
    accumulate: int = 1
    declared: bool = False
    random_layers: list[str] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    batch_norm_statistics: str = ""
    samplers: list[str] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    dtype: str = "float32"
    bare: bool = False
    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, **values: Any) -> Event:
        """Adds an event, which the caller may complete later."""
        event: Event = {"kind": kind, **values}
        self.events.append(event)
        return event

    def write(self, folder: Path) -> None:
        """Writes `rank<n>.json`, the file of this process."""
        (folder / f"rank{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Reads what `write` wrote."""
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**content)

    def of_kind(self, kind: str) -> Sequence[Event]:
        """Returns the events of one kind."""
        return [event for event in self.events if event["kind"] == kind]


def prefix_of(number: int) -> str:
    """Returns what stands before the names of a model's tensors; "" for the first model, since most scripts have only one."""
    return f"model{number}." if number else ""


def number_of(item: object, earlier: list[Any]) -> int:
    """Returns the place of an object in a list, to which it is added if it is new.

    `list.index` would compare by `==`, which a class of optimizers may define in its own way.
    """
    for place, other in enumerate(earlier):
        if other is item:
            return place
    earlier.append(item)
    return len(earlier) - 1


def read_all(folder: Path) -> list[Recording]:
    """Returns the recordings of all processes, by rank."""
    recordings = [Recording.read(path) for path in folder.glob("rank*.json")]
    return sorted(recordings, key=lambda recording: recording.rank)
