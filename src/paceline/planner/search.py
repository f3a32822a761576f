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
from typing import Any

from paceline.base.errors import ConfigError, Problem
from paceline.config.given import Choice

METRICS = ("throughput", "latency", "flops")
ORDERS = ("model_based", "gridsearch", "random")


@dataclass(frozen=True)
class Tuning:
    """How a search goes; names and defaults are those of DeepSpeed's `autotuning` block where it has them.

    Attributes:
        metric: what is best: samples a second, seconds a step, or FLOP/s.
        first_step, last_step: optimizer steps that are measured, counted from 1; a trial ends after the last.
        fast: leaves bucket sizes and gathering as they are.
        micro_sizes: the largest micro-batches of each plan that are tried, at most so many.
        min_micro, max_micro: bounds of a rank's micro-batch.
        min_batch, max_batch: bounds of the batch of all ranks, where it is not fixed; None for none.
        order: "model_based" goes by predicted time, "gridsearch" from the simplest plan on, "random" by lot.
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
        rules = [
            ("metric", self.metric in METRICS, f"one of {', '.join(METRICS)}"),
            ("order", self.order in ORDERS, f"one of {', '.join(ORDERS)}"),
            ("first_step", self.first_step >= 2, "2 or more: the first step warms up"),
            ("last_step", self.last_step >= self.first_step, f"not before the first one, {self.first_step}"),
            ("max_micro", self.max_micro >= self.min_micro, f"not below the least, {self.min_micro}"),
            (
                "max_batch",
                (self.max_batch or self.min_batch) >= self.min_batch,
                f"not below the least, {self.min_batch}",
            ),
        ]
        rules += [
            (name, getattr(self, name) >= 1, "1 or more")
            for name in ("micro_sizes", "min_micro", "min_batch", "early_stop", "trials")
        ]
        strange = set(self.arguments) - {"micro", "accumulate"}
        rules.append(("arguments", not strange, "arguments that follow `micro` or `accumulate`"))
        problems = [
            Problem(
                "tune-value",
                f"a tuning cannot go by {name} = {getattr(self, name)!r}.",
                why=f"it comes from {places.get(name, 'the defaults')}; expected: {expected}",
                fix="change it to such a value, or leave it out",
            )
            for name, good, expected in rules
            if not good
        ]
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
        words += [f"tmbspg{self.micro}"] if self.micro is not None else []
        words += [f"recompute-{self.recompute}"] if self.recompute != "no" else []
        words += [f"{name.rpartition('.')[2]}-{value}" for name, value in self.options]
        return "_".join(words)

    @property
    def simplicity(self) -> tuple[Any, ...]:
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
        found: dict[str, Any] = {}
        if divided:
            whole = self.zero == 0 or width == 1
            found |= {
                "replicate": width if whole else 1,
                "shard": 1 if whole else width,
                "zero": 0 if whole else self.zero,
            }
        return found | {"recompute": self.recompute, "accumulate": self.accumulate}


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
        return [
            Candidate(zero, micro, accumulate, recompute, options)
            for recompute in self.recompute
            for zero in self.zero
            for options in ((), *self.options.get(zero, ()))
            for micro, accumulate in sorted(self.micro, key=lambda pair: -(pair[0] or 0))
        ]


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
    if total is not None:
        share = total // width
        sizes = [size for size in range(1, share + 1) if share % size == 0]
        pairs = [(size, share // size) for size in sizes]
    else:
        pairs = [(2**power, accumulate) for power in range(tuning.max_micro.bit_length())]
        pairs += [] if (micro, accumulate) in pairs else [(micro, accumulate)]
        most = tuning.max_batch
        pairs = [
            pair
            for pair in sorted(pairs)
            if tuning.min_batch <= pair[0] * accumulate * width <= (most or pair[0] * accumulate * width)
        ]
    return [pair for pair in pairs if tuning.min_micro <= pair[0] <= tuning.max_micro]


def score(metric: str, seconds: float, batch: int | None, flops: float) -> float:
    """How good a step of so many seconds is; more is better."""
    if metric == "latency":
        return -seconds
    return (flops if metric == "flops" else float(batch or 1)) / max(seconds, 1e-12)


def sort_out(
    candidates: Sequence[Candidate], forecasts: Mapping[Candidate, Forecast], usable: int, tuning: Tuning
) -> tuple[list[Candidate], list[Candidate]]:
    """Those to launch, in their order, and those that are not: of each plan the largest micro-batches that fit.

    Of what does not fit, the smallest micro-batch of each plan is told; whatever is larger does not fit either.
    """
    queue: list[Candidate] = []
    left: list[Candidate] = []
    plans: dict[tuple[Any, ...], list[Candidate]] = {}
    for each in candidates:
        plans.setdefault((each.recompute, each.zero, each.options), []).append(each)
    for those in plans.values():
        good = [each for each in those if not forecasts[each].problem and forecasts[each].bytes <= usable]
        queue += sorted(good, key=lambda each: -(each.micro or 0))[: tuning.micro_sizes]
        bad = [each for each in those if each not in good]
        left += sorted(bad, key=lambda each: each.micro or 0)[:1]
    if tuning.order == "random":
        random.Random(0).shuffle(queue)
    elif tuning.order == "model_based":

        def worth(each: Candidate) -> tuple[Any, ...]:
            seen = forecasts[each]
            good = score(tuning.metric, seen.seconds, each.batch(1), seen.flops)
            # Equal predictions: fewer, larger micro-batches cost fewer calls, and a simpler plan fewer messages.
            return (-round(good, 6), *each.simplicity)

        queue.sort(key=worth)
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
        if self.leader is not None and self.leader != before and (before is None or not self._tie(self.leader, before)):
            self.since = 0
        else:
            self.since += 1

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
        fine = [each for each, seen in self.results.items() if seen.status == "measured"]
        return max(fine, key=self.score, default=None)

    def best(self) -> tuple[Candidate | None, list[Candidate]]:
        """The one to take: of those as fast as the fastest, within noise, the simplest; and the others of those."""
        fastest = self.leader
        if fastest is None:
            return None, []
        equal = [
            each
            for each, seen in self.results.items()
            if seen.status == "measured" and (each == fastest or self._tie(each, fastest))
        ]
        equal.sort(key=lambda each: each.simplicity)
        return equal[0], equal[1:]

    def contenders(self) -> list[Candidate]:
        """The fastest, and those that its lead over them may be mere noise: worth a second trial each, three at most."""
        fastest = self.leader
        fine = [each for each, seen in self.results.items() if seen.status == "measured"]
        near = [
            each
            for each in fine
            if each == fastest or (fastest and self._apart(each, fastest) <= self._noise(each, fastest))
        ]
        return sorted(near, key=self.score, reverse=True)[:3] if len(near) > 1 else []

    def again(self, candidate: Candidate, measured: Measured) -> bool:
        """Takes in a second trial; whether it counts. Other work on a machine only adds time, so the faster one does."""
        if measured.status != "measured" or measured.seconds >= self.results[candidate].seconds:
            return False
        self.results[candidate] = measured
        return True

    def score(self, candidate: Candidate) -> float:
        """How good a measured candidate is; more is better."""
        seen = self.results[candidate]
        return score(self.tuning.metric, seen.seconds, seen.batch, self.flops.get(candidate, 0.0))

    def _tie(self, one: Candidate, other: Candidate) -> bool:
        """Whether two differ by no more than their own steps do among themselves, and by no more than a tenth."""
        return self._apart(one, other) <= min(self._noise(one, other), 0.1)

    def _apart(self, one: Candidate, other: Candidate) -> float:
        """By what share of the better one two differ."""
        a, b = self.score(one), self.score(other)
        return abs(a - b) / max(abs(a), abs(b), 1e-12)

    def _noise(self, *those: Candidate) -> float:
        """The larger share of a step by which the measured steps of one are apart."""
        return max(self.results[each].noise / max(self.results[each].seconds, 1e-12) for each in those)
