"""`deepspeed.initialize`: reads the config, builds an `Accelerator` from it, and returns the engine and its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.accelerator import Accelerator
from paceline.compat.deepspeed.engine import DeepSpeedEngine
from paceline.config.deepspeed import read
from paceline.config.given import Given
from paceline.world.world import World


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Engine, optimizer, loader and scheduler of a config. Ranks: all."""
    told = read(config if config is not None else config_params)
    batch = told.batch(World.detect().size)
    window = Given("accumulate", batch.accumulate, "code", told.places.get("gradient_accumulation_steps", told.source))
    accelerator = Accelerator(plan=[*told.given, window])
    assert model is not None
    if optimizer is None:
        parameters = list(model_parameters) if model_parameters is not None else model.parameters()
        optimizer = torch.optim.AdamW(parameters, **told["optimizer.params"])
    engine = DeepSpeedEngine(accelerator, told, batch, model, optimizer)
    return engine, engine.optimizer, None, None


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Takes part in the process group."""


def add_config_arguments(parser: Any) -> Any:
    """Adds `--deepspeed` and `--deepspeed_config` to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="asks for DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's json file")
    return parser
