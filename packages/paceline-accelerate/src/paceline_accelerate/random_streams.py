"""`accelerate.utils.random`: random streams that all processes share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline_accelerate.errors import CompatAssertionError, CompatValueError
from paceline_accelerate.kinds import RNGType, text_of
from paceline_accelerate.state import PartialState
from paceline_doors.absent import refuse


def synchronize_rng_state(rng_type: object = None, generator: torch.Generator | None = None) -> None:
    """Gives every process rank 0's random stream of one kind.

    Args:
        rng_type: an `RNGType` or its value; None is torch's on the CPU.
        generator: for the kind "generator".

    Ranks: all.

    Raises:
        CompatAssertionError: `compat-argument`, for a device that is not here, or "generator" without one.
        CompatValueError: `compat-argument`, for a kind that there is not.
    """
    kind = "torch" if rng_type is None else text_of(rng_type)
    if kind not in RNGType:
        raise CompatValueError(
            "compat-argument",
            f"{kind!r} is not a valid RNGType.",
            why=f"known: {', '.join(RNGType.list())}",
            fix='use "torch" or "generator"',
        )
    if kind == "xla":
        refuse("synchronize_rng_state('xla')", "TPUs are not driven here", "use 'torch'")
    state = PartialState()
    if kind == "generator":
        if generator is None:
            raise CompatAssertionError(
                "compat-argument",
                "there is no generator to synchronise.",
                why='rng_type is "generator", and generator is None',
                fix="pass `generator=`",
            )
        if state.num_processes > 1:
            generator.set_state(state.collectives.broadcast(generator.get_state()))
        return
    if kind == "torch":
        if state.num_processes > 1:
            torch.set_rng_state(state.collectives.broadcast(torch.get_rng_state()))
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        raise CompatAssertionError(
            "compat-argument",
            f"random streams of {kind!r} cannot be synchronised.",
            why=f"this process computes on {state.device}",
            fix='use "torch"',
        )
    device = torch.get_device_module(kind)
    device.set_rng_state(state.collectives.broadcast(device.get_rng_state()))


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Sends rank 0's random streams of several kinds to all ranks. Ranks: all."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)
