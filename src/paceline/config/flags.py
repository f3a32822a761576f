"""The settings of a launch as flags of the same command elsewhere: in an allocation of SLURM, or in a pod."""

from __future__ import annotations

import json
from collections.abc import Collection

from paceline.config.settings import settings_of
from paceline.config.sources import Launch


def flags_of(settings: Launch, leave_out: Collection[str]) -> list[str]:
    """The flags that say what somebody has set, wherever that was said.

    Args:
        settings: the merged settings.
        leave_out: names of settings that the other command learns in another way, or that are not for it.
    """
    table = settings_of()
    words: list[str] = []
    for row in settings.decisions:
        if row.source == "default" or row.field in leave_out or row.value is None:
            continue
        if row.field.startswith("options."):
            value = row.value if isinstance(row.value, str) else json.dumps(row.value)
            words += ["--option", f"{row.field.removeprefix('options.')}={value}"]
            continue
        flag = table[row.field].flag
        if isinstance(row.value, bool):
            words.append(flag if row.value else f"--no-{flag.removeprefix('--')}")
        elif str(row.value).startswith("-"):
            words.append(f"{flag}={row.value}")
        else:
            words += [flag, str(row.value)]
    return words
