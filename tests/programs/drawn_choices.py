"""What a drawn program for DeepSpeed is, by its seed: its config, and the choices of its loop."""

from __future__ import annotations

import random
from typing import Any

_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 8},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
    "StepLR": {"step_size": 2, "gamma": 0.5},
}
_OPTIMIZERS = (
    *("Adam", "AdamW", "SGD", "Muon", "Adagrad", "RMSprop", "Lion"),
    *("own SGD", "own Adam", "own AdamW", "made by a function"),
)
_CORRECTED = ("Adam", "AdamW", "own Adam", "own AdamW", "made by a function")  # by the number of steps
# DeepSpeed divides the states of these by ZeRO without a word.
_TESTED = ("Adam", "AdamW", "Muon", "Adagrad", "own Adam", "own AdamW", "made by a function")


def draw(seed: int) -> dict[str, Any]:
    """Returns what one program is: its `config`, and the choices of its loop."""
    chance = random.Random(seed)
    stage = seed % 4
    steps = chance.choice((1, 1, 2, 3))
    precision = chance.choice(("fp32", "fp32", "bf16", "fp16", "fp16 fixed", "autocast"))
    if not stage and precision.startswith("fp16"):
        # On a CPU DeepSpeed 0.19.8 divides gradients by a loss scale there, by which it has not multiplied the loss.
        precision = "fp16 of scale 1"
    optimizer = chance.choice(_OPTIMIZERS)
    if not stage and precision in ("bf16", "fp16 of scale 1") and optimizer in _CORRECTED:
        # There it steps once with gradients of zero, so that Adam corrects its averages for one step too many.
        precision = "fp32"
    if optimizer == "Muon" and (precision.startswith("fp16") or not stage):
        optimizer = "AdamW"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": chance.choice((1, 2, 4)),
        "gradient_accumulation_steps": steps,
        "steps_per_print": 10**6,
        "zero_optimization": _zero(stage, chance),
        **_precision(precision, chance),
    }
    clip = chance.choice((0.0, 0.0, 0.05, 1.0, None))
    if clip is not None:  # DeepSpeed clips to 1 where a config says nothing
        config["gradient_clipping"] = clip
    decay = chance.choice((0.0, 0.0, 0.1))
    if params := _params(optimizer, decay, chance):
        config["optimizer"] = {"type": optimizer, "params": params}
    if optimizer not in _TESTED:
        config["zero_allow_untested_optimizer"] = True
    # DeepSpeed gives schedulers that it does not make before the optimizer its own one, of which torch's take only torch's.
    scheduler = _scheduler(optimizer, is_plain=not stage and precision == "fp32", chance=chance)
    if scheduler in _SCHEDULES:
        params = dict(_SCHEDULES[scheduler])
        if scheduler == "WarmupLR":
            params["warmup_type"] = chance.choice(("log", "linear"))
        if scheduler == "OneCycle" and ("SGD" in optimizer or optimizer in ("Adagrad", "RMSprop", "Muon", "Lion")):
            params["cycle_momentum"] = False
        config["scheduler"] = {"type": scheduler, "params": params}
    if chance.random() < 0.3:
        config["prescale_gradients"] = True
        # DeepSpeed refuses another factor at stages 2 and 3.
        config["gradient_predivide_factor"] = chance.choice((1.0, 2.0)) if stage < 2 else 1.0
    if optimizer == "Muon" or (stage >= 2 and "prescale_gradients" in config):
        config["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed refuses it with either
    if chance.random() < 0.3:
        config["communication_data_type"] = chance.choice(("fp32", "bf16", "fp16"))
    if stage and precision == "bf16" and chance.random() < 0.3:
        config["data_types"] = {"grad_accum_dtype": chance.choice(("fp32", "bf16"))}
    if chance.random() < 0.2 and stage == 2:
        config["managed_gradient_accumulation"] = False
    # DeepSpeed takes `loss.backward()` from stage 1 on, and under fp16 not without `engine.scale`.
    backward = chance.choice(("engine", "engine", "loss", "scale"))
    if not stage or (backward == "loss" and precision.startswith("fp16")):
        backward = "engine"
    if backward != "engine":  # DeepSpeed counts no samples then
        config.pop("managed_gradient_accumulation", None)
    program: dict[str, Any] = {
        "config": config,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "decay": decay,
        "precision": precision,
        "groups": chance.random() < 0.4,
        "frozen": chance.random() < 0.3,
        "norm": chance.random() < 0.5,
        "tied": chance.random() < 0.25,
        # A layer that some micro-batches do not use. DeepSpeed's stage 3 steps it by the gradient of a step before.
        "skips": chance.random() < 0.2 and stage < 3,
        "backward": backward,
        "micro_batches": steps * chance.choice((5, 7)) + chance.choice((0, 0, 1)),
        "evaluates": chance.random() < 0.3,
        "outlier": chance.choice((0, 3)) if precision in ("fp16", "bf16") else 0,
        "loader": chance.random() < 0.3,
        # Where the script sets gradients to zero, which the engine does after each step by itself.
        "zeroes": chance.choice(("", "", "engine", "optimizer", "module")),
        "sets_rate": chance.choice((0, 0, 0, 2)),
        "sets_batch": chance.random() < 0.15,
    }
    # DeepSpeed has no `no_sync` where gradients are divided, and none around `engine.step`.
    without_exchange = stage < 2 and steps == 1 and precision in ("fp32", "bf16") and backward == "engine"
    alone = "module alone" if stage < 3 else "all"  # `load_module_only` loads nothing there
    return {
        **program,
        # Of two passes in one micro-batch stages 1 and 2 lose gradients, and stage 3 refuses them.
        "losses": chance.choice((1, 1, 2)) if backward == "engine" and not stage else 1,
        "no_sync": without_exchange and chance.random() < 0.5,
        "reloads": chance.choice(("", "", "all", "no optimizer", "no scheduler", alone, "by tag")),
    }


def _zero(stage: int, chance: random.Random) -> dict[str, Any]:
    """Returns the block of ZeRO."""
    zero: dict[str, Any] = {"stage": stage}
    if stage and chance.random() < 0.6:
        zero["overlap_comm"] = chance.choice((True, False))
        zero["contiguous_gradients"] = chance.choice((True, False))
        zero["reduce_bucket_size"] = chance.choice((50, 10**6))
    if stage in (1, 2) and chance.random() < 0.5:
        zero["reduce_scatter"] = chance.choice((True, False))
        zero["round_robin_gradients"] = chance.choice((True, False))
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = chance.choice((0, 10**5))
    return zero


def _precision(precision: str, chance: random.Random) -> dict[str, Any]:
    """Returns the block of a precision."""
    if precision == "bf16":
        return {"bf16": {"enabled": True}}
    if precision == "autocast":
        block: dict[str, Any] = {"enabled": True, "dtype": "bfloat16"}
        if chance.random() < 0.4:
            block["lower_precision_safe_modules"] = ["torch.nn.Linear"]
        return {"torch_autocast": block}
    if precision == "fp16 of scale 1":
        return {"fp16": {"enabled": True, "loss_scale": 1}}
    if precision == "fp16 fixed":
        return {"fp16": {"enabled": True, "loss_scale": chance.choice((64, 1024))}}
    if precision == "fp16":
        block = {
            "enabled": True,
            "initial_scale_power": chance.choice((8, 18, 20)),
            "loss_scale_window": chance.choice((2, 3, 100)),
            "hysteresis": chance.choice((1, 2)),
            "consecutive_hysteresis": chance.choice((True, False)),
            "min_loss_scale": chance.choice((1, 4)),
        }
        return {"fp16": block}
    return {}


def _params(optimizer: str, decay: float, chance: random.Random) -> dict[str, Any]:
    """Returns the arguments of an optimizer of the config; none where the script makes it."""
    if optimizer == "SGD":
        return {"lr": 0.01, "weight_decay": decay, "momentum": chance.choice((0.0, 0.9))}
    if optimizer in ("Adam", "AdamW"):
        betas = [0.9, chance.choice((0.95, 0.999))]
        params: dict[str, Any] = {"lr": 0.01, "weight_decay": decay, "torch_adam": True, "betas": betas}
        if optimizer == "Adam":
            params["adam_w_mode"] = chance.choice((True, False))
        return params
    if optimizer == "Muon":
        params = {"lr": 0.02, "momentum": 0.9, "weight_decay": decay, "torch_adam": True}
        if chance.random() < 0.5:
            params["adam_lr"] = 0.005
        return params
    if optimizer in ("Adagrad", "RMSprop"):
        return {"lr": 0.01, "weight_decay": decay}
    if optimizer == "Lion":
        return {"lr": 0.002, "weight_decay": decay, "betas": [0.9, 0.99]}
    return {}


def _scheduler(optimizer: str, is_plain: bool, chance: random.Random) -> str:
    """Returns the name of a schedule: of the config, or of one that the script makes.

    Args:
        optimizer: by its name.
        is_plain: whether the engine's optimizer is torch's.
        chance: draws.
    """
    names = ["", *_SCHEDULES, "made by a function"]
    if not is_plain:
        names = [name for name in names if name not in ("StepLR", "made by a function")]
    if optimizer in ("own SGD", "own Adam", "own AdamW"):
        names.append("own LambdaLR")
    return chance.choice(names)
