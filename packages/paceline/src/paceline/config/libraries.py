"""The libraries whose names Paceline serves to scripts: entry points of `paceline.libraries`, each a package of a part."""

from __future__ import annotations

from paceline.base.registry import Registry

LIBRARIES = Registry("paceline.libraries", "library")
