"""accelerate's argument classes that say what a plan says: DeepSpeed, tensor parallel, dynamo.

What each field comes to stands in `paceline.compat.accelerate.engine_fields`; `compat.fsdp.said_by` reads the objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.base import env as environment
from paceline.compat.accelerate.arguments import KwargsHandler
from paceline.compat.accelerate.engine_fields import DYNAMO, ROWS
from paceline.compat.accelerate.kinds import DynamoBackend
from paceline.compat.accelerate.said_fields import SaidFields


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
        env = environment.snapshot()
        said: dict[str, Any] = {}
        for name, value in vars(self).items():
            if value is not None and value is not False:
                said[name] = value
        from_environment: list[str] = []
        for row in ROWS:
            if row.owner != DYNAMO or not row.variable:
                continue
            text = env.get(row.variable)
            if text and getattr(self, row.attribute) is None:
                is_word = row.attribute in ("backend", "mode")
                value = text if is_word else environment.parse_bool(text)
                setattr(self, row.attribute, value)
                said[row.attribute] = text
                from_environment.append(row.attribute)
        self.from_environment = tuple(from_environment)
        backend = getattr(self.backend, "value", self.backend) or "NO"
        self.backend = DynamoBackend(str(backend).upper())
        self.mode = self.mode or "default"
        self.fullgraph = bool(self.fullgraph)
        self.use_regional_compilation = bool(self.use_regional_compilation)
        self.remember(said)

    def __bool__(self) -> bool:
        return not self.disable and self.backend != DynamoBackend.NO

    def to_dict(self) -> dict[str, Any]:
        """All fields, the backend as torch spells it."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that differ from their defaults."""
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
