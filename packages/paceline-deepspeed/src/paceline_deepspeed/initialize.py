"""`deepspeed.initialize`: reads the config, builds an `Accelerator` from it, and returns the engine and its parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.accelerator import Accelerator, start_accelerator
from paceline.base import env as environment
from paceline.base import wording
from paceline.base.log import warn_once
from paceline.config.given import Given
from paceline.config.overrides import Overrides
from paceline.run.starting import RunArguments
from paceline.world.world import World
from paceline_deepspeed import around_forward, checkpointing, optimizers, schedules
from paceline_deepspeed.arguments import checked, sizes_for_auto
from paceline_deepspeed.config import Batch, DeepSpeedConfig
from paceline_deepspeed.engine import DeepSpeedEngine
from paceline_deepspeed.loader import loader_of
from paceline_deepspeed.phrases import PHRASES
from paceline_deepspeed.processes import init_distributed
from paceline_deepspeed.profiling import wall_clock_settings
from paceline_deepspeed.semantics import DEEPSPEED
from paceline_deepspeed.width import data_ranks

# DeepSpeed leaves batch norms and buffers as they are on each rank, gives each parameter a gradient, and trains with losses
# that were computed with the model itself.
_AS_THERE = {
    "batch_norm.statistics": "local",
    "replicate.broadcast_buffers": False,
    "replicate.unused": "zeros",
    "shard.broadcast_buffers": False,
    "zero.broadcast_buffers": False,
}

_WORDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # what `mixed_precision` calls them


def build(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: object = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Returns the engine, the optimizer, the loader and the scheduler that a config describes.

    Args:
        args: parsed arguments, of which `deepspeed_config` and `local_rank` are read.
        model: the model to train; a `PipelineModule` gets a `PipelineEngine`.
        optimizer: an optimizer, or a function that makes one from parameters; it is used in place of the config's.
        model_parameters: the tensors or groups that the config's optimizer steps; None for all that are trained.
        training_data: a dataset. The returned loader gives micro-batches of it, shuffled alike on all ranks.
        lr_scheduler: a scheduler, or a function that makes one from the optimizer; it is used in place of the config's.
        mpu: model-parallel groups, which must be those of the plan: `tensor_parallel.autotp_size` neighbours each.
        dist_init_required: False if the script initializes the process group itself.
        collate_fn: the loader's.
        config, config_params: a dict, or the path of a JSON file.
        distributed_port, mesh_param: are accepted and have no effect.

    Ranks: all.

    Raises:
        ConfigError, PlanError: before anything is touched, all problems at once.
    """
    engine_class = _engine_of(model)
    parsed = checked(
        args,
        model,
        mpu,
        config,
        config_params,
        pipeline=engine_class is not DeepSpeedEngine,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
        training_data=training_data,
    )
    assert model is not None
    # transformers has replaced "auto" in its config.
    for notice in parsed.notices_beside(sizes_for_auto(model)):
        warn_once("config", notice)
    # Whether the batch divides is known before the group is formed, so that a wrong one raises on every rank.
    ranks = data_ranks(parsed, World.detect().size, environment.snapshot())
    # DeepSpeed learns from mpu alone that the ranks which divide layers share their samples. Without it, each counts in
    # `train_batch_size`, as in what transformers writes for "auto".
    if mpu is None:
        ranks *= max(1, parsed["tensor_parallel.autotp_size"])
    batch = parsed.batch(engine_class.width(model, ranks))
    init_distributed(dist_init_required=dist_init_required)

    half = _half_dtype(parsed, model, is_stepped=optimizer is not None or parsed["optimizer.type"] is not None)
    settings = [*_settings(parsed, batch), *engine_class.settings(model, batch, training_data, collate_fn)]
    is_asked = parsed["fp16.enabled"] or parsed["bf16.enabled"]
    if half is not None and not is_asked:
        place = f"parameters of the model are {str(half).removeprefix('torch.')}"
        settings.append(Given("mixed_precision", _WORDS[half], "code", place))
    trains = engine_class.trains(parsed, optimizer)
    accelerator = _accelerator(model, parsed, batch, settings, trains, half)
    checkpointing.follow(parsed)

    chosen_optimizer = optimizers.chosen(parsed, model, optimizer, model_parameters)
    scheduler = None
    if chosen_optimizer is not None:
        scheduler = _scheduler(parsed, chosen_optimizer, lr_scheduler)
    loader = None
    if training_data is not None:
        drop_last = parsed["dataloader_drop_last"]
        loader = loader_of(training_data, batch.micro, collate_fn, drop_last, engine_class.shuffles())
    engine = engine_class(
        accelerator, parsed, batch, model, chosen_optimizer, scheduler, loader, optimizer, lr_scheduler
    )
    if (
        trains
    ):  # the script may give the model again, with another optimizer, and its parameters stay what they are then
        for module in {engine.module, engine.prepared_model}:
            vars(module)[_ENGINE] = _EngineOfModel(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


@wraps(build)
def initialize(*arguments: Any, **keywords: Any) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    wording.use(PHRASES)  # such a script has no other names for what errors tell it to do
    return build(*arguments, **keywords)


class _EngineOfModel:
    """The engine that has prepared a model: an attribute of the model, which its copies do not take over."""

    def __init__(self, engine: DeepSpeedEngine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_EngineOfModel], tuple[()]]:
        return _EngineOfModel, ()


_ENGINE = "_paceline_engine"


def _engine_before(model: nn.Module) -> DeepSpeedEngine | None:
    """Returns the engine that has prepared a model; None if there is none, or if it only evaluates and has changed nothing.

    A script may give its model to `initialize` again: to train it with another optimizer, or, as trl's DPO does, because the
    first engine only evaluates. A model is prepared once, so the new engine takes over the accelerator of the old one.
    """
    reference: _EngineOfModel | None = vars(model).get(_ENGINE)
    return None if reference is None else reference.engine


def _accelerator(
    model: nn.Module,
    parsed: DeepSpeedConfig,
    batch: Batch,
    settings: list[Given],
    trains: bool,
    half: torch.dtype | None,
) -> Accelerator:
    """Returns the accelerator that will prepare a model: a new one, or that of the engine which has prepared it before."""
    engine_before = _engine_before(model)
    if engine_before is None:
        if half is not None:
            _set_dtypes(model, half, trains)
        scaler = scaler_options(parsed) if half is torch.float16 else None
        new = start_accelerator(RunArguments(overrides=Overrides(plan=settings), scaler=scaler, semantics=DEEPSPEED))
        if half is not None and _engine_of(model) is DeepSpeedEngine:  # a pipeline runs its layers itself
            around_forward.compute_alike(model, new.autocast)
        return new
    accelerator = engine_before.accelerator
    if engine_before.optimizer is not None:
        accelerator.clear()
        engine_before.give_up()
    accelerator.gradient_accumulation_steps = batch.accumulate
    _say_what_differs(engine_before.config, parsed)
    return accelerator


def _say_what_differs(before: DeepSpeedConfig, now: DeepSpeedConfig) -> None:
    """Says which settings have no effect, because the model was prepared by an earlier config."""
    earlier_values = {setting.name: setting.value for setting in before.given}
    for setting in now.given:
        earlier_value = earlier_values.get(setting.name)
        if earlier_value != setting.value:
            warn_once(
                "compat",
                f"{setting.name} stays {earlier_value}, and does not become {setting.value}: an earlier call of "
                "`deepspeed.initialize` got this model.",
            )


def _settings(config: DeepSpeedConfig, batch: Batch) -> list[Given]:
    """Returns the settings that follow from a config, for any model."""
    place = config.places.get("gradient_accumulation_steps", config.source)
    return [
        *config.given,
        *wall_clock_settings(config),
        # Whatever a command line, a variable or a file says is stronger than these.
        *(Given(f"options.{name}", value, "default", "as under DeepSpeed") for name, value in _AS_THERE.items()),
        Given("accumulate", batch.accumulate, "code", place),
    ]


def scaler_options(config: DeepSpeedConfig | Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's fp16 block as keywords for `Accelerator(scaler=...)`.

    Args:
        config: values by dotted name.

    A step whose loss is not finite is skipped like any other overflow, as scripts written for DeepSpeed expect. At stage 0
    of ZeRO an overflow at the minimum of the scale is skipped too, because DeepSpeed ends the run at the other stages alone.
    """
    # A fixed scale: by factors of 1 neither an overflow nor a row of good steps changes it.
    if config["fp16.loss_scale"]:
        return {
            "init_scale": float(config["fp16.loss_scale"]),
            "growth_factor": 1.0,
            "backoff_factor": 1.0,
            "bad_loss": "skip",
        }
    at_minimum = "raise"
    if config["zero_optimization.stage"] == 0:
        at_minimum = "skip"
    return {
        "init_scale": 2.0 ** config["fp16.initial_scale_power"],
        "growth_interval": config["fp16.loss_scale_window"],
        "growth_delay": 1,
        "hysteresis": config["fp16.hysteresis"],
        "consecutive_hysteresis": config["fp16.consecutive_hysteresis"],
        "min_scale": float(config["fp16.min_loss_scale"]),
        "bad_loss": "skip",
        "at_minimum": at_minimum,
    }


def _half_dtype(config: DeepSpeedConfig, model: nn.Module, *, is_stepped: bool) -> torch.dtype | None:
    """Returns the dtype of 16 bits in which a model is computed; None where it is computed in that of its parameters.

    ZeRO steps float32 copies of the parameters, also where the config says nothing and the script has loaded its model in
    16 bits; for float16 it then scales the loss too, by the config's `fp16` block or its defaults. Stage 0 steps parameters as
    they are.

    Args:
        config: what was asked for.
        model: the script's.
        is_stepped: whether the engine has an optimizer.
    """
    if config["fp16.enabled"]:
        return torch.float16
    if config["bf16.enabled"]:
        return torch.bfloat16
    is_said = any(given.name == "mixed_precision" for given in config.given)
    if is_said or not (is_stepped and config["zero_optimization.stage"]):
        return None
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if dtype in _WORDS else None


def _set_dtypes(model: nn.Module, half: torch.dtype, trains: bool) -> None:
    """Gives the parameters of a model the dtypes in which they are kept, in place.

    DeepSpeed makes all of them 16 bits, and steps float32 copies. Here those that are trained are float32 themselves, since
    small steps would be lost in 16 bits, and autocast computes in 16 bits. Others are kept in 16 bits, which takes half of the
    memory, apart from those of norms, which on a CPU take no weight of 16 bits beside a float32 input.

    Args:
        model: the script's.
        half: the dtype of 16 bits.
        trains: whether parameters that need gradients are trained.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        has_matrix = any(parameter.dim() > 1 for parameter in own)
        for parameter in own:
            if trains and parameter.requires_grad:
                _convert(parameter, torch.float32)
            elif has_matrix:
                _convert(parameter, half)


def _convert(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Changes the dtype of a parameter and of its gradient in place, if it is one of the three that models compute in."""
    if parameter.dtype == dtype or parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return
    gradient = parameter.grad
    parameter.grad = None
    parameter.data = parameter.data.to(dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _engine_of(model: Any) -> type[DeepSpeedEngine]:
    """Returns the class of the engine that trains a model."""
    pipe = sys.modules.get("paceline_deepspeed.pipe")  # loaded, if the model came from there
    if pipe is None or not isinstance(model, pipe.PipelineModule):
        return DeepSpeedEngine
    from paceline_deepspeed.pipe_engine import PipelineEngine

    return PipelineEngine


def _scheduler(parsed: DeepSpeedConfig, optimizer: Any, lr_scheduler: Any) -> Any:
    """Returns the script's scheduler, else the config's; None where neither is there."""
    name = parsed["scheduler.type"]
    if lr_scheduler is None:
        return schedules.of_config(parsed, optimizer)
    chosen = lr_scheduler
    if not hasattr(lr_scheduler, "step"):  # a function that makes one
        chosen = lr_scheduler(optimizer)
    if name is not None:
        warn_once(
            "compat",
            f"two schedulers: the script's {type(chosen).__name__} is used, and the config's {name} "
            f"({parsed.places.get('scheduler.type', parsed.source)}) is not. Drop one of them.",
        )
    return chosen


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` and their old names to a parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="asks for DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's json file")
    group.add_argument("--deepscale", default=False, action="store_true", help="old name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="old name of --deepspeed_config")
    return parser
