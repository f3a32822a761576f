"""Puts the sections of docs/errors.md into alphabetical order: append a section anywhere, then run this."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).with_name("errors.md")


def sort(text: str) -> str:
    """The page with its `## code` sections sorted."""
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "\n\n".join(part.strip() for part in [head, *sorted(sections, key=lambda part: part.split("\n")[0])]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(sort(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
