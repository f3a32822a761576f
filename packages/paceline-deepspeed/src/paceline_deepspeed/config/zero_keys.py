"""Keys of `zero_optimization`: the stages of ZeRO, and where states are kept."""

from __future__ import annotations

from typing import Any

from paceline.config.kinds import YES_NO, Kind
from paceline_deepspeed.config.kinds import BLOCK, STAGE, SWITCH, TEXT, count, number, word
from paceline_deepspeed.config.row import NOTHING, Derived, Key, Staged, gone, idle, key
from paceline_doors.cases import VALUE, Case

_MIB = Derived("4 x elements / 2^20", lambda elements: round(elements * 4 / 2**20, 3) or 0.001)
_IN = "zero_optimization"
_AHEAD = "FSDP2 gathers the next unit while one computes; how many ahead: options.shard.prefetch"
_UNITS = "FSDP2 gathers and reduces unit by unit, a repeated block each"
_FLAT = "there is no flat buffer of all parameters"
_QUANTISED = "what ranks exchange is not quantised"
_DEFAULT_SIZE = "it is DeepSpeed's default; ours is 25 MiB"
_BY_UNITS = "parameters are read unit by unit, one ahead"
_IN_PARTS = "states are read and written part by part, beside the step: options.offload.part_mb"
_DEVICE = word("none", "cpu", "nvme")
_AT_THREE = "it counts at stage 3"
_MICS = "hybrid sharding is a plan of two axes here"


def _zero(name: str, kind: Kind, default: object, doc: str, *cases: Case, **more: Any) -> Key:
    older = tuple(f"{_IN}.{old_name}" for old_name in more.pop("old", ()))
    return key(f"{_IN}.{name}", kind, default, doc, *cases, old=older, **more)


def _idle(name: str, kind: Kind, default: object, why: str, **more: Any) -> Key:
    return idle(f"{_IN}.{name}", kind, default, why, **more)


def _third(name: str, kind: Kind, default: object, doc: str, *cases: Case) -> Key:
    """Makes the row of a key that DeepSpeed has with the prefix `stage3_` and, for Python code, without."""
    return _zero(f"stage3_{name}", kind, default, doc, *cases, old=(name,))


_OPTIMIZER = f"{_IN}.offload_optimizer"
_PARAM = f"{_IN}.offload_param"
_ON_DISK = Derived("optimizer=disk:VALUE", lambda folder: f"optimizer=disk:{folder}")
_ALL_ON_DISK = Derived("all=disk:VALUE", lambda folder: f"all=disk:{folder}")
_MOVED = f"{_OPTIMIZER}.device=cpu"
_PARAM_MOVED = f"{_PARAM}.device=cpu"

ZERO = (
    _zero("stage", STAGE, 0, "what ranks divide: 1 optimizer states, 2 gradients too, 3 parameters too",
          Case("0", {"zero": 0}), Case("1|2|3", {"zero": VALUE})),
    _idle("contiguous_gradients", YES_NO, True, "gradients lie in buckets from the start"),
    _idle("reduce_scatter", YES_NO, True, "each rank receives its own rows, or whole gradients where that is faster"),
    _zero("reduce_bucket_size", count(1), 500_000_000, "elements that are reduced together",
          Case("500000000", why=_DEFAULT_SIZE),
          Staged("*", {"options.replicate.bucket_cap_mb": _MIB}, stages="1"),
          Staged("*", {"options.zero.bucket_cap_mb": _MIB}, stages="2", unless=(f"{_IN}.allgather_bucket_size",)),
          Staged("*", why=_UNITS, stages="3"), Case("*", why="it counts at stages 1 and 2")),
    _idle("use_multi_rank_bucket_allreduce", YES_NO, True, "buckets hold rows of all ranks as it is"),
    _idle("allgather_partitions", YES_NO, True, "rows are gathered in buckets, always"),
    _zero("allgather_bucket_size", count(1), 500_000_000, "elements that are gathered together",
          Case("500000000", why=_DEFAULT_SIZE),
          Staged("*", {"options.zero.bucket_cap_mb": _MIB}, stages="12"),
          Staged("*", why=_UNITS, stages="3"), Case("*", why="it counts at stages 1 and 2")),
    _idle("overlap_comm", YES_NO, None, "gradients travel while the backward pass goes on, at every stage"),
    _zero("compute_grad_norm", YES_NO, True, "the norm of gradients is computed",
          Case("*", why="the norm is computed where clipping or the script asks for it")),
    _idle("load_from_fp32_weights", YES_NO, True, "checkpoints hold the float32 weights alone"),
    _idle("elastic_checkpoint", YES_NO, False, "every checkpoint loads at any width"),
    _zero("sub_group_size", count(1), 1_000_000_000, "elements that are stepped together",
          Case("*", {"options.offload.part_mb": _MIB}), needs=f"{_OPTIMIZER}.device=nvme"),
    _idle("round_robin_gradients", YES_NO, False, "rows of every gradient go to all ranks alike"),
    _zero("ignore_unused_parameters", YES_NO, True, "no: a parameter without a gradient is an error",
          Case("*", why="parameters that the loss does not reach are found, and their gradients are zero or absent")),
    _idle("legacy_stage1", YES_NO, False, "there is one stage 1"),
    _idle("parameter_alignment", YES_NO, False, _FLAT),
    _idle("zero_hpz_partition_size", count(1), 1, "parts on each host: options.shard.reshard with that width"),
    _zero("zero_quantized_weights", YES_NO, False, "weights are gathered in 8 bits", Case("*", why=_QUANTISED)),
    _idle("zero_quantized_nontrainable_weights", YES_NO, False, _QUANTISED),
    _idle("zero_quantized_gradients", YES_NO, False, _QUANTISED),
    _idle("memory_efficient_linear", YES_NO, True, "torch's linear keeps no copy of a weight"),
    _idle("pipeline_loading_checkpoint", YES_NO, False, "files are read by all ranks, a part each"),
    _idle("override_module_apply", YES_NO, True, "modules keep their methods"),
    _idle("log_trace_cache_warnings", YES_NO, False, "no order of modules is recorded"),
    _idle("enable_sanity_checks", YES_NO, False, "--debug compares collectives over ranks"),
    _idle("save_muon_momentum_buffer_in_memory", YES_NO, False, "states stay where the optimizer has them"),
    _idle("leaf_module", BLOCK, None, "units are found by themselves; options.shard.wrap names others"),
    _third("prefetch_bucket_size", count(0), 50_000_000, "elements that are gathered ahead",
           Staged("0", why="FSDP2 gathers one unit ahead at least", stages="3"), Case("*", why=_AHEAD)),
    _third("param_persistence_threshold", count(0), 100_000, "parameters up to so many elements stay whole",
           Case("*", why="small parameters are gathered with the unit that they belong to")),
    _third("model_persistence_threshold", count(0), 2**63 - 1, "elements that may stay whole in all",
           Case("*", why="small parameters are gathered with the unit that they belong to")),
    _third("max_live_parameters", count(0), 1_000_000_000, "elements that are whole at a time",
           Case("*", why="at most two units are whole at a time")),
    _third("max_reuse_distance", count(0), 1_000_000_000, "parameters that are used again so soon stay whole",
           Case("*", why="units give their parameters up, or keep them: options.shard.reshard")),
    _zero("stage3_gather_16bit_weights_on_model_save", YES_NO, False, "`save_16bit_model` writes whole weights",
          old=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")),
    _third("module_granularity_threshold", count(0), 0, "modules below this size are gathered whole",
           Case("*", why=_UNITS)),
    _third("use_all_reduce_for_fetch_params", YES_NO, False, "parameters are gathered by all-reduce",
           Case("*", why="parameters are gathered by all-gather")),
    _third("allgather_sequential", YES_NO, False, "parameters are gathered one by one", Case("*", why=_UNITS)),
    _zero("offload_optimizer.device", _DEVICE, "none", "where optimizer states are kept",
          Case("none", why=NOTHING), Staged("nvme", why="it counts from stage 1 on", stages="0"),
          Staged("cpu", {"offload": "optimizer"}, stages="123"), Case("cpu", why="it counts from stage 1 on")),
    _zero("offload_optimizer.pin_memory", YES_NO, True, "copies go through page-locked memory",
          Case("*", {"options.offload.pin_memory": VALUE}), needs=_MOVED),
    _zero("offload_optimizer.nvme_path", TEXT, None, "the folder of states on a disk",
          Staged("*", {"offload": _ON_DISK}, stages="123"), Staged("*", why="it counts from stage 1 on", stages="0"),
          needs=f"{_OPTIMIZER}.device=nvme"),
    _idle("offload_optimizer.buffer_count", count(0), 4, _IN_PARTS),
    _idle("offload_optimizer.pipeline_read", YES_NO, False, _IN_PARTS),
    _idle("offload_optimizer.pipeline_write", YES_NO, False, _IN_PARTS),
    _idle("offload_optimizer.pipeline", YES_NO, False, _IN_PARTS),
    _idle("offload_optimizer.fast_init", YES_NO, False, _IN_PARTS),
    _zero("offload_optimizer.ratio", number(0.0, 1.0), 1.0, "which part of the states is kept there",
          Case("*", why="all states are kept there, or none"), needs=_MOVED),
    _zero("offload_optimizer.super_offload", YES_NO, False, "a scheme of its own for Grace-Hopper",
          Case("*", why="there is one scheme"), needs=_MOVED),
    _zero("offload_optimizer.cpuadam_cores_perc", number(0.0, 1.0), 0.8, "part of the cores for the step",
          Case("*", why="OMP_NUM_THREADS, or --threads, says how many threads step"), needs=_MOVED),
    _zero("offload_param.device", _DEVICE, "none", "where parameters are kept (stage 3)",
          Case("none", why=NOTHING), Staged("nvme", why=_AT_THREE, stages="012"),
          Staged("cpu", {"offload": "all"}, stages="3"), Case("cpu", why=_AT_THREE)),
    _zero("offload_param.pin_memory", YES_NO, True, "copies go through page-locked memory",
          Case("*", why="FSDP2 copies through page-locked memory where there is an accelerator"), needs=_PARAM_MOVED),
    _zero("offload_param.nvme_path", TEXT, None, "the folder of parameters, and of states, on a disk",
          Staged("*", {"offload": _ALL_ON_DISK}, stages="3"), Staged("*", why=_AT_THREE, stages="012"),
          needs=f"{_PARAM}.device=nvme"),
    _idle("offload_param.buffer_count", count(0), 5, _BY_UNITS),
    _idle("offload_param.buffer_size", count(0), 100_000_000, _BY_UNITS),
    _idle("offload_param.max_in_cpu", count(0), 1_000_000_000, _BY_UNITS),
    _zero("cpu_offload", YES_NO, False, "the older way to say `offload_optimizer: {device: cpu}`",
          Case("false", why=NOTHING), Staged("true", {"offload": "optimizer"}, stages="123"),
          Case("true", why="it counts from stage 1 on")),
    _zero("cpu_offload_param", YES_NO, False, "the older way to say `offload_param: {device: cpu}`",
          Case("false", why=NOTHING), Staged("true", {"offload": "all"}, stages="3"),
          Case("true", why=_AT_THREE)),
    _zero("cpu_offload_use_pin_memory", YES_NO, True, "the older way to say `pin_memory`",
          Case("*", {"options.offload.pin_memory": VALUE}), needs=f"{_IN}.cpu_offload=true"),
    gone(f"{_IN}.zenflow", SWITCH, None, "updates are not spread over steps", "leave it out"),
    _zero("mics_shard_size", count(-1), -1, "ranks that divide together",
          Case("-1|0", why=NOTHING),
          Case("*", why=_MICS, fix="leave it out, and start with `paceline launch --shard 8 --replicate auto`")),
    gone(f"{_IN}.mics_hierarchical_params_gather", YES_NO, False, _MICS, "leave it out"),
    gone(f"{_IN}.zeropp_loco_param", SWITCH, None, _QUANTISED, "leave it out"),
)  # fmt: skip
