"""What `paceline launch --on ray` is told on top of the settings of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import matching
from paceline.config.settings import setting

_GROUP = "Ray"


@dataclass(frozen=True)
class RaySettings:
    """Settings of jobs that Ray runs."""

    ray_address: str | None = setting(
        None, matching(r"\S+", "an address", "ADDRESS"), "Ray cluster to use; not set: as RAY_ADDRESS says.", _GROUP
    )


SETTINGS = RaySettings
