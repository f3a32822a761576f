"""What a drawn program for DeepSpeed is, by its seed: its config, and the choices of its loop."""

from __future__ import annotations

import random
from typing import Any


def draw(seed: int) -> dict[str, Any]:
    """Returns what one program is: its `config`, and the choices of its loop."""
    chance = random.Random(seed)
    stage = seed % 4
    steps = chance.choice((1, 1, 2, 3))
    precision = chance.choice(("fp32", "fp32", "bf16", "fp16", "fp16 fixed"))
    if not stage and precision.startswith("fp16"):
        # On a CPU DeepSpeed 0.19.8 divides gradients by a loss scale there, by which it has not multiplied the loss.
        precision = "bf16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": chance.choice((1, 2, 4)),
        "gradient_accumulation_steps": steps,
        "gradient_clipping": chance.choice((0.0, 0.0, 0.05, 1.0)),
        "steps_per_print": 10**6,
        "zero_optimization": {"stage": stage},
    }
    decay = chance.choice((0.0, 0.0, 0.1))
    optimizer = chance.choice(("Adam", "AdamW", "SGD", "own SGD", "own Adam"))
    if optimizer == "SGD":
        params: dict[str, Any] = {"lr": 0.05, "weight_decay": decay, "momentum": chance.choice((0.0, 0.9))}
        config["optimizer"] = {"type": "SGD", "params": params}
        config["zero_allow_untested_optimizer"] = True
    elif not optimizer.startswith("own"):
        params = {"lr": 0.01, "weight_decay": decay, "torch_adam": True, "betas": [0.9, chance.choice((0.95, 0.999))]}
        if optimizer == "Adam":
            params["adam_w_mode"] = chance.choice((True, False))
        config["optimizer"] = {"type": optimizer, "params": params}
    else:
        config["zero_allow_untested_optimizer"] = True
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": chance.choice((8, 18, 20)),
            "loss_scale_window": chance.choice((2, 3, 100)),
            "hysteresis": chance.choice((1, 2)),
            "consecutive_hysteresis": chance.choice((True, False)),
            "min_loss_scale": chance.choice((1, 4)),
        }
    elif precision == "fp16 fixed":
        config["fp16"] = {"enabled": True, "loss_scale": chance.choice((64, 1024))}
    scheduler = chance.choice(("", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"))
    schedules: dict[str, dict[str, Any]] = {
        "WarmupLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": chance.choice(("log", "linear"))},
        "WarmupDecayLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 8},
        "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3},
        "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
        "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    }
    if scheduler == "OneCycle" and "SGD" in optimizer:
        schedules["OneCycle"]["cycle_momentum"] = False
    if scheduler:
        config["scheduler"] = {"type": scheduler, "params": schedules[scheduler]}
    if chance.random() < 0.3:
        config["prescale_gradients"] = True
        # DeepSpeed refuses another factor at stages 2 and 3.
        config["gradient_predivide_factor"] = chance.choice((1.0, 2.0)) if stage < 2 else 1.0
    if chance.random() < 0.3:
        config["communication_data_type"] = chance.choice(("fp32", "bf16", "fp16"))
    zero = config["zero_optimization"]
    if stage and chance.random() < 0.6:
        zero["overlap_comm"] = chance.choice((True, False))
        zero["contiguous_gradients"] = chance.choice((True, False))
        zero["reduce_bucket_size"] = chance.choice((50, 10**6))
    if stage in (1, 2) and chance.random() < 0.5:
        zero["reduce_scatter"] = chance.choice((True, False))
        zero["round_robin_gradients"] = chance.choice((True, False))
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = chance.choice((0, 10**5))
    program: dict[str, Any] = {
        "config": config,
        "optimizer": optimizer,
        "decay": decay,
        "precision": precision,
        "groups": chance.random() < 0.4,
        "frozen": chance.random() < 0.3,
        "norm": chance.random() < 0.5,
        # DeepSpeed takes `loss.backward()` from stage 1 on, and under fp16 not without `engine.scale`.
        "backward": chance.choice(("engine", "loss" if stage and "fp16" not in precision else "engine")),
        "micro_batches": steps * chance.choice((5, 7)) + chance.choice((0, 0, 1)),
        "evaluates": chance.random() < 0.3,
        "outlier": chance.choice((0, 3)) if precision == "fp16" else 0,
    }
    # DeepSpeed has no `no_sync` where gradients are divided, and none around `engine.step`.
    without_exchange = stage < 2 and steps == 1 and precision in ("fp32", "bf16") and program["backward"] == "engine"
    return {
        **program,
        "losses": chance.choice((1, 1, 2)) if program["backward"] == "engine" else 1,
        "no_sync": without_exchange and chance.random() < 0.5,
        "reloads": chance.random() < 0.4,
    }
