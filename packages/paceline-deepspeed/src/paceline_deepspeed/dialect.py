"""DeepSpeed's config files, shown as what they mean here: `paceline explain --deepspeed ds_config.json`.

Its launcher's flags are those of torchrun (`config/launchers.py`) or of `paceline deepspeed`; in a run its config comes through
`deepspeed.initialize`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.dialects import ConfigDialect
from paceline.config.given import Given


class DeepSpeedDialect(ConfigDialect):
    """DeepSpeed's config files."""

    name = "deepspeed"
    explains = "show what a DeepSpeed config means; with --procs also its batch sizes"

    def explain(self, path: str, flags: Sequence[Given], *, as_json: bool, changed: bool) -> str:
        from paceline_deepspeed.explained import explain

        return explain(path, flags, as_json=as_json, changed=changed)


DIALECT = DeepSpeedDialect()
