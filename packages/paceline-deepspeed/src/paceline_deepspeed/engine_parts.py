"""`Engine`: what the parts of an engine know of it. `engine.DeepSpeedEngine` is built of them, and so lies above them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from paceline.accelerator import Accelerator
from paceline_deepspeed.config import Batch, DeepSpeedConfig
from paceline_deepspeed.config_view import ConfigView

if TYPE_CHECKING:
    from paceline_deepspeed.attendance import Attendance


class Engine(Protocol):
    """The state of an engine, as its parts read it. `DeepSpeedEngine` says what each attribute is."""

    accelerator: Accelerator
    view: ConfigView
    optimizer: Any
    lr_scheduler: Any
    attendance: Attendance
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int

    @property
    def config(self) -> DeepSpeedConfig: ...

    @property
    def batch(self) -> Batch: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def prepared_model(self) -> nn.Module: ...

    @property
    def steps_in_window(self) -> int: ...

    def restart_window(self, done: int) -> None: ...

    def shuffles(self) -> bool: ...

    def get_lr(self) -> list[float]: ...

    def get_mom(self) -> list[Any]: ...
