"""DeepSpeed's learning-rate schedules, by its formulas, and the choice of one by the name that a config gives.

    t = last_batch_iteration      -1 when a schedule is made, which writes the rate of the first update;
    step()                        t += 1, and the rate of the next update is written

So update number k, counted from 0, is taken with the rate of t = k - 1. At t = -1 and at t = 0 a warm-up stands at its
minimum, hence its first *two* updates do: DeepSpeed's habit, kept. With `warmup_first_step=True` (in a config:
`"paceline": {"warmup_first_step": true}`) the first update takes the warm-up's step 1 instead.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.base.errors import ConfigError, PrepareError
from paceline.base.log import warn_once

Rates = float | Sequence[float]


class Schedule:
    """A schedule whose rates are a function of t alone. `last_batch_iteration` is t in this and all that follow.

    Args:
        optimizer: whose groups' rates are written.
        last_batch_iteration: t; from -1 the first rates are written at once.

    Attributes:
        optimizer: the one that was given, out of what wraps it.
        last_batch_iteration: t, the only state.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = _optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    def get_lr(self) -> list[float]:
        """Rates of t, one for each group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Rates that were written last."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on to the next t, or to the one given, and writes its rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a t; the optimizer's rates come with the optimizer's own state."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _write(self) -> None:
        """Writes the rates of t into the groups."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            # A step that was compiled or captured reads the rate from this very tensor.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _begin(self) -> None:
        """Writes the first rates, unless the schedule goes on from another t; at the end of a constructor."""
        if self.last_batch_iteration == -1:
            self._write()

    def _per_group(self, value: Rates, name: str) -> list[float]:
        """Lists a value for each group, from one value for all or from a list."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups  # type: ignore[list-item]
        if len(value) != groups:
            raise _wrong(
                f"{name} has {len(value)} values.",
                f"the optimizer has {groups} groups of parameters",
                f"give one value for all, or {groups}",
            )
        return list(value)


class _Warmup(Schedule):
    """What schedules with a warm-up share: how much of it is done at t."""

    def __init__(
        self, optimizer: Optimizer, steps: int, kind: str, last_batch_iteration: int, first_step: bool
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        # Of one step the logarithm is 0, and the warm-up is divided by it (`_warmed`).
        self.warmup_num_steps = max(2, _count(steps, "warmup_num_steps"))
        if kind not in ("log", "linear"):
            warn_once("compat", f"warmup_type {kind!r} is neither 'log' nor 'linear'; it is taken as 'log'. Say which.")
            kind = "log"
        self.warmup_type = kind
        self._num_skipped = 2 if first_step else 0

    @property
    def _t(self) -> int:
        """The t of the formulas: two ahead with `first_step`, where the first update takes the warm-up's step 1, at t = 1."""
        return self.last_batch_iteration + self._num_skipped

    def _warmed(self) -> float:
        """Computes the part of the warm-up that is done, 0 to 1; only where t < warmup_num_steps."""
        if self.warmup_type == "linear":
            return self._t / self.warmup_num_steps
        return math.log(self._t + 1) / math.log(self.warmup_num_steps)


class WarmupLR(_Warmup):
    """From the minimum to the maximum, then constant: `min + (max - min) * g`, `g = log(t + 1) / log(N)` or `t / N`.

    Args:
        warmup_min_lr, warmup_max_lr: one rate, or one for each group; the maximum defaults to the groups' own rates.
        warmup_num_steps: N, at least 2.
        warmup_type: "log" or "linear".
        warmup_first_step: the first update takes step 1 of the warm-up; else the first two stand at its minimum.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        warmup_first_step: bool = False,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration, warmup_first_step)
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self._begin()

    def get_lr(self) -> list[float]:
        # At t = -1 the logarithm of t + 1 does not exist; the rate is the minimum.
        if self._t < 0:
            return _between(self.min_lrs, self.max_lrs, 0.0)
        return _between(self.min_lrs, self.max_lrs, self._fraction())

    def _fraction(self) -> float:
        """Computes g: how far the rate is on its way from the minimum to the maximum."""
        if self._t < self.warmup_num_steps:
            return self._warmed()
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then down to the minimum in a line: `g = (total - t) / (total - N)`, at least 0.

    Args:
        total_num_steps: where it ends.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration, warmup_first_step: see `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        warmup_first_step: bool = False,
    ) -> None:
        # Before the base's constructor, which writes the first rates and so calls `_fraction`.
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
            warmup_first_step,
        )
        _compare(total_num_steps, self.warmup_num_steps)

    def _fraction(self) -> float:
        if self._t < self.warmup_num_steps:
            return self._warmed()
        remaining = self.total_num_steps - self._t
        # At least 1, because a total within the warm-up is only warned of (`_compare`).
        decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, remaining / decay_steps)


class WarmupCosineLR(_Warmup):
    """The groups' own rates times a ratio, which warms up to 1 and falls with the cosine.

    Args:
        total_num_steps: where the cosine ends; the ratio stays there.
        warmup_min_ratio: the ratio where the warm-up begins (before it, the ratio is 0).
        warmup_num_steps, warmup_type, last_batch_iteration, warmup_first_step: see `WarmupLR`.
        cos_min_ratio: the ratio where the cosine ends.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        warmup_first_step: bool = False,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration, warmup_first_step)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs: list[Any] = []
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            # A tensor is written in place from now on (`_write`), so the group's own rate is remembered in a copy.
            if isinstance(rate, torch.Tensor):
                rate = rate.clone()
            self.org_lrs.append(rate)
        _compare(total_num_steps, self.warmup_num_steps)
        self._begin()

    def get_lr_ratio(self) -> float:
        # As in DeepSpeed, whose first update has a rate of 0 and not of the least ratio.
        if self._t < 0:
            return 0.0
        if self._t < self.warmup_num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._warmed()
        cosine_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        # 1 at most: past its end the cosine would rise again.
        done = min(1.0, (self._t - self.warmup_num_steps + 1) / cosine_steps)
        cosine = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class LRRangeTest(Schedule):
    """Ever larger rates, to find where training breaks: `min * (1 + rate * i)`, `i = (t + 1) / size`.

    Args:
        lr_range_test_min_lr: the first rate, or one for each group.
        lr_range_test_step_size: updates in an interval i.
        lr_range_test_step_rate: by what it grows in each.
        lr_range_test_staircase: rates change at whole intervals only.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _count(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._begin()

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        growth = 1 + self.step_rate * interval
        return [rate * growth for rate in self.min_lr]


class OneCycle(Schedule):
    """Up and down once, momentum the other way, then a slow decay (Smith, 2018: https://arxiv.org/abs/1803.09820).

    With s from 0 to 1 and back over the cycle: `lr = min + (max - min) * s`, `beta1 = max - (max - min) * s`; after it
    `lr = min / (1 + rate * k)`, `beta1 = max * (1 + rate * k)` with k in units of `decay_step_size`. As in DeepSpeed, beta2
    becomes 0.99 whatever the optimizer had (`cycle_beta2=None` leaves it), and the very first update has beta1 at its minimum.

    Args:
        cycle_min_lr, cycle_max_lr: one rate, or one for each group.
        decay_lr_rate, decay_mom_rate: of the decay after the cycle; 0 is none.
        cycle_first_step_size, cycle_second_step_size: updates up and down; down as many as up where None.
        cycle_first_stair_count, cycle_second_stair_count: stairs of each half; 0 is a slope; None as the first.
        decay_step_size: updates in a unit of the decay; 0 is no decay.
        cycle_momentum: whether beta1 moves.
        cycle_min_mom, cycle_max_mom: bounds of beta1.
        cycle_beta2: what beta2 becomes; None leaves the optimizer's own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        cycle_beta2: float | None = 0.99,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.first = cycle_first_step_size
        self.second = cycle_first_step_size
        if cycle_second_step_size is not None:
            self.second = cycle_second_step_size
        if self.first <= 0 or self.second < 0:
            raise _wrong(
                "a cycle needs steps.",
                f"cycle_first_step_size={self.first}, cycle_second_step_size={self.second}",
                "give the first half at least 1 step, and the second none or more",
            )
        self.total_size = self.first + self.second
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self._stairs = (cycle_first_stair_count, cycle_second_stair_count)
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.decay_step_size = decay_step_size
        # An optimizer without betas (SGD) keeps its momentum, and only the rate moves.
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self._beta2 = cycle_beta2
        if cycle_momentum and not self.cycle_momentum:
            name = type(self.optimizer).__name__
            warn_once("compat", f"{name} has no betas, so OneCycle moves its rate only; say cycle_momentum: false.")
        # Not by `_begin`: of the first update, beta1 is the minimum, as in DeepSpeed, where `get_mom` gives the maximum.
        if self.last_batch_iteration == -1:
            self._write()
            self._write_betas(self.min_moms)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on to the next t, or to the one given, and writes its rates and betas."""
        super().step(last_batch_iteration)
        self._write_betas(self.get_mom())

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            return _between(self.min_lrs, self.max_lrs, self._height())
        divisor = 1 + self.decay_lr_rate * self._decayed()
        return [low / divisor for low in self.min_lrs]

    def get_mom(self) -> list[float] | None:
        """Computes the first betas of t; None where they don't move."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            return _between(self.max_moms, self.min_moms, self._height())  # the other way round than the rate
        factor = 1 + self.decay_mom_rate * self._decayed()
        return [high * factor for high in self.max_moms]

    def _height(self) -> float:
        """Computes s: 0 where the cycle begins and ends, 1 at its top."""
        # One ahead of t, as in DeepSpeed: the rate of t is that of update t + 1. 0 where the cycle ends, as where it begins.
        place = (self.last_batch_iteration + 1) % self.total_size
        stairs_up, stairs_down = self._stairs
        if place <= self.first:
            return _climbed(place, self.first, stairs_up)
        return _climbed(self.total_size - place, self.second, stairs_down)

    def _decayed(self) -> float:
        """Counts k: units of the decay since the end of the cycle."""
        if not self.decay_step_size:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _write_betas(self, first_betas: list[float] | None) -> None:
        if first_betas is None or not self.cycle_momentum:
            return
        for group, beta1 in zip(self.optimizer.param_groups, first_betas, strict=True):
            beta2 = self._beta2
            if beta2 is None:
                _, beta2 = group["betas"]
            group["betas"] = (beta1, beta2)


def _climbed(steps: int, size: int, stairs: int) -> float:
    """Computes how much of one half of the cycle is done: on a slope, or up to the last whole stair."""
    if stairs <= 0:
        return steps / size
    return math.floor(steps * stairs / size) / stairs


def _between(starts: Sequence[float], ends: Sequence[float], fraction: float) -> list[float]:
    """Computes for each group the value at a fraction of the way from its start to its end."""
    return [start + (end - start) * fraction for start, end in zip(starts, ends, strict=True)]


_CLASSES: tuple[type[Schedule], ...] = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
SCHEDULES = {schedule.__name__: schedule for schedule in _CLASSES}
VALID_LR_SCHEDULES = list(SCHEDULES)
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
TOTAL_NUM_STEPS = "total_num_steps"


def build(type: str, optimizer: Optimizer, params: Mapping[str, Any]) -> Any:
    """Makes the schedule that a config asks for.

    Args:
        type: one of `SCHEDULES`, or the name of a class in `torch.optim.lr_scheduler`.
        optimizer: whose rates it writes.
        params: its keywords.

    Raises:
        ConfigError: `deepspeed-schedule`, for a name or a parameter that is not known, missing, or of no use.
    """
    chosen = SCHEDULES.get(type) or getattr(torch.optim.lr_scheduler, type, None)
    if not inspect.isclass(chosen):
        torch_names = [name for name, value in vars(torch.optim.lr_scheduler).items() if inspect.isclass(value)]
        example = "WarmupLR"
        close_names = difflib.get_close_matches(type, [*SCHEDULES, *torch_names], 1)
        if close_names:
            example = close_names[0]
        raise _wrong(
            f"there is no schedule {type!r}.",
            f"scheduler.type is one of {', '.join(SCHEDULES)}, or a class of torch.optim.lr_scheduler",
            f"write {example!r}",
        )
    schedule: Callable[..., Any] = chosen
    # All problems are told at once, before the class is called. The first parameter is the optimizer, which a config cannot
    # give.
    parameters = list(inspect.signature(schedule).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    unknown = [name for name in params if name not in names]
    missing = []
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in params:
            missing.append(parameter.name)
    if unknown or missing:
        why = [f"{name} is no parameter of {type}" for name in unknown]
        why += [f"{name} is missing, and has no default" for name in missing]
        fix = f"its parameters are {', '.join(names)}"
        close_names = []
        if unknown:
            close_names = difflib.get_close_matches(unknown[0], ["optimizer", *names], 1)
        if close_names:
            fix = f"did you mean {close_names[0]!r}?"
        raise _wrong(f"{type} cannot be made from these parameters.", why, fix)
    return schedule(optimizer, **params)


def of_config(config: Mapping[str, Any] | Any, optimizer: Optimizer) -> Any:
    """Makes the schedule of a config's `scheduler` block; None where there is none."""
    kind = config["scheduler.type"]
    params = dict(config["scheduler.params"])
    if kind is None:
        return None
    # The key holds for the whole config, and only schedules with a warm-up have the parameter.
    if config["paceline.warmup_first_step"] and issubclass(SCHEDULES.get(kind, Schedule), _Warmup):
        params["warmup_first_step"] = True
    return build(kind, optimizer, params)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds a flag for each parameter of the schedules to a parser, with DeepSpeed's defaults, which are the flags' own."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="schedule of the learning rate")
    for flag, default, text in _FLAGS:
        if default is False:
            group.add_argument(f"--{flag}", action="store_true", help=text)
        else:
            group.add_argument(f"--{flag}", type=type(default), default=default, help=text)
    return parser


_FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("lr_range_test_min_lr", 0.001, "LRRangeTest: the first rate"),
    ("lr_range_test_step_rate", 1.0, "LRRangeTest: by what it grows in an interval"),
    ("lr_range_test_step_size", 1000, "LRRangeTest: updates in an interval"),
    ("lr_range_test_staircase", False, "LRRangeTest: change at whole intervals only"),
    ("cycle_first_step_size", 1000, "OneCycle: updates up"),
    ("cycle_first_stair_count", -1, "OneCycle: stairs up"),
    ("cycle_second_step_size", -1, "OneCycle: updates down"),
    ("cycle_second_stair_count", -1, "OneCycle: stairs down"),
    ("decay_step_size", 1000, "OneCycle: updates in a unit of the decay"),
    ("cycle_min_lr", 0.01, "OneCycle: lowest rate"),
    ("cycle_max_lr", 0.1, "OneCycle: highest rate"),
    ("decay_lr_rate", 0.0, "OneCycle: decay of the rate"),
    ("cycle_momentum", False, "OneCycle: move momentum too"),
    ("cycle_min_mom", 0.8, "OneCycle: lowest momentum"),
    ("cycle_max_mom", 0.9, "OneCycle: highest momentum"),
    ("decay_mom_rate", 0.0, "OneCycle: decay of momentum"),
    ("warmup_min_lr", 0.0, "WarmupLR: first rate"),
    ("warmup_max_lr", 0.001, "WarmupLR: last rate"),
    ("warmup_num_steps", 1000, "WarmupLR: updates of the warm-up"),
    ("warmup_type", "log", "WarmupLR: log or linear"),
    ("warmup_min_ratio", 0.01, "WarmupCosineLR: first ratio"),
    ("cos_min_ratio", 0.01, "WarmupCosineLR: last ratio"),
)


def _optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimizer, or the one inside of what wraps it."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    raise PrepareError(
        "schedule-optimizer",
        f"a schedule was given a {type(optimizer).__name__} in place of an optimizer.",
        why="it writes learning rates into the groups of a torch.optim.Optimizer",
        fix="pass the optimizer that `deepspeed.initialize` returned, or your own",
    )


def _count(value: Any, name: str) -> int:
    # A whole number in a config may be a float, as in 1e3; True would pass for 1.
    if isinstance(value, bool) or value != int(value) or value <= 0:
        raise _wrong(f"{name} must be a positive whole number.", f"{name}={value!r}", "count optimizer steps")
    return int(value)


def _compare(total: int, warmup: int) -> None:
    if total < warmup:
        warn_once(
            "compat",
            f"the schedule ends at total_num_steps={total}, before its warm-up of warmup_num_steps={warmup} "
            "is done; raise the first or lower the second.",
        )


def _wrong(what: str, why: str | list[str], fix: str) -> ConfigError:
    return ConfigError("deepspeed-schedule", what, why=why, fix=fix)
