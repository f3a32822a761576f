"""`Runtime`: what a run takes from its surroundings. A rehearsal and a tuning trial put something else there.

    Runtime             a real run: devices, a process group that answers, files that are written
    RehearsalRuntime    `planner.rehearsal`: ranks that do not exist, tensors without values, no files
    ScriptNotes, Trial  `planner.trial`: the run is looked at, writes no files, and ends after the last measured step
    Recorder            `verify.recorder`: the same, and what it computes is recorded

A script constructs its `Accelerator` by itself, so that nobody can hand it a runtime. What builds a run looks it up once, with
`current`; `use` puts another one there, in a process that is thrown away afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from paceline.world import device as devices
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.config import RunSettings
    from paceline.world.collectives import Collectives


class PreparedRun(Protocol):
    """A run and what it has prepared, as `paceline.run.Run` shows it."""

    @property
    def plan(self) -> Any:
        """The plan of the models prepared last."""

    @property
    def prepared(self) -> Any:
        """What was prepared; its `models` are the prepared models."""


class Window(Protocol):
    """The micro-batches of a step, as `optim.accumulate.Accumulation` shows them."""

    @property
    def steps(self) -> int:
        """Micro-batches in a step."""

    @property
    def batch(self) -> Any:
        """What the loader says of the batch at hand; None without a prepared loader."""

    @property
    def declared(self) -> bool:
        """Whether the loop says where its micro-batches are."""


class Runtime:
    """The surroundings of a real run.

    Attributes:
        keeps_files: whether checkpoints and trackers write, and whether a run looks for a checkpoint to go on from.
        others_answer: whether the other ranks exist, and so answer what this one asks.
        compares_widths: whether runs of several widths are compared, so that samples come in one order at each, also where
            another library's own order is another on one process.
        chooses_kernels: whether optimizers may get kernels by the device of their parameters. A rehearsal for accelerators
            runs on the CPU, whose choice would not be theirs.
        backend: what a group of ranks that do not exist stands for, such as "gloo"; "" where the group itself says it.
    """

    keeps_files = True
    others_answer = True
    chooses_kernels = True
    compares_widths = False
    backend = ""

    def device(self, world: World, *, cpu: bool = False, index: int | None = None) -> torch.device:
        """The device of this process; see `device.detect`."""
        return devices.detect(world, cpu=cpu, index=index)

    def collectives(self, world: World, device: torch.device) -> Collectives | None:
        """Collective operations in the place of those over the process group; None for those."""
        return None

    def memory(self, device: torch.device, local_size: int) -> int:
        """Bytes that one rank may count on: its accelerator's, or its share of the host's."""
        if device.type != "cpu":
            return int(torch.accelerator.get_memory_info(device)[1])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_size

    def settings(self, settings: RunSettings) -> RunSettings:
        """The merged settings of a run, before anything is built of them."""
        return settings

    # -- what happens in the run -----------------------------------------------------------------------------

    def preparing(self, run: PreparedRun, models: Sequence[nn.Module]) -> None:
        """Called with the models that were given to `prepare`, before anything is done to them."""

    def prepared(self, run: PreparedRun) -> None:
        """Called after models were prepared."""

    def batches(self, steps: Iterator[Any]) -> Iterator[Any]:
        """What a loader yields on its way to the loop."""
        return steps

    def foreign_config(self, library: str, config: Any) -> Any:
        """Another library's config, as the script gave it, before it is read."""
        return config

    def micro_batch(self, inputs: object, samples: int) -> None:
        """Called where an engine is fed.

        Args:
            inputs: one micro-batch of this rank.
            samples: of one optimizer step over all ranks.
        """

    def backward(self, loss: torch.Tensor, scaled: torch.Tensor, num_items: object) -> None:
        """Called where a backward pass begins; of a pipeline, where it has ended.

        Args:
            loss: as the script gave it, 0-dim.
            scaled: what the window's scale made of it, loss scaling not included; its mean over the ranks that read
                different samples is what this micro-batch adds to the loss of the step.
            num_items: what the script said of items that `loss` sums over; None where it said nothing.
        """

    def logged(self, values: Mapping[str, object], step: int | None) -> None:
        """Called on each rank with what the script logs."""

    def gathered(self, how: str, values: object, result: object) -> None:
        """Called where the script has gathered values of all ranks.

        Args:
            how: name of the method: "gather", "reduce" or "gather_for_metrics".
        """

    def stepped(self, optimizer: torch.optim.Optimizer, window: Window) -> None:
        """Called after each step of a prepared optimizer, those that an overflow has skipped included."""


_current = Runtime()


def current() -> Runtime:
    """The runtime of this process."""
    return _current


def use(runtime: Runtime) -> None:
    """Puts a runtime in the place of the current one, before the run is built."""
    global _current
    _current = runtime
