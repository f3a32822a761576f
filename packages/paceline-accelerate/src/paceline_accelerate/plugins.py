"""accelerate's argument classes for tensor parallel and for `torch.compile`.

The table in `engine_fields` says what becomes of each field; `paceline_accelerate.fsdp.said_by` reads the objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.base import env as environment
from paceline_accelerate.arguments import KwargsHandler
from paceline_accelerate.engine_fields import DYNAMO
from paceline_accelerate.kinds import DynamoBackend
from paceline_accelerate.said_fields import SaidFields


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallel over `tp_size` ranks."""

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchDynamoPlugin(KwargsHandler, SaidFields):
    """Options of `torch.compile`; fields that are left None are filled from ACCELERATE_DYNAMO_* variables.

    Raises:
        ValueError: an unknown backend.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        said = self.fill_from_environment(DYNAMO)
        for name in self.from_environment:
            if name not in ("backend", "mode"):
                setattr(self, name, environment.parse_bool(said[name]))
        backend = getattr(self.backend, "value", self.backend) or "NO"
        self.backend = DynamoBackend(str(backend).upper())
        self.mode = self.mode or "default"
        self.fullgraph = bool(self.fullgraph)
        self.use_regional_compilation = bool(self.use_regional_compilation)
        # A False asks for nothing, and must not override a flag.
        self.remember({name: value for name, value in said.items() if value is not False})

    def __bool__(self) -> bool:
        return not self.disable and self.backend != DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of `torch.compile` that differ from their defaults."""
        defaults = {
            "backend": "no",
            "mode": "default",
            "fullgraph": False,
            "dynamic": None,
            "options": None,
            "disable": False,
        }
        fields = self.to_dict()
        return {name: fields[name] for name, default in defaults.items() if fields[name] != default}
