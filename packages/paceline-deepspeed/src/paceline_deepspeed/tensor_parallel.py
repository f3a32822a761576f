"""`deepspeed.tp_model_init`: a script says before `initialize` over how many ranks the layers of a model are divided."""

from __future__ import annotations

from typing import Any

from torch import nn

_SIZE = "_paceline_tp_size"


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any = None, config: Any = None, **others: Any) -> nn.Module:
    """Notes the number of ranks at a model, and returns the model; `initialize` divides it, as the config says too.

    Args:
        tp_size: ranks that divide each layer.
        dtype, config, others: are accepted and have no effect; `initialize` gets the config.
    """
    vars(model)[_SIZE] = tp_size
    return model


def noted_size(model: object) -> int:
    """Returns the number of ranks that `tp_model_init` has noted; 1 without it."""
    return int(getattr(model, _SIZE, 1))
