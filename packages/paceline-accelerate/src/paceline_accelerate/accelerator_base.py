"""`AcceleratorBase`: what the parts of accelerate's accelerator know of it beside the names of Paceline's own.

`accelerator.Accelerator` makes these parts, and so lies above them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from paceline.accelerator import Accelerator as NativeAccelerator
from paceline_accelerate.arguments import ProjectConfiguration
from paceline_accelerate.preparation import AcceleratePreparation
from paceline_accelerate.state import AcceleratorState

if TYPE_CHECKING:
    from paceline_deepspeed.engine import DeepSpeedEngine


class Engines(Protocol):
    """DeepSpeed's engines of an accelerator."""

    engines: list[DeepSpeedEngine]


class AcceleratorBase(NativeAccelerator):
    """Declares attributes; `accelerator.Accelerator` sets them, and has the methods.

    Attributes:
        state: what `AcceleratorState()` shows.
        step: micro-batches of the window so far.
        deepspeed: DeepSpeed's engines; None without them.
        project_configuration: the folders.
        parallelism_config: the axes that the script has asked for.
    """

    preparation: AcceleratePreparation
    state: AcceleratorState
    step: int
    deepspeed: Engines | None
    project_configuration: ProjectConfiguration
    parallelism_config: Any
    split_batches: Any
    use_stateful_dataloader: Any
