"""Every key of a DeepSpeed config and what becomes of it: one table, from which reading, docs and tests follow.

    a case with `means`      our settings and options that say the same
    a case with `why`        it has no effect here, and why
    a case with `fix` too    it is refused; what to do instead
    no case that fits        the engine (or who else `doc` names) reads its value

Keys of ZeRO stand in `zero_keys`, those of what is measured, logged and tuned in `watch_keys`;
parameters of optimizers and schedulers in `parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from paceline.config.kinds import YES_NO
from paceline_deepspeed.config.kinds import ANY, BLOCK, DTYPE, INTERVAL, LIST, SWITCH, TEXT, count, number, word
from paceline_deepspeed.config.row import NOTHING, Key, Staged, gone, idle, key
from paceline_doors.cases import VALUE, Case

_MEAN = "gradients are averaged over ranks; where the division stands changes rounding alone"
_NO_MOE = "experts are not divided over ranks"
_DIVIDED = "which matrices are divided, and how, follows from the model: `plan.explain()` lists them"
_HALF = "arithmetic runs under autocast; masters and states stay float32"

_BATCH = (
    key("train_batch_size", count(1), None, "samples of one optimizer step on all ranks together; see the batch triangle",
        hint="train_batch_size"),
    key("train_micro_batch_size_per_gpu", count(1), None, "samples of one forward pass on one rank",
        hint="per_device_train_batch_size"),
    key("gradient_accumulation_steps", count(1), None, "micro-batches in one optimizer step",
        hint="gradient_accumulation_steps"),
)  # fmt: skip

_STEP = (
    key("gradient_clipping", number(), 1.0, "largest norm of all gradients together, which a step clips to; 0: no clipping",
        hint="max_grad_norm"),
    key("steps_per_print", INTERVAL, None, "the engine prints a line every so many steps"),
    key("managed_gradient_accumulation", YES_NO, True, "no: every `engine.step()` ends a window"),
    idle("prescale_gradients", YES_NO, False, _MEAN),
    idle("gradient_predivide_factor", number(), 1.0, _MEAN),
    key("gradient_allreduce_op", word("mean", "sum"), "mean", "sum: gradients of ranks are added, not averaged",
        Staged("sum", stages="012", why="gradients are averaged over ranks",
             fix="leave it out, and multiply the loss by the number of ranks, which gives the sum")),
    key("communication_data_type", DTYPE, None, "dtype in which gradients travel",
        Staged("fp16", {"options.replicate.comm_hook": "fp16"}, stages="01"),
        Staged("bf16", {"options.replicate.comm_hook": "bf16"}, stages="01"),
        Staged("fp32|fp16|bf16", why="stage 2 reduces gradients in their own dtype, float32", stages="2"),
        Staged("fp32", {"options.shard.reduce_dtype": "float32"}, stages="3"),
        Staged("fp16", {"options.shard.reduce_dtype": "float16"}, stages="3"),
        Staged("bf16", {"options.shard.reduce_dtype": "bfloat16"}, stages="3"),
        Case("fp32", why="gradients travel in float32 as it is")),
    key("seq_parallel_communication_data_type", DTYPE, None, "dtype of what sequence-parallel ranks exchange",
        Case("*", why="ranks exchange tensors in their own dtype")),
    idle("disable_allgather", YES_NO, False, "ranks gather rows in buckets, not one by one"),
    key("dataloader_drop_last", YES_NO, False, "the loader that the engine makes leaves a smaller last batch out"),
    key("zero_allow_untested_optimizer", YES_NO, False, "ZeRO divides any optimizer",
        Case("*", why="ZeRO divides the states of any optimizer; one that looks at whole matrices is divided by parameters")),
    idle("zero_force_ds_cpu_optimizer", YES_NO, True, "torch's fused optimizers step on the host"),
    idle("disable_python_gc", YES_NO, False, "Python's collector is left alone"),
    idle("dump_state", YES_NO, False, "`paceline explain --deepspeed` prints a config, and `plan.explain()` what it became"),
    idle("log_level", word("debug", "info", "warning", "error", "critical", "off"), "warning",
         "the engine prints its lines where `steps_per_print` asks for them"),
    key("data_types.grad_accum_dtype", DTYPE, None, "dtype in which gradients are added up",
        Case("fp32", why="gradients are added up in their parameters' dtype, float32"),
        Case("*", why="gradients are added up in float32, which loses nothing and takes more memory")),
    key("data_types.param_dtype", DTYPE, None, "dtype in which parameters are kept",
        Case("*", why=_HALF)),
    key("data_types.buffer_dtype", DTYPE, None, "dtype in which buffers are kept",
        Case("*", why="buffers keep the dtype that the model gave them")),
    key("data_types.keep_in_fp32_modules", LIST, None, "modules whose parameters stay float32",
        Case("*", why="all parameters stay float32, and autocast casts what an operation wants")),
    key("sequence_parallel_size", count(1), 1, "ranks that divide each sequence",
        Case("1", why=NOTHING), Case("*", {"cp": VALUE, "options.context.method": "ulysses"})),
    gone("use_data_before_expert_parallelism", YES_NO, False, _NO_MOE, "leave it out"),
)  # fmt: skip

_PRECISION = (
    key("fp16.enabled", YES_NO, False, "float16 arithmetic with loss scaling", Case("true", {"mixed_precision": "fp16"}),
        hint="fp16"),
    idle("fp16.auto_cast", YES_NO, False, "autocast casts inputs of each operation, always"),
    key("fp16.loss_scale", number(), 0.0, "a fixed scale of the loss; 0: it is found"),
    key("fp16.initial_scale_power", count(0, 127), 16, "the scale begins at 2 to this power"),
    key("fp16.loss_scale_window", count(1), 1000, "steps without overflow after which the scale doubles"),
    key("fp16.hysteresis", count(1), 2, "overflows until the scale is halved"),
    key("fp16.consecutive_hysteresis", YES_NO, False, "each good step fills `hysteresis` up again"),
    key("fp16.min_loss_scale", number(), 1.0, "the scale is never below this"),
    idle("fp16.fp16_master_weights_and_grads", YES_NO, False, _HALF),
    key("bf16.enabled", YES_NO, False, "bfloat16 arithmetic", Case("true", {"mixed_precision": "bf16"}), hint="bf16"),
    key("bf16.check_grad_overflow", YES_NO, True, "a step whose gradients are not finite is skipped",
        old=("bf16.check_overflow",)),
    idle("bf16.immediate_grad_update", YES_NO, False, "gradients are added up where autograd puts them"),
    idle("bf16.bf16_master_weights_and_grads", YES_NO, False, _HALF),
    idle("bf16.bf16_optimizer_states", YES_NO, False, _HALF),
    idle("bf16.ddp_bf16", YES_NO, False, _HALF),
    key("torch_autocast.enabled", YES_NO, False, "arithmetic under autocast"),
    key("torch_autocast.dtype", DTYPE, "bf16", "its dtype",
        Case("bf16", {"mixed_precision": "bf16"}), Case("fp16", {"mixed_precision": "fp16"}),
        Case("fp32", why=NOTHING), always=True),
    idle("torch_autocast.lower_precision_safe_modules", LIST, None, "autocast decides by operation, for all modules"),
)  # fmt: skip

_OPTIMIZER = (
    key("optimizer.type", TEXT, None, "the optimizer that the engine makes where the script hands none over", required=True),
    key("optimizer.params", BLOCK, {}, "its arguments; see below"),
    idle("optimizer.legacy_fusion", YES_NO, False, "there is one fused implementation, torch's"),
    key("scheduler.type", TEXT, None, "the scheduler that the engine makes and steps once for each optimizer step",
        required=True),
    key("scheduler.params", BLOCK, {}, "its arguments; see below"),
)  # fmt: skip

_ACTIVATIONS = (
    key("activation_checkpointing.partition_activations", YES_NO, False,
        "saved inputs are divided over model-parallel ranks",
        Case("true", why="inputs that are saved stay whole on their rank")),
    key("activation_checkpointing.cpu_checkpointing", YES_NO, False,
        "`deepspeed.checkpointing.checkpoint` keeps saved inputs in the host's memory"),
    key("activation_checkpointing.contiguous_memory_optimization", YES_NO, False, "saved inputs lie in one buffer",
        Case("true", why="torch's allocator keeps saved inputs without gaps")),
    key("activation_checkpointing.number_checkpoints", count(1), None, "how many inputs that buffer is for",
        Case("*", why="there is no such buffer")),
    key("activation_checkpointing.synchronize_checkpoint_boundary", YES_NO, False,
        "the device is waited for around each checkpointed function",
        Case("true", why="streams are ordered without waiting")),
    key("activation_checkpointing.profile", YES_NO, False, "each checkpointed function is timed, forward and backward"),
    key("pipeline.activation_checkpoint_interval", count(0), 0,
        "a pipeline's stage recomputes groups of so many layers; 0: none"),
    key("pipeline.use_reentrant", YES_NO, True, "which of torch's two recomputations is used",
        Case("true", why="the one that is not reentrant gives the same numbers, and needs no gradient of inputs"),
        Case("false", why=NOTHING)),
    key("pipeline.stages", ANY, "auto", "number of stages", Case("*", why="`PipelineModule(num_stages=...)` says it")),
    key("pipeline.partition", TEXT, "best", "where stages begin",
        Case("*", why="`PipelineModule(partition_method=...)` says it")),
    key("pipeline.seed_layers", YES_NO, False, "each layer is built from a seed of its own",
        Case("*", why="`PipelineModule(seed_layers=...)` says it")),
    idle("pipeline.pipe_partitioned", YES_NO, True, "activations travel whole between stages"),
    idle("pipeline.grad_partitioned", YES_NO, True, "gradients travel whole between stages"),
    key("pipeline.schedule", word("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev"), "1f1b",
        "order of micro-batches; a key of ours, DeepSpeed has 1f1b alone"),
)  # fmt: skip

_TENSOR = (
    key("tensor_parallel.autotp_size", count(0), 0, "ranks that divide the matrices of each layer",
        Case("0|1", why=NOTHING), Case("*", {"tp": VALUE})),
    idle("tensor_parallel.dtype", DTYPE, "fp16", "the model keeps its precision; bf16 and fp16 say how it computes"),
    idle("tensor_parallel.tp_overlap_comm", YES_NO, False, "torch decides when parts are exchanged"),
    idle("tensor_parallel.vocab_parallel_lm_head", YES_NO, None, _DIVIDED),
    idle("tensor_parallel.vocab_parallel_ce_backend", TEXT, "torch", _DIVIDED),
    idle("tensor_parallel.tensor_parallel", ANY, None, "autotp_size says how many ranks", old=("tensor_parallel.tp",)),
    idle("tensor_parallel.injection_policy_tuple", ANY, None, _DIVIDED),
    idle("tensor_parallel.partition_config", ANY, None, _DIVIDED),
    idle("tensor_parallel.preset_model", TEXT, None, _DIVIDED),
    idle("tensor_parallel.keep_module_on_host", YES_NO, False, _DIVIDED),
    idle("tensor_parallel.replace_with_kernel_inject", YES_NO, False, "no kernels are put into models",
         old=("tensor_parallel.kernel_inject",)),
)  # fmt: skip

_CHECKPOINT = (
    key("checkpoint.tag_validation", word("WARN", "IGNORE", "FAIL"), "WARN",
        "what happens where ranks name different tags"),
    key("checkpoint.load_universal", YES_NO, False, "without a tag, `latest_universal` is looked for first",
        Case("*", why="a checkpoint loads at any width as it is, and a universal one too")),
    gone("checkpoint.use_node_local_storage", YES_NO, False, "a checkpoint is one folder that all hosts see",
         "leave it out, and save to a shared folder or to S3"),
    idle("checkpoint.parallel_write.pipeline_stage", YES_NO, False, "every rank writes what it holds, always"),
    idle("checkpoint.checkpoint_serialization", YES_NO, True, "files are written in torch's own layout"),
    idle("checkpoint.writer", BLOCK, None, "files are written by threads of their own"),
)  # fmt: skip

# Keys of ours: what DeepSpeed does by habit, and how to have it otherwise. DeepSpeed itself passes them over.
_OURS = (
    key("paceline.warmup_first_step", YES_NO, False,
        "yes: warm-up counts from the first step; DeepSpeed takes the first two with `warmup_min_lr`"),
)  # fmt: skip

_REMOVED = (
    gone("amp", SWITCH, None, "Apex is not used", "say `\"bf16\": {\"enabled\": true}`, or fp16"),
    gone("sparse_gradients", YES_NO, False, "gradients of embeddings travel as they are",
         "leave it out; `sparse=True` of torch.nn.Embedding is understood at stages 0 and 1"),
    gone("sparse_attention", SWITCH, None, "attention is the model's own",
         "leave it out; call torch's scaled_dot_product_attention with a mask"),
    gone("elasticity", SWITCH, None, "it belongs to the launcher here",
         "leave it out, and start with `paceline launch --nodes 1:3`: checkpoints load at any width"),
    gone("compression_training", SWITCH, None, "models are not pruned or quantised in training", "leave it out"),
    gone("quantize_training", SWITCH, None, "models are not quantised in training", "leave it out"),
    gone("weight_quantization", SWITCH, None, "weights are not quantised", "leave it out"),
    gone("eigenvalue", SWITCH, None, "it serves quantisation in training, which is not there", "leave it out"),
    gone("curriculum_learning", SWITCH, None, "the order of samples is the loader's own",
         "leave it out, and order samples with a sampler"),
    gone("data_efficiency", SWITCH, None, "the order of samples is the loader's own",
         "leave it out, and order samples with a sampler"),
    gone("progressive_layer_drop", SWITCH, None, "layers are the model's own", "leave it out, and drop layers in forward"),
    gone("graph_harvesting", SWITCH, None, "graphs are captured by torch.compile",
         "leave it out, and start with `paceline launch --compile`"),
    gone("hybrid_engine", SWITCH, None, "generation runs on the model as it is", "leave it out"),
    gone("expert_parallel", SWITCH, None, _NO_MOE, "leave it out"),
    gone("compile", SWITCH, None, "blocks are compiled by torch.compile",
         "leave it out, and start with `paceline launch --compile`"),
    idle("nebula", SWITCH, None, "checkpoints are saved in the background by `save_checkpoint` itself"),
    idle("datastates_ckpt", SWITCH, None, "checkpoints are saved in the background by `save_checkpoint` itself"),
    idle("timers", BLOCK, None, "what is not measured costs nothing; `wall_clock_breakdown` measures"),
    idle("aio", BLOCK, None, "nothing is kept on NVMe"),
    idle("vocabulary_size", count(0), None, "nothing depends on it"),
    idle("data_parallel_size", count(0), None, "it follows from the plan"),
)  # fmt: skip


@cache
def rows() -> tuple[Key, ...]:
    """Lists the rows of the whole table."""
    from paceline_deepspeed.config.watch_keys import WATCH
    from paceline_deepspeed.config.zero_keys import ZERO

    return (
        *_BATCH,
        *_OPTIMIZER,
        *_STEP,
        *_PRECISION,
        *ZERO,
        *_ACTIVATIONS,
        *_TENSOR,
        *_CHECKPOINT,
        *WATCH,
        *_OURS,
        *_REMOVED,
    )


@cache
def by_name() -> Mapping[str, Key]:
    """Rows by dotted name, and by their older names."""
    keys = {row.name: row for row in rows()}
    for row in rows():
        keys.update(dict.fromkeys(row.old, row))
    return MappingProxyType(keys)


@cache
def blocks() -> frozenset[str]:
    """Returns the dotted names of all blocks."""
    names: set[str] = set()
    for name in by_name():
        parts = name.split(".")
        names.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(names)
