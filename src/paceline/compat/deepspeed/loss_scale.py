"""DeepSpeed's fp16 block in the words of our loss scaler, the same at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scaler_options(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Keywords for `Accelerator(scaler=...)`.

    Args:
        config: values by dotted name, as `compat.deepspeed.config.read` gives them.

    A step whose loss is not finite is skipped like any other overflow, as scripts written for DeepSpeed expect.
    """
    if config["fp16.loss_scale"]:
        return {
            "init_scale": float(config["fp16.loss_scale"]),
            "growth_factor": 1.0,
            "backoff_factor": 1.0,
            "bad_loss": "skip",
        }
    return {
        "init_scale": 2.0 ** config["fp16.initial_scale_power"],
        "growth_interval": config["fp16.loss_scale_window"],
        "growth_delay": 1,
        "hysteresis": config["fp16.hysteresis"],
        "consecutive_hysteresis": config["fp16.consecutive_hysteresis"],
        "min_scale": float(config["fp16.min_loss_scale"]),
        "bad_loss": "skip",
    }
