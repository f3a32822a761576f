"""`Growth`: how the loss scale changes. It is a pure state machine, which is told of overflows and knows no tensors.

    a step overflows     scale x backoff_factor, at least min_scale, once `hysteresis` overflows have been counted
    a good step          after `growth_interval` of them (the first `growth_delay` are not counted) x growth_factor

With the defaults the scale changes as that of `torch.amp.GradScaler` does. With factors of 1.0 it never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.base.errors import ConfigError, Problem
from paceline.config.given import nearest

_LARGEST = 3.4028234663852886e38  # of float32, in which a loss is scaled


@dataclass
class Growth:
    """A loss scale and how it changes.

    Args:
        init_scale: the first scale.
        growth_factor, backoff_factor: the scale is multiplied by these after good steps, and after overflows.
        growth_interval: the number of good steps in a row after which the scale grows.
        growth_delay: the number of good steps that are not counted, at the beginning and after an overflow.
        hysteresis: the number of overflows, counted since the scale has grown, from which on it falls.
        consecutive_hysteresis: whether every good step begins the count of overflows anew; otherwise only growth does.
        min_scale: the scale never falls below it, and an overflow at it is an error; 0 for no minimum.

    Attributes:
        scale: the scale of the next backward pass.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_delay: int = 0
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 0.0
    scale: float = field(init=False)
    _good_steps: int = field(init=False)  # in a row
    _overflows_left: int = field(init=False)  # until the scale falls

    def __post_init__(self) -> None:
        self.scale = float(self.init_scale)
        self._good_steps = -self.growth_delay  # below zero, good steps bring growth no nearer
        self._overflows_left = self.hysteresis

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Growth:
        """Returns the growth that the keywords of a loss scaler ask for.

        Raises:
            ConfigError: `scaler-option`, for names that are not known and numbers that cannot work; all at once.
        """
        defaults = {option.name: option.default for option in fields(cls) if option.init}
        names = (*defaults, "enabled", "bad_loss", "at_minimum")
        problems: list[Problem] = []
        for name in sorted(options.keys() - defaults.keys()):
            close = nearest(name, names)
            fix = "use one of these, or leave it out"
            if close:
                fix = f"write {close!r}"
            what = f"the loss scaler has no option {name!r}."
            problems.append(Problem("scaler-option", what, f"options: {', '.join(names)}", fix))
        bounds = {
            "init_scale": (0.0, _LARGEST),
            "growth_factor": (1.0, _LARGEST),
            "backoff_factor": (2.0**-126, 1.0),
            "growth_interval": (1, float("inf")),
            "growth_delay": (0, float("inf")),
            "hysteresis": (1, float("inf")),
            "min_scale": (0.0, _LARGEST),
        }
        for name, (low, high) in bounds.items():
            value = options.get(name, defaults[name])
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high or (name == "init_scale" and value == 0):
                why = f"it goes from {low} to {high}"
                if name == "init_scale":
                    why += ", 0 excluded"
                fix = f"leave it out for {defaults[name]}"
                problems.append(Problem("scaler-option", f"scaler option {name}={value!r} cannot work.", why, fix))
        if problems:
            raise ConfigError.of(problems)
        return cls(**options)

    @property
    def exhausted(self) -> bool:
        """Whether one more overflow would need a scale below the minimum."""
        return self.min_scale > 0 and self.scale <= self.min_scale and self._overflows_left <= 1

    def update(self, overflow: bool) -> None:
        """Changes the scale after a step."""
        if overflow:
            if self._overflows_left <= 1:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            else:
                self._overflows_left -= 1
            self._good_steps = -self.growth_delay
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self._good_steps = 0
            self._overflows_left = self.hysteresis
            if self.scale * self.growth_factor <= _LARGEST:
                self.scale *= self.growth_factor
        elif self.consecutive_hysteresis:
            self._overflows_left = self.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Returns the state under the names of `torch.amp.GradScaler`, which can load it."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._good_steps,
            "_hysteresis": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict`, or that of torch's scaler, has returned."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["_growth_tracker"])
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self._overflows_left = state.get("_hysteresis", self.hysteresis)
