"""`Detector`: says of each optimizer step, before it is taken, whether its loss or its gradients are out of the ordinary.

    nan             the loss or a gradient is not a finite number
    loss_spike      the loss lies more than `loss_spike_deviations` deviations above the median of the losses before it
    gradient_norm   the norm is more than `gradient_norm_factor` times the median of the norms before it

Deviations are those of a normal distribution, estimated by the median absolute deviation (1.4826 * MAD), which a few
outliers do not move. What is judged is the same on all ranks, so that all decide alike; and nothing here communicates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from paceline.config.kinds import one_of, positive, whole
from paceline.plan.options import option

NAME = "anomalies"  # of the block of options: `--option anomalies.nan=skip`
KINDS = ("nan", "loss_spike", "gradient_norm")
ACTIONS = ("no", "log", "skip", "rollback", "stop")  # of several anomalies of one step the last one's counts

_NORMAL = 1.4826  # the deviation of a normal distribution in units of its median absolute deviation
# Losses that hardly vary have a deviation of almost nothing, and then rounding alone is many of them.
_LEAST_DEVIATION = 0.01  # of the median

_ACTION = one_of(*ACTIONS)


@dataclass(frozen=True)
class AnomalyOptions:
    """What counts as an anomaly, and what is done then."""

    nan: str = option("no", _ACTION, "What is done where the loss or a gradient is NaN or infinite.")
    loss_spike: str = option("no", _ACTION, "What is done where the loss spikes.")
    loss_spike_deviations: float = option(6, positive(), "Deviations above the median at which a loss is a spike.")
    gradient_norm: str = option("no", _ACTION, "What is done where the norm of the gradients explodes.")
    gradient_norm_factor: float = option(10, positive(), "Multiple of the median norm at which a norm has exploded.")
    window: int = option(128, whole(4), "Steps whose losses and norms are compared with.")
    warmup: int = option(32, whole(2), "Steps before the first spike or explosion can be seen.")
    limit: int = option(10, whole(1), "Steps skipped in a row, and rollbacks in all, after which the run stops.")
    without_checkpoint: str = option(
        "stop", one_of("stop", "skip"), "What a rollback does where the run has neither saved nor loaded a checkpoint."
    )

    @property
    def action_of(self) -> dict[str, str]:
        """Kind -> action, of those that are looked for."""
        actions: dict[str, str] = {kind: getattr(self, kind) for kind in KINDS}
        return {kind: action for kind, action in actions.items() if action != "no"}


def flattened(block: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they stand in the code, by the names of `AnomalyOptions`.

    Args:
        block: an action by kind, or a mapping of `action` and the kind's own options.

    Example:
        >>> flattened({"nan": "skip", "loss_spike": {"deviations": 6, "action": "rollback"}})
        {'nan': 'skip', 'loss_spike_deviations': 6, 'loss_spike': 'rollback'}
    """
    options: dict[str, Any] = {}
    for kind, value in block.items():
        if not isinstance(value, Mapping):
            options[str(kind)] = value
            continue
        if "action" not in value:
            options[str(kind)] = "log"
        for name, entry in value.items():
            options[str(kind) if name == "action" else f"{kind}_{name}"] = entry
    return options


@dataclass(frozen=True)
class Anomaly:
    """One thing that is out of the ordinary in one step.

    Attributes:
        kind: one of `KINDS`.
        value: the loss or the norm; None where it is not the same on all ranks.
        limit: what it should not have exceeded; None for `nan`.
        action: one of `ACTIONS`.
        text: what happened, in one sentence.
    """

    kind: str
    value: float | None
    limit: float | None
    action: str
    text: str


@dataclass(frozen=True)
class StepFacts:
    """What all ranks know of a step before it is taken.

    Attributes:
        loss: mean over the step's samples; None where no backward pass went through the accelerator.
        norm: of the gradients, before they are clipped; None where it was not taken.
        bad_losses, bad_gradients: how many ranks hold a loss, or a norm, that is not finite.
        first_bad_rank: the lowest of these ranks.
    """

    loss: float | None = None
    norm: float | None = None
    bad_losses: int = 0
    bad_gradients: int = 0
    first_bad_rank: int = 0


class Detector:
    """Judges the steps of one optimizer (or of several that step together).

    Args:
        options: what is looked for.
    """

    def __init__(self, options: AnomalyOptions) -> None:
        self._options = options
        self._losses: deque[float] = deque(maxlen=options.window)
        self._norms: deque[float] = deque(maxlen=options.window)

    def judge(self, facts: StepFacts) -> list[Anomaly]:
        """All anomalies of a step; remembers its values unless the step is not going to be taken."""
        anomalies = [*self._not_finite(facts), *self._spike(facts.loss), *self._explosion(facts.norm)]
        if all(anomaly.action == "log" for anomaly in anomalies):
            if facts.loss is not None and not facts.bad_losses:
                self._losses.append(facts.loss)
            if facts.norm is not None and not facts.bad_gradients:
                self._norms.append(facts.norm)
        return anomalies

    def _not_finite(self, facts: StepFacts) -> list[Anomaly]:
        action = self._options.nan
        if action == "no" or not (facts.bad_losses or facts.bad_gradients):
            return []
        subject = "a gradient is"
        ranks = facts.bad_gradients
        if facts.bad_losses:
            subject = "the loss is"
            ranks = facts.bad_losses
        others = f" and {ranks - 1} more" if ranks > 1 else ""
        text = f"{subject} not a finite number on rank {facts.first_bad_rank}{others}."
        return [Anomaly("nan", None, None, action, text)]

    def _spike(self, loss: float | None) -> list[Anomaly]:
        action = self._options.loss_spike
        if action == "no" or loss is None or not math.isfinite(loss) or len(self._losses) < self._first:
            return []
        middle = median(self._losses)
        deviation = _NORMAL * median(abs(value - middle) for value in self._losses)
        deviation = max(deviation, _LEAST_DEVIATION * abs(middle))
        limit = middle + self._options.loss_spike_deviations * deviation
        if loss <= limit:
            return []
        text = (
            f"the loss is {loss:.6g}, above {limit:.6g}: the median of the last {len(self._losses)} steps is {middle:.6g}, "
            f"their deviation {deviation:.3g}."
        )
        return [Anomaly("loss_spike", loss, limit, action, text)]

    def _explosion(self, norm: float | None) -> list[Anomaly]:
        action = self._options.gradient_norm
        if action == "no" or norm is None or not math.isfinite(norm) or len(self._norms) < self._first:
            return []
        middle = median(self._norms)
        limit = self._options.gradient_norm_factor * middle
        if norm <= limit:
            return []
        text = (
            f"the norm of the gradients is {norm:.6g}, above {limit:.6g}: the median of the last {len(self._norms)} steps "
            f"is {middle:.6g}."
        )
        return [Anomaly("gradient_norm", norm, limit, action, text)]

    @property
    def _first(self) -> int:
        """Values that are needed before one can be judged."""
        return min(self._options.warmup, self._options.window)

    def state_dict(self) -> dict[str, list[float]]:
        """What the next steps are compared with."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Takes back what `state_dict` gave; of more values than the window holds now, the last ones."""
        self._losses = deque(state["losses"], maxlen=self._options.window)
        self._norms = deque(state["norms"], maxlen=self._options.window)


def strongest(anomalies: list[Anomaly]) -> str:
    """Returns the action that counts where a step has these anomalies; "no" for none."""
    return max((anomaly.action for anomaly in anomalies), key=ACTIONS.index, default="no")


def names() -> list[str]:
    """Names of all options."""
    return [entry.name for entry in fields(AnomalyOptions)]
