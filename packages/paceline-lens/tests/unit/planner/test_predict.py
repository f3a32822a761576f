"""What a plan that does not fit is told: only plans that were rehearsed, by the search that `--auto` makes."""

from __future__ import annotations

import json

import pytest

from paceline.base.errors import PlanError
from paceline.config.given import Choice
from paceline.config.settings import RunSettings
from paceline.config.sources import HANDED
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision
from paceline.plan.resolve import draft, resolve
from paceline.planner.estimate import shown
from paceline_lens.forecast import predict as module
from paceline_lens.forecast.allocation_trace import KINDS, Peak
from paceline_lens.forecast.device import device_of
from paceline_lens.forecast.rehearsal import Rehearsal, SimulatedWorld
from paceline_lens.forecast.work import Work

GIB = 2**30
WORLD = SimulatedWorld(world_size=8, local_size=8)
FACTS = ModelFacts(
    "Model", 10**9, 10**9, 4 * 10**9, 4 * 10**9, blocks=tuple(f"blocks.{number}" for number in range(12))
)
ACTIVATIONS = 20 * GIB


def peak_of(plan) -> int:
    """Bytes that a rehearsal sees: temporaries of the loss, which no formula knows, are 6 GiB under every plan."""
    activations = 3 * GIB if plan.recompute == "blocks" else ACTIVATIONS
    if plan.offloads_activations:
        activations //= 6
    states = {0: 16, 1: 16 * 0.3, 2: 16 * 0.2, 3: 16 / 8}[plan.zero or 0] * 1e9
    if plan.offloads_states:
        states = 0 if plan.zero == 3 else states / 2
    return int(activations + states + 6 * GIB)


def rehearse(code, seen):
    def perform(work, simulated):
        said = {name: row[0] for name, row in json.loads(simulated.settings[HANDED]).items()}
        seen.append(said)
        values = {**said, **code}
        decisions = [
            Decision(name, value, "code" if name in code else "command line") for name, value in values.items()
        ]
        plan = resolve(draft(RunSettings.of(values), decisions, simulated.world_size), (FACTS,), STRATEGIES)
        largest = {**dict.fromkeys(KINDS, 0), "activations": ACTIVATIONS}
        return Rehearsal(plan, (FACTS,), Peak(peak_of(plan), largest, largest), Work(), optimizer=8 * 10**9)

    return perform


def predicted(monkeypatch, device, code=None, opened=(), **flags):
    seen = []
    monkeypatch.setattr(module, "rehearse", rehearse(code or {}, seen))
    decisions = [Choice(name, value, "command line", f"--{name}") for name, value in flags.items()]
    return module.predict(lambda: None, WORLD, device=device_of(device), decisions=decisions, opened=opened), seen


def test_settings_of_a_launcher_are_no_settings_of_a_plan(monkeypatch) -> None:
    opened = module.searched_settings()
    plain, _ = predicted(monkeypatch, "a100-14GB", opened=opened)
    launched, _ = predicted(monkeypatch, "a100-14GB", opened=opened, procs=8)
    assert launched.chosen.settings == plain.chosen.settings


def test_it_is_what_auto_takes_and_was_rehearsed(monkeypatch):
    asked, seen = predicted(monkeypatch, "a100-14GB", shard=8)
    chosen, _ = predicted(monkeypatch, "a100-14GB", opened=module.searched_settings())
    assert not asked.fits and asked.instead is not None and asked.instead.fits
    settings = asked.instead.chosen.settings
    assert settings == chosen.chosen.settings and settings in [{**said} for said in seen]
    again, _ = predicted(monkeypatch, "a100-14GB", **settings)
    assert again.fits


def test_what_the_code_says_is_not_proposed_anew(monkeypatch):
    asked, _ = predicted(monkeypatch, "a100-14GB", code={"shard": 8, "zero": 3})
    assert asked.instead.fits and asked.instead.chosen.settings["recompute"] == "blocks"
    assert not {"shard", "zero"} & asked.instead.chosen.settings.keys()


def test_nothing_is_proposed_if_nothing_fits_and_no_plan_is_rehearsed_twice(monkeypatch):
    asked, seen = predicted(monkeypatch, "a100-6GB", shard=8, recompute="blocks")
    assert not asked.fits and asked.instead.chosen.settings is None and "fits instead" not in asked.text()
    texts = [json.dumps(said, sort_keys=True, default=str) for said in seen]
    assert len(texts) == len(set(texts))


@pytest.mark.needs("large")
def test_offload_comes_last_and_its_cost_is_said(monkeypatch):
    """Formulas let more plans through than fit, and those are rehearsed first."""
    opened = ["replicate", "shard", "zero", "recompute", "offload"]
    roomy, _ = predicted(monkeypatch, "a100-14GB", opened=opened)
    assert roomy.fits and roomy.chosen.settings["offload"] == "no" and "wait in the host's memory" not in roomy.text()
    tight, seen = predicted(monkeypatch, "a100-9GB", opened=opened)
    assert tight.fits and tight.chosen.settings["offload"] not in ("no", "auto")
    assert "--offload " in tight.text() and "wait in the host's memory, and a step copies" in tight.text()
    assert tight.json()["elsewhere"]["host"] > 0
    values = [said["offload"] for said in seen]
    assert "no" in values and values == sorted(values, key=lambda value: value != "no")
    # Also where the plan that was asked for does not fit; and what the code says of offload stays.
    asked, _ = predicted(monkeypatch, "a100-9GB", code={"tp": 1, "pp": 1}, shard=8)
    assert asked.instead.fits and "--offload " in asked.text().partition("fits instead")[2]
    fixed, _ = predicted(monkeypatch, "a100-9GB", code={"offload": "no"})
    assert not fixed.instead.fits
    nothing, _ = predicted(monkeypatch, "a100-6GB", opened=opened)
    assert not nothing.fits and nothing.chosen.settings is None and "nothing that was tried fits" in nothing.text()


@pytest.mark.needs("large")
def test_a_folder_is_named_by_auto(monkeypatch):
    report, seen = predicted(monkeypatch, "a100-4GB", opened=["offload"], offload="auto=disk:/d", shard=8, zero=1)
    assert {said["offload"] for said in seen} == {"no"}
    assert {"optimizer=disk:/d", "activations+optimizer=disk:/d"} <= {
        plan.settings["offload"] for plan in report.rejected
    }


def test_an_error_of_the_search_does_not_hide_the_plan_that_was_asked_for(monkeypatch):
    seen = []
    perform = rehearse({}, seen)

    def refuse(work, simulated):
        if seen:
            raise PlanError("plan-rehearsal", "the script refuses.", fix="none")
        return perform(work, simulated)

    monkeypatch.setattr(module, "rehearse", refuse)
    decisions = [Choice("shard", 8, "command line", "--shard")]
    report = module.predict(lambda: None, WORLD, device=device_of("a100-14GB"), decisions=decisions)
    assert not report.fits and "the script refuses." in report.text()


def test_a_value_of_a_file_is_overruled_by_a_flag():
    assert shown({"shard": 8, "zero": 3}) == "--shard 8"
    assert shown({"shard": 8, "zero": 3}, ["zero"]) == "--shard 8 --zero 3"
