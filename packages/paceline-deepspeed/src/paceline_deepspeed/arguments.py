"""The arguments of `deepspeed.initialize`, checked together before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from paceline.base.errors import ConfigError, PacelineError, Problem
from paceline.world import runtime
from paceline.world.world import World
from paceline_deepspeed.config import DeepSpeedConfig, read
from paceline_deepspeed.tensor_parallel import noted_size


def checked(
    args: object, model: Any, mpu: object, config: Any, config_params: Any, *, pipeline: bool = False, **parts: Any
) -> DeepSpeedConfig:
    """Reads the config that the arguments name.

    Args:
        parts: `optimizer`, `lr_scheduler`, `model_parameters` and `training_data`, as `initialize` got them.

    Raises:
        ConfigError: `deepspeed-config-source`, `deepspeed-model`, `deepspeed-argument`, `deepspeed-mpu`,
            `deepspeed-local-rank`, and those of the config itself; all at once.
    """
    problems = [*_unusable(parts), *_local_rank(args)]
    if not isinstance(model, nn.Module):
        why = f"model is a {type(model).__name__}"
        if model is None:
            why = "model=None"
        fix = "pass `model=` a torch.nn.Module"
        problems.insert(0, Problem("deepspeed-model", "`deepspeed.initialize` needs a model.", why, fix))
    sources = {
        "initialize(config=...)": config,
        "initialize(config_params=...)": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    configs = {place: value for place, value in sources.items() if value is not None}
    # Without exactly one config there is nothing to read, so the problems that are known by now are all.
    if len(configs) != 1:
        problems += [*_mpu(mpu, pipeline, 1), _not_one_config(configs)]
        raise ConfigError.of(problems)
    ((place, content),) = configs.items()
    try:
        if not isinstance(content, Mapping | Path | str):
            raise ConfigError(
                "deepspeed-config-source",
                f"{place} is a {type(content).__name__}.",
                why="a config is a dict, the path of a JSON file, or a dict in base64",
                fix="pass one of these",
            )
        parsed = read(runtime.current().foreign_config("deepspeed", content))
    except PacelineError as error:
        # Problems of the arguments and of the config are told together.
        raise ConfigError.of([*problems, *_mpu(mpu, pipeline, 1), *error.problems]) from None
    divided = max(1, parsed["tensor_parallel.autotp_size"])
    problems += [*_mpu(mpu, pipeline, divided), *_noted(noted_size(model), divided)]
    if problems:
        raise ConfigError.of(problems)
    return parsed


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer) or callable(value)


def _is_scheduler(value: object) -> bool:
    return hasattr(value, "step") or callable(value)


def _are_parameters(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | torch.Tensor)


def _is_dataset(value: object) -> bool:
    return isinstance(value, IterableDataset) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


# argument -> (whether a value can be used, what it must be)
_PARTS = {
    "optimizer": (_is_optimizer, "a torch.optim.Optimizer, or a function of parameters that returns one"),
    "lr_scheduler": (_is_scheduler, "an object with `step()`, or a function of the optimizer that returns one"),
    "model_parameters": (_are_parameters, "an iterable of tensors or of parameter groups, as model.parameters()"),
    "training_data": (_is_dataset, "a data set with `__len__` and `__getitem__`, or an IterableDataset"),
}


def _unusable(parts: Mapping[str, Any]) -> list[Problem]:
    """Lists the problems of arguments whose types cannot be used."""
    problems = []
    for name, value in parts.items():
        is_usable, expected = _PARTS[name]
        if value is None or is_usable(value):
            continue
        what = f"`deepspeed.initialize` cannot use {name}={value!r:.60}."
        why = f"{name} is of type {type(value).__name__}; expected: {expected}"
        problems.append(Problem("deepspeed-argument", what, why, f"pass `{name}=` such an object, or leave it out"))
    return problems


def _not_one_config(configs: Mapping[str, Any]) -> Problem:
    """Returns the problem of a config that was given nowhere, or in several places."""
    if not configs:
        return Problem(
            "deepspeed-config-source",
            "no config was given.",
            "`initialize` got neither config= nor config_params=, and args has no deepspeed_config",
            'pass `config="ds_config.json"` or a dict, or start the script with `--deepspeed_config ds_config.json`',
        )
    why = []
    for place, value in configs.items():
        if not isinstance(value, str | Path):
            value = type(value).__name__  # a dict may fill pages
        why.append(f"{place}: {value}")
    fix = f"keep {next(iter(configs))}, and drop the rest"
    return Problem("deepspeed-config-source", f"the config was given {len(configs)} times.", why, fix)


def _mpu(mpu: object, pipeline: bool, divided: int) -> list[Problem]:
    """Refuses a model-parallel unit that is not as the plan: a plan has groups of its own. One of size 1 changes nothing.

    Args:
        divided: ranks over which the config divides layers.
    """
    if mpu is None:
        return []
    size = 1
    place = None
    # The names in Megatron's newer releases, and in its older ones.
    for kind in ("tensor_model_parallel", "model_parallel"):
        if hasattr(mpu, f"get_{kind}_world_size"):
            size = getattr(mpu, f"get_{kind}_world_size")()
            place = getattr(mpu, f"get_{kind}_rank", lambda: None)()
            break
    if pipeline:
        fix = "leave mpu out"
        return [Problem("deepspeed-mpu", "a PipelineModule brings its own groups.", f"mpu={type(mpu).__name__}", fix)]
    if size == 1:
        return []
    why = [f"{type(mpu).__name__} divides layers over {size} ranks", f"tensor_parallel.autotp_size is {divided}"]
    if size != divided:
        fix = f"{_divide(size)}, if the model is whole on each rank"
        return [Problem("deepspeed-mpu", "`mpu` and the config divide layers over other numbers of ranks.", why, fix)]
    rank = World.detect().rank
    if place is not None and place != rank % size:
        why = [
            f"rank {rank} is number {place} of its group in {type(mpu).__name__}, and number {rank % size} in the plan"
        ]
        fix = f"make groups of neighbours: ranks 0 to {size - 1}, and so on"
        return [Problem("deepspeed-mpu", "the groups of `mpu` are other ranks than the plan's.", why, fix)]
    return []


def _noted(size: int, divided: int) -> list[Problem]:
    """Refuses a size of `tp_model_init` that the config does not say: the plan follows the config alone."""
    if size in (1, divided):
        return []
    why = [f"deepspeed.tp_model_init(tp_size={size})", f"tensor_parallel.autotp_size is {divided}"]
    what = "the script and its config divide layers over other numbers of ranks."
    return [Problem("deepspeed-mpu", what, why, _divide(size))]


def _divide(size: int) -> str:
    return f'write `"tensor_parallel": {{"autotp_size": {size}}}` in the config'


def _local_rank(args: object) -> list[Problem]:
    """Refuses a `local_rank` in the script's arguments that is not this process's."""
    world = World.detect()
    given_rank = getattr(args, "local_rank", None)
    # -1 is the usual default of `--local_rank`, where no launcher gives a number.
    if given_rank in (None, -1, world.local_rank):
        return []
    return [
        Problem(
            "deepspeed-local-rank",
            f"args.local_rank is {given_rank!r}, but this process is number {world.local_rank} on its host.",
            f"LOCAL_RANK={world.local_rank} ({world.source}); {world.local_size} processes run on this host",
            "leave the default of `--local_rank` at -1, or start the script with `paceline launch --compat deepspeed`",
        )
    ]


def sizes_for_auto(model: nn.Module) -> dict[str, int]:
    """Returns what accelerate and transformers write in place of "auto": sizes that follow from a model's hidden size.

    Models that are not of transformers have none.
    """
    config = getattr(model, "config", None)
    hidden = getattr(config, "hidden_size", None)
    if not hidden:
        # A model whose stages differ has a list.
        hidden = max(getattr(config, "hidden_sizes", None) or [0])
    if not hidden:
        return {}
    return {
        "zero_optimization.reduce_bucket_size": hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
    }
