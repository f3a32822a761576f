"""accelerate's argument classes, and what each says in our words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.compat.accelerate.errors import CompatValueError
from paceline.compat.accelerate.kinds import DDPCommunicationHookType
from paceline.compat.accelerate.said_fields import SaidFields


class KwargsHandler:
    """Base of keyword bundles."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]

    def to_kwargs(self) -> dict[str, Any]:
        """Fields that differ from those of an object for which nobody has said anything, in code or by a variable."""
        with environment.patched(dict.fromkeys(environment.snapshot())):
            defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


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


_HOOKS = ("comm_hook", "comm_wrapper", "comm_state_option")


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

    def to_dict(self, ignore_keys: tuple[str, ...] = _HOOKS) -> dict[str, Any]:
        """All fields but those that say how gradients travel, which are no arguments of DistributedDataParallel."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Registers what the three fields say with a model that DistributedDataParallel wraps."""
        from paceline.parallel.data.communication_hooks import install

        options = self.options()
        if "comm_hook" in options:
            wrapper = options.get("comm_wrapper", "none")
            install(model, options["comm_hook"], wrapper, model.process_group, options.get("comm_state", {}))

    def options(self) -> dict[str, Any]:
        """What our `replicate` strategy is told: fields that were set, under its names."""
        options = self.to_kwargs()
        for name in ("dim", "check_reduction"):  # which `replicate` has no use for
            options.pop(name, None)
        for name in ("comm_hook", "comm_wrapper"):
            value = getattr(self, name)
            word = str(getattr(value, "value", value))
            if word != "no":
                options[name] = word
        state = dict(self.comm_state_option)
        if options.get("comm_hook") in ("power_sgd", "batched_power_sgd"):
            # accelerate leaves the first step that is compressed to torch, whose default this is.
            state.setdefault("start_powerSGD_iter", 1000)
        if state:
            options["comm_state"] = state
        return options


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler, SaidFields):
    """Options of the process group; the backend follows from the device."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        given_values = {name: value for name, value in self.to_dict().items() if value is not None}
        if self.timeout is None:
            # torch's own, for NCCL and for all others.
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)
        self.remember(given_values)


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

    def build(self) -> Any:
        """torch's profiler with these options.

        Raises:
            CompatValueError: `compat-argument`, for an activity that the profiler does not know.
        """
        from torch import profiler

        kinds = {name.lower(): kind for name, kind in profiler.ProfilerActivity.__members__.items()}
        unknown = [name for name in self.activities or [] if name.lower() not in kinds]
        if unknown:
            raise CompatValueError(
                "compat-argument",
                f"ProfileKwargs: activities cannot hold {unknown!r}.",
                why=f"torch's profiler knows: {', '.join(kinds)}",
                fix='write activities=["cpu"]',
            )
        activities = [kinds[name.lower()] for name in self.activities or []]
        schedule = profiler.schedule(**self.schedule_option) if self.schedule_option else None
        return profiler.profile(
            activities=activities or None,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
