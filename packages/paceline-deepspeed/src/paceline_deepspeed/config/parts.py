"""Optimizers and schedulers that a DeepSpeed config names, and the parameters that each takes.

A type of torch's own is built with whatever parameters are given: torch says what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from paceline.config.kinds import YES_NO, Kind
from paceline_deepspeed.config.kinds import ANY, NUMBERS, PAIR, count, number, word


@dataclass(frozen=True)
class Param:
    """One parameter.

    Attributes:
        kind: how its value is read.
        default: DeepSpeed's own.
        hint: TrainingArguments' name of what "auto" stands for.
        why: why it is refused; "" for one that is taken.
        fix: what to do instead.
        required: there is no default.
    """

    kind: Kind
    default: Any = None
    hint: str = ""
    why: str = ""
    fix: str = ""
    required: bool = False


@dataclass(frozen=True)
class Part:
    """One optimizer or scheduler.

    Attributes:
        name: its type, as DeepSpeed spells it.
        params: what it takes; None where torch's own constructor decides.
        why: why it is refused; "" for one that is there.
        fix: what to do instead.
    """

    name: str
    params: Mapping[str, Param] | None = None
    why: str = ""
    fix: str = ""


_LR = Param(NUMBERS, 1e-3, "learning_rate")
_CLIPPED = Param(
    ANY, why="the engine clips, and not the optimizer", fix="say `gradient_clipping` at the top of the config"
)


def _optimizer(name: str, **params: Param) -> Part:
    weight = {"weight_decay": Param(number(), 0.0, "weight_decay")}
    return Part(name, {"lr": _LR, **weight, **params, "max_grad_norm": _CLIPPED})


def _adam(name: str, **params: Param) -> Part:
    return _optimizer(
        name, betas=Param(PAIR, (0.9, 0.999), "adam_betas"), eps=Param(number(), 1e-8, "adam_epsilon"),
        bias_correction=Param(YES_NO, True), amsgrad=Param(YES_NO, False), **params,
    )  # fmt: skip


_ADAMS = {
    "adam_w_mode": Param(YES_NO, True), "adamw_mode": Param(YES_NO, True), "torch_adam": Param(YES_NO, False),
    "fused": Param(YES_NO), "foreach": Param(YES_NO), "capturable": Param(YES_NO), "maximize": Param(YES_NO),
    "differentiable": Param(YES_NO), "set_grad_none": Param(YES_NO, True), "fp32_optimizer_states": Param(YES_NO, True),
}  # fmt: skip
_COMPRESSED = (
    "gradients are not compressed to one bit",
    "use Adam (Lamb); `communication_data_type` halves what travels",
)
CLOSURE = (
    "it computes the loss several times in each step, by a closure, and `engine.step()` has none",
    "use AdamW; or train with paceline.Accelerator, whose prepared optimizer takes `optimizer.step(closure)`",
)
_MU = ("parametrisations are the model's own", "make the groups with `mup`, and hand `initialize` the optimizer")

_FIXED = "DeepSpeed's Muon has 5 iterations, in Nesterov's form, whatever the config says"
_LEAVE_OUT = "leave it out"

_OWN_OPTIMIZERS = (
    _adam("Adam", **_ADAMS),
    _adam("AdamW", **_ADAMS),
    _adam("Lamb", max_coeff=Param(number(), 10.0), min_coeff=Param(number(), 0.01), eps_inside_sqrt=Param(YES_NO, False)),
    _optimizer("Lion", betas=Param(PAIR, (0.9, 0.999), "adam_betas")),
    _optimizer("Adagrad", eps=Param(number(), 1e-10), amsgrad=Param(YES_NO, False), lr_decay=Param(number(), 0.0),
               initial_accumulator_value=Param(number(), 0.0), foreach=Param(YES_NO), fused=Param(YES_NO),
               maximize=Param(YES_NO), differentiable=Param(YES_NO)),
    _optimizer("Muon", momentum=Param(number(), 0.95), ns_method=Param(word("gram", "standard"), "gram"),
               betas=Param(PAIR, (0.9, 0.95)), eps=Param(number(), 1e-10), muon_lr=Param(NUMBERS), adam_lr=Param(NUMBERS),
               adam_w_mode=Param(YES_NO, True), torch_adam=Param(YES_NO, False), fp32_optimizer_states=Param(YES_NO, True),
               nesterov=Param(YES_NO, True, why=_FIXED, fix=_LEAVE_OUT),
               ns_steps=Param(count(1), 5, why=_FIXED, fix=_LEAVE_OUT),
               per_head_muon=Param(YES_NO, False, why="Muon steps whole matrices here", fix=_LEAVE_OUT)),
    _optimizer("SGD", momentum=Param(number(), 0.0), dampening=Param(number(None), 0.0), nesterov=Param(YES_NO, False),
               maximize=Param(YES_NO), foreach=Param(YES_NO), differentiable=Param(YES_NO), fused=Param(YES_NO)),
    *(Part(name, None, *_COMPRESSED) for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")),
    *(Part(name, None, *_MU) for name in ("MuAdam", "MuAdamW", "MuSGD")),
    Part("LBFGS", None, *CLOSURE),
)  # fmt: skip
_TORCH_OPTIMIZERS = "Adadelta Adafactor Adamax ASGD NAdam RAdam RMSprop Rprop SparseAdam"

_STEPS = Param(count(1), 1000, "warmup_steps")
_TOTAL = Param(count(1), None, "max_steps", required=True)
_CURVE = Param(word("log", "linear"), "log")
_BEGUN = {"last_batch_iteration": Param(count(-1), -1)}


def _scheduler(name: str, **params: Param) -> Part:
    return Part(name, {**params, **_BEGUN})


_RANGE = {
    "lr_range_test_min_lr": Param(NUMBERS, 1e-3), "lr_range_test_step_size": Param(count(1), 2000),
    "lr_range_test_step_rate": Param(number(None), 1.0), "lr_range_test_staircase": Param(YES_NO, False),
}  # fmt: skip
_CYCLE = {
    "cycle_min_lr": Param(NUMBERS, required=True), "cycle_max_lr": Param(NUMBERS, required=True),
    "decay_lr_rate": Param(number(None), 0.0), "cycle_first_step_size": Param(count(1), 2000),
    "cycle_second_step_size": Param(count(1)), "cycle_first_stair_count": Param(count(0), 0),
    "cycle_second_stair_count": Param(count(0)), "decay_step_size": Param(count(0), 0),
    "cycle_momentum": Param(YES_NO, True), "cycle_min_mom": Param(number(), 0.8), "cycle_max_mom": Param(number(), 0.9),
    "decay_mom_rate": Param(number(None), 0.0),
}  # fmt: skip

_OWN_SCHEDULERS = (
    _scheduler("LRRangeTest", **_RANGE),
    _scheduler("OneCycle", **_CYCLE),
    _scheduler("WarmupLR", warmup_min_lr=Param(NUMBERS, 0.0), warmup_max_lr=Param(NUMBERS, None, "learning_rate"),
               warmup_num_steps=_STEPS, warmup_type=_CURVE),
    _scheduler("WarmupDecayLR", total_num_steps=_TOTAL, warmup_min_lr=Param(NUMBERS, 0.0),
               warmup_max_lr=Param(NUMBERS, 1e-3, "learning_rate"), warmup_num_steps=_STEPS, warmup_type=_CURVE),
    _scheduler("WarmupCosineLR", total_num_steps=_TOTAL, warmup_min_ratio=Param(number(), 0.0), warmup_num_steps=_STEPS,
               cos_min_ratio=Param(number(), 1e-4), warmup_type=_CURVE),
)  # fmt: skip
_TORCH_SCHEDULERS = """StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR CyclicLR
    OneCycleLR CosineAnnealingWarmRestarts LambdaLR MultiplicativeLR ReduceLROnPlateau"""

# DeepSpeed's own optimizers are found whatever their capital letters; torch's, and all schedules, by their exact name.
PARTS: Mapping[str, tuple[Part, ...]] = MappingProxyType({
    "optimizer": (*_OWN_OPTIMIZERS, *map(Part, _TORCH_OPTIMIZERS.split())),
    "scheduler": (*_OWN_SCHEDULERS, *map(Part, _TORCH_SCHEDULERS.split())),
})  # fmt: skip


def part(role: str, name: str) -> Part | None:
    """Finds the optimizer or scheduler of a type; None where there is none."""
    by_name = {part.name: part for part in PARTS[role]}
    own_optimizers = {part.name.lower(): part for part in _OWN_OPTIMIZERS}
    if role == "optimizer" and name not in by_name:
        return own_optimizers.get(name.lower())
    return by_name.get(name)
