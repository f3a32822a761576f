"""Runs of `deepspeed_trainer.py`: TrainingArguments by the name of a run."""

# Those of one process that the real one can do on the CPU.
RECORDED = ("stage 2", "stage 3, accumulation, their scheduler", "stage 1, their optimizer")

_AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
_WHOLE = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "reduce_bucket_size": "auto"}
_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto",
                                      "torch_adam": True}}  # fmt: skip

CASES = {
    "stage 2": {"deepspeed": {"zero_optimization": {"stage": 2}, **_AUTO}},
    "stage 3, accumulation, their scheduler": {
        "gradient_accumulation_steps": 2,
        "deepspeed": {"zero_optimization": _WHOLE, **_AUTO, "scheduler": {"type": "WarmupLR", "params": _WARMUP}},
    },
    "stage 1, their optimizer": {"deepspeed": {"zero_optimization": {"stage": 1}, **_AUTO, "optimizer": _ADAMW}},
    "stage 0": {"deepspeed": {"zero_optimization": {"stage": 0}, **_AUTO}},
    "stage 3, not whole": {"deepspeed": {"zero_optimization": {"stage": 3}, **_AUTO}},
}
