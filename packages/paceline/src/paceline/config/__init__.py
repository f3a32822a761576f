"""Defines the settings, and merges their values from flags, variables, files and code with the source of each."""

from paceline.config.given import Choice, Given
from paceline.config.overrides import Overrides, PlanArgument
from paceline.config.settings import LaunchSettings, RunSettings
from paceline.config.sources import Launch, Resolved, resolve_launch, resolve_run

__all__ = [
    "Choice",
    "Given",
    "Launch",
    "LaunchSettings",
    "Overrides",
    "PlanArgument",
    "Resolved",
    "RunSettings",
    "resolve_launch",
    "resolve_run",
]
