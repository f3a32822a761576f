"""How often to save, and how much time is useful: the formulas of Young and of Daly.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22(3), 2006 (doi 10.1016/j.future.2004.11.016)

    Young   tau = sqrt(2 C M)
    Daly    tau = sqrt(2 C M) [1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)] - C   for C < 2M, otherwise M
            time = M e^(R/M) (e^((tau + C)/M) - 1) T / tau

`C` is what a save costs the training, `M` the mean time between failures, `R` the time from a failure to the first step after
it, `T` the time without failures and saves, `tau` the computation between two saves. Failures are independent of each other and
of time (a Poisson process), and may come in a save or a restart too. All are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Above this exponent nothing is useful any more, and `math.exp` overflows at 709.
_MOST = 700.0
SLOWER = 10.0


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds between two saves, to the first order."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds of computation between two saves, to a higher order."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def useful_share(interval_s: float, save_s: float, recovery_s: float, mtbf_s: float) -> float:
    """Returns the share of all time in which new steps are computed (Daly's complete cost function).

    Args:
        interval_s: computation between two saves.
        save_s: what a save costs.
        recovery_s: from a failure to the first step after it.
        mtbf_s: mean time between failures.
    """
    exponent = (interval_s + save_s) / mtbf_s
    if exponent + recovery_s / mtbf_s > _MOST:
        return 0.0
    return interval_s / (mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(exponent))


@dataclass(frozen=True)
class JobCosts:
    """What was measured of one job, in seconds.

    Attributes:
        step_s: a step.
        save_s: how long a save keeps the training waiting.
        late_s: how much later the checkpoint is complete. A failure in this time loses the checkpoint too.
        recovery_s: from a failure to the first step after it, without the steps that are computed twice.
    """

    step_s: float
    save_s: float
    late_s: float
    recovery_s: float


@dataclass(frozen=True)
class SizeForecast:
    """What is expected at one number of devices.

    Attributes:
        devices: their number.
        failures_per_day: of all of them.
        mtbf_s: mean time between two failures.
        young_s, daly_s: seconds of computation between two saves, by both formulas.
        steps: steps between two saves, by Daly's.
        useful: share of the time that is useful, with this interval.
        useful_slower: the same where saves and recoveries take `SLOWER` times as long, with the interval that is best then.
    """

    devices: int
    failures_per_day: float
    mtbf_s: float
    young_s: float
    daly_s: float
    steps: int
    useful: float
    useful_slower: float


def forecast(costs: JobCosts, devices: Sequence[int], device_mtbf_s: float) -> list[SizeForecast]:
    """Returns what is expected at each number of devices.

    Args:
        costs: of the job; they count as independent of the number of devices.
        devices: the numbers.
        device_mtbf_s: mean time between failures of one device, with its share of host and network.
    """
    rows = []
    for count in devices:
        mtbf_s = device_mtbf_s / count
        interval_s, useful = _best(costs, mtbf_s, 1.0)
        _, slower = _best(costs, mtbf_s, SLOWER)
        steps = max(1, round(interval_s / costs.step_s))
        young_s = young_interval(costs.save_s, mtbf_s)
        rows.append(SizeForecast(count, 86400 / mtbf_s, mtbf_s, young_s, interval_s, steps, useful, slower))
    return rows


def _best(costs: JobCosts, mtbf_s: float, factor: float) -> tuple[float, float]:
    """Returns the interval, and the share that is useful with it. No save begins before the one before is complete."""
    save_s = costs.save_s * factor
    late_s = costs.late_s * factor
    interval_s = max(daly_interval(save_s, mtbf_s), late_s, costs.step_s)
    return interval_s, useful_share(interval_s, save_s, costs.recovery_s * factor + late_s, mtbf_s)
