"""Settings that belong to one launcher alone, such as SLURM's partition.

An entry point of `paceline.cluster_settings` has the name of a launcher, and names a frozen dataclass, whose fields are
declared with `config.settings.setting`. They become flags, variables and keys of files like all other
settings, so no two settings may have the same name.
"""

from __future__ import annotations

from paceline.base.registry import Registry

CLUSTERS = Registry("paceline.cluster_settings", "cluster")
