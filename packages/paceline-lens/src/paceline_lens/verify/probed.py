"""`ProbedScript` runs a script up to the first call of its model in training, and probes that model with that batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base import env as environment
from paceline.launch.job import Target
from paceline.launch.worker.worker import become, leave
from paceline.torch_internals.replaced import replaced
from paceline_lens.verify.isolation import IsolationReport, Leak, probed

_FILE = "isolation.json"


class ProbedScript:
    """Probes the model of a script.

    Args:
        folder: where the report goes.
        laws: which laws hold: keyword arguments of `isolation`.
    """

    def __init__(self, folder: Path, laws: dict[str, Any]) -> None:
        self._folder = folder
        self._laws = laws
        self._depth = 0

    def run(self, target: Target, compat: str) -> None:
        """Runs the script in this process, which ends without returning from here."""
        with replaced(nn.Module, "__call__", self._noting(nn.Module.__call__)):
            become(target.on(environment.get("LOCAL_RANK") or 0), compat)

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
            if self._depth or not is_trained:
                return original(module, *args, **kwargs)
            self._depth += 1  # calls from here on are those of the probes
            report = probed(module, args, kwargs, **self._laws)
            content = {"laws": report.laws, "leaks": list(map(asdict, report.leaks))}
            (self._folder / _FILE).write_text(json.dumps(content), encoding="utf-8")
            return leave(0)

        return call


def read_report(folder: Path) -> IsolationReport | None:
    """Returns the report of a run; None if its script never called a model in training."""
    path = folder / _FILE
    if not path.exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    return IsolationReport(content["laws"], [Leak(**leak) for leak in content["leaks"]])
