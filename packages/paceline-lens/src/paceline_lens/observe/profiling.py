"""Joins what measures (`observe/profiles.py`) to what is measured: the phases of the step, the plan's prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.config import Overrides
from paceline.planner.estimate import Need, estimate
from paceline.run.prepared import PreparedModel
from paceline.run.run import Run
from paceline.run.states import States
from paceline_lens.observe.phases import follow_phases
from paceline_lens.observe.profiles import NAME, ProfileOptions, Profiles

Options = ProfileOptions


def overrides(argument: Any, overrides: Overrides) -> Overrides:
    """Adds what `Accelerator(profile=...)` asks for (`paceline.run.observers`).

    Args:
        argument: names as text or as a list; or a mapping from names to mappings of options.
        overrides: what the script gives besides.
    """
    if isinstance(argument, str):
        return replace(overrides, profile=argument)
    overrides = replace(overrides, profile=",".join(map(str, argument)) or "no")
    options_of_profiles: dict[str, Any] = {}
    for name, options in argument.items() if isinstance(argument, Mapping) else ():
        if isinstance(options, Mapping):
            prefix = str(name).replace("-", "_")
            options_of_profiles |= {f"{prefix}_{key}": value for key, value in options.items()}
    if not options_of_profiles:
        return overrides
    others = overrides.options or {}
    merged = {**others.get(NAME, {}), **options_of_profiles}
    return replace(overrides, options={**others, NAME: merged})


def flattened(block: Mapping[str, Any]) -> dict[str, Any]:
    """See `paceline.run.observers`."""
    return dict(block)


def join(run: Run, states: States, joined: Mapping[str, Any]) -> Profiles | None:
    """Joins the profiles that the setting `profile` asks for (`paceline.run.observers`); None where it asks for none.

    Raises:
        ConfigError: `profile-options`.
    """
    names = [name for name in run.settings.profile.split(",") if name != "no"]
    if not names:
        return None

    def predicted() -> dict[str, int]:
        if not run.prepared.models:
            return {}
        return estimate(run.plan, Need.of(run.situation())).parts

    # Logs are appended to, which the URL of a store does not take.
    has_folder = run.project_dir is not None and "://" not in run.project_dir
    places = {decision.field: decision.where or decision.source for decision in run.decisions}
    profiles = Profiles(
        names,
        run.settings.options.get(NAME, {}),
        run.device,
        run.world.is_main,
        run.collectives,
        lambda: run.plan.layout.width,
        predicted,
        run.project_dir if has_folder else None,
        places,
        follow_phases(run),
    )
    run.lifetime.subscribe(profiles.finish)
    follow_models(run, profiles.follow)
    return profiles


def follow_models(run: Run, follow: Callable[[nn.Module, int], None]) -> None:
    """Calls a function with each model that is prepared from now on, and its number of parameters before any was divided."""
    followed: list[PreparedModel] = []

    def prepared(models: Sequence[nn.Module]) -> None:
        for entry in run.prepared.models:
            if not any(entry is known for known in followed):
                followed.append(entry)
                follow(entry.module, entry.facts.parameters)

    run.events.prepared.subscribe(prepared)
