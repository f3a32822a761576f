"""Forecasts of time where they are used: in the report, in the search for a plan, and for the candidates of a tuning."""

from collections import Counter
from dataclasses import replace

import pytest
from torch import nn

from paceline.config.given import Choice
from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import ModelFacts, model_facts
from paceline.plan.plan import Decision
from paceline.plan.resolve import draft, resolve
from paceline.planner.estimate import Chosen, Need, estimate
from paceline_lens.forecast.allocation_trace import KINDS, Peak
from paceline_lens.forecast.calibration import Calibration, Link, Lookup, Machine
from paceline_lens.forecast.device import device_of
from paceline_lens.forecast.predict import _fastest
from paceline_lens.forecast.rehearsal import Rehearsal
from paceline_lens.forecast.report import PlanReport
from paceline_lens.forecast.work import Computation, Work
from paceline_lens.tune.forecast import Forecaster
from paceline_lens.tune.search import Candidate, Tuning
from paceline_lens.tune.space import settings_of, space_of

CALIBRATION = Calibration(
    Machine("host1", "cpu", "2.13.0", 2, 1),
    measured=0.0,
    matrix={"float32": ((1.0, 100.0),)},
    memory=((1.0, 10.0),),
    optimizer=20.0,
    overhead_s=0.0,
    links={"allreduce": Link(0.0, 1000.0), "send": Link(0.0, 2000.0)},
)
NOTHING = dict.fromkeys(KINDS, 0)


def rehearsal(flops: int, **settings) -> Rehearsal:
    facts = model_facts(nn.Linear(10, 10, bias=False))
    plan = resolve(draft(RunSettings.of(settings), [], 2), (facts,), STRATEGIES)
    work = Work(
        Counter({Computation("forward", "float32", flops, 0): 1, Computation("optimizer", "float32", 0, 100): 1})
    )
    return Rehearsal(plan, (facts,), Peak(0, NOTHING, NOTHING), work, optimizer=2 * 4 * 100)


def report(flops: int, lookup: Lookup | None, **settings) -> PlanReport:
    seen = rehearsal(flops, **settings)
    return PlanReport(seen.plan, 2, seen, chosen=Chosen(settings), lookup=lookup)


def test_a_report_prints_the_terms_or_why_there_are_none():
    text = report(1000, Lookup(CALIBRATION, "/file of 2026-11-23"), replicate=2).text()
    assert "forecast for this machine: 15000.0 ms a step, by /file of 2026-11-23" in text
    assert "    compute            10000.0 ms  matrix products" in text
    assert "    optimizer           5000.0 ms" in text
    without = report(1000, Lookup(None, "/file is not used: it is 40 days old"), replicate=2)
    assert "no forecast of its time on this machine: /file is not used: it is 40 days old" in without.text()
    assert without.json()["step_seconds"] is None
    elsewhere = report(1000, None, replicate=2)
    assert "forecast" not in elsewhere.text() and "step_seconds" not in elsewhere.json()


@pytest.mark.parametrize(
    ("axis", "tokens_of_a_rank"), [("replicate", 64), ("shard", 64), ("cp", 32), ("tp", 32), ("pp", 32)]
)
def test_tokens_of_sequences_and_models_that_ranks_divide_are_shared(axis, tokens_of_a_rank):
    seen = rehearsal(1000)
    seen.work.lookups[10] = 64  # every rank looks up whole sequences
    plan = draft(RunSettings.of({axis: 2}), [], 2)
    assert PlanReport(plan, 2, seen).tokens_a_second(1.0) == tokens_of_a_rank


def test_of_the_plans_that_fit_the_fastest_is_taken_and_the_others_say_their_time():
    lookup = Lookup(CALIBRATION, "/file")
    slow, fast = report(1000, lookup, replicate=2), report(500, lookup, shard=2, zero=1)
    best = _fastest([slow, fast])
    assert best.plan is fast.plan
    assert [str(plan) for plan in best.rejected] == ["--replicate 2: fits, and a step takes 15000.0 ms"]
    unknown = [replace(entry, lookup=None) for entry in (slow, fast)]
    assert _fastest(unknown) is not None and _fastest(unknown).plan is slow.plan and not _fastest(unknown).rejected


def test_a_plan_whose_step_takes_half_the_samples_is_no_faster_for_a_shorter_step():
    lookup = Lookup(CALIBRATION, "/file")
    of_four, of_two = report(1000, lookup, replicate=2), report(600, lookup, replicate=2)
    # Two ranks of tensor parallel read the same samples: 11 s for one micro-batch, against 15 s for two.
    plan = draft(RunSettings.of({"tp": 2}), [], 2)
    of_two = replace(of_two, plan=plan, chosen=Chosen({"tp": 2}))
    best = _fastest([of_four, of_two])
    assert best.plan is of_four.plan
    reason = "--tp 2: fits, and a step takes 11000.0 ms, with 1 / 2 of the samples"
    assert [str(rejected) for rejected in best.rejected] == [reason]


def test_candidates_of_a_tuning_scale_what_was_rehearsed():
    seen = rehearsal(1000, replicate=2)
    device = device_of("cpu-64GB")
    forecaster = Forecaster.of(seen, 2, device, 2, CALIBRATION)
    whole = 100 * 4  # bytes of the model
    settings = {"replicate": 2, "shard": 1, "zero": 0, "recompute": "no", "accumulate": 2}
    # Twice the samples, and two of these micro-batches; an all-reduce sends (n - 1) / n of the bytes twice.
    forecast = forecaster.forecast(Candidate(0, 4, 2), settings)
    assert forecast.seconds == pytest.approx(4 * 10 + 5 + whole / 1000)
    slow = replace(forecaster, calibration=replace(CALIBRATION, overhead_s=1.0))
    # Two operations, for each of two micro-batches.
    assert slow.forecast(Candidate(0, 4, 2), settings).seconds == pytest.approx(forecast.seconds + 2 * 2)
    divided = {"replicate": 1, "shard": 2, "zero": 1, "recompute": "no", "accumulate": 1}
    one = forecaster.forecast(Candidate(1, 2, 1), divided)
    # Each rank steps half of the parameters, and sends these halves too.
    assert one.seconds == pytest.approx(10 + 2.5 + 1.5 * whole / 1000)
    by_datasheet = Forecaster.of(seen, 2, device, 2).forecast(Candidate(0, 4, 2), settings)
    assert by_datasheet.seconds == pytest.approx(4000 / device.single + whole / device.link)


def test_what_a_tuning_may_do_with_offload():
    """A rehearsal is told "no" by the tuning itself, which closes nothing; what the code says does."""
    auto = Choice("offload", "auto=disk:/d", "command line", "--offload")
    notes = {"rows": None, "windows": False}
    for source, expected in {
        "command line": ("no", "optimizer", "optimizer=disk:/d", "all=disk:/d"),
        "code": ("no",),
    }.items():
        decisions = [Decision("offload", "no", source, "a candidate of the tuning")]
        plan = draft(RunSettings.of({"replicate": 2}), decisions, 2)
        seen = replace(rehearsal(1000, replicate=2), plan=plan)
        space = space_of(seen, notes, None, Tuning(), [auto], 2)
        assert space.offload == expected, source
        settings = settings_of(space.candidates()[-1], space, 2)
        assert settings.get("offload") == (expected[-1] if source != "code" else None)


def test_activations_that_a_plan_takes_away_are_not_taken_away_twice():
    blocks = tuple(f"blocks.{number}" for number in range(12))
    facts = ModelFacts("Model", 100, 100, 400, 400, blocks=blocks)
    plan = resolve(draft(RunSettings.of({"recompute": "blocks"}), [], 1), (facts,), STRATEGIES)
    needed = estimate(plan, Need((facts,), activations=10**9)).activations
    seen = replace(
        rehearsal(1000), plan=plan, models=(facts,), memory=Peak(0, NOTHING, {**NOTHING, "activations": needed})
    )
    assert seen.activations == pytest.approx(10**9, rel=1e-6)
    assert estimate(plan, seen.need(2.0)).activations == pytest.approx(needed, rel=1e-6)
