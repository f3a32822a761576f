"""A DeepSpeed config in a tuning: its `autotuning` block, a config with a candidate's values, and the best one.

A script may build its config itself, so it is taken where it is read: in the process of the script, from the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

from paceline_deepspeed.config import DeepSpeedConfig

# Under another name: a trial replaces `read` wherever it stands in `compat`, by a function that comes here.
from paceline_deepspeed.config import read as read_config
from paceline_deepspeed.config.batch import MICRO, STEPS, TRAIN
from paceline_deepspeed.config.text import entries_of, plain
from paceline_lens.tune.search import Candidate, Tuning

_STAGE = "zero_optimization.stage"
# Blocks that write files, or cost time.
_WATCHERS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
# Keys of the `autotuning` block -> attributes of `Tuning`.
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
# Keys of a config -> what of a candidate says them.
_FOLLOWS = {MICRO: "micro", STEPS: "accumulate"}


class SearchedConfig:
    """A script's config, read for a search: several stages are no conflict in it.

    Args:
        config: as it was read, with `autotuning` switched on.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config

    def tuning(self, said: Mapping[str, Any]) -> Tuning:
        """Reads what the `autotuning` block asks for; the command line (`said`) wins, and a null means the default.

        Raises:
            ConfigError: `tune-value`.
        """
        places: dict[str, str] = {}
        values: dict[str, Any] = {}
        for theirs, ours in _KEYS.items():
            name = f"autotuning.{theirs}"
            if name in self.config.places and self.config[name] is not None:
                values[ours] = self.config[name]
                places[ours] = self.config.places[name]
        arguments = values.get("arguments") or {}
        values["arguments"] = {_FOLLOWS.get(key, key): flag for key, flag in arguments.items()}
        tuning = Tuning(**{**values, **said})
        tuning.check(places)
        return tuning

    def stages(self) -> tuple[int, ...]:
        """Lists the ZeRO stages to try: those of `zero_optimization.stage` ("all", a list, one), all where it is not given."""
        stage = self.config[_STAGE]
        if _STAGE not in self.config.places or stage == "all":
            return (0, 1, 2, 3)
        if isinstance(stage, list | tuple):
            return tuple(stage)
        return (int(stage),)

    def fixed_batch(self) -> int | None:
        total = self.config[TRAIN]
        if not isinstance(total, int):  # not given, or "auto"
            return None
        return total

    def options(self, stage: int) -> tuple[tuple[tuple[str, Any], ...], ...]:
        if stage == 0:  # it has no buckets of its own
            return ()
        # Below and above DeepSpeed's default of 500 million elements.
        combinations = []
        for size in (50_000_000, 1_000_000_000):
            combinations.append((("reduce_bucket_size", size), ("allgather_bucket_size", size)))
        return tuple(combinations)


class DeepSpeedConfigs:
    """How a tuning reads and writes configs (`paceline_lens.tune.script_config`)."""

    called = "a DeepSpeed config"
    trial_file = "ds_config.json"
    best_file = "ds_config_optimal.json"

    def with_file(self, words: Sequence[str], file: str) -> list[str]:
        changed = list(words)
        # `--deepspeed` alone is a switch; with a value after it, as transformers has it, it names the file. The "-" stands
        # for what comes after the last word.
        for number, (word, following) in enumerate(pairwise([*words, "-"])):
            if word in ("--deepspeed_config", "--deepspeed") and not following.startswith("-"):
                changed[number + 1] = file
            elif word.startswith("--deepspeed_config="):
                changed[number] = f"--deepspeed_config={file}"
        return changed

    def launch_command(self, procs: int) -> list[str]:
        return ["deepspeed", "--num_gpus", str(procs)]

    def contents(self, config: Any) -> dict[str, Any]:
        _, block = entries_of(config, "deepspeed.initialize(config={})")
        return plain(block)  # type: ignore[no-any-return]

    def read(self, content: Mapping[str, Any]) -> SearchedConfig:
        """Reads a config for a search.

        Raises:
            ConfigError: those of `paceline_deepspeed.config.read`.
        """
        searched = {**(content.get("autotuning") or {}), "enabled": True}
        return SearchedConfig(read_config({**content, "autotuning": searched}))

    def plain(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the config that one run takes: one stage, the first of those to try, and nothing that writes or measures."""
        quiet = deepcopy(dict(content))
        for name in _WATCHERS:
            if isinstance(quiet.get(name), Mapping):
                quiet[name] = {**quiet[name], "enabled": False}
        for name in ("autotuning", "wall_clock_breakdown", "memory_breakdown"):
            quiet.pop(name, None)
        if "stage" in (quiet.get("zero_optimization") or {}):
            quiet["zero_optimization"]["stage"] = self.read(content).stages()[0]
        if not {TRAIN, MICRO} & set(quiet):
            quiet[MICRO] = 1  # it is for the search to say
        return quiet

    def with_candidate(
        self, content: Mapping[str, Any], candidate: Candidate, arguments: Mapping[str, str]
    ) -> dict[str, Any]:
        """Makes the config of a candidate.

        Args:
            content: the user's.
            arguments: what the script's own arguments say; a key that is "auto" for them stays so.
        """
        changed = deepcopy(dict(content))
        changed.pop("autotuning", None)
        zero = changed.setdefault("zero_optimization", {})
        zero["stage"] = candidate.zero
        zero.update(dict(candidate.options))
        if candidate.micro is None:
            return changed
        if changed.get(TRAIN) != "auto":
            changed.pop(TRAIN, None)  # it follows from the other two at every number of processes
        for key, value in ((MICRO, candidate.micro), (STEPS, candidate.accumulate)):
            said_by_argument = changed.get(key) == "auto" and _FOLLOWS[key] in arguments
            if not said_by_argument:
                changed[key] = value
        return changed

    def of_candidate(self, candidate: Candidate, micro: int | None, precision: str) -> dict[str, Any]:
        config: dict[str, Any] = {}
        if micro:
            config[MICRO] = micro
        config[STEPS] = candidate.accumulate
        config["zero_optimization"] = {"stage": candidate.zero}
        if precision in ("fp16", "bf16"):
            config[precision] = {"enabled": True}
        return config


SCRIPT_CONFIGS = DeepSpeedConfigs()
