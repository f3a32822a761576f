"""Settings that belong to one launcher alone, such as SLURM's partition: a file for each launcher that has any.

A file has the name of its launcher. Its last line `SETTINGS = ...` names a frozen dataclass, whose fields are declared with
`config.settings.setting`. They become flags, variables and keys of files like all other settings, so no two settings may
have the same name. Another distribution offers its settings under the entry point `paceline.cluster_settings`.
"""

from __future__ import annotations

from paceline.base.registry import Registry

CLUSTERS = Registry("paceline.config.clusters", "SETTINGS", "paceline.cluster_settings")
