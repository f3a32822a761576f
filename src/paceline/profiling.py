"""Joins what measures (`observe/profiles.py`) to what is measured: the models, the loaders, the plan's prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.config import Choice, RunSettings
from paceline.data.active import ActiveLoaders
from paceline.observe.profiles import NAME, Profiles
from paceline.plan.plan import Decision
from paceline.planner.estimate import Need, estimate
from paceline.preparation import Preparation
from paceline.world.collectives import Collectives
from paceline.world.world import World


def profiles_of(
    settings: RunSettings,
    prepared: Preparation,
    active: ActiveLoaders,
    collectives: Collectives,
    world: World,
    device: torch.device,
    folder: str | None,
    decisions: Sequence[Choice | Decision],
) -> Profiles | None:
    """The profiles that the setting `profile` asks for; None where it asks for none, and then nothing is joined.

    Raises:
        ConfigError: `profile-options`.
    """
    names = [name for name in settings.profile.split(",") if name != "no"]
    if not names:
        return None

    def predicted() -> dict[str, int]:
        if not prepared.models:
            return {}
        found = estimate(prepared.plan, Need(tuple(each.facts for each in prepared.models)))
        return {name: count for name, count in vars(found).items() if name != "sent"}

    profiles = Profiles(
        names,
        settings.options.get(NAME, {}),
        device,
        world.is_main,
        collectives,
        lambda: prepared.plan.layout.width,
        predicted,
        folder if folder is None or "://" not in folder else None,
        {each.field: each.where or each.source for each in decisions},
    )
    prepared.profiles = profiles
    active.batches = profiles.phases.batches
    return profiles
