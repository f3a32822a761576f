"""accelerate's argument classes, and what each says in our words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.compat.accelerate.kinds import DDPCommunicationHookType


class KwargsHandler:
    """Base of keyword bundles."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != _default(each)}  # type: ignore[arg-type]


def _default(each: Any) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


@dataclass
class DataLoaderConfiguration:
    """How loaders are divided over processes."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Folders of a run and the names of its checkpoints."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Sets the project's folder, and the folder of logs where none was named."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches make a window. `adjust_scheduler` does nothing, here as there."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DistributedDataParallel."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = DDPCommunicationHookType.NO
    comm_wrapper: Any = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """What our `replicate` strategy is told: fields that were set, under its names."""
        told = {name: value for name, value in self.to_kwargs().items() if name not in ("dim", "check_reduction")}
        for name in ("comm_hook", "comm_wrapper"):
            if name in told:
                told[name] = str(getattr(told[name], "value", told[name]))
        if "comm_state_option" in told:
            told["comm_state"] = told.pop("comm_state_option")
        return told


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group; the backend follows from the device."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of an autocast region."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of torch's profiler."""

    activities: list[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
