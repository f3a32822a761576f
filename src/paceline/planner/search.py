"""What a tuning tries, in which order, when it stops, and which candidate is the best: all of it pure.

    Space --candidates--> forecast each --sort_out--> those that do not fit, never launched
                                                  +-> the queue, by predicted time --trials--> best

A candidate is a way of dividing the model (ZeRO), of keeping activations, a micro-batch and options of strategies. Where
the batch of all ranks together is fixed, accumulation follows the micro-batch: accumulate = batch / width / micro.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from paceline.base.errors import ConfigError, Problem
from paceline.config.given import Choice

METRICS = ("throughput", "latency", "flops")
ORDERS = ("model_based", "gridsearch", "random")


@dataclass(frozen=True)
class Tuning:
    """How a search goes.

    Attributes:
        metric: what is best: samples a second, seconds a step, or FLOP/s.
        first_step, last_step: optimizer steps that are measured, counted from 1; a trial ends after the last.
        fast: leaves bucket sizes and gathering as they are.
        micro_sizes: the largest micro-batches of each plan that are tried, at most so many.
        min_micro, max_micro: bounds of a rank's micro-batch.
        min_batch, max_batch: bounds of the batch of all ranks, where it is not fixed; None for none.
        order: "model_based" goes by predicted time, "gridsearch" from the simplest plan on, "random" at random.
        early_stop: trials without an improvement after which no more are run.
        trials: at most so many.
        results_dir, exps_dir: where results, and what each trial printed, are written.
        overwrite: begins anew where results are there already; else what was measured is taken from them.
        arguments: the script's own arguments that follow: "micro" and "accumulate" -> "--batch-size".
    """

    metric: str = "throughput"
    first_step: int = 3
    last_step: int = 5
    fast: bool = True
    micro_sizes: int = 3
    min_micro: int = 1
    max_micro: int = 1024
    min_batch: int = 1
    max_batch: int | None = None
    order: str = "model_based"
    early_stop: int = 5
    trials: int = 50
    results_dir: str = "autotuning_results"
    exps_dir: str = "autotuning_exps"
    overwrite: bool = False
    arguments: Mapping[str, str] = field(default_factory=dict)

    def check(self, places: Mapping[str, str]) -> None:
        """Refuses what cannot be searched by.

        Args:
            places: where each value was given, by attribute.

        Raises:
            ConfigError: `tune-value`; all problems at once.
        """
        unknown = set(self.arguments) - {"micro", "accumulate"}
        max_batch = self.max_batch or self.min_batch
        rules = [
            ("metric", self.metric in METRICS, f"one of {', '.join(METRICS)}"),
            ("order", self.order in ORDERS, f"one of {', '.join(ORDERS)}"),
            ("first_step", self.first_step >= 2, "2 or more: the first step warms up"),
            ("last_step", self.last_step >= self.first_step, f"not before the first one, {self.first_step}"),
            ("max_micro", self.max_micro >= self.min_micro, f"not below the least, {self.min_micro}"),
            ("max_batch", max_batch >= self.min_batch, f"not below the least, {self.min_batch}"),
        ]
        for name in ("micro_sizes", "min_micro", "min_batch", "early_stop", "trials"):
            rules.append((name, getattr(self, name) >= 1, "1 or more"))
        rules.append(("arguments", not unknown, "arguments that follow `micro` or `accumulate`"))
        problems: list[Problem] = []
        for name, is_valid, expected in rules:
            if not is_valid:
                what = f"a tuning cannot go by {name} = {getattr(self, name)!r}."
                why = f"it comes from {places.get(name, 'the defaults')}; expected: {expected}"
                problems.append(Problem("tune-value", what, why, "change it to such a value, or leave it out"))
        if problems:
            raise ConfigError.of(problems)


@dataclass(frozen=True)
class Candidate:
    """One thing to try.

    Attributes:
        zero: what ranks along `shard` divide, 0 to 3.
        micro: samples of one micro-batch on one rank; None where it is the script's own.
        accumulate: micro-batches in one optimizer step.
        recompute: as the setting.
        options: of strategies, by "strategy.option".
    """

    zero: int
    micro: int | None
    accumulate: int
    recompute: str = "no"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Names its folder, such as `z2_gas1_tmbspg8`."""
        words = [f"z{self.zero}", f"gas{self.accumulate}"]
        if self.micro is not None:
            words.append(f"tmbspg{self.micro}")
        if self.recompute != "no":
            words.append(f"recompute-{self.recompute}")
        words += [f"{name.rpartition('.')[2]}-{value}" for name, value in self.options]
        return "_".join(words)

    @property
    def plan(self) -> tuple[str, int, tuple[tuple[str, Any], ...]]:
        """What it has in common with candidates of other micro-batches."""
        return self.recompute, self.zero, self.options

    @property
    def simplicity(self) -> tuple[int, bool, int, int, int]:
        """Less is simpler: what stays with the user of a plan, where two are equally fast."""
        return (self.zero, self.recompute != "no", len(self.options), self.accumulate, -(self.micro or 0))

    def batch(self, width: int) -> int | None:
        """Samples of one optimizer step over all ranks; None where the script alone knows."""
        return None if self.micro is None else self.micro * self.accumulate * width

    def settings(self, width: int, *, divided: bool = True) -> dict[str, Any]:
        """The same in our settings, for `width` ranks that read different samples.

        Args:
            divided: whether the candidate says how the model is divided; else that stays as it is.
        """
        settings: dict[str, Any] = {"recompute": self.recompute, "accumulate": self.accumulate}
        if not divided:
            return settings
        if self.zero == 0 or width == 1:
            return {"replicate": width, "shard": 1, "zero": 0, **settings}
        return {"replicate": 1, "shard": width, "zero": self.zero, **settings}


@dataclass(frozen=True)
class Space:
    """What may be varied.

    Attributes:
        zero, recompute: values to try.
        micro: (micro-batch, accumulation) pairs to try.
        options: by ZeRO stage, sets of options to try beside none.
        closed: what may not be varied, by knob, with the reason.
    """

    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    micro: tuple[tuple[int | None, int], ...]
    options: Mapping[int, tuple[tuple[tuple[str, Any], ...], ...]] = field(default_factory=dict)
    closed: tuple[Choice, ...] = ()

    def candidates(self) -> list[Candidate]:
        """All of them, from the simplest plan on, and the largest micro-batch first."""
        micro_batches = sorted(self.micro, key=lambda pair: -(pair[0] or 0))
        candidates: list[Candidate] = []
        for recompute, zero in product(self.recompute, self.zero):
            for options in ((), *self.options.get(zero, ())):
                candidates += [
                    Candidate(zero, micro, accumulate, recompute, options) for micro, accumulate in micro_batches
                ]
        return candidates


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a candidate on one rank.

    Attributes:
        bytes: held at once at most.
        seconds: of one step, at the datasheet's rates; a lower bound.
        flops: of one step.
        problem: why it cannot be launched at all; "" where it can.
    """

    bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Measured:
    """What came of one trial.

    Attributes:
        status: "measured", "does not fit" or "failed".
        seconds: of one step, the median of those measured, on the slowest rank.
        noise: how far the measured steps are from that, in seconds: the median distance.
        batch: samples of one step over all ranks; None where nobody could count them.
        bytes: that the fullest rank took, at most.
        why: what stopped it, where it was not the end of the measurement.
        wall_s: how long the trial took, from its start to its end.
    """

    status: str
    seconds: float = 0.0
    noise: float = 0.0
    batch: int | None = None
    bytes: int = 0
    why: str = ""
    wall_s: float = 0.0


def batches(tuning: Tuning, width: int, micro: int, accumulate: int, total: int | None) -> list[tuple[int, int]]:
    """The micro-batches to look at, each with the accumulation that goes with it.

    Args:
        tuning: has the bounds.
        width: ranks that read different samples.
        micro, accumulate: as they are now.
        total: the batch of all ranks where that is fixed; None where accumulation is, and the batch follows.
    """
    pairs: list[tuple[int, int]] = []
    if total is not None:
        # The batch of a rank is fixed: each of its divisors may be the micro-batch.
        share = total // width
        pairs = [(size, share // size) for size in range(1, share + 1) if share % size == 0]
    else:
        powers_of_2 = {2**power for power in range(tuning.max_micro.bit_length())}
        for size in sorted(powers_of_2 | {micro}):
            batch = size * accumulate * width
            if batch >= tuning.min_batch and (not tuning.max_batch or batch <= tuning.max_batch):
                pairs.append((size, accumulate))
    return [pair for pair in pairs if tuning.min_micro <= pair[0] <= tuning.max_micro]


def score(metric: str, seconds: float, batch: int | None, flops: float) -> float:
    """How good a step of so many seconds is; more is better."""
    if metric == "latency":
        return -seconds
    work = flops if metric == "flops" else float(batch or 1)
    return work / max(seconds, 1e-12)


def sort_out(
    candidates: Sequence[Candidate], forecasts: Mapping[Candidate, Forecast], usable: int, tuning: Tuning
) -> tuple[list[Candidate], list[Candidate]]:
    """Those to launch, in their order, and those that are not: of each plan the largest micro-batches that fit.

    Of what does not fit, the smallest micro-batch of each plan is told; whatever is larger does not fit either.
    """
    queue: list[Candidate] = []
    left: list[Candidate] = []
    by_plan: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        by_plan.setdefault(candidate.plan, []).append(candidate)
    for group in by_plan.values():
        fitting: list[Candidate] = []
        others: list[Candidate] = []
        for candidate in sorted(group, key=lambda candidate: candidate.micro or 0):
            forecast = forecasts[candidate]
            if not forecast.problem and forecast.bytes <= usable:
                fitting.append(candidate)
            else:
                others.append(candidate)
        queue += fitting[::-1][: tuning.micro_sizes]
        left += others[:1]

    def predicted_rank(candidate: Candidate) -> tuple[float, ...]:
        forecast = forecasts[candidate]
        predicted = score(tuning.metric, forecast.seconds, candidate.batch(1), forecast.flops)
        # Equal predictions: fewer, larger micro-batches cost fewer calls, and a simpler plan fewer messages.
        return (-round(predicted, 6), *candidate.simplicity)

    if tuning.order == "random":
        random.Random(0).shuffle(queue)
    elif tuning.order == "model_based":
        queue.sort(key=predicted_rank)
    return queue, left


@dataclass
class Progress:
    """What has been measured, and whether to go on.

    Args:
        tuning: how the search goes.
        flops: of each candidate's step.
    """

    tuning: Tuning
    flops: Mapping[Candidate, float]
    results: dict[Candidate, Measured] = field(default_factory=dict)
    since: int = 0  # trials since the last improvement

    def add(self, candidate: Candidate, measured: Measured) -> None:
        """Takes in one result."""
        before = self.leader
        self.results[candidate] = measured
        leader = self.leader
        improved = leader is not None and leader != before and (before is None or not self._tie(leader, before))
        self.since = 0 if improved else self.since + 1

    @property
    def done(self) -> str:
        """Why no more trials are run; "" where they go on."""
        if len(self.results) >= self.tuning.trials:
            return f"{self.tuning.trials} trials were run, as many as were allowed"
        if self.since >= self.tuning.early_stop and self.leader is not None:
            return f"the last {self.since} trials were no improvement"
        return ""

    @property
    def leader(self) -> Candidate | None:
        """The fastest so far; None where nothing was measured."""
        return max(self.measured, key=self.score, default=None)

    @property
    def measured(self) -> list[Candidate]:
        """Those whose trial came to its end."""
        return [candidate for candidate, result in self.results.items() if result.status == "measured"]

    def best(self) -> tuple[Candidate | None, list[Candidate]]:
        """The one to take: of those as fast as the fastest, within noise, the simplest; and the others of those."""
        fastest = self.leader
        if fastest is None:
            return None, []
        equal = [candidate for candidate in self.measured if self._tie(candidate, fastest)]
        equal.sort(key=lambda candidate: candidate.simplicity)
        return equal[0], equal[1:]

    def contenders(self) -> list[Candidate]:
        """The fastest, and those that its lead over them may be mere noise: worth a second trial each, three at most."""
        fastest = self.leader
        if fastest is None:
            return []
        near = [
            candidate
            for candidate in self.measured
            if self._difference(candidate, fastest) <= self._noise(candidate, fastest)
        ]
        if len(near) == 1:
            return []
        return sorted(near, key=self.score, reverse=True)[:3]

    def again(self, candidate: Candidate, measured: Measured) -> bool:
        """Takes in a second trial; whether it counts. Other work on a machine only adds time, so the faster one does."""
        if measured.status != "measured" or measured.seconds >= self.results[candidate].seconds:
            return False
        self.results[candidate] = measured
        return True

    def score(self, candidate: Candidate) -> float:
        """How good a measured candidate is; more is better."""
        result = self.results[candidate]
        return score(self.tuning.metric, result.seconds, result.batch, self.flops.get(candidate, 0.0))

    def _tie(self, first: Candidate, other: Candidate) -> bool:
        """Whether two differ by no more than their own steps do among themselves, and by no more than a tenth."""
        return self._difference(first, other) <= min(self._noise(first, other), 0.1)

    def _difference(self, first: Candidate, other: Candidate) -> float:
        """By what share of the better one two differ."""
        one_score = self.score(first)
        other_score = self.score(other)
        return abs(one_score - other_score) / max(abs(one_score), abs(other_score), 1e-12)

    def _noise(self, *candidates: Candidate) -> float:
        """The larger share of a step by which the measured steps of one differ."""
        results = [self.results[candidate] for candidate in candidates]
        return max(result.noise / max(result.seconds, 1e-12) for result in results)
