"""What `paceline launch --on kubernetes` is told on top of the settings of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import matching
from paceline.config.settings import setting

_GROUP = "Kubernetes"


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of jobs that Kubernetes runs."""

    image: str | None = setting(
        None, matching(r"\S+", "an image", "IMAGE"), "Container image that the pods run; it contains Paceline.", _GROUP
    )


SETTINGS = KubernetesSettings
