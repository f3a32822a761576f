"""`deepspeed.checkpointing`: functions whose activations are computed again in the backward pass, on torch's own.

`configure(...)` or the config's block `activation_checkpointing` say how; without either, the defaults hold. Random
draws and autocast are those of the first time, nested calls and keyword arguments work, and inputs need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from paceline.base.errors import ConfigError
from paceline.base.log import warn_once
from paceline.run.run import live_runs
from paceline.world import runtime
from paceline_deepspeed.config import DeepSpeedConfig, read
from paceline_deepspeed.device import get_accelerator
from paceline_deepspeed.timers import timed


@dataclass
class _Choices:
    """How functions are recomputed."""

    configured: bool = False  # whether anyone said so
    on_host: bool = False  # inputs that are kept lie in the host's memory
    profile: bool = False  # each call is timed


_chosen = _Choices()


def configure(
    mpu_: object = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Says how `checkpoint` works from now on.

    Args:
        mpu_: not needed.
        deepspeed_config: a file or a dict, whose block `activation_checkpointing` counts where no argument is given.
        partition_activations: dividing kept inputs over tensor-parallel ranks: there are none, so it changes nothing.
        contiguous_checkpointing, num_checkpoints: one buffer for kept inputs: torch's allocator needs none.
        checkpoint_in_cpu: kept inputs lie in the host's memory.
        synchronize: waiting for the device around each call: done where calls are timed.
        profile: times each call, forward and backward, and logs both once a step.

    Raises:
        ConfigError: `deepspeed-checkpointing`, where a buffer is asked for without its size; those of the config.
    """
    config = None
    if deepspeed_config is not None:
        config = read(runtime.current().foreign_config("deepspeed", deepspeed_config))

    def choice(argument: object, key: str) -> Any:
        """Returns the argument where it was given, else the config's value."""
        if argument is not None or config is None:
            return argument
        return config[f"activation_checkpointing.{key}"]

    partitioned = choice(partition_activations, "partition_activations")
    contiguous = choice(contiguous_checkpointing, "contiguous_memory_optimization")
    if contiguous and choice(num_checkpoints, "number_checkpoints") is None:
        raise ConfigError(
            "deepspeed-checkpointing",
            "contiguous checkpointing was asked for without the number of checkpoints.",
            why="contiguous_checkpointing=True, num_checkpoints=None: the buffer's size is not known",
            fix="leave contiguous_checkpointing out: torch's allocator needs no such buffer",
        )
    for key, is_on in (("partition_activations", partitioned), ("contiguous_memory_optimization", contiguous)):
        if is_on:
            warn_once(
                "compat",
                f"activation_checkpointing.{key} changes nothing here: kept inputs are whole, one after the other. "
                "Leave it out; `cpu_checkpointing` saves the device's memory.",
            )
    _chosen.configured = True
    _chosen.on_host = bool(choice(checkpoint_in_cpu, "cpu_checkpointing"))
    _chosen.profile = bool(choice(profile, "profile"))


def follow(config: DeepSpeedConfig) -> None:
    """Takes what an engine's config says, unless `configure` was called."""
    if not _chosen.configured and any(name.startswith("activation_checkpointing.") for name in config.places):
        _chosen.configured = True
        _chosen.on_host = bool(config["activation_checkpointing.cpu_checkpointing"])
        _chosen.profile = bool(config["activation_checkpointing.profile"])


def is_configured() -> bool:
    """Whether `configure` was called, or an engine's config has the block."""
    return _chosen.configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` and keeps its inputs alone; the rest is computed again in the backward pass."""
    if _chosen.profile:
        return timed(_recomputed)(function, *args, **kwargs)
    return _recomputed(function, *args, **kwargs)


def _recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    saving: AbstractContextManager[Any] = nullcontext()
    if _chosen.on_host and torch.accelerator.is_available():
        saving = torch.autograd.graph.save_on_cpu(pin_memory=True)
    with saving:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def do_nothing(*args: object, **keywords: object) -> None:
    """Does nothing: nothing is kept between steps, no buffer needs the number of layers, and there are no tensor-parallel
    ranks to divide inputs over.
    """


reset = set_num_layers = partition_activations_in_checkpoint = do_nothing


class CudaRNGStatesTracker:
    """Named random streams of this process's device.

    Example:
        >>> tracker.add("dropout", 1234)
        >>> with tracker.fork("dropout"): x = dropout(x)
    """

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begins a stream.

        Raises:
            ConfigError: `deepspeed-stream`, where there is one of that name.
        """
        if name in self.states_:
            raise ConfigError(
                "deepspeed-stream",
                f"there is a random stream called {name!r} already.",
                why=f"streams: {', '.join(self.states_)}",
                fix="call `reset()` first, or take another name",
            )
        # A state is made by the generator itself; afterwards its own draws go on as if nothing had happened.
        generator = _generator()
        before = generator.get_state()
        generator.manual_seed(seed)
        self.states_[name] = generator.get_state()
        generator.set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Takes the draws inside from a stream, which goes on where it was.

        Raises:
            ConfigError: `deepspeed-stream`, for one that was not added.
        """
        if name not in self.states_:
            raise ConfigError(
                "deepspeed-stream",
                f"there is no random stream called {name!r}.",
                why=f"streams: {', '.join(self.states_) or 'none'}",
                fix=f"begin it: `get_cuda_rng_tracker().add({name!r}, seed)`, or call model_parallel_cuda_manual_seed(seed)",
            )
        generator = _generator()
        before = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device for what is alike on all ranks, and a stream for what would differ over tensor-parallel ranks."""
    _tracker.reset()
    _generator().manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)  # the offset is DeepSpeed's, so that scripts draw the same numbers


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def _generator() -> torch.Generator:
    """Returns the default generator of the device on which this process computes."""
    runs = live_runs()
    kind = runs[0].device.type if runs else get_accelerator().device_name()
    if kind == "cpu":
        return torch.default_generator
    generators = torch.get_device_module(kind).default_generators
    generator: torch.Generator = generators[torch.accelerator.current_device_index()]
    return generator
