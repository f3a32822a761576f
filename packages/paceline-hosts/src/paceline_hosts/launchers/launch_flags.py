"""Writes the settings of a launch as flags, for the same command in another place: a SLURM allocation, or a pod."""

from __future__ import annotations

import json
from collections.abc import Collection

from paceline.config.settings import settings_of
from paceline.config.sources import Launch


def flags_of(settings: Launch, leave_out: Collection[str]) -> list[str]:
    """Returns flags for all settings that have been set, from whatever source.

    Args:
        settings: the merged settings.
        leave_out: names of settings that the other command gets in another way or does not need.
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
        # As a word of its own, argparse would take such a value for another flag.
        elif str(row.value).startswith("-"):
            words.append(f"{flag}={row.value}")
        else:
            words += [flag, str(row.value)]
    return words
