"""Decides what a tuning tries, in which order, when it stops, and which candidate is the best. All of it is pure.

    Space --candidates--> forecast each --sort_out--> those that do not fit, never launched
                                                  +-> the queue, by predicted time --trials--> best

A candidate is a way of dividing the model (ZeRO), of keeping activations, a micro-batch and options of strategies. Where
the batch of all ranks together is fixed, accumulation follows the micro-batch: accumulate = batch / width / micro.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from paceline.base.errors import ConfigError, Problem
from paceline.config.given import Choice

METRICS = ("throughput", "latency", "flops")
ORDERS = ("model_based", "gridsearch", "random")


@dataclass(frozen=True)
class Tuning:
    """The settings of a search.

    Attributes:
        metric: what the search optimizes: samples a second, seconds a step, or FLOP/s.
        first_step, last_step: optimizer steps that are measured, counted from 1; a trial ends after the last.
        fast: whether the search leaves bucket sizes and gathering as they are.
        micro_sizes: how many micro-batches of each plan are tried at most; these are the largest ones that fit.
        min_micro, max_micro: bounds of a rank's micro-batch.
        min_batch, max_batch: bounds of the batch of all ranks, where it is not fixed; None for none.
        order: "model_based" goes by predicted time, "gridsearch" from the simplest plan on, "random" at random.
        early_stop: trials without an improvement after which no more are run.
        trials: the largest number of trials.
        results_dir, exps_dir: where results, and what each trial printed, are written.
        overwrite: whether a search begins anew if there are results already; otherwise it takes what they measured.
        arguments: the script's own arguments that get a candidate's numbers: "micro" or "accumulate" -> "--batch-size".
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
        # Each rule: the attribute, whether its value is valid, and what is expected of it.
        unknown = set(self.arguments) - {"micro", "accumulate"}
        is_range = self.max_batch is None or self.max_batch >= self.min_batch
        rules = [
            ("metric", self.metric in METRICS, f"one of {', '.join(METRICS)}"),
            ("order", self.order in ORDERS, f"one of {', '.join(ORDERS)}"),
            ("first_step", self.first_step >= 2, "2 or more: the first step warms up"),
            ("last_step", self.last_step >= self.first_step, f"not before the first one, {self.first_step}"),
            ("max_micro", self.max_micro >= self.min_micro, f"not below the least, {self.min_micro}"),
            ("max_batch", is_range, f"not below the least, {self.min_batch}"),
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
    """One combination of values that a trial can run.

    Attributes:
        zero: the ZeRO stage, 0 to 3: what ranks along `shard` divide.
        micro: samples of one micro-batch on one rank; None where it is the script's own.
        accumulate: micro-batches in one optimizer step.
        recompute: the value of the setting `recompute`.
        options: options of strategies, by "strategy.option".
        offload: the value of the setting `offload`.
    """

    zero: int
    micro: int | None
    accumulate: int
    recompute: str = "no"
    options: tuple[tuple[str, Any], ...] = ()
    offload: str = "no"

    @property
    def name(self) -> str:
        """The name of its folder, such as `z2_gas1_tmbspg8`: ZeRO stage, accumulation steps, micro-batch of a process."""
        words = [f"z{self.zero}", f"gas{self.accumulate}"]
        if self.micro is not None:
            words.append(f"tmbspg{self.micro}")
        if self.recompute != "no":
            words.append(f"recompute-{self.recompute}")
        if self.offload != "no":
            moved, _, on_disk = self.offload.partition("=")
            words.append(f"offload-{moved}" + ("-disk" if on_disk else ""))
        words += [f"{name.rpartition('.')[2]}-{value}" for name, value in self.options]
        return "_".join(words)

    @property
    def plan(self) -> tuple[str, str, int, tuple[tuple[str, Any], ...]]:
        """What it has in common with candidates of other micro-batches."""
        return self.offload, self.recompute, self.zero, self.options

    @property
    def simplicity(self) -> tuple[bool, int, bool, int, int, int]:
        """A sort key, in which a smaller value is simpler; it decides between plans that are equally fast."""
        moves = self.offload != "no"
        return (moves, self.zero, self.recompute != "no", len(self.options), self.accumulate, -(self.micro or 0))

    def batch(self, width: int) -> int | None:
        """Returns the samples of one optimizer step over all ranks; None if only the script knows them."""
        return None if self.micro is None else self.micro * self.accumulate * width

    def settings(self, width: int, *, divided: bool = True) -> dict[str, Any]:
        """Returns the candidate as settings of Paceline, for `width` ranks that read different samples.

        Args:
            divided: whether the candidate says how the model is divided; otherwise that stays as it is.
        """
        settings: dict[str, Any] = {"recompute": self.recompute, "accumulate": self.accumulate, "offload": self.offload}
        if not divided:
            return settings
        # With one rank there is nothing to divide, whatever the ZeRO stage.
        if self.zero == 0 or width == 1:
            return {"replicate": width, "shard": 1, "zero": 0, **settings}
        return {"replicate": 1, "shard": width, "zero": self.zero, **settings}


@dataclass(frozen=True)
class Space:
    """What may be varied.

    Attributes:
        zero, recompute: values to try.
        micro: (micro-batch, accumulation) pairs to try.
        options: sets of options to try for each ZeRO stage, in addition to no options at all.
        closed: the settings that may not be varied, each with the reason.
        offload: values to try, in this order: a later one only where no plan with an earlier one fits.
    """

    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    micro: tuple[tuple[int | None, int], ...]
    options: Mapping[int, tuple[tuple[tuple[str, Any], ...], ...]] = field(default_factory=dict)
    closed: tuple[Choice, ...] = ()
    offload: tuple[str, ...] = ("no",)

    def candidates(self) -> list[Candidate]:
        """Returns all candidates; simpler plans come first, and within a plan larger micro-batches."""
        micro_batches = sorted(self.micro, key=lambda pair: -(pair[0] or 0))
        candidates: list[Candidate] = []
        for offload, recompute, zero in product(self.offload, self.recompute, self.zero):
            if len(self.offload) > 1 and "all" in offload.partition("=")[0] and zero < 3:
                continue  # only stage 3 takes parameters off the device
            for options in ((), *self.options.get(zero, ())):
                for micro, accumulate in micro_batches:
                    candidates.append(Candidate(zero, micro, accumulate, recompute, options, offload))
        return candidates


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a candidate on one rank.

    Attributes:
        bytes: the peak memory of the rank.
        seconds: the time of one step, at the datasheet's rates; a lower bound.
        flops: the floating-point operations of one step.
        problem: why the candidate cannot be launched at all; "" if it can.
    """

    bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Measured:
    """The result of one trial.

    Attributes:
        status: "measured", "does not fit" or "failed".
        seconds: the median time of the measured steps, on the slowest rank.
        noise: the median distance of the measured steps from that median, in seconds.
        batch: samples of one step over all ranks; None if they could not be counted.
        bytes: the peak memory of the fullest rank.
        why: what stopped the trial before its last measured step; "" if nothing did.
        wall_s: how long the trial took, from its start to its end.
        trials: how many trials there were; the fastest is the one that counts.
    """

    status: str
    seconds: float = 0.0
    noise: float = 0.0
    batch: int | None = None
    bytes: int = 0
    why: str = ""
    wall_s: float = 0.0
    trials: int = 1


def batches(tuning: Tuning, width: int, micro: int, accumulate: int, total: int | None) -> list[tuple[int, int]]:
    """Returns the micro-batches to look at, each with the accumulation that goes with it.

    Args:
        tuning: the settings of the search, of which the bounds are used.
        width: ranks that read different samples.
        micro, accumulate: the values that the script has now.
        total: the batch of all ranks if it is fixed; None if accumulation is fixed, so that the batch follows from it.
    """
    pairs: list[tuple[int, int]] = []
    if total is not None:
        # The batch of a rank is fixed: each of its divisors may be the micro-batch.
        share = total // width
        pairs = [(size, share // size) for size in range(1, share + 1) if share % size == 0]
    else:
        # Powers of 2 keep the list short; the script's own micro-batch must stay among them whatever it is.
        max_batch: float = math.inf
        if tuning.max_batch is not None:
            max_batch = tuning.max_batch
        powers_of_2 = {2**power for power in range(tuning.max_micro.bit_length())}
        for size in sorted(powers_of_2 | {micro}):
            batch = size * accumulate * width
            if tuning.min_batch <= batch <= max_batch:
                pairs.append((size, accumulate))
    return [pair for pair in pairs if tuning.min_micro <= pair[0] <= tuning.max_micro]


def score(metric: str, seconds: float, batch: int | None, flops: float) -> float:
    """Returns how good a step of so many seconds is; more is better."""
    if metric == "latency":
        return -seconds
    # Throughput, in samples a second. If the script does not say its batch, all candidates have the same one.
    work = float(batch or 1)
    if metric == "flops":
        work = flops
    return work / max(seconds, 1e-12)


def sort_out(
    candidates: Sequence[Candidate], forecasts: Mapping[Candidate, Forecast], usable: int, tuning: Tuning
) -> tuple[list[Candidate], list[Candidate]]:
    """Chooses the candidates to launch: the largest micro-batches of each plan that fit.

    Plans that move memory elsewhere are looked at only where none fits that moves less.

    Returns:
        The candidates to launch, in their order; and those that do not fit. Of the latter, each plan lists only its smallest
        micro-batch, since anything larger does not fit either.
    """
    queue: list[Candidate] = []
    left: list[Candidate] = []
    by_plan: dict[object, list[Candidate]] = {}
    offload_that_fits = ""
    for candidate in candidates:
        if offload_that_fits and candidate.offload != offload_that_fits:
            break
        forecast = forecasts[candidate]
        if not forecast.problem and forecast.bytes <= usable:
            offload_that_fits = candidate.offload
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
        largest_first = fitting[::-1]
        queue += largest_first[: tuning.micro_sizes]
        left += others[:1]

    def predicted_rank(candidate: Candidate) -> tuple[float, ...]:
        forecast = forecasts[candidate]
        predicted = score(tuning.metric, forecast.seconds, candidate.batch(1), forecast.flops)
        # `simplicity` decides between equal predictions: fewer, larger micro-batches need fewer calls of operations, and a
        # simpler plan needs fewer messages. Rounding makes predictions equal that differ only by floating-point error.
        return (-round(predicted, 6), *candidate.simplicity)

    if tuning.order == "random":
        # The seed is fixed, so that a search that was interrupted meets the candidates in the same order again.
        random.Random(0).shuffle(queue)
    elif tuning.order == "model_based":
        queue.sort(key=predicted_rank)
    return queue, left


@dataclass
class SearchProgress:
    """Holds what has been measured, and decides whether to go on.

    Args:
        tuning: the settings of the search.
        flops: the floating-point operations of one step of each candidate.
    """

    tuning: Tuning
    flops: Mapping[Candidate, float]
    results: dict[Candidate, Measured] = field(default_factory=dict)
    since: int = 0  # trials since the last improvement

    def add(self, candidate: Candidate, measured: Measured) -> None:
        """Adds the result of one trial."""
        previous_leader = self.leader
        self.results[candidate] = measured
        leader = self.leader
        # A lead within the noise is no improvement: otherwise noise alone could keep the search from stopping early.
        improved = False
        if leader is not None and leader != previous_leader:
            improved = previous_leader is None or not self._tie(leader, previous_leader)
        self.since += 1
        if improved:
            self.since = 0

    @property
    def done(self) -> str:
        """Why no more trials are run; "" while the search goes on."""
        if len(self.results) >= self.tuning.trials:
            return f"{self.tuning.trials} trials were run, as many as were allowed"
        if self.since >= self.tuning.early_stop and self.leader is not None:
            return f"the last {self.since} trials were no improvement"
        return ""

    @property
    def leader(self) -> Candidate | None:
        """The best candidate by the metric so far; None if nothing was measured."""
        return max(self.measured, key=self.score, default=None)

    @property
    def measured(self) -> list[Candidate]:
        """The candidates whose trial came to its end."""
        return [candidate for candidate, result in self.results.items() if result.status == "measured"]

    def best(self) -> tuple[Candidate | None, list[Candidate]]:
        """Returns the simplest of the candidates that are as good as the leader within the noise, and the others of these."""
        fastest = self.leader
        if fastest is None:
            return None, []
        equal = [candidate for candidate in self.measured if self._tie(candidate, fastest)]
        equal.sort(key=lambda candidate: candidate.simplicity)
        return equal[0], equal[1:]

    def contenders(self) -> list[Candidate]:
        """Returns the leader and the candidates that it may lead by noise alone; each is worth a second trial.

        They are three at most. The list is empty if no other candidate is near.
        """
        fastest = self.leader
        if fastest is None:
            return []
        near = []
        for candidate in self.measured:
            if self._difference(candidate, fastest) <= self._noise(candidate, fastest):
                near.append(candidate)
        if len(near) == 1:
            return []
        return sorted(near, key=self.score, reverse=True)[:3]

    def again(self, candidate: Candidate, measured: Measured) -> Measured:
        """Adds the result of a second trial, and returns the one that counts from now on.

        Other work on a machine can only add time, so that the faster of two trials is closer to the truth.
        """
        result = self.results[candidate]
        if measured.status == "measured" and measured.seconds < result.seconds:
            result = measured
        result = replace(result, trials=2)
        self.results[candidate] = result
        return result

    def score(self, candidate: Candidate) -> float:
        """Returns how good a measured candidate is; more is better."""
        result = self.results[candidate]
        return score(self.tuning.metric, result.seconds, result.batch, self.flops.get(candidate, 0.0))

    def _tie(self, first: Candidate, other: Candidate) -> bool:
        """Returns whether two candidates differ by no more than their measured steps do, and by no more than 10%."""
        return self._difference(first, other) <= min(self._noise(first, other), 0.1)

    def _difference(self, first: Candidate, other: Candidate) -> float:
        """Returns the difference between two scores as a share of the larger one."""
        one_score = self.score(first)
        other_score = self.score(other)
        return abs(one_score - other_score) / max(abs(one_score), abs(other_score), 1e-12)

    def _noise(self, *candidates: Candidate) -> float:
        """Returns the largest relative noise of these candidates: the spread of their steps as a share of a step."""
        results = [self.results[candidate] for candidate in candidates]
        return max(result.noise / max(result.seconds, 1e-12) for result in results)
