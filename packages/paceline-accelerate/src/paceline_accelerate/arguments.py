"""The classes of accelerate's arguments: keyword bundles for `Accelerator(kwargs_handlers=...)`, and configurations.

Some translate themselves into Paceline's options; `accelerator_arguments` and `accelerator` call those methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.kinds import DDPCommunicationHookType, text_of
from paceline_accelerate.said_fields import SaidFields


class KwargsHandler:
    """Base class of keyword bundles; subclasses are dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields; of a subclass that is no dataclass all attributes."""
        if not is_dataclass(self):
            return dict(vars(self))
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        # Some classes fill their fields from variables, so the defaults are those under an empty environment.
        with environment.patched(dict.fromkeys(environment.snapshot())):
            defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class DataLoaderConfiguration:
    """Says how loaders are divided over processes."""

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
        """Sets the project's folder, which is the folder of logs too unless that was named."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Says how many micro-batches make an optimizer step. `adjust_scheduler` has no effect, as under accelerate."""

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
        """Returns all fields but those of communication hooks, which are no arguments of DistributedDataParallel."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Registers the communication hook of the three fields with a model that DistributedDataParallel wraps."""
        from paceline_large.compression.hooks import install

        options = self.options()
        if "comm_hook" in options:
            wrapper = options.get("comm_wrapper", "none")
            install(model, options["comm_hook"], wrapper, model.process_group, options.get("comm_state", {}))

    def options(self) -> dict[str, Any]:
        """Returns the options of Paceline's `replicate` strategy: the fields that were set, under its names."""
        options = self.to_kwargs()
        # These say how DDP itself works; `replicate` needs none of them.
        for name in ("dim", "check_reduction", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"):
            options.pop(name, None)
        for name in ("comm_hook", "comm_wrapper"):
            word = text_of(getattr(self, name))
            if word != "no":
                options[name] = word
        state = dict(self.comm_state_option)
        if options.get("comm_hook") in ("power_sgd", "batched_power_sgd"):
            # torch's own default for the first step that is compressed, which accelerate does not change.
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
    """Options of the process group. `backend` has no effect: the backend follows from the device."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        given_values = {name: value for name, value in self.to_dict().items() if value is not None}
        if self.timeout is None:
            # torch's own defaults, for NCCL and for all other backends.
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
        """Returns torch's profiler with these options.

        Raises:
            CompatValueError: `compat-argument`, for an activity that the profiler does not know.
        """
        from torch import profiler

        names = self.activities or []
        members = profiler.ProfilerActivity.__members__.items()
        activity_of = {name.lower(): activity for name, activity in members}
        unknown = [name for name in names if name.lower() not in activity_of]
        if unknown:
            raise CompatValueError(
                "compat-argument",
                f"ProfileKwargs: activities cannot hold {unknown!r}.",
                why=f"torch's profiler knows: {', '.join(activity_of)}",
                fix='write activities=["cpu"]',
            )
        activities = [activity_of[name.lower()] for name in names]
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
