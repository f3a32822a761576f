"""Joins what measures (`observe/profiles.py`) to what is measured: the phases of the step, the plan's prediction."""

from __future__ import annotations

from paceline.observe.profiles import NAME, Profiles
from paceline.planner.estimate import Need, estimate
from paceline.run.run import Run


def profiles_of(run: Run) -> Profiles | None:
    """Returns the profiles that the setting `profile` asks for; None where it asks for none, and then nothing is joined.

    Raises:
        ConfigError: `profile-options`.
    """
    names = [name for name in run.settings.profile.split(",") if name != "no"]
    if not names:
        return None

    def predicted() -> dict[str, int]:
        if not run.prepared.models:
            return {}
        need = Need(tuple(model.facts for model in run.prepared.models))
        bytes_of = vars(estimate(run.plan, need))
        return {name: count for name, count in bytes_of.items() if name != "sent"}

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
        run.follow_phases(),
    )
    run.events.leaving.subscribe(profiles.finish)
    return profiles
