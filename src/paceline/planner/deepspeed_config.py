"""A DeepSpeed config in a tuning: its `autotuning` block, a config with a candidate's values, and the best one.

A script may build its config itself, so it is taken where it is read: in the process of the script, from the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from paceline.config.deepspeed import DeepSpeedConfig, read
from paceline.planner.search import Candidate, Tuning

MICRO, ACCUMULATE, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_STAGE, _STAGES = "zero_optimization.stage", (0, 1, 2, 3)
_WATCHERS = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
)  # they write, or cost time
_KEYS = {
    "metric": "metric",
    "start_profile_step": "first_step",
    "end_profile_step": "last_step",
    "fast": "fast",
    "num_tuning_micro_batch_sizes": "micro_sizes",
    "min_train_micro_batch_size_per_gpu": "min_micro",
    "max_train_micro_batch_size_per_gpu": "max_micro",
    "min_train_batch_size": "min_batch",
    "max_train_batch_size": "max_batch",
    "tuner_type": "order",
    "tuner_early_stopping": "early_stop",
    "tuner_num_trials": "trials",
    "results_dir": "results_dir",
    "exps_dir": "exps_dir",
    "overwrite": "overwrite",
    "arg_mappings": "arguments",
}
_FOLLOWS = {MICRO: "micro", ACCUMULATE: "accumulate"}


def enabled(content: Mapping[str, Any] | None) -> bool:
    """Whether a config asks to be tuned."""
    return bool(((content or {}).get("autotuning") or {}).get("enabled"))


def told(content: Mapping[str, Any]) -> DeepSpeedConfig:
    """A config for a search, read: several stages are no conflict in it.

    Raises:
        ConfigError: those of `config.deepspeed.read`.
    """
    searched = {**(content.get("autotuning") or {}), "enabled": True}
    return read({**content, "autotuning": searched})


def tuning_of(config: DeepSpeedConfig, said: Mapping[str, Any]) -> Tuning:
    """What the `autotuning` block asks for, under what the command line said; a null means the default.

    Raises:
        ConfigError: `tune-value`.
    """
    places = {}
    values: dict[str, Any] = {}
    for theirs, ours in _KEYS.items():
        name = f"autotuning.{theirs}"
        if name in config.places and config[name] is not None:
            values[ours], places[ours] = config[name], config.places[name]
    values["arguments"] = {_FOLLOWS.get(key, key): flag for key, flag in (values.get("arguments") or {}).items()}
    tuning = Tuning(**{**values, **said})
    tuning.check(places)
    return tuning


def stages(config: DeepSpeedConfig) -> tuple[int, ...]:
    """ZeRO stages to try: those of `zero_optimization.stage` ("all", a list, one), all where it is not given."""
    stage = config[_STAGE] if _STAGE in config.places else "all"
    if stage == "all":
        return _STAGES
    return tuple(stage) if isinstance(stage, list | tuple) else (int(stage),)


def fixed_batch(config: DeepSpeedConfig) -> int | None:
    """The batch of all ranks together, where the config fixes it."""
    total = config[TOTAL]
    return total if isinstance(total, int) else None


def plain(content: Mapping[str, Any]) -> dict[str, Any]:
    """The config as one run takes it: one stage, the first of those to try, and nothing that writes."""
    found = _quiet(content)
    if "stage" in (found.get("zero_optimization") or {}):
        found["zero_optimization"]["stage"] = stages(told(content))[0]
    if not {TOTAL, MICRO} & set(found):
        found[MICRO] = 1  # it is for the search to say
    return found


def with_candidate(content: Mapping[str, Any], candidate: Candidate, arguments: Mapping[str, str]) -> dict[str, Any]:
    """The config of a candidate.

    Args:
        content: the user's.
        arguments: what the script's own arguments say; a key that is "auto" for them stays so.
    """
    found = deepcopy(dict(content))
    found.pop("autotuning", None)
    zero = found.setdefault("zero_optimization", {})
    zero["stage"] = candidate.zero
    zero.update(dict(candidate.options))
    if candidate.micro is not None:
        pair = {MICRO: candidate.micro, ACCUMULATE: candidate.accumulate}
        kept = {key for key in pair if found.get(key) == "auto" and _FOLLOWS[key] in arguments}
        if found.get(TOTAL) != "auto":
            found.pop(TOTAL, None)  # it follows from the other two at every number of processes
        found.update({key: value for key, value in pair.items() if key not in kept})
    return found


def quiet_candidate(content: Mapping[str, Any], candidate: Candidate, arguments: Mapping[str, str]) -> dict[str, Any]:
    """The config of a candidate's trial."""
    return _quiet(with_candidate(content, candidate, arguments))


def _quiet(content: Mapping[str, Any]) -> dict[str, Any]:
    found = deepcopy(dict(content))
    for name in _WATCHERS:
        if isinstance(found.get(name), Mapping):
            found[name] = {**found[name], "enabled": False}
    for name in ("autotuning", "wall_clock_breakdown", "memory_breakdown"):
        found.pop(name, None)
    return found


def options(stage: int) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Sets of options of the ZeRO block that are worth a trial."""
    if stage == 0:
        return ()
    return tuple(
        (("reduce_bucket_size", size), ("allgather_bucket_size", size)) for size in (50_000_000, 1_000_000_000)
    )
