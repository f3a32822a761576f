"""Keys of what is measured (profilers), logged (monitors) and searched (autotuning)."""

from __future__ import annotations

from typing import Any

from paceline.config.kinds import YES_NO, Kind
from paceline_deepspeed.config.kinds import BLOCK, LIST, TEXT, count, number, word
from paceline_deepspeed.config.row import NOTHING, Derived, Key, idle, key
from paceline_doors.cases import VALUE, Case

_FROM_ONE = Derived("the number + 1", lambda step: step + 1)
_JOINED = Derived("joined by commas", lambda ops: ",".join(map(str, ops)))


def _flops(name: str, kind: Kind, default: object, doc: str, *cases: Case) -> Key:
    return key(f"flops_profiler.{name}", kind, default, doc, *cases)


def _tune(name: str, kind: Kind, default: object, doc: str, *cases: Case) -> Key:
    return key(f"autotuning.{name}", kind, default, doc, *cases)


def _monitor(name: str, **more: tuple[Kind, Any, str]) -> tuple[Key, ...]:
    enabled = key(f"{name}.enabled", YES_NO, False, f"learning rate, loss scale and times are logged to {name}")
    return enabled, *(key(f"{name}.{inside}", kind, default, doc) for inside, (kind, default, doc) in more.items())


_FOLDER = {
    "output_path": (TEXT, "", "folder of its files"),
    "job_name": (TEXT, "DeepSpeedJobName", "folder in that folder"),
}

_PROFILES = (
    key("wall_clock_breakdown", YES_NO, False, "forward, backward, reduction and step are timed",
        Case("true", {"profile": "wall-clock"})),
    key("memory_breakdown", YES_NO, False, "memory is noted at each phase", Case("true", {"profile": "memory"})),
    _flops("enabled", YES_NO, False, "operations of one step are counted, module by module",
           Case("true", {"profile": "flops"})),
    _flops("profile_step", count(0), 1, "which step, from 0", Case("*", {"options.profile.flops_step": _FROM_ONE})),
    _flops("module_depth", count(-1), -1, "how deep the text goes into the modules; -1: all the way",
           Case("*", {"options.profile.flops_depth": VALUE})),
    _flops("top_modules", count(1), 1, "how many modules it names at each depth",
           Case("*", {"options.profile.flops_top": VALUE})),
    _flops("detailed", YES_NO, True, "the tree of all modules is printed too",
           Case("*", {"options.profile.flops_detailed": VALUE})),
    _flops("output_file", TEXT, None, "where it is written; not given: the terminal",
           Case("*", {"options.profile.flops_file": VALUE})),
    _flops("recompute_fwd_factor", number(), 0.0, "what part of the forward pass is computed again in the backward pass",
           Case("0|0.0", why=NOTHING), Case("*", why="operations are counted as they run, those of the backward pass too")),
    key("comms_logger.enabled", YES_NO, False, "collectives are timed, by kind and size", Case("true", {"profile": "comms"})),
    key("comms_logger.prof_all", YES_NO, True, "all of them; no: those of `prof_ops`",
        Case("true", why=NOTHING), Case("false", why="`prof_ops` says which")),
    key("comms_logger.prof_ops", LIST, [], "which ones", Case("*", {"options.profile.comms_ops": _JOINED}),
        needs="comms_logger.prof_all=false"),
    key("comms_logger.verbose", YES_NO, False, "each one is printed as it ends",
        Case("*", {"options.profile.comms_verbose": VALUE})),
    idle("comms_logger.debug", YES_NO, False, "the callers of collectives are shown by --debug"),
)  # fmt: skip

_MONITORS = (
    *_monitor("tensorboard", **_FOLDER),
    *_monitor("csv_monitor", **_FOLDER),
    *_monitor("wandb", group=(TEXT, None, "its group"), team=(TEXT, None, "its entity"), 
             project=(TEXT, "deepspeed", "its project")),
    *_monitor("comet",
              samples_log_interval=(count(1), 100, "samples between two points"), project=(TEXT, None, "its project"),
              workspace=(TEXT, None, "its workspace"), api_key=(TEXT, None, "the key"),
              experiment_name=(TEXT, None, "name of the experiment"), experiment_key=(TEXT, None, "key of the experiment"),
              online=(YES_NO, None, "whether it is sent at once"), mode=(TEXT, None, "get, create or get_or_create")),
)  # fmt: skip

_LAUNCHED = "`paceline tune` runs on the processes that it is started with"
_TUNING = (
    _tune("enabled", YES_NO, False, "`paceline tune` searches for the fastest config"),
    _tune("fast", YES_NO, True, "stage and micro-batch alone; no: bucket sizes too"),
    _tune("results_dir", TEXT, "autotuning_results", "folder of the results"),
    _tune("exps_dir", TEXT, "autotuning_exps", "folder of the trials"),
    _tune("overwrite", YES_NO, True, "earlier results are written over"),
    _tune("metric", word("throughput", "latency", "flops", "forward", "backward", "step"), "throughput",
          "what counts as better"),
    _tune("start_profile_step", count(0), 3, "first step of a trial that is measured"),
    _tune("end_profile_step", count(1), 5, "last one"),
    _tune("tuner_type", word("gridsearch", "random", "model_based"), "gridsearch", "in which order candidates are tried"),
    _tune("tuner_early_stopping", count(0), 5, "trials without a better one after which the search ends"),
    _tune("tuner_num_trials", count(0), 50, "trials at most"),
    _tune("arg_mappings", BLOCK, None, "arguments of the script that repeat keys of this config"),
    _tune("max_train_batch_size", count(1), None, "largest `train_batch_size` that is tried"),
    _tune("min_train_batch_size", count(1), 1, "smallest one"),
    _tune("max_train_micro_batch_size_per_gpu", count(1), 1024, "largest micro-batch that is tried"),
    _tune("min_train_micro_batch_size_per_gpu", count(1), 1, "smallest one"),
    _tune("num_tuning_micro_batch_sizes", count(1), 3, "how many micro-batch sizes are tried at each stage"),
    _tune("mp_size", count(1), 1, "ranks that divide the model",
          Case("1", why=NOTHING), Case("*", why="the plan's own axes say it")),
    _tune("model_info", BLOCK, None, "what is known of the model", Case("*", why="the model itself is asked")),
    _tune("model_info_path", TEXT, None, "where that is written", Case("*", why="the model itself is asked")),
    _tune("metric_path", TEXT, None, "where a trial writes its numbers", Case("*", why="trials run in one process")),
    _tune("num_nodes", count(1), None, "hosts", Case("*", why=_LAUNCHED)),
    _tune("num_gpus", count(1), None, "processes on each", Case("*", why=_LAUNCHED)),
)  # fmt: skip

WATCH = (*_PROFILES, *_MONITORS, *_TUNING)
