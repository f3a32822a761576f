"""What is compared: programs of this folder with their options, and how each library is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One program with its options.

    Attributes:
        name: for the table, and for `--only`.
        program: a file in `programs`.
        options: what both sides are told.
        procs: numbers of processes.
        launch: flags that both launchers know.
        resume: options of a second run, which goes on from a checkpoint; None for none.
        resume_own: whether each side goes on from its own checkpoint, and not from the other's.
        resume_real: whether both go on from that of the real library.
        doors: libraries whose names Paceline serves. With "deepspeed" among them the real side has DeepSpeed.
        plan: flags of Paceline alone: a plan of its own.
        alone: whether the real side trains on one process.
        reference: options of the real side alone: the batches of all ranks, where it is one process.
        runner: a file in `programs` that starts the program on the real side.
        differs: what of the result is another on purpose, by its key, with the reason.
        tolerance: the largest relative difference that is taken for none. Our AdamW on the CPU steps in one fused kernel,
            which differs in the last bits of float32 from the one that a script gets.
        bound_s: seconds after which a resumed run of the real library is ended; 0 for the usual limit.
    """

    name: str
    program: str
    options: dict[str, Any] = field(default_factory=dict)
    procs: tuple[int, ...] = (1, 2)
    launch: tuple[str, ...] = ()
    resume: dict[str, Any] | None = None
    resume_own: bool = False
    resume_real: bool = False
    doors: str = "accelerate"
    plan: tuple[str, ...] = ()
    alone: bool = False
    runner: str = ""
    reference: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    tolerance: float = 2e-4
    bound_s: float = 0

    @property
    def needs_deepspeed(self) -> bool:
        """Whether the real side needs the real DeepSpeed."""
        return "deepspeed" in self.doors


SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6}
RESUME: dict[str, Any] = {"resume": "FOLDER/out/checkpoint-6"}
LORA_SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
LORA_RESUME: dict[str, Any] = {"resume": "FOLDER/out/checkpoint-4"}

# -- as users run them -----------------------------------------------------------------------------------------

PLAIN = [
    Case("clm", "clm"),
    Case(
        "clm accumulation, warm-up, evaluation, best model",
        "clm",
        {
            "gradient_accumulation_steps": 2,
            "warmup_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "load_best_model_at_end": True,
            "save_strategy": "steps",
            "save_steps": 3,
        },
    ),
    Case("clm resume", "clm", SAVED, resume=RESUME),
    Case("clm resume, accumulation", "clm", SAVED | {"gradient_accumulation_steps": 2}, resume=RESUME),
    Case("clm bf16", "clm", {"bf16": True}),
    Case("clm bf16 by the launcher", "clm", launch=("--mixed_precision", "bf16")),
    Case("clm gradient checkpointing", "clm", {"gradient_checkpointing": True}),
    Case("clm label smoothing", "clm", {"label_smoothing_factor": 0.1}),
    Case("clm neftune", "clm", {"neftune_noise_alpha": 5.0}),
    Case("clm length grouping", "clm", {"train_sampling_strategy": "group_by_length"}),
    Case("clm dispatch", "clm", {"accelerator_config": {"dispatch_batches": True}}),
    Case("clm split batches", "clm", {"accelerator_config": {"split_batches": True}}),
    Case("clm no even batches", "clm", {"accelerator_config": {"even_batches": False}}),
    Case("clm plain sampler", "clm", {"accelerator_config": {"use_seedable_sampler": False}}),
    Case("clm stream", "clm", {"stream": True}),
    Case("clm stream, dispatch", "clm", {"stream": True, "accelerator_config": {"dispatch_batches": True}}),
    Case("clm workers", "clm", {"dataloader_num_workers": 2}),
    Case("clm drop last", "clm", {"dataloader_drop_last": True}),
    # A graph draws its dropout by a seed of its own, and accelerate compiles the whole model where we compile its blocks.
    Case("clm compile", "clm", {"torch_compile": True, "max_steps": 4, "dropout": 0.0}, procs=(1,)),
    Case("classification", "classification"),
    Case("sequence to sequence", "seq2seq"),
    # On two processes the real library's resumed run does not end, and says nothing.
    Case("own loop", "no_trainer", resume={"resume": True}, bound_s=60),
    Case(
        "own loop bf16, workers, tensorboard",
        "no_trainer",
        {"mixed_precision": "bf16", "workers": 1, "log_with": "tensorboard"},
    ),
    # Without a resume: the real one then begins again with the first epoch's order, and ours goes on.
    Case("own loop, seedable sampler", "no_trainer", {"loader": {"use_seedable_sampler": True}}),
    Case("own loop, stateful loader", "no_trainer", {"loader": {"use_stateful_dataloader": True}}),
    Case("LoRA", "lora"),
    Case("LoRA resume", "lora", LORA_SAVED, resume=LORA_RESUME),
    Case("LoRA, own loop", "lora_loop", resume={"resume": True}),
    Case("trl SFT packing", "trl_sft", {"packing": True}),
    Case("trl SFT assistant", "trl_sft", {"assistant_only_loss": True}),
    Case("trl DPO", "trl_dpo"),
    # On two processes the real one ends with an error: its ranks make folders of their own for the data's cache.
    Case("trl DPO precomputed", "trl_dpo", {"precompute_ref_log_probs": True}, procs=(1,)),
    Case("trl GRPO", "trl_grpo"),
    Case("sentence-transformers", "sentences"),
    Case("diffusion", "diffusion"),
]

# -- the Trainer's own words for a divided model ---------------------------------------------------------------


def _fsdp(version: int, state_dict_type: str, **config: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"version": version, "state_dict_type": state_dict_type, **config}}


# Dropout is off: a divided model draws masks of its own.
STILL: dict[str, Any] = {"dropout": 0.0}
# Rows enough that no batch is filled up: one process then has the same global batches.
EVEN: dict[str, Any] = {**STILL, "rows": 64, "eval_rows": 16}
WHOLE_BATCH = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
NO_FSDP = {"fsdp": None, "fsdp_config": None}
OTHER_FILES = {"checkpoints": "one process saves other files than several do"}
NO_WHOLE_MODEL = {"saved": "Trainer's save_model writes nothing under SHARDED_STATE_DICT, with either library"}
FSDP = [
    Case(
        f"clm FSDP 2, {kind.partition('_')[0].lower()} state",
        "clm",
        {**SAVED, **STILL, **_fsdp(2, kind)},
        procs=(2,),
        resume=RESUME,
        runner="fsdp_on_cpu",
    )
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
]
# accelerate's FSDP 1 needs an accelerator: one process stands for it.
FSDP += [
    Case(
        f"clm FSDP 1, {kind.partition('_')[0].lower()} state",
        "clm",
        {**SAVED, **EVEN, **_fsdp(1, kind)},
        procs=(2,),
        alone=True,
        reference=WHOLE_BATCH | NO_FSDP,
        resume=RESUME,
        resume_own=True,
        differs=OTHER_FILES | (NO_WHOLE_MODEL if "SHARDED" in kind else {}),
        # The eighth step has three times the usual gradient. Its norm differs by 1.5e-4 between one and two processes of
        # accelerate as well: the sums of a batch are made in another order.
        tolerance=5e-4,
    )
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
]
FSDP += [
    Case(
        "clm FSDP 2, checkpointed blocks, gathered once",
        "clm",
        {**STILL, **_fsdp(2, "FULL_STATE_DICT", reshard_after_forward=False, activation_checkpointing=True)},
        procs=(2,),
        runner="fsdp_on_cpu",
    ),
    Case(
        "LoRA FSDP 2",
        "lora",
        {**LORA_SAVED, **STILL, **_fsdp(2, "FULL_STATE_DICT")},
        procs=(2,),
        resume=LORA_RESUME,
        runner="fsdp_on_cpu",
    ),
]

# -- DeepSpeed -------------------------------------------------------------------------------------------------

_AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def _zero(stage: int, **block: Any) -> dict[str, Any]:
    return {"use_cpu": False, "deepspeed": {**_AUTO, "zero_optimization": {"stage": stage, **block}}}


_GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
_ON_HOST = {"device": "cpu"}
OTHER_SCRIPT = {"saved": "DeepSpeed's second script, zero_to_torch.py, is not written"}
# The real DeepSpeed cannot evaluate on two CPU processes: one process stands for them.
DEEPSPEED = [
    Case(
        name,
        program,
        {**saved, **EVEN, **options},
        (2,),
        resume=resume,
        resume_own=True,
        doors="accelerate,deepspeed",
        runner="without_kernel",
        alone=True,
        reference=WHOLE_BATCH,
        differs=OTHER_FILES if options.get("gathers", True) else OTHER_FILES | OTHER_SCRIPT,
        # Biases whose gradient is noise sum to other last digits.
        tolerance=5e-4,
    )
    for name, program, saved, options, resume in (
        ("clm zero 2", "clm", SAVED, _zero(2), RESUME),
        ("clm zero 3, whole weights saved", "clm", SAVED, _zero(3, **_GATHERED), RESUME),
        ("clm zero 3, divided weights saved", "clm", SAVED, _zero(3) | {"gathers": False}, RESUME),
        ("LoRA zero 3", "lora", LORA_SAVED, _zero(3, **_GATHERED), LORA_RESUME),
    )
]
DEEPSPEED += [
    Case(
        name,
        "clm",
        {**STILL, **options},
        (1,),
        doors="accelerate,deepspeed",
        runner="without_kernel",
        # DeepSpeed's own kernel steps offloaded states; biases whose gradient is noise sum to other last digits.
        tolerance=1e-3,
        # What `deepspeed.zero.Init` has divided cannot compute on the CPU in the real one.
        reference={"pretrained": False},
    )
    for name, options in (
        ("clm zero 3, from_pretrained", {**_zero(3, **_GATHERED), "pretrained": True}),
        ("clm zero 2, offload", _zero(2, offload_optimizer=_ON_HOST)),
        ("clm zero 3, offload", _zero(3, **_GATHERED, offload_optimizer=_ON_HOST, offload_param=_ON_HOST)),
    )
]

# -- plans of Paceline's own, beside one process of the real library -------------------------------------------

_PLANNED: dict[str, Any] = {**SAVED, **EVEN}
PLANS = [
    Case(
        f"{program} plan {' '.join(plan)}",
        program,
        {**_PLANNED, **(LORA_SAVED if program == "lora" else {}), "model": "llama"},
        procs=(2,),
        plan=plan,
        alone=True,
        reference={} if plan[0] == "--tp" else WHOLE_BATCH,
        resume=LORA_RESUME if program == "lora" else RESUME,
        resume_own=True,
        differs=OTHER_FILES,
    )
    for program, plan in (
        ("clm", ("--zero", "2")),
        ("clm", ("--zero", "3")),
        ("clm", ("--shard", "auto")),
        ("clm", ("--tp", "2")),
        ("lora", ("--zero", "3")),
    )
]
_ZERO_3, _SHARD, _TP = ("--zero", "3"), ("--shard", "auto"), ("--tp", "2")
_STEPS_3: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
_RESUME_3: dict[str, Any] = {"resume": "FOLDER/out/checkpoint-3"}


def _beside_one(name: str, program: str, plan: tuple[str, ...], options: dict[str, Any], **more: Any) -> Case:
    """A plan on two processes beside one process that has the batches of both, or the same ones under `--tp`.

    Args:
        more: fields of the case; "batch" is how many rows a process has in a batch.
    """
    batch = more.pop("batch", 4)
    reference = {"per_device_train_batch_size": 2 * batch}
    # Evaluated in the same batches on both sides: a mean of means depends on them.
    options = {**STILL, "per_device_eval_batch_size": batch, **options}
    fields: dict[str, Any] = {"reference": {} if plan[0] == "--tp" else reference, "alone": True, "resume_own": True}
    fields |= {"differs": OTHER_FILES, **more}
    return Case(f"{name} plan {' '.join(plan)}", program, options, (2,), plan=plan, **fields)


_BEST: dict[str, Any] = {**EVEN, **_STEPS_3, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
_TRL: dict[str, Any] = {**_STEPS_3, "model": "llama"}
for _plan in (_ZERO_3, _SHARD, _TP):
    PLANS += [
        # Beside two processes, but under `--tp`: trl's accuracy in an evaluation is a mean over steps of all processes.
        _beside_one(
            "trl_sft",
            "trl_sft",
            _plan,
            {**_TRL, "packing": True},
            batch=2,
            resume=_RESUME_3,
            alone=_plan is _TP,
            reference={},
        ),
        _beside_one("trl_dpo", "trl_dpo", _plan, _TRL, batch=2, resume=_RESUME_3),
        # Its completions are sampled by each rank; one process would draw others. Under `--tp` both ranks have one process's.
        Case(
            f"trl_grpo plan {' '.join(_plan)}",
            "trl_grpo",
            {**STILL, "model": "llama"},
            (2,),
            plan=_plan,
            alone=_plan is _TP,
            differs={"logged": "its num_tokens counts the rows of both ranks"} if _plan is _TP else {},
        ),
    ]
# The attention's biases of GPT-2 have gradients that are noise, and sum to other last digits.
PLANS += [_beside_one("trl_dpo, gpt2", "trl_dpo", _ZERO_3, {}, batch=2, tolerance=1e-3)]
for _plan in (_ZERO_3, _SHARD):
    PLANS += [
        # Beside two processes: Trainer multiplies the loss of a T5 by their number.
        Case(
            f"seq2seq with generation plan {' '.join(_plan)}",
            "seq2seq",
            {**STILL, **_STEPS_3, "rows": 32},
            (2,),
            plan=_plan,
            resume=_RESUME_3,
            resume_own=True,
            differs=OTHER_FILES,
        ),
        _beside_one("clm, best model, accumulation", "clm", _plan, {**_BEST, "gradient_accumulation_steps": 2}),
        _beside_one("clm, compile", "clm", _plan, {**EVEN, "torch_compile": True, "max_steps": 4}),
        # Which rows are grouped depends on the batch of a process.
        Case(
            f"clm, length grouping plan {' '.join(_plan)}",
            "clm",
            {**SAVED, **EVEN, "train_sampling_strategy": "group_by_length"},
            (2,),
            plan=_plan,
            resume=RESUME,
            resume_own=True,
            differs=OTHER_FILES,
        ),
    ]
PLANS += [
    _beside_one("lora", "lora", _SHARD, {**LORA_SAVED, "model": "llama", "rows": 64}, resume=LORA_RESUME),
    Case(
        "lora_loop plan --zero 3",
        "lora_loop",
        {**STILL, "model": "llama"},
        (2,),
        plan=_ZERO_3,
        resume={"resume": True},
        resume_own=True,
    ),
]

# -- folders, each library going on from the other's ------------------------------------------------------------------

_GO_ON: dict[str, Any] = {"resume": True}
FOLDERS = [
    Case(f"folder of accelerate{name}", "state_folder", options, resume=_GO_ON)
    for name, options in (
        ("", {}),
        (", safetensors", {"safe": True}),
        (", torch's files", {"safe": False}),
        (", bf16", {"mixed_precision": "bf16"}),
    )
]
for _kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
    _options: dict[str, Any] = {"fsdp": _kind}
    _fields: dict[str, Any] = {"procs": (2,), "resume": _GO_ON, "runner": "fsdp_on_cpu"}
    _name = f"folder of FSDP 2, {_kind.partition('_')[0].lower()} state"
    FOLDERS += [
        Case(f"{_name}, its functions", "state_folder", _options | {"functions": True}, **_fields),
        # Our save_state writes a folder of ours under FSDP, which any number of processes reads.
        Case(_name, "state_folder", _options, resume_real=True, **_fields),
    ]
for _stage in (0, 1, 2, 3):
    _fields = {"resume": _GO_ON, "doors": "accelerate,deepspeed", "runner": "without_kernel"}
    # DeepSpeed reads a universal folder of ours, and no other.
    FOLDERS += [
        Case(f"folder of DeepSpeed, stage {_stage}", "engine_folder", {"stage": _stage}, resume_real=True, **_fields)
    ]
    if _stage:
        _options = {"stage": _stage, "universal": True}
        FOLDERS += [Case(f"universal folder of DeepSpeed, stage {_stage}", "engine_folder", _options, **_fields)]

CASES = [*PLAIN, *FSDP, *DEEPSPEED, *PLANS, *FOLDERS]
