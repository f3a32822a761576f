"""`set_seed`: one seed for every source of random numbers in a process."""

from __future__ import annotations

import operator
import random

import numpy as np
import torch
import torch.distributed as dist

from paceline.base.errors import ConfigError
from paceline.config.keywords import checked_keywords
from paceline.world.layout import Layout
from paceline.world.world import World

_NUMPY_LIMIT = 2**32
_layout: Layout | None = None


def follow(layout: Layout) -> None:
    """Says which ranks read the same samples, and so draw alike in `set_seed(..., device_specific=True)`."""
    global _layout
    _layout = layout


@checked_keywords
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> int:
    """Seeds Python, NumPy and torch, on the CPU and on every accelerator.

    The order of samples does not hang on it: that is a pure function of the loader's own seed, epoch and position.

    Args:
        seed: 0 or more.
        device_specific: add the number of the share of samples that this process reads, so that each share gets other
            numbers (dropout, augmentation). That is the rank, but processes along tp, cp and pp compute one share
            together and draw alike. Leave it off while a model is made, so that all ranks begin alike.
        deterministic: let torch use deterministic algorithms alone: slower, and an operation that has none raises.

    Returns:
        The seed that this process now uses.

    Ranks: each seeds itself; nothing is communicated.

    Raises:
        ConfigError: `seed-value`.
    """
    try:
        number = operator.index(seed)  # also of NumPy's whole numbers and of True, which torch takes, too
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ConfigError(
            "seed-value",
            f"{seed!r} cannot be a seed.",
            why=f"set_seed got a {type(seed).__name__}; a seed is a whole number from 0 to 2**63 - 1",
            fix="set_seed(42)",
        )
    seed = number
    if device_specific:
        if not (dist.is_available() and dist.is_initialized()):
            seed += World.detect().rank
        elif _layout is None:
            seed += dist.get_rank()
        else:
            # Peers that compute the same samples together (tp, cp, pp) must draw the same numbers.
            seed += _layout.data_index(dist.get_rank())
    random.seed(seed)
    np.random.seed(seed % _NUMPY_LIMIT)
    torch.manual_seed(seed)  # every accelerator that torch knows, too
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return seed
