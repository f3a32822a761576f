"""`DrillOrders`: what the command tells the processes of a drill. It imports no torch, since the command reads it too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class DrillOrders:
    """What a process of a drill is told.

    Attributes:
        folder: where it writes its lines.
        checkpoints: where the checkpoints of the script go; "" where the script was told a folder itself.
        kind: of the script: "script" or "module".
        strike: the kind of `Fault` that strikes; "" for none.
        rank, step: where it strikes, and in which step: the one after so many.
    """

    folder: str
    checkpoints: str = ""
    kind: str = "script"
    strike: str = ""
    rank: int = 0
    step: int = -1

    def save(self) -> Path:
        """Writes the orders into the folder, and returns the file."""
        path = Path(self.folder) / "drill.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> DrillOrders:
        """Reads what `save` has written."""
        return cls(**json.loads(Path(path).read_text()))
